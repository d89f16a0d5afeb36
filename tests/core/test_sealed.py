import hashlib
from pathlib import Path

import pytest

from fedguild.core.errors import CheckpointError
from fedguild.core.sealed import map_sealed, read_sealed, write_sealed

CONTENT = bytes(range(256)) * 3


@pytest.mark.parametrize("content", [b"", b"\n", CONTENT])
def test_content_comes_back(tmp_path, content):
    write_sealed(tmp_path / "deep" / "file", content)
    assert read_sealed(tmp_path / "deep" / "file") == content


def test_the_first_line_is_the_checksum_of_the_rest(tmp_path):
    write_sealed(tmp_path / "file", CONTENT)
    line, _, rest = (tmp_path / "file").read_bytes().partition(b"\n")
    assert line.decode() == hashlib.sha256(rest).hexdigest()
    assert rest == CONTENT


@pytest.mark.parametrize("position", [0, 64, 65, 400, -1])
def test_one_flipped_bit_is_noticed(tmp_path, position):
    path = tmp_path / "file"
    write_sealed(path, CONTENT)
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="file is damaged"):
        read_sealed(path)


@pytest.mark.parametrize("position", [0, 63, 64, 65, 126, 127, 128, -1])
def test_one_flipped_bit_of_an_aligned_file_is_noticed(tmp_path, position):
    """Whether it is read or mapped; also where the bit is in the padding."""
    path = tmp_path / "file"
    write_sealed(path, CONTENT, aligned=True)
    assert read_sealed(path) == bytes(map_sealed(path)[0]) == CONTENT
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 1
    path.write_bytes(damaged)
    for reading in (read_sealed, map_sealed):
        with pytest.raises(CheckpointError, match="file is damaged"):
            reading(path)


@pytest.mark.parametrize("length", [0, 10, 65, 800])
def test_a_cut_off_file_is_noticed(tmp_path, length):
    path = tmp_path / "file"
    write_sealed(path, CONTENT)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="file is damaged"):
        read_sealed(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"Cannot read .*absent: No such file"):
        read_sealed(tmp_path / "absent")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows of file descriptors")
def test_mapped_files_hold_no_file_descriptor(tmp_path):
    path = tmp_path / "file"
    write_sealed(path, CONTENT, aligned=True)
    before = len(list(Path("/proc/self/fd").iterdir()))
    mapped = [map_sealed(path)[0] for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before < len(mapped)
    mapped[0][0] ^= 1
    assert bytes(mapped[1]) == read_sealed(path) == CONTENT, "a write is private"
