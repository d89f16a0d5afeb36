import errno
import os

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.core.files import make_folder, replacing, require_own, write_bytes, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_its_user_can_read_what_is_written(tmp_path):
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("below", ["file", "file/a", "file/a/b"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, below):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FedGuildError, match=f"Cannot create the folder .*{below}: Not a directory") as caught:
        make_folder(tmp_path / below)
    assert "no file may stand where it or a folder above it would be" in caught.value.hint
    with pytest.raises(FedGuildError, match="Cannot create the folder"):
        write_text(tmp_path / below / "c.txt", "y")
    assert names(tmp_path) == ["file"]


def test_a_reader_sees_the_old_content_until_the_end(tmp_path):
    write_bytes(tmp_path / "x", b"old")
    with replacing(tmp_path / "x") as temporary:
        temporary.write_bytes(b"new")
        assert (tmp_path / "x").read_bytes() == b"old"
        assert temporary.parent == tmp_path
    assert (tmp_path / "x").read_bytes() == b"new"


def test_an_error_of_the_writer_keeps_the_old_content_and_passes(tmp_path):
    write_bytes(tmp_path / "x", b"old")

    def fail_half_way():
        with replacing(tmp_path / "x") as temporary:
            temporary.write_bytes(b"ne")
            raise KeyError("writer")

    with pytest.raises(KeyError, match="writer"):
        fail_half_way()
    assert (tmp_path / "x").read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_content(tmp_path, monkeypatch, call):
    write_bytes(tmp_path / "x", b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(FedGuildError, match=r"Cannot write .*x: No space left on device") as caught:
        write_bytes(tmp_path / "x", b"new")
    assert "free some space" in caught.value.hint
    assert (tmp_path / "x").read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


def test_no_link_in_a_folder_leads_out_of_it(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    for made in (folder / "models/round-1", other):
        made.mkdir(parents=True)
    (folder / "models/latest").symlink_to("round-1")
    (tmp_path / "linked").symlink_to(folder)
    for whole in (folder, tmp_path / "linked", tmp_path / "missing"):
        require_own(whole)
    for target in (other, other / "missing", "../../other"):
        link = folder / "models" / "history"
        link.symlink_to(target)
        with pytest.raises(FedGuildError, match=f"{link} is a link to {target}, outside of {folder}"):
            require_own(folder)
        link.unlink()
