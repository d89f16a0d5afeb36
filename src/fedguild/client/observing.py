"""Observers of the MoE layers' routing, for the duration of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fedguild.model.moe.view import MoeLayer, Routing


@contextmanager
def observing(layers: Sequence[MoeLayer], observer: Callable[[Routing], None]) -> Iterator[None]:
    for layer in layers:
        layer.observers.append(observer)
    try:
        yield
    finally:
        for layer in layers:
            layer.observers.remove(observer)
