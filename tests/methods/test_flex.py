"""FLEx: the layer with a graft and the choice of the expert against a loop, what is shared and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedguild.core.errors import ModelError
from fedguild.core.payload import ADAPTER
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.measuring.costs.flops import cost
from fedguild.methods.flex import GRAFT, Flex, FlexSettings, grafted_expert
from fedguild.methods.flex.grafted_expert import GraftedExpert, source_name
from fedguild.model.backbone import Backbone
from fedguild.model.moe.view import MoeLayer
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.model.slots import SlotModel
from fedguild.server.method import client_model
from tests import families
from tests.backbones import random_rows, tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors
from tests.oracles import flex as oracle

Seen = dict[str, list[tuple[Tensor, Tensor]]]
"""Path of a block -> input [N, H] and output [N, H] of its experts, of every pass."""


def flex(**options: object) -> Flex:
    return Flex(FlexSettings(**{"rank": 2, "graft_rank": 2, **options}))


@contextmanager
def watching(backbone: Backbone) -> Iterator[Seen]:
    """Writes down what goes into the experts and what comes out, after the hooks that were there before."""
    seen: Seen = {layer.info.name: [] for layer in backbone.moe}

    def hook(name: str) -> Any:
        return lambda _, args, output: seen[name].append((args[0].detach(), output.detach()))

    handles = [
        backbone.model.get_submodule(layer.info.experts).register_forward_hook(hook(layer.info.name))
        for layer in backbone.moe
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def matrices(layer: MoeLayer) -> list[dict[str, Tensor]]:
    """The frozen matrices of every expert of a layer."""
    own = layer.frozen()
    pairs = zip(own.gate_up.detach(), own.down.detach(), strict=True)
    return [
        dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True))
        for gate_up, down in pairs
    ]


def rows(count: int, seed: int) -> list[Encoded]:
    return [Encoded(tuple(row), 2) for row in random_rows([4 + index for index in range(count)], seed)]


@pytest.mark.parametrize("combine", ["add", "mix"])
def test_a_layer_is_that_of_the_loop(combine: str) -> None:
    """Two clients with other experts, gates and numbers of rows in one pass."""
    olmoe_backbone = tiny_backbone("olmoe", dtype=torch.float64)
    method, info = flex(combine=combine, targets=["q_proj"]), olmoe_backbone.info
    plans = [method.plan(info, budget) for budget in (LARGE, SMALL)]
    adapters = [random_tensors(info, plan, seed) for seed, plan in enumerate(plans)]
    for slot, adapter in enumerate(adapters):
        adapter |= {
            source_name(layer.name): torch.tensor(float(3 * slot + index)) for index, layer in enumerate(info.moe)
        }
    batch = collate([rows(2, 1), rows(3, 2)], 0, None)
    with (
        watching(olmoe_backbone) as plain,
        SlotModel(olmoe_backbone, plans) as model,
        watching(olmoe_backbone) as whole,
    ):
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        with torch.no_grad():
            model.logits(batch)
    graft = plans[0].part(GraftedExpert)
    assert graft is not None
    slots = [0] * (4 + 5) + [1] * (4 + 5 + 6)
    for layer in olmoe_backbone.moe:
        name, frozen = layer.info.name, matrices(layer)
        ((tokens, routed),), ((_, found),) = plain[name], whole[name]
        assert len(tokens) == len(slots), "rows are packed, without padding"
        for token, slot in enumerate(slots):
            own = {key: value.double() for key, value in adapters[slot].items()}
            factors = {p: (own[f"{name}.graft.{p}.lora_A"], own[f"{name}.graft.{p}.lora_B"]) for p in frozen[0]}
            expert = oracle.grafted(frozen[int(own[source_name(name)])], factors, graft.scale)
            weight, bias = own[f"{name}.graft.gate.weight"][0], float(own[f"{name}.graft.gate.bias"])
            expected = oracle.layer(tokens[token], routed[token], expert, weight, bias, combine)
            torch.testing.assert_close(found[token], expected, rtol=1e-8, atol=1e-8)


def test_a_client_grafts_the_expert_that_rebuilds_its_layer_best(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Alone or with others, on the data of its own; chosen once, from the model before it trains."""
    clients = [client(0, LARGE, 3), client(1, LARGE, 5)]
    federation = Federation(olmoe_backbone, flex(), clients, tmp_path)
    state = federation.start()
    federation.train(state)
    kept = [federation.memory.load(who.name, 2).part(GRAFT) for who in clients]
    for who, memory in zip(clients, kept, strict=True):
        with watching(olmoe_backbone) as seen, torch.no_grad():
            for row in federation.examples[who.index]:
                olmoe_backbone.model(input_ids=torch.tensor([row.input_ids]))
        for layer in olmoe_backbone.moe:
            tokens = [one for hidden, _ in seen[layer.info.name] for one in hidden.flatten(0, -2)]
            routed = [one for _, output in seen[layer.info.name] for one in output.flatten(0, -2)]
            expected = oracle.choice(tokens, routed, matrices(layer))
            assert int(memory[source_name(layer.info.name)]) == expected
    federation.train(state, 2)
    for who, memory in zip(clients, kept, strict=True):
        later = federation.memory.load(who.name, 3).part(GRAFT)
        moved = {name for name, value in memory.items() if not torch.equal(later[name], value)}
        assert moved
        assert not {source_name(layer.info.name) for layer in olmoe_backbone.moe} & moved


def test_an_answer_that_was_not_preferred_chooses_no_expert(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    def choices(folder: str, rejected: tuple[int, ...]) -> list[int]:
        federation = Federation(olmoe_backbone, flex(), [client(0, LARGE, 3)], tmp_path / folder)
        if rejected:
            pairs = [replace(row, rejected=Encoded(rejected, 1)) for row in federation.examples[0]]
            federation.examples = {0: pairs}
        federation.train(federation.start())
        kept = federation.memory.load(federation.clients[0].name, 2).part(GRAFT)
        return [int(kept[source_name(layer.info.name)]) for layer in olmoe_backbone.moe]

    assert len({tuple(choices(str(token), (token,) * 40)) for token in (3, 5, 7)}) == 1
    assert choices("pairs", (7,) * 40) == choices("alone", ())


def test_choices_measured_at_once_have_the_losses_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does; all at once, and three at a time; with padding."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    backbone.packs = False
    plans = [flex().plan(backbone.info, budget) for budget in (LARGE, SMALL)]
    batch = collate([rows(2, 1), rows(3, 2)], 0, None)
    found = []
    for devices, elements in (("cpu", 1), ((), 1 << 20), ((), 3 * 16 * batch.input_ids.numel())):
        monkeypatch.setattr(grafted_expert, "ONE_BY_ONE", devices)
        monkeypatch.setattr(grafted_expert, "ELEMENTS", elements)
        with SlotModel(backbone, plans) as model, model.attached[GraftedExpert].measuring() as losses, torch.no_grad():
            model.logits(batch)
        found.append(losses)
    for name, expected in found[0].items():
        assert expected.min() > 0
        for other in found[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-12, atol=0)


def test_only_what_lies_outside_of_the_experts_is_shared(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The server neither gets nor has a graft, and no client has another's."""
    clients = [client(0, LARGE, 3), client(1, SMALL, 2), client(2, MIDDLE, 2)]
    federation = Federation(olmoe_backbone, flex(), clients, tmp_path)
    state = federation.start()
    sent = federation.train(state, who=[0, 1])
    after = federation.method.aggregate(state, iter(sent))
    names = [*after.tensors, *(name for one in sent for name in one.payload.tensors)]
    assert all(".self_attn." in name for name in names)
    first, second, newcomer = (
        client_model(federation.method, after, federation.model, who, federation.memory.load(who.name, 2))
        for who in clients
    )
    assert newcomer.plan.part(GraftedExpert) is None
    assert newcomer.tensors.keys() == after.part(ADAPTER).keys()
    own = [name for name in first.tensors if ".graft." in name and not name.endswith("source")]
    assert all(not torch.equal(first.tensors[name], second.tensors[name]) for name in own)
    assert all(torch.equal(first.tensors[name], value) for name, value in after.part(ADAPTER).items())


def test_a_graft_starts_as_its_expert_at_the_weight_of_one_beside_k(olmoe_backbone: Backbone) -> None:
    info = olmoe_backbone.info
    plan = AdapterPlan(flex().plan(info, LARGE).parts)
    start = initial_adapter(info, plan, torch_rng(0, "start"))
    gates = [torch.sigmoid(value).item() for name, value in start.items() if name.endswith("gate.bias")]
    assert gates == pytest.approx([1 / 5, 1 / 5])
    assert not any(bool(value.any()) for name, value in start.items() if name.endswith(("lora_B", "gate.weight")))


def test_its_products_are_counted(olmoe_backbone: Backbone) -> None:
    """One expert of 3 · 16 · 8 in each of 2 layers, whatever the budget's active experts."""
    info = olmoe_backbone.info
    for budget in (LARGE, SMALL):
        whole = flex().plan(info, budget)
        plain = whole.without(GraftedExpert)
        assert cost(info, whole).product_parameters - cost(info, plain).product_parameters == 2 * 3 * 16 * 8
        assert cost(info, whole).active_parameters - cost(info, plain).active_parameters == 2 * 3 * 16 * 8
        own = sum(4 * (16 + 8) + 2 * (8 + 16) for _ in info.moe) + 2 * (16 + 1)
        assert cost(info, whole).trainable - cost(info, plain).trainable == own


def test_experts_are_no_target() -> None:
    with pytest.raises(ValidationError, match="must not include experts"):
        flex(targets=["attention", "experts"])


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_experts_with_biases_or_weighted_inputs_are_refused(family: str):
    with pytest.raises(ModelError, match=rf"has no biases and a plain input, but the experts of tiny {family} "):
        GraftedExpert(2, 1.0, 0.5).shapes(families.tiny_backbone(family).info)
