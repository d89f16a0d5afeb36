"""The packaged models: their names in `model.path`, and their folders."""

from __future__ import annotations

from pathlib import Path

from fedguild.errors import ModelError
from fedguild.model import english, tiny

EMBEDDED = "embedded"
ENGLISH = "english"
PACKAGED = {EMBEDDED: tiny.CHECKPOINT, ENGLISH: english.CHECKPOINT}
"""Name -> folder in the layout of the Hugging Face hub."""
_BUILDS = {
    EMBEDDED: f"python -m {tiny.__name__}.build --out DIR",
    ENGLISH: f"python -m {english.__name__}.build --corpus DIR",
}


def packaged(name: str) -> Path | None:
    """Returns the folder of the packaged model of this name; None where there is no such name.

    Raises:
        ModelError: the package was built without that model's weights.
    """
    folder = PACKAGED.get(name)
    if folder is not None and not (folder / "model.safetensors").exists():
        raise ModelError(
            f"This package holds no weights of the model '{name}': {folder} has no model.safetensors.",
            f"Train them with `{_BUILDS[name]}` and copy the checkpoint that it writes "
            "to that folder, or give the checkpoint's own folder as model.path.",
        )
    return folder
