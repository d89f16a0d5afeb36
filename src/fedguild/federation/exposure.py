"""Exposure of a site's text by a round of plain training: whether an upload's span alone tells which tokens it saw.

The gradient of a linear layer is a sum over tokens of outer products, of the error at its output and of its input. A
factor of rank r, or a full weight whose shorter side is r, therefore spans its tokens' inputs while fewer than r of
them are in the sum. In the first layer an input follows from the token alone, and whoever knows the vocabulary finds
each of them (`benchmarks/inversion.py`). With r tokens or more the span is everything, and this way is closed. It is
not the only one: the condition bounds the cheapest attack and promises nothing. A promise takes differential privacy.

The server chooses which steps are in the sum. With SGD each step keeps 1 - learning_rate × weight_decay of those
before, so that at 1 the last step is left alone; AdamW likewise. Adam divides by its own moments, which leaves no such
span, unless its eps is so large that it is SGD.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedguild.config.training import TrainingSettings
from fedguild.server.schema import Shape

LEFT = 1e-3
"""Share of a step's gradient below which it no longer hides the others'."""
LARGEST_EPS = 1e-4
"""Adam with a larger eps counts as SGD."""


@dataclass(frozen=True)
class Exposure:
    """What the settings of a run leave in an upload.

    Attributes:
        optimizer: `training.optimizer`; `sgd` also for an Adam whose eps is as large as SGD's steps are.
        decay: The largest `learning_rate` × `weight_decay` of a step.
        steps: Optimizer steps of a round whose gradients are left in the upload.
        tokens: The fewest distinct tokens of this site's text that these steps can have.
        rank: The largest number of directions that a trained tensor can tell apart.
    """

    optimizer: str
    decay: float
    steps: int
    tokens: int
    rank: int

    @property
    def tokens_per_rank(self) -> float:
        """The distinct tokens behind an upload, over the directions that it can tell apart."""
        return self.tokens / self.rank

    def __str__(self) -> str:
        several = "1 step" if self.steps == 1 else f"{self.steps} steps"
        facts = (
            f"an upload has {several} with at least {self.tokens} distinct tokens, and the largest trained tensor "
            f"tells {self.rank} directions apart ({self.tokens_per_rank:.3g} tokens a direction)"
        )
        if self.tokens_per_rank >= 1:
            return f"What this setting can reveal: {facts}: the tokens cannot be read from its span."
        if self.optimizer != "sgd":
            return f"What this setting can reveal: {facts}: only {self.optimizer} keeps the tokens from its span."
        return f"What this setting can reveal: {facts}: the tokens of the text can be read from the upload."


def counted_optimizer(training: TrainingSettings) -> str:
    """Returns the optimizer that a site's limits are about: `sgd` also for an Adam whose eps makes it SGD."""
    return "sgd" if training.eps > LARGEST_EPS else training.optimizer


def exposure(
    training: TrainingSettings, steps: int, texts: Iterable[Sequence[int]], shapes: Iterable[Shape]
) -> Exposure:
    """Returns what a round of training leaves in an upload.

    Args:
        training: The run's settings.
        steps: Optimizer steps of a round on this site.
        texts: The site's training texts as token ids, as the run cuts them.
        shapes: The shapes of the tensors that are uploaded.
    """
    decay = training.learning_rate * training.weight_decay
    optimizer = counted_optimizer(training)
    kept = 1.0 if optimizer == "adam" else abs(1 - decay)
    left = steps if kept >= 1 else 1 if kept <= LEFT else min(steps, math.ceil(math.log(LEFT) / math.log(kept)))
    batch = training.batch_size * training.gradient_accumulation_steps
    distinct = sorted({frozenset(text) for text in texts}, key=len)
    one, every = (len(frozenset().union(*some)) for some in (distinct[:batch], distinct))
    return Exposure(
        optimizer,
        decay,
        left,
        min(one * left, every),
        rank_of(shapes),
    )


def rank_of(shapes: Iterable[Shape]) -> int:
    """Returns the largest number of directions that tensors of these shapes can tell apart."""
    return max((min(shape[-2:]) for shape in shapes if len(shape) >= 2), default=1)
