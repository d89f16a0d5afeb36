import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.export.folder import new_folder


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with new_folder(target) as folder:
        (folder / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "model") as folder:
            (folder / "half").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FedGuildError, match=r"Cannot write .*model: No space left on device(.|\n)*free some space"):
        fill()
    assert not list(tmp_path.iterdir())


def test_a_file_or_a_full_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(FedGuildError, match="already exists"), new_folder(path):
            pytest.fail("the folder was begun")
    assert (tmp_path / "file").read_text() == "x"


def test_what_a_killed_process_had_begun_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    begins = "import os, sys, time\nfrom pathlib import Path\nfrom fedguild.export.folder import new_folder\n"
    begins += "with new_folder(Path(sys.argv[1])) as folder:\n    (folder / 'weights').write_bytes(b'1')\n"
    begins += "    print('begun', flush=True)\n    time.sleep(600)\n"
    with subprocess.Popen(
        [sys.executable, "-c", begins, tmp_path / "model"], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with new_folder(tmp_path / "another"):
            pass
        assert len(list(tmp_path.glob(".*.part"))) == 1
        other.kill()
    with new_folder(tmp_path / "model"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "model"]
