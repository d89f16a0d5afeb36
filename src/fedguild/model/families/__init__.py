"""The architectures whose routers and experts can be adapted, and `FAMILIES`, which finds them.

Most are rows of `table.yaml`: where the router is and its rule. An architecture that needs code is a file named like
the `model_type` of transformers, which defines `FAMILY`, a `Family` (`model/moe/family.py`). A family of another
package has the name of its entry point in the group `fedguild.model_families`, which is also its `model_type`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedguild.core.plugins import Plugins

if TYPE_CHECKING:
    from fedguild.model.moe.family import Family


@cache
def _rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns model_type -> title and attributes of every family of the table."""
    return {
        name: (title, {key: value for key, value in group.items() if key != "families"})
        for group in yaml.safe_load(Path(__file__).with_name("table.yaml").read_text("utf-8"))
        for name, title in group["families"].items()
    }


def _titles() -> dict[str, str]:
    return {name: title for name, (title, _) in _rows().items()}


@cache
def _described(name: str) -> Family:
    from fedguild.model.moe.family import Family

    return Family(**_rows()[name][1])


def _accepted(name: str, loaded: object) -> Family:
    from fedguild.model.moe.family import Family

    if loaded is None:
        return _described(name)
    if not isinstance(loaded, Family):
        raise TypeError(f"a model family is a Family, not a {type(loaded).__name__}")
    return loaded


FAMILIES = Plugins(
    "model family",
    "fedguild.model.families",
    "fedguild.model_families",
    _accepted,
    attribute="FAMILY",
    listed=_titles,
)
