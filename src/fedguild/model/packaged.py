"""The packaged models: their names in `model.path`, and their folders."""

from __future__ import annotations

from pathlib import Path

from fedguild.core.errors import ModelError

EMBEDDED = "embedded"
ENGLISH = "english"
PACKAGED = {name: Path(__file__).parent / "weights" / name for name in (EMBEDDED, ENGLISH)}
"""Name -> folder in the layout of the Hugging Face hub, whose README.md is the model card."""
_BUILDS = {
    EMBEDDED: "python -m tools.tiny.build --out DIR",
    ENGLISH: "python -m tools.english.build --corpus DIR",
}
MADE_LATER = ("models/smollm2-135m", "models/smollm2-moe")
"""Folders of presets that `make smollm2` writes, relative to the working directory."""


def is_on_hub(path: str) -> bool:
    """Whether `model.path` is an id on the hub: neither a packaged model nor a path on this machine."""
    return path not in PACKAGED and not Path(path).exists()


def packaged(name: str) -> Path | None:
    """Returns the folder of the packaged model of this name; None if there is none.

    Raises:
        ModelError: the package was built without that model's weights, or the folder of a preset is still to be made.
    """
    if name in MADE_LATER and not Path(name).exists():
        raise ModelError(
            f"There is no folder {name} here.",
            "Run `make smollm2` in FedGuild's repository, which takes a minute, or give the folder as model.path.",
        )
    folder = PACKAGED.get(name)
    if folder is not None and not (folder / "model.safetensors").exists():
        raise ModelError(
            f"This package holds no weights of the model '{name}': {folder} has no model.safetensors.",
            f"Train them in FedGuild's repository with `{_BUILDS[name]}` and copy the checkpoint that it writes "
            "to that folder, or give the checkpoint's own folder as model.path.",
        )
    return folder
