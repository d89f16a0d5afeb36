import errno
import os
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
