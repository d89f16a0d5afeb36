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


def packaged(name: str) -> Path | None:
    """Returns the folder of the packaged model of this name; None if there is none.

    Raises:
        ModelError: the package was built without that model's weights.
    """
    folder = PACKAGED.get(name)
    if folder is not None and not (folder / "model.safetensors").exists():
        raise ModelError(
            f"This package holds no weights of the model '{name}': {folder} has no model.safetensors.",
            f"Train them in FedGuild's repository with `{_BUILDS[name]}` and copy the checkpoint that it writes "
            "to that folder, or give the checkpoint's own folder as model.path.",
        )
    return folder
