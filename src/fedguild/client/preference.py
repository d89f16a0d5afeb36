"""Direct Preference Optimization: the loss of a preference pair against the backbone without the adapter.

R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
equation 7; in our words, for a pair of a chosen answer w and a rejected answer l to one prompt:

    margin = beta ((log pi(w) - log ref(w)) - (log pi(l) - log ref(l)))
    loss = -log sigmoid(margin)

Symbols: pi the client's model, ref the frozen backbone without its adapter, beta `training.dpo_beta`; log pi and log
ref sum over an answer's learned tokens. It is the loss `sigmoid` of TRL's DPOTrainer.

The reference never changes within a round, so its log-likelihoods are computed before the first step, once for each
pair that the round trains on: one forward pass more, and no second model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedguild.client.sums import sums_of_slots
from fedguild.data.batches import Encoded, collate
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel


def has_pairs(examples: Sequence[Encoded]) -> bool:
    """Whether a client's examples are preference pairs; they all are, or none is."""
    return bool(examples) and examples[0].rejected is not None


def preference_losses(losses: Tensor, pairs: Sequence[Encoded], reference: Tensor, beta: float) -> Tensor:
    """Returns [pairs], the loss of every pair.

    Args:
        losses: [P] negative log-likelihoods of the targets of the pairs' rows, in order.
        reference: [pairs, 2] the reference's sums of the same.
    """
    return -logsigmoid(margins(sums_of_rows(losses, pairs), reference, beta))


def margins(own: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Returns [pairs], beta times how much more likely than the reference has it the model has the chosen answer made.

    Args:
        own: [pairs, 2] negative log-likelihood of the chosen and of the rejected answer.
        reference: The same of the reference.
    """
    gained = reference.to(own) - own
    return beta * (gained[:, 0] - gained[:, 1])


def sums_of_rows(losses: Tensor, pairs: Sequence[Encoded]) -> Tensor:
    """Returns [pairs, 2], the sums of the targets' losses over the two rows of every pair."""
    return sums_of_slots(losses, [len(row.targets) for pair in pairs for row in pair.rows]).view(-1, 2)


@torch.no_grad()
def reference_losses(
    model: SlotModel, examples: Sequence[Sequence[Encoded]], batch_size: int, pad_id: int
) -> list[Tensor]:
    """Returns every slot's [pairs, 2], the negative log-likelihoods under the backbone as its client runs it.

    That is with the client's active experts, and without its adapter, whatever hooks this has, and without what earlier
    rounds have merged into the weights.

    Args:
        model: The cohort's slots, which are set aside meanwhile.
        examples: Every slot's pairs; some may be empty.
    """
    backbone = model.backbone
    plans = [AdapterPlan((), plan.active_experts) for plan in model.plans]
    found: list[list[Tensor]] = [[] for _ in examples]
    with model.set_aside(), backbone.as_loaded(), SlotModel(backbone, plans) as plain:
        for start in range(0, max(map(len, examples), default=0), batch_size):
            rows = [pairs[start : start + batch_size] for pairs in examples]
            flat = [pair for pairs in rows for pair in pairs]
            sums = sums_of_rows(plain.token_losses(collate(rows, pad_id, plain.seq2seq)), flat).cpu()
            for slot, own in enumerate(sums.split([len(pairs) for pairs in rows])):
                found[slot].append(own)
    return [torch.cat(sums) if sums else torch.zeros(0, 2) for sums in found]
