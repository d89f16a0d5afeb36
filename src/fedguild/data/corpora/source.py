"""Sources of a corpus's splits: a local file or folder, or a dataset on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedguild.core.errors import DataError
from fedguild.data.example import Example

TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.+%:\[\]-]+))?")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset on the Hugging Face hub.

    Attributes:
        name: `owner/name`.
        config: Its configuration; empty for the only or default one.
        split: The split to read; empty for the one that the corpus looks for.
        revision: Branch, tag or commit; empty for the newest.
    """

    name: str
    config: str = ""
    split: str = ""
    revision: str = ""

    def __str__(self) -> str:
        return self.name + (f":{self.config}" if self.config else "") + (f"@{self.split}" if self.split else "")


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one split of a corpus.

    Attributes:
        where: A local file or folder, or a dataset on the hub.
        splits: Names that the split may have there, in order of preference; `dev+val` joins two.
        training: For the test split, the training examples, so that a reader repeats the choices made there (which
            tasks, which labels); empty otherwise.
    """

    where: Path | HubDataset
    splits: tuple[str, ...]
    training: tuple[Example, ...] = ()

    @property
    def folder(self) -> Path | None:
        return self.where if isinstance(self.where, Path) and self.where.is_dir() else None


def locate(text: str, default: HubDataset | None = None) -> Path | HubDataset:
    """Returns the local file or folder that `text` names, or else the hub dataset.

    Args:
        text: A path, or a hub id `owner/name`, `owner/name:config` or `owner/name:config@split`.
        default: The corpus's own dataset on the hub; if `text` names it, its configuration and revision are filled in.

    Raises:
        DataError: `text` is neither.
    """
    path = Path(text).expanduser()
    if path.exists():
        return path
    match = _HUB_ID.fullmatch(text)
    if match is None or path.suffix in TABLE_SUFFIXES or text.startswith((".", "~")):
        raise DataError(
            f"The data file or folder {text} does not exist.",
            "Give a local file or folder, or a Hugging Face dataset as owner/name, owner/name:config or "
            "owner/name:config@split.",
        )
    hub = HubDataset(match["name"], match["config"] or "", match["split"] or "")
    if default is not None and hub.name == default.name:
        hub = replace(hub, config=hub.config or default.config, revision=default.revision)
    return hub


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
    return path.suffix in TABLE_SUFFIXES and re.fullmatch(rf"(.*[_.-])?{re.escape(part)}", path.stem) is not None


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
