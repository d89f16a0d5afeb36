"""HMoLE: a mixture of LoRA experts on linear layers, with a router whose shape no expert changes.

Source: Zhang et al., Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
Architectures (FedAMoLE), NeurIPS 2025, Section 4.2 and Equations 4 to 9, 11, 13, 20 and 21. A client
holds some of a module's pool of experts; row n of its storage is the expert `ids[n]` of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedguild.core.errors import ConfigError, ModelError
from fedguild.methods.fedamole.embeddings import Embeddings
from fedguild.methods.fedamole.kernel import Gating, Stacked, Tokens, balance_loss, mixture_product
from fedguild.model.adapters.lora import kaiming_uniform
from fedguild.model.adapters.part import AdapterHost, AdapterPart, OutputHook, Standalone
from fedguild.model.adapters.storage import Layout
from fedguild.model.backbone import Backbone
from fedguild.model.info import LinearInfo, ModelInfo
from fedguild.model.on_device import on_device
from fedguild.model.runtime import Pass
from fedguild.model.targets import targeted_linears

Held = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class MixtureOfLora(AdapterPart):
    """A shared LoRA expert and some experts of a pool on every targeted linear layer.

    Attributes:
        targets: Leaf names of linear layers (`q_proj`), or the groups `attention` and `mlp`.
        rank: r, the rank of every expert.
        scale: Factor on every low-rank product, alpha / r in LoRA's notation.
        experts: E, the experts of a module's pool.
        capacity: b, the most experts that a client holds in a module.
        top_k: k^e, the active experts per token.
        shared: Whether there is a shared expert, which every token uses.
        router: `invariant` scores an expert by <W^t h, A_j h> (Eq. 6), with W^t [r, in]; `vanilla` by
            the expert's row of W_r [E, in] times h, unscaled (Eq. 18).
        score_scale: Whether the invariant router's scores are divided by √r or by √in.
        renormalise: Whether the weights of a token's active experts are made to sum to one.
        dropout: Dropout rate on the input of the experts, in training; the router gets the whole input.
        held: The held experts as (module path, ids in the pool), for evaluation; in training,
            `Mixture.assign` sets them.
    """

    targets: tuple[str, ...]
    rank: int
    scale: float
    experts: int
    capacity: int
    top_k: int
    shared: bool = True
    router: Literal["invariant", "vanilla"] = "invariant"
    score_scale: Literal["rank", "hidden"] = "rank"
    renormalise: bool = True
    dropout: float = 0.0
    held: Held = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"A LoRA rank must be at least 1, but is {self.rank}.")
        if not 1 <= self.top_k <= self.capacity:
            raise ConfigError(
                f"A mixture cannot have {self.top_k} active experts per token and room for {self.capacity} per client.",
                "Choose at least 1 active expert and at most as many as a client may hold.",
            )
        if self.experts < self.top_k:
            raise ConfigError(f"A pool of {self.experts} experts has fewer than the {self.top_k} active per token.")
        for module, ids in self.held:
            self.check_held(module, ids)

    def check_held(self, module: str, ids: Sequence[int]) -> None:
        """Raises ConfigError unless a client may hold these experts of the pool in a module."""
        if len(set(ids)) != len(ids) or any(not 0 <= index < self.experts for index in ids):
            raise ConfigError(
                f"{module}: a client cannot hold the experts {list(ids)}.",
                f"Give different ids from 0 to {self.experts - 1}.",
            )
        if not self.top_k <= len(ids) <= self.capacity:
            raise ConfigError(
                f"{module}: a client holds {len(ids)} expert(s), but {self.top_k} are active per token.",
                f"Give each client {self.top_k} to {self.capacity} experts per module.",
            )

    def linears(self, model: ModelInfo) -> tuple[LinearInfo, ...]:
        """Returns the linear layers that get a mixture.

        Raises:
            ConfigError: a target names no linear layer of this model, or there is no target.
        """
        routed = sorted({"router", "experts"} & set(self.targets))
        if routed or not self.targets:
            raise ConfigError(
                f"A mixture of LoRA experts cannot be put on {', '.join(routed) or 'no layer'}.",
                "Name linear layers: attention, mlp, or leaf names such as q_proj.",
            )
        return targeted_linears(model, self.targets)

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape of the mixture's trainables, without the slot axis.

        Per module: `.shared.lora_A` [r, in] and `.shared.lora_B` [out, r]; `.experts.lora_A`
        [b, r, in] and `.experts.lora_B` [b, out, r]; `.router` [r, in], or [E, in] where it is vanilla.

        Raises:
            ConfigError: a target names no linear layer of this model, or there is no target.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in self.linears(model):
            if self.shared:
                shapes[f"{linear.name}.shared.lora_A"] = (self.rank, linear.inputs)
                shapes[f"{linear.name}.shared.lora_B"] = (linear.outputs, self.rank)
            shapes[f"{linear.name}.experts.lora_A"] = (self.capacity, self.rank, linear.inputs)
            shapes[f"{linear.name}.experts.lora_B"] = (self.capacity, linear.outputs, self.rank)
            rows = self.rank if self.router == "invariant" else self.experts
            shapes[f"{linear.name}.router"] = (rows, linear.inputs)
        return shapes

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns the initial values: B zero; A and the router uniform in ±1/√in, as in nn.Linear."""
        return torch.zeros(shape) if name.endswith("lora_B") else kaiming_uniform(shape, rng)

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns the slots first; a vanilla router does not decay, because a client holds only some of its rows."""
        return Layout(shape, decays=self.router == "invariant" or not name.endswith(".router"))

    def attach(self, host: AdapterHost, parts: Sequence[MixtureOfLora]) -> None:
        """Hooks the mixtures into the backbone, and leaves a `Mixture` in `host.attached`.

        Raises:
            ConfigError: the slots' parts differ in more than the held experts.
        """
        if any(replace(part, held=()) != replace(self, held=()) for part in parts):
            raise ConfigError(
                "The clients of a cohort must have the same mixture of LoRA experts, except for those held."
            )
        host.attached[MixtureOfLora] = Mixture(host, parts)

    def standalone(self, backbone: Backbone, parts: Sequence[AdapterPart], tensors: Mapping[str, Tensor]) -> Standalone:
        """Returns the held experts, the shared one and the routers for `standalone.py`."""
        held, own, scales = dict(self.held), dict[str, Tensor](), dict[str, float | None]()
        for linear in self.linears(backbone.info):
            ids = list(held[linear.name])
            for name in (name for name in tensors if name.startswith(f"{linear.name}.")):
                value = tensors[name]
                if ".experts." in name:
                    value = value[: len(ids)]
                elif name.endswith(".router") and self.router == "vanilla":
                    value = value[ids]
                own[name] = value
            width = self.rank if self.score_scale == "rank" else linear.inputs
            scales[linear.name] = width**-0.5 if self.router == "invariant" else None
        settings = {
            "modules": scales,
            "top_k": self.top_k,
            "scale": self.scale,
            "renormalise": self.renormalise,
            "shared": self.shared,
        }
        return Standalone(Path(__file__).with_name("standalone.py"), settings, own)


class Mixture:
    """The mixtures of all slots of a SlotModel.

    Attributes:
        part: The mixture's sizes and options.
        modules: Paths of the linear layers that have one.
    """

    def __init__(self, host: AdapterHost, parts: Sequence[MixtureOfLora]) -> None:
        self.part = parts[0]
        linears = self.part.linears(host.backbone.info)
        self.modules = tuple(linear.name for linear in linears)
        self._host = host
        self._held: dict[str, list[tuple[int, ...]]] = {module: [()] * host.slots for module in self.modules}
        self._gatings: dict[str, Gating] = {}
        self._balance: dict[str, Tensor] = {}
        self._gathering: Embeddings | None = None
        self._tokens: tuple[Pass, Tokens] | None = None
        self._rates = tuple(part.dropout for part in parts)
        self._inputs = {linear.name: linear.inputs for linear in linears}
        self._kind = torch.float64 if host.backbone.dtype is torch.float64 else torch.float32
        for slot, part in enumerate(parts):
            if part.held:
                self.assign(slot, dict(part.held))
        for module in self.modules:
            linear = host.backbone.model.get_submodule(module)
            host.change_output(linear, self._hook(module))

    def assign(self, slot: int, held: Mapping[str, Sequence[int]]) -> None:
        """Assigns experts of the pool to a slot's rows: row n of a module is expert `held[module][n]`.

        Rows beyond them take no part in the softmax, the top-k or the loss, and their gradient
        is zero. A module left out keeps its experts.

        Raises:
            ConfigError: a module has no mixture, or a client cannot hold these experts.
        """
        for module, ids in held.items():
            if module not in self._held:
                raise ConfigError(f"{module} has no mixture of LoRA experts.", f"Known: {', '.join(self.modules)}.")
            self.part.check_held(module, ids)
        for module, ids in held.items():
            self._held[module][slot] = tuple(ids)
            self._gatings.pop(module, None)

    def held(self, slot: int) -> dict[str, tuple[int, ...]]:
        """Returns module -> ids in the pool of the slot's rows; empty where none was assigned."""
        return {module: self._held[module][slot] for module in self.modules}

    def balance_loss(self) -> Tensor:
        """Returns [S], each slot's load balance loss of the last pass, with gradients (Eq. 20).

        The sum over modules of |E_m| Σ_j f_j p̄_j: f_j is the fraction of the real tokens' top-k
        choices that went to expert j, p̄_j its mean probability over them. 0 for a slot without tokens.

        Raises:
            ModelError: there was no pass yet.
        """
        if not self._balance:
            raise ModelError("A load balance loss needs a forward pass first.")
        return torch.stack(list(self._balance.values())).sum(0)

    @contextmanager
    def embeddings(self) -> Iterator[Embeddings]:
        """Collects the forward passes inside the block; the yielded object has the embeddings afterwards."""
        self._gathering = gathered = Embeddings()
        try:
            yield gathered
        finally:
            self._gathering = None
        loaded = self._host.loaded
        for module, held in self._held.items():
            gathered.project(module, loaded[f"{module}.router"], loaded[f"{module}.experts.lora_A"], held)

    def _hook(self, module: str) -> OutputHook:
        stored = {
            name.removeprefix(f"{module}."): trainable.stored
            for name, trainable in self._host.loaded.items()
            if name.startswith(f"{module}.")
        }

        kept = Stacked()

        def hook(current: Pass, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            dropped = self._host.dropout(hidden, module, current, self._rates)
            tokens = self._tokens_of(current, hidden)
            gating = self._gating(module, current)
            total, p, active = mixture_product(output.flatten(0, -2), hidden, dropped, stored, gating, tokens, kept)
            balance = balance_loss(p, active, gating, tokens)
            if self._host.backbone.runtime.counting:
                self._note(module, hidden, balance, tokens)
            return total.view_as(output)

        return hook

    def _note(self, module: str, hidden: Tensor, balance: Tensor, tokens: Tokens) -> None:
        """Stores the results of a pass."""
        self._balance[module] = balance
        if self._gathering is not None:
            self._gathering.add(module, hidden, tokens)

    def _tokens_of(self, current: Pass, hidden: Tensor) -> Tokens:
        """Returns the pass's tokens, computed once per pass."""
        if self._tokens is None or self._tokens[0] is not current or len(self._tokens[1].slot) != len(hidden):
            tokens = Tokens.of(current, len(hidden), hidden.device, self._kind)
            self._tokens = (current, tokens)
        return self._tokens[1]

    def _gating(self, module: str, current: Pass) -> Gating:
        """Returns a module's gating, computed once per assignment.

        Raises:
            ModelError: a slot with rows has no experts.
        """
        held = self._held[module]
        for slot, (ids, rows) in enumerate(zip(held, current.rows_per_slot, strict=True)):
            if rows and not ids:
                raise ModelError(f"Slot {slot} holds no experts of {module}.", "Call Mixture.assign before a pass.")
        if module not in self._gatings:
            self._gatings[module] = self._new_gating(module)
        return self._gatings[module]

    def _new_gating(self, module: str) -> Gating:
        held, part, device = self._held[module], self.part, self._host.device
        rows = max(part.top_k, *(len(ids) for ids in held))
        sizes = on_device([len(ids) for ids in held], device)
        ids = on_device([[*row, *[0] * (rows - len(row))] for row in held], device)
        some_blocked = any(len(ids) < rows for ids in held)
        blocked = torch.arange(rows, device=device) >= sizes[:, None] if some_blocked else None
        width = part.rank if part.score_scale == "rank" else self._inputs[module]
        return Gating(
            rows=rows,
            top_k=part.top_k,
            scale=part.scale,
            score_scale=width**-0.5 if part.router == "invariant" else None,
            renormalise=part.renormalise,
            held=sizes,
            blocked=blocked,
            ids=ids,
        )
