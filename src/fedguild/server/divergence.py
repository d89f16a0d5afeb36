"""Training that diverges: checks of a round's state, uploads and losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from fedguild.core.errors import CheckpointError, DivergedError
from fedguild.core.payload import Payload
from fedguild.server.guard import not_finite
from fedguild.server.round import Outcome

NEARLY_GUESSING, WORSE_THAN_UNTRAINED, WORSE_THAN_GUESSING = 0.85, 1.5, 2.0
"""Multiples of losses above which training is taken to have diverged; see `require_learning`."""
DIVERGED_HINT = (
    "The last complete round is untouched, but resuming repeats this one: start again with a lower "
    "training.learning_rate or training.max_grad_norm."
)
START_HINT = (
    "See what the method and the budgets change in the model, for example fewer active experts, or raise "
    "training.loss_limit."
)


def require_finite_uploads(outcome: Outcome, reasons: Mapping[str, str]) -> None:
    """Raises DivergedError where every client trained until its values were no longer finite."""
    if outcome.accepted or not outcome.asked or any(one.index not in outcome.not_finite for one in outcome.asked):
        return
    listed = "".join(f"\n  {client}: {reason}" for client, reason in sorted(reasons.items()))
    raise DivergedError(
        f"The training of round {outcome.round} diverged: 0 of {len(outcome.asked)} clients delivered a valid upload."
        f"{listed}",
        DIVERGED_HINT,
    )


def require_finite(state: Payload, when: str) -> None:
    """Raises CheckpointError where a state has NaN or infinity."""
    broken = not_finite(state)
    if broken:
        raise CheckpointError(
            f"The state {when} has NaN or infinity in '{broken}'; it is not saved.",
            "`fedguild resume FOLDER --round N` goes back to the checkpoint of an earlier round; training that "
            "diverges needs a lower learning rate or training.max_grad_norm.",
        )


def require_learning(
    outcome: Outcome,
    limit: float | Literal["auto"] | None,
    vocabulary: int,
    untrained: float | None = None,
    start_hint: str = "",
    *,
    dpo: bool = False,
) -> None:
    """Raises if a round's training diverged by its clients' losses, each the mean over its steps.

    The median client counts, so that a minority cannot stop a run by what it reports; losses that are withheld for
    privacy do not count. A model whose values overflow predicts every token alike, with the loss ln V.

    Args:
        outcome: The round.
        limit: `training.loss_limit`; auto: 2 ln 2 for `dpo`, else 2 ln V or, if `untrained` is known, the larger of
            0.85 ln V and 1.5 times that.
        vocabulary: V, the number of tokens that the model chooses from.
        untrained: The backbone's own loss on training texts, nats per response token; None if it is not known.
        start_hint: The method's advice for a model that it makes worse before any training.
        dpo: Whether the losses are those of DPO, with which guessing which answer is the chosen one has ln 2.

    Raises:
        DivergedError: the loss is not finite, or above the limit; the message tells a model that was above it before
            the first update from one that training took there.
    """
    if limit is None:
        return
    guessing, unit, alike = (math.log(2), "pair", "answer") if dpo else (math.log(vocabulary), "token", "token")
    if limit != "auto":
        highest = limit
    elif untrained is None:
        highest = WORSE_THAN_GUESSING * guessing
    else:
        highest = max(NEARLY_GUESSING * guessing, WORSE_THAN_UNTRAINED * untrained)
    reports = [one.report for one in outcome.deliveries if one.task.client.index in outcome.accepted]
    trained = [one for one in reports if not one.withheld and one.steps]
    middle = _median(one.loss for one in trained)
    if middle <= highest:
        return
    start = _median(one.first_loss for one in trained if one.first_loss is not None) if outcome.round == 1 else 0.0
    others = f"guessing every {alike} alike has {guessing:.4g}"
    others += "" if untrained is None else f", the backbone without training {untrained:.4g}"
    if start > highest:
        raise DivergedError(
            f"The model is bad before any training: the median client's loss in its first step is {start:.4g} nats per "
            f"{unit}, above the limit of {highest:.4g} (training.loss_limit); {others}.",
            f"A lower learning rate does not help. {start_hint or START_HINT}",
        )
    raise DivergedError(
        f"The training of round {outcome.round} diverged: the median client's loss is {middle:.4g} nats per {unit}, "
        f"above the limit of {highest:.4g} (training.loss_limit); {others}.",
        DIVERGED_HINT,
    )


def _median(losses: Iterable[float]) -> float:
    """Returns the lower median, NaN as infinity; 0 for no loss."""
    ordered = sorted(math.inf if math.isnan(loss) else loss for loss in losses)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0
