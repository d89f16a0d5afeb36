"""`fedguild.json` of an exported folder: its form, what it adapts, and its base model with a hash.

An adapter's base model is a hub id, or `base`, a path relative to the folder: a copy of a packaged model, or a link to
a folder. With the manifest, `fedguild export` makes other forms from a folder that a site took home.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel, ConfigDict, ValidationError

from fedguild import __version__
from fedguild.core.errors import ModelError
from fedguild.core.files import write_json
from fedguild.export.card import Origin
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.weight_files import files_of, source_of_weights

MANIFEST, BASE = "fedguild.json", "base"
"""The file, and the base model in an adapter's folder, if that is not on the hub."""
Form = Literal["peft", "per-expert", "merged", "code", "gguf"]
_BLOCK_BYTES = 2**24


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())


class BaseModelOf(_Part):
    """The base model of an exported one.

    Attributes:
        model: Its hub id, or its path relative to the folder; its name if the folder does not need it.
        revision: Its branch, tag or commit on the hub.
        sha256: Of its config and weights; empty if they are not at hand.
        dtype: The dtype in which it was adapted.
        trust_remote_code: Whether loading it runs code of its own.
    """

    model: str
    revision: str | None
    sha256: str
    dtype: str
    trust_remote_code: bool = False


class LoraOf(_Part):
    """An adapter's rank, scale and targets, as `Lora` has them."""

    rank: int
    scale: float
    targets: list[str]


class Manifest(_Part):
    """What `fedguild.json` holds.

    Attributes:
        lora: Of an adapter; None for a checkpoint.
        origin: The fields of `Origin`.
    """

    fedguild: str
    form: Form
    base: BaseModelOf
    lora: LoraOf | None
    origin: dict[str, str | int]

    @property
    def plan(self) -> AdapterPlan:
        assert self.lora is not None
        return AdapterPlan((Lora(self.lora.rank, self.lora.scale, tuple(self.lora.targets)),))


def write_manifest(folder: Path, form: Form, base: BaseModelOf, plan: AdapterPlan, origin: Origin) -> None:
    lora = plan.part(Lora) if form in ("peft", "per-expert") else None
    adapted = None if lora is None else LoraOf(rank=lora.rank, scale=lora.scale, targets=list(lora.targets))
    manifest = Manifest(fedguild=__version__, form=form, base=base, lora=adapted, origin=asdict(origin))
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """Returns an exported folder's manifest.

    Raises:
        ModelError: it cannot be read.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ModelError(f"{path} cannot be read: {str(error).splitlines()[0]}.", "Export the model again.") from error


def place_of_base(folder: Path, base: BaseModelOf) -> str:
    """Returns the base model of an exported adapter as `load_backbone` takes it."""
    return os.path.realpath(folder / BASE) if base.model == BASE else base.model


def digest_of_base(path: str, revision: str | None = None) -> str:
    """Returns the SHA-256 of a model's config and the weights that are loaded, file by file.

    Empty if one of them is not on this machine: the hub's cache may hold a part of them.
    """
    folder = Path(path)
    if not folder.exists():
        found: Any = try_to_load_from_cache(path, "config.json", revision=revision) if path.count("/") == 1 else None
        if not isinstance(found, str):
            return ""
        folder = Path(found).parent
    files = [folder]
    if folder.is_dir():
        config, source = folder / "config.json", source_of_weights(folder)
        if source is None or not config.is_file():
            return ""
        try:
            files = [config, *files_of(source)]
        except ModelError:
            return ""
    whole = hashlib.sha256()
    for file in sorted(files):
        own = hashlib.sha256()
        with open(file, "rb") as content:
            while block := content.read(_BLOCK_BYTES):
                own.update(block)
        whole.update(f"{file.name} {own.hexdigest()}\n".encode())
    return whole.hexdigest()
