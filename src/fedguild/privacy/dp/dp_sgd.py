"""The parameters of one client's DP-SGD in a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedguild.privacy.dp.noise import Noise


@dataclass(frozen=True)
class DpSgd:
    """A client's DP-SGD in a round (Abadi et al., CCS 2016, Algorithm 1).

    Attributes:
        clip: C, the largest L2 norm of an example's gradient over all trained tensors.
        noise_multiplier: sigma; the noise on the sum of clipped gradients has the standard deviation sigma C.
        probability: q, with which each example enters a step.
        steps: Number of steps.
        divisor: What the noisy sum is divided by: the expected number of examples in a step.
        noise: Draws the noise and the examples of each step.
    """

    clip: float
    noise_multiplier: float
    probability: float
    steps: int
    divisor: float
    noise: Noise

    def batch(self, step: int, examples: int) -> list[int]:
        """Returns the indices of the examples that enter a step, each with probability q; it may be empty."""
        drawn: list[int] = (self.noise.uniform(examples, "sample", step) < self.probability).nonzero()[0].tolist()
        return drawn

    def mask_seed(self, step: int, example: int) -> int:
        """Returns the secret 63-bit seed of an example's dropout mask in a step."""
        return int.from_bytes(self.noise.child("dropout", step, example).key[:8], "big") >> 1

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values, the noise's key included, for `from_plain`."""
        return {**vars(self), "noise": self.noise.key.hex()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> DpSgd:
        return cls(**{**plain, "noise": Noise(bytes.fromhex(plain["noise"]))})


def microbatches(drawn: list[int], size: int) -> Iterable[list[int]]:
    for start in range(0, len(drawn), size):
        yield drawn[start : start + size]
