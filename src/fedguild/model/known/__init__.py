"""Known architectures: the published sizes of public models, for counts without a download.

Each file in this folder holds a model's hub id and, as in its `config.json`, the keys that determine its shape. A known
model is found by its hub id or by its file's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class KnownModel:
    """A public model's shape.

    Attributes:
        name: Its short name, for example `olmoe-1b-7b`.
        hub_id: The model on the hub.
        config: Keys of its `config.json`, `model_type` among them.
    """

    name: str
    hub_id: str
    config: dict[str, Any]


@cache
def known_models() -> tuple[KnownModel, ...]:
    return tuple(KnownModel(path.stem, **json.loads(path.read_text("utf-8"))) for path in sorted(FOLDER.glob("*.json")))


def find_known(name: str) -> KnownModel | None:
    """Returns the model with this hub id or short name; None if it is not known."""
    return next((model for model in known_models() if name in (model.hub_id, model.name)), None)
