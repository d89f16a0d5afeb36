"""Sources of a corpus's splits: a local file or folder, or a dataset on the Hugging Face hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedguild.core.errors import DataError
from fedguild.data.example import Example

if TYPE_CHECKING:
    from fedguild.data.conversation import Tally

_KINDS = {
    "json": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "excel": (".xlsx", ".xls", ".ods"),
}
SUFFIXES = tuple(suffix for suffixes in _KINDS.values() for suffix in suffixes)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.+%:\[\]-]+))?")
_LOCAL = re.compile(r"(?P<name>.+?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.+%:\[\]-]+))?")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset on the Hugging Face hub, or a folder that is laid out like one.

    Attributes:
        name: `owner/name`, or the folder.
        config: Its configuration; empty for the only or default one.
        split: The split to read; empty for the one that the corpus looks for.
        revision: Branch, tag or commit; empty for the newest.
    """

    name: str
    config: str = ""
    split: str = ""
    revision: str = ""

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    def __str__(self) -> str:
        return self.name + (f":{self.config}" if self.config else "") + (f"@{self.split}" if self.split else "")


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one split of a corpus.

    Attributes:
        where: A local file or folder, several files, or a dataset on the hub.
        splits: Names that the split may have there, in order of preference; `dev+val` joins two.
        training: For the test split, the training examples, so that a reader repeats the choices made there (which
            tasks, which labels); empty otherwise.
        tally: Receives what a reader finds; None if it is not wanted.
    """

    where: Path | tuple[Path, ...] | HubDataset
    splits: tuple[str, ...]
    training: tuple[Example, ...] = ()
    tally: Tally | None = field(default=None, compare=False)

    @property
    def path(self) -> Path:
        """The one file of this source, in a folder that of the split.

        Raises:
            DataError: it is several files or a dataset of the hub, or the folder has no such split.
        """
        if isinstance(self.where, Path):
            return self.where if self.folder is None else require_split_paths(self.folder, self.splits)[0]
        raise DataError("This data set is read from one file.", "Give a file or a folder.")

    @property
    def folder(self) -> Path | None:
        return self.where if isinstance(self.where, Path) and self.where.is_dir() else None


def kind_of(path: Path, *, lines: bool = False) -> str | None:
    """Returns the kind of a table file, by its suffix in any case and behind that of a compression; None for others.

    Args:
        lines: Whether JSON lines are a kind of their own.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packed = len(suffixes) > 1 and suffixes[-1] in _COMPRESSED
    suffix = "" if not suffixes else suffixes[0] if packed else suffixes[-1]
    kind = next((kind for kind, known in _KINDS.items() if suffix in known), None)
    if packed and kind not in ("json", "csv"):
        return None
    return "lines" if lines and kind == "json" and suffix != ".json" else kind


def stem_of(path: Path) -> str:
    """Returns a table file's name without its suffixes."""
    stem = Path(path.stem)
    return stem.stem if path.suffix.lower() in _COMPRESSED else path.stem


def locate(given: str | Sequence[str], default: HubDataset | None = None) -> Path | tuple[Path, ...] | HubDataset:
    """Returns the local file, folder or files that are named, or else the hub dataset.

    Args:
        given: A path, several paths, a pattern of paths (`data/*.jsonl`), or a hub id `owner/name`,
            `owner/name:config` or `owner/name:config@split`; a folder takes a config and a split likewise.
        default: The corpus's own dataset on the hub; if `text` names it, its configuration and revision are filled in.

    Raises:
        DataError: `text` is neither.
    """
    if not isinstance(given, str):
        found = [locate(one) for one in given]
        files = [one for each in found for one in (each if isinstance(each, tuple) else (each,))]
        if not files or not all(isinstance(one, Path) and one.is_file() for one in files):
            raise DataError(f"Several sources must be files, but these are: {', '.join(given)}.")
        return tuple(one for one in files if isinstance(one, Path))
    text, path = given, Path(given).expanduser()
    if path.exists():
        return path
    match = _HUB_ID.fullmatch(text)
    if match is None and glob.has_magic(text):
        paths = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
        tables = tuple(one for one in paths if one.is_file() and kind_of(one) is not None)
        if not tables:
            raise DataError(f"No data file matches {text}.", f"Accepted file types: {', '.join(SUFFIXES)}.")
        return tables
    local = _LOCAL.fullmatch(text)
    if local is not None and Path(local["name"]).expanduser().is_dir():
        return HubDataset(str(Path(local["name"]).expanduser()), local["config"] or "", local["split"] or "")
    if match is None or kind_of(path) is not None or text.startswith((".", "~")):
        raise DataError(
            f"The data file or folder {text} does not exist.",
            "Give a local file or folder, or a Hugging Face dataset as owner/name, owner/name:config or "
            "owner/name:config@split.",
        )
    hub = HubDataset(match["name"], match["config"] or "", match["split"] or "")
    if default is not None and hub.name == default.name:
        hub = replace(hub, config=hub.config or default.config, revision=default.revision)
    return hub


def is_data(given: str) -> bool:
    """Whether a text names data on this machine: a table, a pattern of tables, or a folder."""
    path = Path(given).expanduser()
    return is_here(given) and (not path.is_file() or kind_of(path) is not None)


def is_here(given: str | Sequence[str] | None) -> bool:
    """Whether a source is on this machine."""
    if given is None:
        return False
    try:
        where = locate(given)
    except DataError:
        return False
    return not isinstance(where, HubDataset) or where.is_local


def first_split(splits: Sequence[str], available: Sequence[str]) -> str | None:
    """Returns the first of `splits` whose parts (joined by `+`) are all in `available`."""
    return next((name for name in splits if set(name.split("+")) <= set(available)), None)


def split_paths(folder: Path, splits: Sequence[str]) -> list[Path]:
    """Returns the files or subfolders of `folder` that hold the first of `splits` found there.

    A subfolder is named like the split; a file's name without its suffix is the split's or ends in
    it after `_`, `-` or `.` (`snli_1.0_test.jsonl`). The list is empty if no split is there.

    Raises:
        DataError: two files claim the same split.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        for part in {part for name in splits for part in name.split("+")}:
            if not is_split(path, part):
                continue
            if part in files:
                raise DataError(
                    f"Both {files[part].name} and {path.name} in {folder} could be the '{part}' split.",
                    "Give one of the files instead of the folder.",
                )
            files[part] = path
    name = first_split(splits, list(files))
    return [files[part] for part in name.split("+")] if name else []


def is_split(path: Path, part: str) -> bool:
    """Whether a table file or a folder is named like the split `part`."""
    if path.is_dir():
        return path.name == part
    return kind_of(path) is not None and re.fullmatch(rf"(.*[_.-])?{re.escape(part)}", stem_of(path)) is not None


def require_split_paths(folder: Path, splits: Sequence[str]) -> list[Path]:
    """Returns `split_paths`, or raises DataError listing what the folder holds."""
    paths = split_paths(folder, splits)
    if not paths:
        names = sorted(path.name for path in folder.iterdir())
        listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise DataError(
            f"The folder {folder} has no split named {' or '.join(splits)}; it holds: {listed or 'nothing'}.",
            "Give the file itself, or name it like the split (train.jsonl, test.jsonl).",
        )
    return paths
