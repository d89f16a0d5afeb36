"""FLAME against its equations: Eq. 5's rescaler, Eq. 6-7's aggregation, and who keeps what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.payload import ROUTING, Payload
from fedguild.methods.flame import Flame, FlameSettings
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import Backbone
from fedguild.server.method import Roster, Upload, client_model
from fedguild.server.validation import check_upload
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.oracles import flame as oracle
from tests.oracles.aggregation import weighted_mean

TEMPERATURES = (0.0, 1.0, 2.0, 8.0)
RESCALERS = ("per_layer", "shared", "static", "none")


def flame(**options: object) -> Flame:
    return Flame(FlameSettings(**{"rank": 2, **options}))


def experts_of(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def with_frequency(sent: Upload, frequency: Tensor) -> Upload:
    """The upload with a_i / S_i [L, M] in place of its own."""
    routing = {f"{ROUTING}/{experts_of(layer)}": row for layer, row in enumerate(frequency)}
    return Upload(sent.round, sent.client, Payload({**sent.payload.tensors, **routing}))


def frequency_of(sent: Upload) -> Tensor:
    """The upload's a_i / S_i, [L, M]."""
    return in_layer_order(sent.payload.part(ROUTING))


def in_layer_order(by_experts: dict[str, Tensor]) -> Tensor:
    return torch.stack([by_experts[experts_of(layer)] for layer in range(len(by_experts))])


def random_round(method: Flame, backbone: Backbone, clients: int) -> tuple[Payload, list[Upload]]:
    """A random global state and random uploads of clients with 3, 8, 13, … examples."""
    model = backbone.info
    plan = method.plan(model, LARGE)
    state = Payload(upload(client(0, LARGE), adapter=random_tensors(model, plan, 99)).payload.tensors)
    uploads = [
        with_frequency(
            upload(client(i, LARGE, 3 + 5 * i), adapter=random_tensors(model, plan, i)),
            oracle.random_frequency(len(model.moe), 8, seed=i),
        )
        for i in range(clients)
    ]
    return state, uploads


# Eq. 6 and 7


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("frequency", [[[0.0, 0.0]], [[1.0, 0.0]], [[0.25, 0.5], [0.75, 1.0]], [[0.3]]])
def test_gamma(temperature: float, frequency: list[list[float]]) -> None:
    sent = with_frequency(upload(client(0, LARGE, 7)), torch.tensor(frequency))
    expected = [[oracle.gamma(value, temperature, 7) for value in layer] for layer in frequency]
    found = in_layer_order(flame(temperature=temperature).gamma(sent))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_aggregation(clients: int, temperature: float, olmoe_backbone: Backbone) -> None:
    method = flame(temperature=temperature, rescaler="none")
    state, uploads = random_round(method, olmoe_backbone, clients)
    found = method.aggregate(state, iter(uploads)).tensors
    assert found.keys() == state.tensors.keys()
    for name, before in state.tensors.items():
        layer = int(name.split(".")[2])
        values = [sent.payload.tensors[name] for sent in uploads]
        examples = [sent.client.examples for sent in uploads]
        if ".experts." in name:
            weights = [
                [oracle.gamma(f, temperature, n) for f in frequency_of(sent)[layer].tolist()]
                for sent, n in zip(uploads, examples, strict=True)
            ]
            expected = oracle.mean_of_experts(values, weights, before)
        else:
            expected = weighted_mean(values, [torch.tensor(float(n)) for n in examples], before)
        torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_by_k_i_a_budget_weighs_what_its_data_weigh() -> None:
    """Two clients of as many examples and the same routing, k = 8 and k = 1: at t = 2 as published 64 to 1."""
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    sums = []
    for by_active in (False, True):
        weights = []
        for active in (8, 1):
            who = ClientInfo(0, Budget("one", active, 1), 10)
            sent = upload(who, routing={experts_of(0): shares * active / 8})
            weights.append(flame(temperature=2.0, frequency_by_active=by_active).gamma(sent)[experts_of(0)])
        sums.append(float(weights[0].sum() / weights[1].sum()))
        torch.testing.assert_close(weights[0] / weights[0].sum(), weights[1] / weights[1].sum())
    assert sums == pytest.approx([64.0, 1.0])


def test_an_expert_that_nobody_activated_keeps_its_global_value(olmoe_backbone: Backbone) -> None:
    method = flame(temperature=2.0, rescaler="none")
    state, uploads = random_round(method, olmoe_backbone, 3)
    quiet = torch.ones(2, 8)
    quiet[1, 6] = 0.0
    uploads = [with_frequency(sent, quiet) for sent in uploads]
    found = method.aggregate(state, uploads).tensors
    for name, before in state.tensors.items():
        if ".experts." not in name:
            continue
        same = [expert for expert in range(8) if torch.equal(found[name][expert], before[expert])]
        assert same == ([6] if name.startswith("adapter/model.layers.1.") else [])


# a_i^j and S_i


@contextmanager
def recorded_routing(backbone: Backbone) -> Iterator[list[tuple[int, Tensor, Tensor, list[bool]]]]:
    """Yields a list that fills with each router pass: layer, logits [N, M], slot of each token, which are real."""
    passes: list[tuple[int, Tensor, Tensor, list[bool]]] = []

    def recorder(layer: int):
        def record(_, __, output) -> None:
            current, tokens = backbone.runtime.current, output[0].shape[0]
            keep = current.keep(tokens)
            real = [True] * tokens if keep is None else keep.tolist()
            passes.append((layer, output[0].detach().clone(), current.slot_of_token(tokens, output[0].device), real))

        return record

    handles = [part.router.register_forward_hook(recorder(index)) for index, part in enumerate(backbone.moe)]
    yield passes
    for handle in handles:
        handle.remove()


def recount(passes, slot: int, active: int, unit: str) -> Tensor:
    """a_i^j / S_i of a slot, [L, M]."""
    layers = 1 + max(layer for layer, *_ in passes)
    counts, totals = torch.zeros(layers, 8), torch.zeros(layers, 1)
    for layer, logits, slots, real in passes:
        mine = [ok and owner == slot for ok, owner in zip(real, slots.tolist(), strict=True)]
        found = torch.tensor(oracle.count_activations(logits, mine, active))
        counts[layer] += found if unit == "token" else (found > 0)
        totals[layer] += sum(mine) if unit == "token" else 1
    return counts / totals


@pytest.mark.parametrize("unit", ["token", "step"])
def test_the_frequency_is_a_slow_recount(
    unit: str, olmoe_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [client(0, LARGE, 4), client(1, SMALL, 4), client(2, MIDDLE, 3)]
    federation = Federation(olmoe_backbone, flame(frequency=unit), clients, tmp_path)
    monkeypatch.setattr(olmoe_backbone, "packs", False)
    with recorded_routing(olmoe_backbone) as passes:
        uploads = federation.train(federation.start())
    assert len(passes) == 4
    assert any(not all(real) for *_, real in passes)
    for slot, sent in enumerate(uploads):
        frequency = frequency_of(sent)
        active = sent.client.budget.active_experts
        torch.testing.assert_close(frequency, recount(passes, slot, active, unit), rtol=1e-6, atol=1e-7)
        if unit == "token":
            torch.testing.assert_close(frequency.sum(dim=1), torch.full((2,), float(active)))


# s_i


def scales(tensors) -> dict[str, float]:
    return {name: float(value) for name, value in tensors.items() if name.endswith("output_scale")}


LAYERS = [f"model.layers.{layer}.mlp.output_scale" for layer in (0, 1)]
SCALE_NAMES = {"per_layer": LAYERS, "shared": ["output_scale"], "static": [], "none": []}


@pytest.mark.parametrize("rescaler", RESCALERS)
def test_the_four_rescalers(rescaler: str, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    method = flame(rescaler=rescaler)
    plan = method.plan(olmoe_backbone.info, SMALL)
    kinds = {"static": OutputScale("fixed", 4.0), "none": None}
    assert plan.part(OutputScale) == kinds.get(rescaler, OutputScale(rescaler, 1.0))
    federation = Federation(olmoe_backbone, method, [client(0, SMALL), client(1, LARGE)], tmp_path)
    for sent in federation.train(federation.start()):
        learned = scales(sent.payload.part("rescaler"))
        assert list(learned) == SCALE_NAMES[rescaler]
        assert all(value != 1.0 for value in learned.values())
        check_upload(sent.payload, method.schema(olmoe_backbone.info, sent.client, Payload()))


def test_the_static_ratio_is_k_over_k_i(olmoe_backbone: Backbone) -> None:
    plans = [flame(rescaler="static").plan(olmoe_backbone.info, budget) for budget in (LARGE, MIDDLE, SMALL)]
    assert [plan.part(OutputScale).start for plan in plans] == [1.0, 2.0, 4.0]


def test_a_client_goes_on_from_its_own_scale(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Client 1 sits round 2 out; without learning, everybody uploads the scale that it begins with."""
    federation = Federation(olmoe_backbone, flame(), [client(i, SMALL) for i in range(3)], tmp_path)
    method, state = federation.method, federation.start()
    first = federation.train(state, 1)
    state = method.aggregate(state, first)
    second = federation.train(state, 2, who=(0, 2))
    state = method.aggregate(state, second)
    third = federation.train(state, 3, learning_rate=0.0)
    kept = [second[0], first[1], second[1]]
    learned = [scales(sent.payload.part("rescaler")) for sent in kept]
    assert [scales(sent.payload.part("rescaler")) for sent in third] == learned
    assert len({str(values) for values in learned}) == 3
    assert learned[0] != scales(first[0].payload.part("rescaler"))


@pytest.mark.parametrize("rescaler", RESCALERS)
def test_the_download_holds_the_adapter_alone(rescaler: str, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    clients = [client(0, LARGE), client(1, SMALL)]
    federation = Federation(olmoe_backbone, flame(rescaler=rescaler), clients, tmp_path)
    state = federation.method.aggregate(federation.start(), federation.train(federation.start()))
    for who in clients:
        payload = federation.method.download(state, federation.model, who)
        assert payload.tensors.keys() == {name for name in state.tensors if name.startswith("adapter/")}
        assert all(".lora_" in name for name in payload.tensors)


def test_a_budget_is_deployed_with_the_mean_scale_of_its_clients(olmoe_backbone: Backbone) -> None:
    method, model = flame(temperature=0.0), olmoe_backbone.info
    state = method.start(model, Roster([LARGE, MIDDLE, SMALL]), torch.Generator().manual_seed(0))
    plan = method.plan(model, LARGE)
    sent = []
    for index, (budget, scale) in enumerate([(LARGE, 1.2), (LARGE, 1.6), (SMALL, 3.0)]):
        tensors = random_tensors(model, plan, index)
        own = {name: torch.tensor(scale + layer) for layer, name in enumerate(LAYERS)}
        adapter = {name: value for name, value in tensors.items() if name not in LAYERS}
        received = upload(client(index, budget, 1 + 9 * index), adapter=adapter, rescaler=own)
        sent.append(with_frequency(received, torch.ones(2, 8)))
    after = method.aggregate(state, sent)
    for budget, mean in ((LARGE, 1.4), (MIDDLE, None), (SMALL, 3.0)):
        deployment = method.deploy(after, model, budget)
        assert deployment.plan.active_experts == budget.active_experts
        expected = [1.0, 1.0] if mean is None else [mean, mean + 1]
        assert list(scales(deployment.tensors).values()) == pytest.approx(expected)
        for name, value in after.part("adapter").items():
            assert torch.equal(deployment.tensors[name], value)


def test_a_clients_own_model_has_its_own_scale(olmoe_backbone: Backbone) -> None:
    method, model = flame(), olmoe_backbone.info
    state = method.start(model, Roster([SMALL]), torch.Generator().manual_seed(0))
    own = {name: torch.tensor(2.5) for name in LAYERS}
    mine = client_model(method, state, model, client(0, SMALL), Payload(own))
    assert list(scales(mine.tensors).values()) == [2.5, 2.5]
    newcomer = client_model(method, state, model, client(1, SMALL), Payload())
    assert list(scales(newcomer.tensors).values()) == [1.0, 1.0]
