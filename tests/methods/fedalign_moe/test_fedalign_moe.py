"""FedAlign-MoE: what a client trains and sends, who keeps which gate, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.observing import observing
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload, with_part
from fedguild.data.batches import Encoded, collate
from fedguild.methods.fedalign_moe import FedAlignMoe
from fedguild.methods.fedalign_moe.regulariser import LayerTarget
from fedguild.model.backbone import Backbone
from fedguild.model.moe.view import Routing
from fedguild.model.plan import trainable_shapes
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster, Upload, client_model
from tests.backbones import PAD, random_rows, tiny_backbone
from tests.methods.fedalign_moe.federation import EXPERTS, GATES, LAYERS, fedalign, federation_of, random_round
from tests.methods.federation import LARGE, MIDDLE, SETTINGS, SMALL, Federation, client, random_tensors
from tests.oracles import fedalign_moe as oracle
from tests.oracles.aggregation import weighted_mean

# What a client does


def test_only_activated_experts_are_sent(tmp_path: Path) -> None:
    """With 2 of 32 experts per token and few tokens; the uploads say which, the counts of the engine agree."""
    backbone, two = tiny_backbone("olmoe", num_experts=32, num_experts_per_tok=2), Budget("two", 2, 1)
    federation = Federation(backbone, fedalign(), [client(0, two, 2), client(1, two, 1)], tmp_path)
    for delivery in federation.deliver(federation.start()):
        assert delivery.upload is not None
        assert delivery.frequency is not None
        active = {(layer, expert) for layer, expert in (delivery.frequency > 0).nonzero().tolist()}
        assert 0 < len(active) < 64
        for part in ("update", "region"):
            sent = {tuple(key.rsplit("/", 1)) for key in delivery.upload.part(part)}
            assert sent == {(LAYERS[layer], str(expert)) for layer, expert in active}
        assert sum(bool(update.any()) for update in delivery.upload.part("update").values()) > len(active) / 2


def targets_of(method: FedAlignMoe, backbone: Backbone, works: list[LocalWork]) -> dict[int, LayerTarget]:
    with SlotModel(backbone, [method.plan(backbone.info, LARGE)] * len(works)) as model:
        return dict(method._regulariser(Cohort(model, works, SETTINGS, round_index=2, seed=1)).targets)


def test_alpha_is_from_the_last_routing_and_the_consensus(olmoe_backbone: Backbone) -> None:
    """Eq. 4 and 9; a client that never took part has no overlap, so sigmoid(-eta)."""
    method = fedalign(overlap_threshold=0.2, overlap_temperature=0.5)
    state, uploads = random_round(method, olmoe_backbone, 2, awkward=False)
    state = method.aggregate(state, iter(uploads))
    rows = {layer: [part.payload.part("routing")[layer].tolist() for part in uploads] for layer in LAYERS}
    works = []
    for index in range(3):
        who = client(index, LARGE)
        kept = {} if index == 2 else uploads[index].payload.part("routing")
        memory = Payload(with_part("routing", kept))
        works.append(LocalWork(who, [], method.download(state, olmoe_backbone.info, who), memory))
    for index, target in targets_of(method, olmoe_backbone, works).items():
        assert torch.equal(target.reference, state.tensors[f"reference/{LAYERS[index]}"])
        for slot in range(3):
            overlaps = [oracle.overlap(rows[LAYERS[index]], slot, e) if slot < 2 else 0.0 for e in range(EXPERTS)]
            expected = torch.tensor([oracle.alpha(o, 0.2, 0.5) for o in overlaps])
            torch.testing.assert_close(target.weights[slot], expected)
    plain = targets_of(fedalign(adaptive_weights=False), olmoe_backbone, works)
    assert all(bool((target.weights == 1).all()) for target in plain.values())


def test_a_layer_without_a_reference_has_no_part(olmoe_backbone: Backbone) -> None:
    method = fedalign()
    state, uploads = random_round(method, olmoe_backbone, 1)
    state = method.aggregate(state, iter(uploads))
    who = client(0, LARGE)
    work = LocalWork(who, [], method.download(state, olmoe_backbone.info, who), Payload())
    assert list(targets_of(method, olmoe_backbone, [work])) == [0]


RATE, STRENGTH = 0.25, 0.7
TEXTS = [Encoded(tuple(ids), prompt) for ids, prompt in zip(random_rows([5, 9], 3), (2, 7), strict=True)]
"""Responses of 3 and 2 tokens, in texts of 5 and 9."""


def gradients_of_eq_11(
    backbone: Backbone,
    method: FedAlignMoe,
    start: dict[str, Tensor],
    passes: list[list[Encoded]],
    state: Payload,
    alphas: dict[str, list[float]],
    budget: Budget,
) -> dict[str, Tensor]:
    """The mean over the step's response tokens, and L_reg of each pass, by its share of them, in slow loops."""
    targets = sum(row.response_tokens for rows in passes for row in rows)
    references = [state.tensors[f"reference/{layer}"].tolist() for layer in LAYERS]
    with SlotModel(backbone, [method.plan(backbone.info, budget)]) as model:
        model.load(0, start)
        for rows in passes:
            seen: list[Routing] = []
            with observing(backbone.moe, seen.append):
                nll = model.token_losses(collate([rows], PAD)).sum() / targets
            keep = seen[0].keep
            real = [True] * len(seen[0].logits) if keep is None else keep.tolist()
            penalty = oracle.regulariser(
                [routing.logits for routing in seen],
                real,
                references,
                [alphas[layer] for layer in LAYERS],
                budget.active_experts,
                method.settings.divergence,
            )
            over_layers = penalty * len(LAYERS) if method.settings.layers == "sum" else penalty
            share = sum(row.response_tokens for row in rows) / targets
            (nll + method.settings.regularisation * share * over_layers).backward()
        return {name: value.own(0, of=value.stored.grad).clone() for name, value in model.trainables.items()}


@pytest.mark.parametrize(
    ("form", "layers"), [("pointwise", "mean"), ("bernoulli", "mean"), ("bernoulli", "sum"), ("pointwise", "sum")]
)
@pytest.mark.parametrize(("accumulation", "budget"), [(1, LARGE), (2, LARGE), (1, MIDDLE), (2, SMALL)])
def test_a_step_of_gate_and_experts_is_down_eq_11(form: str, layers: str, accumulation: int, budget: Budget) -> None:
    """Plain SGD in round 2, fp64, unclipped: all that trains changes by -rate times the gradient of the oracle.

    k of Top-k(p) and Top-k(p_g) is the client's own, which is below the model's in two of the cases.
    """
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    method = fedalign(regularisation=STRENGTH, divergence=form, layers=layers)
    before, uploads = random_round(method, backbone, 2, awkward=False)
    state = method.aggregate(before, iter(uploads))
    who, plan = client(0, budget, len(TEXTS)), method.plan(backbone.info, budget)
    gates = {name: 0.3 * value for name, value in random_tensors(backbone.info, plan, 7).items() if name in GATES}
    kept = Payload({**with_part("gate", gates), **with_part("routing", uploads[0].payload.part("routing"))})
    work = LocalWork(who, TEXTS, method.download(state, backbone.info, who), kept)
    settings = TrainingSettings(
        optimizer="sgd",
        learning_rate=RATE,
        batch_size=len(TEXTS) // accumulation,
        gradient_accumulation_steps=accumulation,
        steps=1,
        max_grad_norm=None,
    )
    with SlotModel(backbone, [plan]) as model:
        cohort = Cohort(model, [work], settings, round_index=2, seed=1, pad_id=PAD)
        method.local_update(cohort)
        after = cohort.read(0)
    alphas = {}
    for layer in LAYERS:
        rows = [part.payload.part("routing")[layer].tolist() for part in uploads]
        alphas[layer] = [oracle.alpha(oracle.overlap(rows, 0, e), 0.1) for e in range(EXPERTS)]
    start = {**state.part("experts"), **gates}
    passes = [TEXTS] if accumulation == 1 else [[row] for row in TEXTS]
    expected = gradients_of_eq_11(backbone, method, start, passes, state, alphas, budget)
    assert after.keys() == expected.keys() == start.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close((start[name] - after[name]) / RATE, gradient, rtol=1e-5, atol=1e-6, msg=name)


def same(first: list[Upload], second: list[Upload]) -> bool:
    pairs = list(zip(first, second, strict=True))
    assert all(a.payload.tensors.keys() == b.payload.tensors.keys() for a, b in pairs)
    return all(
        torch.equal(value, b.payload.tensors[name]) for a, b in pairs for name, value in a.payload.tensors.items()
    )


def test_the_regulariser_acts_from_the_second_round_on(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    rounds = []
    for strength in (0.0, 0.1, 20.0):
        options = {"regularisation": strength, "divergence": "bernoulli"}
        federation = federation_of(olmoe_backbone, tmp_path / str(strength), **options)
        method, state = federation.method, federation.start()
        first = federation.train(state, 1)
        state = method.aggregate(state, iter(first))
        download = method.download(state, federation.model, federation.clients[0])
        assert bool(download.part("reference")) == bool(download.part("consensus")) == (strength > 0)
        rounds.append((first, federation.train(state, 2)))
    assert same(rounds[0][0], rounds[2][0])
    assert not same(rounds[0][1], rounds[1][1])

    def distance(uploads: list[Upload], reference: list[Upload]) -> float:
        """How far the clients' routing is from their mean, in all."""
        total = 0.0
        for layer in LAYERS:
            rows = torch.stack([part.payload.part("routing")[layer] for part in uploads])
            total += float((rows - rows.mean(dim=0)).abs().sum())
        return total

    assert distance(rounds[2][1], rounds[0][1]) < 0.8 * distance(rounds[0][1], rounds[0][1])


@pytest.mark.parametrize("gate", ["private", "averaged"])
def test_a_client_keeps_the_routing_that_it_sends(gate: str, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The next round's overlap (Eq. 4) is of the p-bar that the consensus was made of."""
    federation = federation_of(olmoe_backbone, tmp_path, gate=gate)
    state = federation.start()
    for number in (1, 2):
        uploads = federation.train(state, number)
        state = federation.method.aggregate(state, iter(uploads))
        for sent in uploads:
            kept = federation.memory.load(sent.client.name, number + 1).part("routing")
            assert kept.keys() == set(LAYERS)
            assert all(torch.equal(sent.payload.tensors[f"routing/{layer}"], row) for layer, row in kept.items())


# Gates


def test_a_private_gate_never_leaves_its_client(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = federation_of(olmoe_backbone, tmp_path)
    method, state = federation.method, federation.start()
    for number in (1, 2):
        uploads = federation.train(state, number)
        state = method.aggregate(state, iter(uploads))
        crossed = [*state.tensors, *(name for part in uploads for name in part.payload.tensors)]
        crossed += list(method.download(state, federation.model, federation.clients[0]).tensors)
        assert not any(".gate." in name or name.startswith("gate/") for name in crossed)


def test_a_client_goes_on_with_its_own_gate(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Client 1 sits round 2 out; without learning, everybody's gate stays what it last was."""
    federation = federation_of(olmoe_backbone, tmp_path)
    method, state = federation.method, federation.start()

    def gates(after_round: int) -> list[Tensor]:
        kept = [federation.memory.load(who.name, after_round + 1).tensors for who in federation.clients]
        return [torch.cat([tensors[f"gate/{name}"].flatten() for name in GATES]) for tensors in kept]

    state = method.aggregate(state, iter(federation.train(state, 1)))
    first = gates(1)
    state = method.aggregate(state, iter(federation.train(state, 2, who=(0, 2))))
    second = gates(2)
    federation.train(state, 3, learning_rate=1e-30)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gates(3), second, strict=True))
    assert torch.equal(second[1], first[1])
    assert not torch.equal(second[0], first[0])
    assert len({str(gate[:4].tolist()) for gate in second}) == 3


def test_models_of_the_server_and_of_a_client(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The global model has the published gate, a client's own the global experts behind its own gate."""
    federation = federation_of(olmoe_backbone, tmp_path)
    method, model, who = federation.method, federation.model, federation.clients[1]
    state = method.aggregate(federation.start(), iter(federation.train(federation.start())))
    experts = state.part("experts")
    memory = federation.memory.load(who.name, 2)
    deployed = method.deploy(state, model, LARGE)
    own, newcomer = (client_model(method, state, model, who, kept) for kept in (memory, Payload()))
    for deployment in (deployed, own, newcomer):
        shapes = {name: tuple(value.shape) for name, value in deployment.tensors.items()}
        assert shapes == trainable_shapes(model, deployment.plan)
        assert all(torch.equal(deployment.tensors[name], value) for name, value in experts.items())
    assert deployed.tensors.keys() == experts.keys()
    for name in GATES:
        assert torch.equal(own.tensors[name], memory.tensors[f"gate/{name}"])
        assert own.tensors[name].any()
        assert not newcomer.tensors[name].any()


def test_uploaded_gates_serve_the_global_model_alone(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Training is that of private gates; the global model has their mean by size."""
    states, sent = [], []
    for gate in ("private", "uploaded"):
        federation = federation_of(olmoe_backbone, tmp_path / gate, gate=gate)
        state = federation.start()
        for number in (1, 2):
            uploads = federation.train(state, number)
            state = federation.method.aggregate(state, iter(uploads))
        states.append(state)
        sent.append(uploads)
    assert all(torch.equal(states[1].tensors[name], value) for name, value in states[0].tensors.items())
    deployed = federation.method.deploy(states[1], federation.model, LARGE).tensors
    for name in GATES:
        values = [part.payload.tensors[f"gate/{name}"] for part in sent[1]]
        expected = weighted_mean(values, [torch.tensor(float(3 + i)) for i in range(3)], torch.zeros(8, 16))
        torch.testing.assert_close(deployed[name].double(), expected.double(), rtol=1e-5, atol=1e-6)
    download = federation.method.download(states[1], federation.model, federation.clients[0])
    assert not any(name.startswith("gate/") for name in download.tensors)


def test_averaged_gates_are_everybodys(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Fig. 13 a: parameter averaging takes the place of L_reg."""
    federation = federation_of(olmoe_backbone, tmp_path, gate="averaged", regularisation=5.0)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, iter(federation.train(state, 1)))
    download = method.download(state, federation.model, federation.clients[0])
    assert {name.partition("/")[0] for name in download.tensors} == {"experts", "gate"}
    memory = federation.memory.load("client-000", 2)
    assert {name.partition("/")[0] for name in memory.tensors} == {"routing"}
    mine = client_model(method, state, federation.model, federation.clients[0], memory).tensors
    for name in GATES:
        assert torch.equal(mine[name], state.tensors[f"gate/{name}"])
        assert mine[name].any()


# Bad input


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"targets": ("router",)}, r"method\.targets: router cannot be .* fedalign-moe\.\nThe gate and the experts"),
        ({"targets": ("experts", "router")}, r"method\.targets: experts and router cannot"),
        ({"experts": "full", "direction": "product"}, r"method\.direction: 'product' .* method\.experts is 'full'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], told: str, olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=told):
        fedalign(**options).start(olmoe_backbone.info, Roster([LARGE]), torch.Generator())


def test_equal_weights_at_the_mean_leave_the_strength(olmoe_backbone: Backbone) -> None:
    """Figure 13 c with alpha at a layer's mean over its experts, for each client its own."""
    method = fedalign(overlap_threshold=0.2, overlap_temperature=0.5)
    state, uploads = random_round(method, olmoe_backbone, 3, awkward=False)
    state = method.aggregate(state, iter(uploads))
    works = []
    for index in range(2):
        who = client(index, LARGE)
        memory = Payload(with_part("routing", uploads[index].payload.part("routing")))
        works.append(LocalWork(who, [], method.download(state, olmoe_backbone.info, who), memory))
    adaptive = targets_of(method, olmoe_backbone, works)
    options = {"adaptive_weights": False, "equal_weight": "mean"}
    equal = targets_of(fedalign(overlap_threshold=0.2, overlap_temperature=0.5, **options), olmoe_backbone, works)
    for layer, target in equal.items():
        for slot in range(2):
            expected = [float(adaptive[layer].weights[slot].mean())] * EXPERTS
            assert target.weights[slot].tolist() == pytest.approx(expected)
            assert adaptive[layer].weights[slot].std() > 0
