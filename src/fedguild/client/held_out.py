"""How well the pseudo-gradient points where an inactive expert's true gradient does (UB-SMoE, Table 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.data.batches import Encoded, collate
from fedguild.model.slots import SlotModel


@dataclass(frozen=True)
class Cosine:
    """A slot's cosines of G~ with the true gradient, over its inactive experts' LoRA.

    Attributes:
        values: [L + 1] cosine of each layer, and of all layers as one vector; 0 where nothing is measured.
        measured: [L + 1] inactive experts that have both gradients.
    """

    values: Tensor
    measured: Tensor


def held_out_cosines(
    cohort: Cohort, examples: Sequence[Sequence[Encoded]], gradients: Sequence[Mapping[str, Tensor]]
) -> list[Cosine]:
    """Returns every slot's cosines, at the weights as they are; leaves no gradient behind.

    An expert is inactive where no token of the slot's held-out examples activates it with the
    slot's own active experts. Its true gradient is that of the same examples' loss with as many
    active experts as the model has, which reaches some of those that the slot cannot afford.

    Args:
        cohort: The clients, before training.
        examples: `examples[slot]`, held out.
        gradients: `gradients[slot]`, G~ by expert LoRA name; a name left out is not measured.
    """
    with cohort.model.collect_routing() as routing:
        for _ in cohort.passes(examples):
            pass
    with _all_active(cohort.model):
        _backward(cohort, examples)
    layers = [layer.experts for layer in cohort.model.backbone.info.moe]
    cosines = [
        _cosine(cohort, slot, gradients[slot], layers, routing.counts[:, slot] == 0) for slot in range(len(cohort.work))
    ]
    cohort.optimizer.zero_grad()
    return cosines


def _backward(cohort: Cohort, examples: Sequence[Sequence[Encoded]]) -> None:
    size = cohort.settings.batch_size
    cohort.optimizer.zero_grad()
    for start in range(0, max(len(rows) for rows in examples), size):
        batch = collate([rows[start : start + size] for rows in examples], cohort.pad_id, cohort.model.seq2seq)
        cohort.model.token_losses(batch).sum().backward()


def _cosine(
    cohort: Cohort, slot: int, gradient: Mapping[str, Tensor], layers: Sequence[str], inactive: Tensor
) -> Cosine:
    """Returns a slot's cosines; `inactive` [L, M] says which experts count."""
    sums = torch.zeros(len(layers), 3, dtype=torch.float64)
    measured = torch.zeros(len(layers), dtype=torch.float64)
    for index, path in enumerate(layers):
        pairs = []
        for name, trainable in cohort.trainables.items():
            if name in gradient and name.startswith(f"{path}."):
                assert trainable.stored.grad is not None
                true = trainable.own(slot, of=trainable.stored.grad)
                pairs.append((gradient[name].flatten(1).double(), true.flatten(1).double().cpu()))
        if pairs:
            pseudo, true = (torch.cat(side, dim=1) for side in zip(*pairs, strict=True))
            counted = inactive[index, : len(pseudo)].cpu() & pseudo.any(dim=1) & true.any(dim=1)
            pseudo, true = pseudo[counted], true[counted]
            sums[index] = torch.stack([(pseudo * true).sum(), pseudo.square().sum(), true.square().sum()])
            measured[index] = counted.sum()
    sums, measured = (torch.cat([each, each.sum(dim=0, keepdim=True)]) for each in (sums, measured))
    norms = (sums[:, 1] * sums[:, 2]).sqrt()
    return Cosine(torch.where(norms > 0, sums[:, 0] / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0), measured)


@contextmanager
def _all_active(model: SlotModel) -> Iterator[None]:
    own = model.plans
    model.plans = tuple(replace(plan, active_experts=None) for plan in own)
    try:
        yield
    finally:
        model.plans = own
