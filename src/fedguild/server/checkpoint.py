"""Checkpoints: the server's state after each complete round, on disk as `FOLDER/round-00003.checkpoint`.

A checkpoint is written atomically, names the run that it belongs to and detects damage. A process that is killed at any
moment resumes from the newest checkpoint.

What a state never changes once it is there, the versions of its merge history, is in files of their own beside the
checkpoints, each written once and named by the SHA-256 of its content. A checkpoint refers to them, and a running state
maps them into memory instead of holding copies, so that neither grows by a version in every round.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedguild.client.merge_ledger import MERGE
from fedguild.config.renamed import state_names
from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.files import replacing
from fedguild.core.packing import Scalar, pack, unpack, views
from fedguild.core.payload import Payload
from fedguild.core.sealed import map_file, read_sealed, remove_leftovers, write_sealed

_SUFFIX = ".checkpoint"
FORMAT, WITH_HISTORY = 2, 3
"""Versions of the checkpoint layout, without and with a history in files of its own; 0.1.0 wrote version 1, without
this number and with other tensor names."""
NAMES = "0.4"
"""Whose names a state's tensors and scalars have; 0.3 did not write it."""
HISTORY = "history"
"""Folder of the history's files, beside the checkpoints."""
_VERSION = re.compile(rf"{MERGE}/\d+/")
_FILE = "_history_file"
"""Attribute of a mapped tensor: its file."""
_FILE_NAME = re.compile(r"round-(\d+)" + re.escape(_SUFFIX))


@dataclass(frozen=True)
class Checkpoint:
    """A run after a complete round.

    Attributes:
        round: The round that is complete.
        state: The method's state after it.
        extra: The round loop's own data, as JSON.
    """

    round: int
    state: Payload
    extra: Mapping[str, Any]


def save(
    folder: Path,
    round: int,
    state: Payload,
    *,
    fingerprint: str,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Payload:
    """Writes the checkpoint of a complete round and removes all but the last `keep`.

    Checkpoints of later rounds, left by a run that was resumed from an earlier one, are removed too.

    Args:
        folder: Folder of the run's checkpoints; created if absent.
        round: The round that is complete.
        state: The method's state after it.
        fingerprint: Identifies the run, for example a hash of its config.
        extra: Any further data needed to resume, as JSON values.
        keep: Number of checkpoints to keep, at least 1.

    Returns:
        The state, its history mapped from the files.

    Raises:
        FedGuildError: the file cannot be written; the earlier checkpoints are kept.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, but is {keep}.")
    remove_leftovers(folder)
    own, mapped, history = _with_history(folder / HISTORY, state.tensors)
    scalars: dict[str, Scalar] = {
        "format": WITH_HISTORY if history else FORMAT,
        "round": round,
        "fingerprint": fingerprint,
        "names": NAMES,
        "state": json.dumps(dict(state.scalars)),
        "extra": json.dumps(dict(extra or {})),
        **({"history": json.dumps(history)} if history else {}),
    }
    write_sealed(_path(folder, round), pack(own, scalars))
    kept = [known for known in rounds(folder) if known <= round][-keep:]
    for known in rounds(folder):
        if known not in kept:
            _path(folder, known).unlink()
    _remove_unused(folder, set(history.values()), [known for known in kept if known != round])
    return Payload({name: mapped.get(name, tensor) for name, tensor in state.tensors.items()}, state.scalars)


def rounds(folder: Path) -> list[int]:
    """Returns the rounds whose checkpoints are in `folder`, oldest first."""
    matches = (_FILE_NAME.fullmatch(path.name) for path in folder.glob(f"*{_SUFFIX}"))
    return sorted(int(match[1]) for match in matches if match)


def latest(folder: Path) -> int | None:
    """Returns the newest round whose checkpoint is in `folder`; None if there is none."""
    return max(rounds(folder), default=None)


def load(folder: Path, round: int, *, fingerprint: str) -> Checkpoint:
    """Returns the checkpoint of a complete round.

    Raises:
        CheckpointError: there is none, it is damaged (the hint names the last undamaged round before it), it was
            written by another version, or it belongs to a run with another fingerprint.
    """
    path = _path(folder, round)
    if not path.exists():
        existing = ", ".join(map(str, rounds(folder))) or "none"
        raise CheckpointError(f"{folder} holds no checkpoint of round {round}.", f"Rounds it holds: {existing}.")
    try:
        tensors, header = _read(path)
    except CheckpointError as error:
        raise CheckpointError(error.message, _way_back(folder, round)) from error
    return _checked(path, tensors, header, fingerprint)


def load_newest(folder: Path, *, fingerprint: str, tell: Callable[[str], None]) -> Checkpoint | None:
    """Returns the newest checkpoint that is not damaged; None if the folder holds none at all.

    Args:
        folder: Folder of the run's checkpoints.
        fingerprint: Of the run, as `save` got it.
        tell: Receives a message for every checkpoint that is skipped.

    Raises:
        CheckpointError: all are damaged, or the newest undamaged one was written by another version or belongs to
            another run.
    """
    damaged: CheckpointError | None = None
    for round in reversed(rounds(folder)):
        try:
            tensors, header = _read(_path(folder, round))
        except CheckpointError as error:
            damaged = damaged or CheckpointError(error.message, _way_back(folder, round))
            tell(f"{error.message} It is skipped for the checkpoint before it.")
            continue
        return _checked(_path(folder, round), tensors, header, fingerprint)
    if damaged is not None:
        raise damaged
    return None


def remove_after(folder: Path, round: int) -> None:
    """Removes the checkpoints of all rounds after one, to which a run goes back; the newest first."""
    for known in sorted(rounds(folder), reverse=True):
        if known > round:
            _path(folder, known).unlink()


def _checked(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], fingerprint: str) -> Checkpoint:
    if header["format"] not in (FORMAT, WITH_HISTORY):
        raise CheckpointError(
            f"{path} has format {header['format']}, but this version of FedGuild reads format {FORMAT}.",
            "FedGuild 0.1.0 wrote it: install fedguild==0.1.0 to resume or export this run, or start it again."
            if header["format"] == 1
            else "Install the version that wrote it; the run's environment.json names it.",
        )
    if header["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} was written with other settings than config.yaml has: its fingerprint is {header['fingerprint']}, "
            f"that of config.yaml {fingerprint}.",
            "Resume with the config that the run began with, or start a new run in another folder. "
            "docs/guides/configs.md says which settings may change.",
        )
    return Checkpoint(header["round"], Payload(tensors, header["state"]), header["extra"])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    content = read_sealed(path)
    try:
        tensors, scalars = unpack(content)
        header: dict[str, Any] = {"round": scalars["round"], "fingerprint": scalars["fingerprint"]}
        header["format"] = scalars.get("format", 1)
        header |= {key: json.loads(str(scalars[key])) for key in ("state", "extra")}
        for prefix, digest in json.loads(str(scalars.get("history", "{}"))).items():
            tensors |= _mapped(path.parent / HISTORY / digest, prefix, verified=True)
        if "names" not in scalars:
            tensors, header["state"] = _with_new_names(tensors, header["state"])
    except FedGuildError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error.message}.") from error
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: it lacks a readable {error}.") from error
    return tensors, header


def _with_new_names(
    tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns a state's tensors and scalars under their names of today, as a checkpoint of 0.3 has them."""
    found = dict(tensors)
    if (ranks := found.get("ranks")) is not None and ranks.dim() == 1:  # HetLoRA had one tensor of all clients' ranks
        del found["ranks"]
        found |= {f"client/{client}/rank": rank for client, rank in enumerate(ranks)}
    names = state_names((*found, *scalars))
    return {names[name]: value for name, value in found.items()}, {names[name]: scalars[name] for name in scalars}


def _with_history(
    folder: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Writes the history's versions that are not in the folder yet.

    Returns:
        The tensors outside of the history, those of the history as they are mapped, and prefix -> file of each version.
    """
    own: dict[str, Tensor] = {}
    versions: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        version = _VERSION.match(name)
        if version is None:
            own[name] = tensor
        else:
            versions.setdefault(version[0], {})[name.removeprefix(version[0])] = tensor
    mapped: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for prefix, parts in versions.items():
        known = {getattr(tensor, _FILE, None) for tensor in parts.values()}
        path = next(iter(known)) if len(known) == 1 else None
        if path is None or path.parent != folder or not path.is_file():
            content = pack(parts, {})
            path = folder / hashlib.sha256(content).hexdigest()
            if not path.is_file():
                with replacing(path) as temporary:
                    temporary.write_bytes(content)
            mapped |= _mapped(path, prefix)
        files[prefix] = path.name
    return own, mapped, files


def _remove_unused(folder: Path, needed: set[str], others: list[int]) -> None:
    """Removes the files of the history that no checkpoint refers to, as after its versions were folded into one.

    Args:
        folder: Folder of the run's checkpoints.
        needed: Files that the newest checkpoint refers to.
        others: The rounds of the other checkpoints.
    """
    unused = [path for path in (folder / HISTORY).glob("*") if path.name not in needed]
    for number in others if unused else ():
        try:
            scalars = unpack(read_sealed(_path(folder, number)))[1]
            needed |= set(json.loads(str(scalars.get("history", "{}"))).values())
        except (FedGuildError, ValueError):
            return  # it is damaged, and may be mended
    for path in unused:
        if path.name not in needed:
            with suppress(OSError):  # in use, on Windows
                path.unlink()


def _mapped(path: Path, prefix: str, *, verified: bool = False) -> dict[str, Tensor]:
    """Returns the tensors of a file of the history, mapped.

    Raises:
        CheckpointError: the file is missing or, if it is to be verified, damaged.
    """
    try:
        content = map_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error.message} It is a part of the run's history.") from error
    if verified and hashlib.sha256(content).hexdigest() != path.name:
        raise CheckpointError(f"{path}, a part of the run's history, is damaged: its checksum does not match.")
    tensors = {f"{prefix}{name}": tensor for name, tensor in views(content).items()}
    for tensor in tensors.values():
        setattr(tensor, _FILE, path)
    return tensors


def _way_back(folder: Path, damaged: int) -> str:
    for earlier in reversed([round for round in rounds(folder) if round < damaged]):
        try:
            _read(_path(folder, earlier))
        except CheckpointError:
            continue
        return f"Round {earlier} is complete: remove the checkpoint of round {damaged} to resume from it."
    return "No earlier round has a complete checkpoint: start the run again."


def _path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:05d}{_SUFFIX}"
