"""Mixture of the logits of two LoRAs in one slot, by a gate: g · z_first + (1 - g) · z_second, one g per row.

g = sigmoid(w · phi + b), where phi is the mean of the prompt's features in the frozen backbone. Every
row of a batch runs twice, all rows under the slots' LoRA and then all rows under their second one; a
hook on the head mixes the two. In generation both runs get the mixed logits, so they continue identically.

Source of the mixture: B. Guo, Y. Mei, D. Xiao, W. Wu, "PFL-MoE: Personalized Federated Learning Based on
Mixture of Experts", APWeb-WAIM 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedguild.core.errors import ConfigError
from fedguild.data.batches import SlotBatch
from fedguild.methods.pfl_moe.prompt_features import Features, prompt_features, target_rows
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.part import AdapterHost, AdapterPart, Standalone
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.on_device import slot_of_rows
from fedguild.model.runtime import Pass
from fedguild.model.weight_changes import weight_modules

SECOND = "personal."
"""Prefix of the names of the second LoRA."""
WEIGHT, BIAS = "logit_gate.weight", "logit_gate.bias"
"""Names of w [H] and b []."""


@dataclass(frozen=True)
class LogitMixture(AdapterPart):
    """The second LoRA and the gate, as they are: neither is trained here, nor is the plan's own LoRA.

    It comes before that LoRA among the plan's parts, since it doubles what LoRA attaches to.

    Attributes:
        rank: Rank of both LoRAs.
        targets: The layers that both adapt, as in the plan.
        features: The features whose mean is phi.
    """

    rank: int
    targets: tuple[str, ...]
    features: Features = "hidden"

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns `personal.{name}` of every name of the LoRA, and the gate's w [H] and b []."""
        second = Lora(self.rank, 1.0, self.targets).shapes(model)
        return {**{f"{SECOND}{name}": shape for name, shape in second.items()}, WEIGHT: (model.hidden,), BIAS: ()}

    def attach(self, host: AdapterHost, parts: Sequence[LogitMixture]) -> None:
        """Doubles every batch, and mixes the head's logits.

        Raises:
            ConfigError: the slots' features differ.
        """
        if any(part.features != self.features for part in parts):
            raise ConfigError("The clients of a cohort must share the features of their gates.")
        host.run_twice(SECOND)
        mixing = _Mixing(host, self.features)
        host.widen = mixing.widen
        head = host.backbone.model.get_output_embeddings()
        host.change_output(head, mixing.mix)

    def standalone(
        self, backbone: Backbone, parts: Sequence[AdapterPart], tensors: Mapping[str, Tensor]
    ) -> Standalone | None:
        """Returns both LoRAs and the gate for `standalone.py`; None for a LoRA that is more than B A."""
        lora = next((part for part in parts if isinstance(part, Lora)), None)
        if lora is None or lora.middle:
            return None
        weights = {
            weight: list(modules)
            for weight, modules in weight_modules(backbone.info).items()
            if f"{modules[0]}.lora_A" in tensors
        }
        own = {name: tensors[name] for name in (WEIGHT, BIAS)}
        for modules in weights.values():
            for name in (f"{module}.{leaf}" for module in modules for leaf in ("lora_A", "lora_B")):
                own |= {f"first.{name}": tensors[name], f"second.{name}": tensors[f"{SECOND}{name}"]}
        routers = {layer.router: layer.top_k for layer in backbone.info.moe}
        settings = {"scale": lora.scale, "features": self.features, "weights": weights, "routers": routers}
        return Standalone(Path(__file__).with_name("standalone.py"), settings, own, merges=False)


def gate_values(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns g [R] = sigmoid(w · phi + b), in the features' dtype.

    Args:
        features: phi, [R, H].
        weight: w of each row's slot, [R, H].
        bias: b of each row's slot, [R].
    """
    return ((features * weight.to(features.dtype)).sum(dim=-1) + bias.to(features.dtype)).sigmoid()


def mixed(gate: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns g · first + (1 - g) · second, in at least fp32; g has the leading dimension of the logits [N, .., V]."""
    kind = torch.promote_types(first.dtype, torch.float32)
    share = gate.to(kind).view(-1, *[1] * (first.dim() - 1))
    return second.to(kind).lerp(first.to(kind), share)


class _Mixing:
    """The gate's values of a batch's rows, computed before the pass and used by the hook on the head.

    Args:
        host: The slots, the gate's storage allocated.
        features: The features whose mean is phi.
    """

    def __init__(self, host: AdapterHost, features: Features) -> None:
        self._host = host
        self._features = features
        self._of_rows = self._of_targets = torch.zeros(0)

    def widen(self, batch: SlotBatch) -> SlotBatch:
        """Returns the batch with all rows repeated after the last one; stores g of each row and target."""
        host = self._host
        slot = slot_of_rows(batch.rows_per_slot, host.device)
        weight, bias = (host.loaded[name].stored.detach().index_select(0, slot) for name in (WEIGHT, BIAS))
        self._of_rows = gate_values(prompt_features(host.backbone, batch, self._features), weight, bias)
        self._of_targets = self._of_rows[target_rows(batch).to(host.device, non_blocking=True)]
        return doubled(batch)

    def mix(self, current: Pass, _: Any, logits: Tensor) -> Tensor:
        """Returns [P, V] mixed logits where positions were selected; in generation [2R, .., V], both halves equal."""
        if current.select is not None:
            return mixed(self._of_targets, *logits.chunk(2))
        both = mixed(self._of_rows, *logits.chunk(2))
        return torch.cat([both, both])


def doubled(batch: SlotBatch) -> SlotBatch:
    """Returns a batch of 2S slots, its rows and positions twice, one after the other; the targets are the same."""

    def twice(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat([tensor, tensor])

    side = batch.input_ids if batch.decoder_ids is None else batch.decoder_ids
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids] * 2),
        mask=torch.cat([batch.mask] * 2),
        rows_per_slot=batch.rows_per_slot * 2,
        predict_at=torch.cat([batch.predict_at, batch.predict_at + side.numel()]),
        position_ids=twice(batch.position_ids),
        segments=twice(batch.segments),
        decoder_ids=twice(batch.decoder_ids),
        decoder_mask=twice(batch.decoder_mask),
    )
