"""The premise of budgets by active experts: what a model loses with fewer of them, before any training.

A model is measured on plain text at its own number of active experts, half of it, and so on down to one, with and
without scaling the active experts' weights to sum to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedguild.core.errors import DataError, ModelError
from fedguild.data.batches import SlotBatch
from fedguild.measuring.scores.expert_usage import expert_utilisation
from fedguild.measuring.scores.statistics import half_width, spread
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.server.diagnosis import FEW

if TYPE_CHECKING:
    import pandas

ROWS_PER_PASS = 4


@dataclass(frozen=True, slots=True)
class Level:
    """The model's loss at one number of active experts.

    Attributes:
        active_experts: k.
        renormalised: Whether the active experts' weights are scaled to sum to one.
        nats: Mean loss per token, in nats.
        lost: The increase over the model's own top-k and scaling.
        half_width: Half the width of the 95 % confidence interval of `lost`, over the rows of text.
    """

    active_experts: int
    renormalised: bool
    nats: float
    lost: float
    half_width: float


@dataclass(frozen=True, slots=True)
class LayerUse:
    """How evenly a layer's experts are used, with the model's own scaling of weights.

    Attributes:
        layer: The layer's name in the model.
        active_experts: k.
        gini: Gini coefficient of the experts' frequencies, from 0 (all alike) to 1 - 1/M.
        idle: Share of experts that are chosen less than a tenth as often as the average expert.
    """

    layer: str
    active_experts: int
    gini: float
    idle: float


@dataclass(frozen=True)
class Premise:
    """What a model loses with fewer active experts.

    Attributes:
        model: The model's name.
        top_k: Its own number of active experts.
        renormalises: Whether it scales the active experts' weights to sum to one.
        tokens: Number of predicted tokens.
        levels: The loss at each number of active experts, the largest first; the model's own scaling first.
        layers: Use of the experts, by layer and number of active experts.
    """

    model: str
    top_k: int
    renormalises: bool
    tokens: int
    levels: Sequence[Level]
    layers: Sequence[LayerUse]

    @property
    def verdict(self) -> str:
        """Whether budgets matter on this model, judged by its loss at one active expert."""
        one = next(level for level in self.levels if level.active_experts == 1)
        lost = f"{one.lost:.3f} ± {one.half_width:.3f} nats a token"
        if one.lost <= one.half_width:
            return f"Budgets have nothing to repair on this text: one active expert loses {lost}."
        return f"One active expert loses {lost}: that is what a method for budgets can win back."

    def frame(self) -> pandas.DataFrame:
        """Returns a row for each number of active experts, with and without renormalisation."""
        import pandas

        return pandas.DataFrame([asdict(level) for level in self.levels])

    def record(self) -> dict[str, object]:
        """Returns everything as JSON values."""
        return {
            "model": self.model,
            "top_k": self.top_k,
            "renormalises": self.renormalises,
            "tokens": self.tokens,
            "levels": [asdict(level) for level in self.levels],
            "layers": [asdict(layer) for layer in self.layers],
            "verdict": self.verdict,
        }


def measure(
    backbone: Backbone,
    texts: Sequence[str],
    *,
    context: int = 256,
    tokens: int = 8192,
    step: Callable[[int, int], None] = lambda _, __: None,
) -> Premise:
    """Returns what a mixture of experts loses with fewer active experts.

    Args:
        texts: Plain text, read from the start in rows of `context` tokens.
        context: Tokens of a row.
        tokens: The most tokens to read.
        step: Called with the number of passes done, and of all passes.

    Raises:
        ModelError: the model is dense, or each token has one expert.
        DataError: the texts do not fill two rows.
    """
    require_choice(backbone.info)
    rows = _rows(backbone, texts, context, tokens)
    top_k, own = backbone.info.top_k, backbone.moe[0].rule.renormalise
    numbers = list(_halves(top_k))
    batches = [_batch(part) for part in rows.split(ROWS_PER_PASS)]
    losses: dict[tuple[bool, int], list[float]] = {}
    layers: list[LayerUse] = []
    total = 2 * len(numbers) * len(batches)
    with SlotModel(backbone, [AdapterPlan(())]) as model, backbone.without_gradients():
        for renormalised in (own, not own):
            for active in numbers:
                found: list[Tensor] = []
                with (
                    _renormalising(backbone, renormalised),
                    model.activating([active]),
                    model.collect_routing() as statistics,
                ):
                    for batch in batches:
                        found.append(model.token_losses(batch).double().cpu().view(batch.rows_per_slot[0], -1).mean(1))
                        step(len(batches) * len(losses) + len(found), total)
                losses[renormalised, active] = torch.cat(found).tolist()
                if renormalised == own:
                    layers += _use(backbone, statistics.counts[:, 0], statistics.layer_tokens[:, 0], active)
    base = losses[own, top_k]
    levels = [_level(active, renormalised, values, base) for (renormalised, active), values in losses.items()]
    return Premise(backbone.info.name, top_k, own, rows.numel() - len(rows), tuple(levels), tuple(layers))


def require_choice(model: ModelInfo) -> None:
    """Raises a ModelError for a model whose active experts cannot be fewer."""
    if model.undescribed:
        model.require_experts("A choice of active experts")
    if not model.moe:
        raise ModelError(
            f"'{model.name}' is a dense model: it has no experts to activate.",
            "Give a mixture of experts. On a dense model budgets differ in rank.",
        )
    if model.top_k == 1:
        raise ModelError(f"'{model.name}' activates one expert per token, so no budget can have fewer.")


def _rows(backbone: Backbone, texts: Sequence[str], context: int, tokens: int) -> Tensor:
    """Returns [rows, context]; each row starts with the tokenizer's special tokens."""
    tokenizer = backbone.tokenizer
    opening: list[int] = [id for id in tokenizer.encode("", add_special_tokens=True) if id != tokenizer.eos_token_id]
    room = context - len(opening)
    if room < 2:
        raise DataError(f"A row of {context} tokens has no token to predict.", "Give a longer context.")
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(ids) >= tokens:
            break
    count = min(len(ids), tokens) // room
    if count < 2:
        raise DataError(
            f"The text has {len(ids)} tokens, fewer than two rows of {context}.",
            "Give more text, or a shorter context.",
        )
    rows = torch.tensor(ids[: count * room]).view(count, room)
    return torch.cat([torch.tensor(opening, dtype=torch.int64).expand(count, -1), rows], 1)


def _batch(rows: Tensor) -> SlotBatch:
    """Returns a batch of one slot that predicts every token after a row's first."""
    count, length = rows.shape
    places = torch.arange(count * length).view(count, length)
    predict = places[:, :-1].reshape(-1)
    mask = torch.ones(count, length, dtype=torch.bool)
    return SlotBatch(rows, mask, (count,), predict, rows[:, 1:].reshape(-1), torch.zeros_like(predict))


def _halves(top_k: int) -> Iterator[int]:
    while top_k >= 1:
        yield top_k
        top_k //= 2


@contextmanager
def _renormalising(backbone: Backbone, wanted: bool) -> Iterator[None]:
    rules = [layer.rule for layer in backbone.moe]
    for layer in backbone.moe:
        layer.rule = replace(layer.rule, renormalise=wanted)
    try:
        yield
    finally:
        for layer, rule in zip(backbone.moe, rules, strict=True):
            layer.rule = rule


def _use(backbone: Backbone, counts: Tensor, tokens: Tensor, active: int) -> list[LayerUse]:
    """Returns the use of each layer's experts; `counts` is [layers, experts]."""
    found = []
    for layer, of_layer, seen in zip(backbone.moe, counts.cpu(), tokens.tolist(), strict=True):
        usage = expert_utilisation(of_layer[None, : layer.info.num_experts], seen)
        even = usage.frequency.mean()
        idle = (usage.frequency < FEW * even).double().mean().item()
        found.append(LayerUse(layer.info.name, active, usage.gini.item(), idle))
    return found


def _level(active: int, renormalised: bool, values: Sequence[float], base: Sequence[float]) -> Level:
    lost = [value - reference for value, reference in zip(values, base, strict=True)]
    return Level(active, renormalised, fmean(values), fmean(lost), half_width(spread(lost)))
