"""The architectures whose routers and experts can be adapted: one file each, and `FAMILIES`, which finds them.

A file is named like the `model_type` of transformers and defines `FAMILY`, a `Family` (`model/moe/family.py`). A
family of another package has the name of its entry point in the group `fedguild.model_families`, which is also its
`model_type`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedguild.core.plugins import Plugins

if TYPE_CHECKING:
    from fedguild.model.moe.family import Family


def _accepted(name: str, loaded: object) -> Family:
    from fedguild.model.moe.family import Family

    if not isinstance(loaded, Family):
        raise TypeError(f"a model family is a Family, not a {type(loaded).__name__}")
    return loaded


FAMILIES = Plugins("model family", "fedguild.model.families", "fedguild.model_families", _accepted, attribute="FAMILY")
