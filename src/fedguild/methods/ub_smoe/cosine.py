"""Cosine of the pseudo-gradient with an inactive expert's true gradient, on held-out examples (UB-SMoE, Table 8).

A measurement beside the algorithm. A client uploads `values` [L + 1], the cosines, and `measured` [L + 1], the
numbers of experts; the state has the mean over the clients that measured it, by their examples, and their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.data.batches import Encoded, collate
from fedguild.methods.ub_smoe.names import COSINE
from fedguild.model.info import ModelInfo
from fedguild.server.terms import Means, Term, Terms, Upload

HELD_OUT = 0.1
"""Largest share of a client's examples that is taken out of its training."""


@dataclass(frozen=True)
class Cosine:
    """A slot's cosines of G~ with the true gradient, over its inactive experts' LoRA.

    Attributes:
        values: [L + 1] cosine of each layer, and of all layers as one vector; 0 where nothing is measured.
        measured: [L + 1] inactive experts that have both gradients.
    """

    values: Tensor
    measured: Tensor


def cosine_terms(sent: Upload) -> Terms:
    """Returns the terms of the clients' mean cosines; a layer in which a client measured no expert does not count."""
    cosine = sent.payload.part(COSINE)
    measured = (cosine["measured"] > 0).float()
    values = Term(cosine["values"], measured * float(sent.client.examples), COSINE, 0, is_change=False)
    why = "method.measure_cosine shows in which layers a client measured"
    return Terms({f"{COSINE}/values": values}, {f"{COSINE}/measured": measured}, secure=False, why=why)


def mean_cosines(means: Means, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state's part `cosine` after a round; nothing where the state has none."""
    if not before:
        return {}
    values = means.moved(COSINE, {"values": torch.zeros_like(before["values"])})
    return {**values, "measured": means.total(f"{COSINE}/measured").float()}


def cosine_shapes(model: ModelInfo) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the part `cosine`: a row for each layer, and one for all."""
    return dict.fromkeys(("values", "measured"), (len(model.moe) + 1,))


def measured_cosines(
    cohort: Cohort, gradients: Sequence[Mapping[str, Tensor] | None], limit: int
) -> list[dict[str, Tensor]]:
    """Returns every client's part `cosine`, measured on examples that it does not train on.

    They are taken out of its training (`Cohort.hold_out`); none where it has only one.

    Args:
        cohort: The clients, before training, their trainables loaded.
        gradients: Each client's G~; None or empty where it has none.
        limit: Largest number of examples to take from a client.
    """
    examples = [
        cohort.hold_out(slot, HELD_OUT, limit) if len(work.examples) > 1 else ()
        for slot, work in enumerate(cohort.work)
    ]
    cosines = held_out_cosines(cohort, examples, [gradient or {} for gradient in gradients])
    return [{"values": cosine.values.float(), "measured": cosine.measured.float()} for cosine in cosines]


def held_out_cosines(
    cohort: Cohort, examples: Sequence[Sequence[Encoded]], gradients: Sequence[Mapping[str, Tensor]]
) -> list[Cosine]:
    """Returns every slot's cosines, at the weights as they are; leaves no gradient behind.

    An expert is inactive in an example where no token of it activates the expert with the slot's
    own active experts. Its true gradient is that of the example's loss with as many active experts
    as the model has, which reaches some of those that the slot cannot afford, summed over the
    examples in which it is inactive.

    Args:
        cohort: The clients, before training.
        examples: `examples[slot]`, held out.
        gradients: `gradients[slot]`, G~ by expert LoRA name; a name left out is not measured.
    """
    layers = [layer.experts for layer in cohort.model.backbone.info.moe]
    names = [[name for name in cohort.trainables if name.startswith(f"{path}.")] for path in layers]
    true = {
        name: torch.zeros_like(cohort.trainables[name].stored, requires_grad=False) for layer in names for name in layer
    }
    for row in range(max(len(rows) for rows in examples)):
        _add_inactive(cohort, [rows[row : row + 1] for rows in examples], names, true)
    return [_cosine(cohort, slot, gradient, names, true) for slot, gradient in enumerate(gradients)]


def _add_inactive(
    cohort: Cohort, rows: Sequence[Sequence[Encoded]], names: Sequence[Sequence[str]], true: Mapping[str, Tensor]
) -> None:
    """Adds to `true` the gradients of one example of each slot, of the experts that are inactive in it."""
    with cohort.model.collect_routing() as routing:
        for _ in cohort.passes(rows):
            pass
    cohort.optimizer.zero_grad()
    info = cohort.model.backbone.info
    with cohort.model.activating([info.top_k] * cohort.model.slots):
        cohort.model.token_losses(collate(rows, cohort.pad_id, cohort.model.seq2seq)).sum().backward()
    for layer, counts in zip(names, routing.counts, strict=True):
        for name in layer:
            grad = cohort.trainables[name].stored.grad
            assert grad is not None
            inactive = (counts[:, : grad.shape[0]] == 0).T.to(grad.dtype)
            true[name].addcmul_(grad, inactive[:, :, None, None])
    cohort.optimizer.zero_grad()


def _cosine(
    cohort: Cohort,
    slot: int,
    gradient: Mapping[str, Tensor],
    names: Sequence[Sequence[str]],
    true: Mapping[str, Tensor],
) -> Cosine:
    """Returns a slot's cosines of G~ with the true gradients of all slots, over each layer's names."""
    sums = torch.zeros(len(names), 3, dtype=torch.float64)
    measured = torch.zeros(len(names), dtype=torch.float64)
    for index, layer in enumerate(names):
        common = [name for name in layer if name in gradient]
        if common:
            left = torch.cat([gradient[name].flatten(1).double() for name in common], dim=1)
            slices = [cohort.trainables[name].own(slot, of=true[name]) for name in common]
            right = torch.cat([value.flatten(1).double().cpu() for value in slices], dim=1)
            counted = left.any(dim=1) & right.any(dim=1)
            left, right = left[counted], right[counted]
            sums[index] = torch.stack([(left * right).sum(), left.square().sum(), right.square().sum()])
            measured[index] = counted.sum()
    sums, measured = (torch.cat([each, each.sum(dim=0, keepdim=True)]) for each in (sums, measured))
    norms = (sums[:, 1] * sums[:, 2]).sqrt()
    return Cosine(torch.where(norms > 0, sums[:, 0] / norms.clamp(min=torch.finfo(norms.dtype).tiny), 0.0), measured)
