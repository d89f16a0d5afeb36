"""The payload: named tensors and scalars, the one type of state, download, upload and client memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedguild.core.packing import Scalar as Scalar

ADAPTER = "adapter"
"""The part of states, downloads and uploads with the trainables that are sent and aggregated."""
SERVER = "server"
"""The part of a state that stays with the server."""
ROUTING = "routing"
"""The part with a client's activation frequencies: its share of tokens that activated each expert, [M] per layer."""


@dataclass(frozen=True)
class Payload:
    """Named tensors and scalars and nothing else, stored and sent as they are.

    One type serves as the server's state between two rounds, as download and upload, and as client memory. Two clients
    in one round may send different names, ranks and expert sets.

    Attributes:
        tensors: Name -> tensor. A name is `part/rest`, where the part (for example `adapter`)
            groups tensors in the byte accounting.
        scalars: Name -> bool, int, float or str.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Mapping[str, Mapping[str, Tensor]], scalars: Mapping[str, Scalar] | None = None) -> Payload:
        """Returns a payload of parts: part -> name without the part -> tensor."""
        tensors = {name: value for part, named in parts.items() for name, value in with_part(part, named).items()}
        return cls(tensors, scalars or {})

    def part(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of one part, by their names without the part."""
        prefix = f"{name}/"
        return {key[len(prefix) :]: value for key, value in self.tensors.items() if key.startswith(prefix)}

    def without(self, *names: str) -> Payload:
        """Returns the payload without some of its tensors and scalars, each by its whole name."""
        left_out = frozenset(names)
        return Payload(
            {name: value for name, value in self.tensors.items() if name not in left_out},
            {name: value for name, value in self.scalars.items() if name not in left_out},
        )


def with_part(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds the prefix `name/` to the names of tensors."""
    return {f"{name}/{key}": value for key, value in tensors.items()}


def is_unchanged(before: Payload, after: Payload) -> bool:
    """Returns whether a payload has tensors, and all of them are the same, bit for bit, in another."""
    if not before.tensors or before.tensors.keys() != after.tensors.keys():
        return False
    return all(torch.equal(value, after.tensors[name]) for name, value in before.tensors.items())


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns a hash of named tensors, by their names and bits."""
    content = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content.update(name.encode() + b"\x1f")
        content.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
