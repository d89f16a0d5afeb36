"""What crosses a client's boundary: named tensors and scalars, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedguild.packing import Scalar as Scalar


@dataclass(frozen=True)
class Payload:
    """Named tensors and scalars on their way between the server and one client.

    Two clients in one round may send other names, ranks and expert sets.

    Attributes:
        tensors: Name -> tensor. A name is `part/rest`, where the part (for example `adapter`)
            groups tensors in the byte accounting.
        scalars: Name -> bool, int, float or str.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def part(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of one part, by their names without the part."""
        prefix = f"{name}/"
        return {key[len(prefix) :]: value for key, value in self.tensors.items() if key.startswith(prefix)}


def with_part(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors` under `name/…`, ready to go into a payload."""
    return {f"{name}/{key}": value for key, value in tensors.items()}
