"""Layouts of stacked experts: the view's own, and the transposed or interleaved one of some models of transformers.

The view takes every projection as [M, out, in], the rows of gate above those of up. Experts stored otherwise are
changed once, when the model is loaded, and get their published layout back in an export.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from fedguild.model.info import ExpertLayout

PUBLISHED = "fedguild_layout"
"""Attribute of an experts module: its layout before it was changed."""


def layout_of(experts: Any) -> ExpertLayout:
    """Returns the layout in which transformers' own model has the experts."""
    own = ExpertLayout(getattr(experts, "is_transposed", False), not getattr(experts, "is_concatenated", True))
    layout: ExpertLayout = getattr(experts, PUBLISHED, own)
    return layout


def canonicalise(experts: Any, layout: ExpertLayout | None = None) -> None:
    """Gives the weights of an experts module the view's layout, in place, one after the other.

    Args:
        layout: Their layout, where the module does not say it.
    """
    layout = layout or layout_of(experts)
    if hasattr(experts, PUBLISHED) or layout == ExpertLayout():
        return
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        if isinstance(weight := getattr(experts, name, None), nn.Parameter):
            setattr(experts, name, nn.Parameter(canonical(weight.detach(), name, layout), requires_grad=False))
    if layout.interleaved:
        experts._apply_gate = MethodType(_apply_gate, experts)
    experts.is_transposed, experts.is_concatenated = False, True
    setattr(experts, PUBLISHED, layout)


def canonical(weight: Tensor, name: str, layout: ExpertLayout) -> Tensor:
    """Returns a projection [M, out, in] of a published one; `name` is the parameter's."""
    if layout.transposed:
        weight = weight.transpose(1, 2)
    if layout.interleaved and name == "gate_up_proj":
        weight = stacked(weight, 1)
    return weight.contiguous()


def published(weight: Tensor, name: str, layout: ExpertLayout) -> Tensor:
    """Returns a projection in its published layout; the inverse of `canonical`."""
    if layout.interleaved and name == "gate_up_proj":
        weight = interleaved(weight, 1)
    return weight.transpose(1, 2) if layout.transposed else weight


def stacked(rows: Tensor, axis: int) -> Tensor:
    """Returns rows of gate and up [.., 2 F, ..], those of gate first, where they alternate."""
    found: Tensor = rows.unflatten(axis, (-1, 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return found


def interleaved(rows: Tensor, axis: int) -> Tensor:
    """Returns rows of gate and up [.., 2 F, ..] in turn, where those of gate come first."""
    found: Tensor = rows.unflatten(axis, (2, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return found


def _apply_gate(experts: Any, gate_up: Tensor) -> Tensor:
    gated: Tensor = type(experts)._apply_gate(experts, interleaved(gate_up, 1))
    return gated
