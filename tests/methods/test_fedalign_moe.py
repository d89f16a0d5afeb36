"""FedAlign-MoE: a round's aggregation against its equations, and what is sent, kept and used by whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.cohort import Cohort, LocalWork
from fedguild.engines.local import LocalEngine
from fedguild.errors import ConfigError, ModelError, UploadError
from fedguild.methods import FedAlignMoe, build_method
from fedguild.methods.fedalign_moe import FedAlignMoeSettings
from fedguild.model.backbone import Backbone
from fedguild.model.plan import trainable_shapes
from fedguild.model.slots import SlotModel
from fedguild.payload import Payload, with_part
from fedguild.server.method import State, Upload
from fedguild.server.rounds import Task
from fedguild.server.validation import check_upload
from fedguild.wire.codec import decode, encode
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, SETTINGS, Federation, client, random_tensors, upload
from tests.oracles import fedalign_moe as oracle
from tests.oracles.aggregation import weighted_mean

LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
GATES = [f"model.layers.{layer}.mlp.gate.delta" for layer in (0, 1)]
EXPERTS, HIDDEN = 8, 16


def fedalign(**options: object) -> FedAlignMoe:
    return FedAlignMoe(FedAlignMoeSettings(**{"rank": 2, **options}))


def federation_of(backbone: Backbone, folder: Path, clients: int = 3, **options: object) -> Federation:
    return Federation(backbone, fedalign(**options), [client(i, LARGE, 3 + i) for i in range(clients)], folder)


def own_experts(state: State, layer: str) -> dict[str, Tensor]:
    """A layer's trainables of its experts."""
    return {name: value for name, value in Payload(state.tensors).part("experts").items() if name.startswith(layer)}


def vector(tensors: dict[str, Tensor], expert: int) -> Tensor:
    """One expert's parameters in one row, by name."""
    return torch.cat([tensors[name][expert].flatten() for name in sorted(tensors)])


# A round's aggregation


def random_round(
    method: FedAlignMoe, backbone: Backbone, clients: int, awkward: bool = True
) -> tuple[State, list[Upload]]:
    """A random global state and random uploads.

    Awkward: nobody activated expert 2; client 0 had no token in layer 1 and an update of zeros for expert 3;
    all margins of expert 4 are zero; only the last client activated expert 5; nothing chose expert 6's region.
    """
    model, plan = backbone.info, method.plan(backbone.info, LARGE)
    rng = torch.Generator().manual_seed(5)
    trained = random_tensors(model, plan, 99)
    experts = {name: value for name, value in trained.items() if ".experts." in name}
    state = State(upload(client(0, LARGE), experts=experts).payload.tensors)
    uploads = []
    for index in range(clients):
        routing, margin, regions, updates = {}, {}, {}, {}
        for layer in LAYERS:
            size = sum(value[0].numel() for name, value in experts.items() if name.startswith(layer))
            routing[layer] = (torch.randn(EXPERTS, generator=rng) * 2).softmax(-1)
            margin[layer] = torch.rand(EXPERTS, generator=rng) * 0.3
            chosen = set(range(EXPERTS))
            if awkward:
                margin[layer][4] = 0.0
                chosen -= {2} if index == clients - 1 else {2, 5}
                if index == 0 and layer == LAYERS[1]:
                    routing[layer], margin[layer], chosen = torch.zeros(EXPERTS), torch.zeros(EXPERTS), set()
            for expert in sorted(chosen):
                updates[f"{layer}/{expert}"] = torch.randn(size, generator=rng)
                regions[f"{layer}/{expert}"] = torch.randn(HIDDEN, generator=rng)
                if awkward and (index, expert) == (0, 3):
                    updates[f"{layer}/{expert}"].zero_()
                if awkward and expert == 6:
                    regions[f"{layer}/{expert}"].zero_()
        who = client(index, LARGE, 3 + 5 * index)
        uploads.append(upload(who, routing=routing, margin=margin, region=regions, update=updates))
    return state, uploads


ABLATIONS = [
    {},
    {"experts": "full"},
    {"direction": "none"},
    {"fixed_threshold": 0.4},
    {"tolerance": 0.25, "similarity_temperature": 0.1},
    {"consistency_weights": False},
]


@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_a_round(clients: int, options: dict[str, object], olmoe_backbone: Backbone) -> None:
    method = fedalign(**options)
    state, uploads = random_round(method, olmoe_backbone, clients)
    after = method.aggregate(state, iter(uploads))
    chosen = {
        "tolerance": options.get("tolerance", 1.0),
        "fixed_threshold": options.get("fixed_threshold"),
        "use_direction": options.get("direction") != "none",
        "temperature": options.get("similarity_temperature", 1.0),
    }
    for layer in LAYERS:
        before, found = own_experts(state, layer), own_experts(after, layer)
        for expert in range(EXPERTS):
            sent = [part for part in uploads if f"update/{layer}/{expert}" in part.payload.tensors]
            updates, regions = (
                [part.payload.tensors[f"{kind}/{layer}/{expert}"] for part in sent] for kind in ("update", "region")
            )
            expected = oracle.aggregated(vector(before, expert), updates, regions, **chosen)
            torch.testing.assert_close(vector(found, expert).double(), expected.double(), rtol=1e-5, atol=1e-6)
        rows = [part.payload.part("routing")[layer].tolist() for part in uploads]
        margins = [part.payload.part("margin")[layer].tolist() for part in uploads]
        present = [i for i, row in enumerate(rows) if sum(row) > 0]
        if not present:
            assert f"reference/{layer}" not in after.tensors
            continue
        rows, margins = [rows[i] for i in present], [margins[i] for i in present]
        omega = oracle.consistency_weights(rows, margins)
        if options.get("consistency_weights") is False:
            omega = [[1 / len(rows)] * EXPERTS for _ in rows]
        torch.testing.assert_close(after.tensors[f"reference/{layer}"], torch.tensor(oracle.reference(rows, omega)))
        mean = [sum(row[e] for row in rows) / len(rows) for e in range(EXPERTS)]
        torch.testing.assert_close(after.tensors[f"consensus/{layer}"], torch.tensor(mean))


def test_what_nobody_activated_stays_bit_by_bit(olmoe_backbone: Backbone) -> None:
    """Also the experts of which the only update is zero, and everything where no upload came."""
    method = fedalign()
    state, uploads = random_round(method, olmoe_backbone, 1)
    after = method.aggregate(state, iter(uploads))
    for layer, same in ((LAYERS[0], {2, 3}), (LAYERS[1], set(range(EXPERTS)))):
        before, found = own_experts(state, layer), own_experts(after, layer)
        assert {e for e in range(EXPERTS) if torch.equal(vector(before, e), vector(found, e))} == same
    nothing = method.aggregate(after, iter([]))
    for part in ("experts", "reference", "consensus"):
        expected = Payload(after.tensors).part(part)
        assert all(torch.equal(Payload(nothing.tensors).part(part)[name], value) for name, value in expected.items())


def test_two_clients_by_hand() -> None:
    """One expert with A = 10, B = 20 (r = 1); another that only the second client activated.

    mu_1 = (1, 0), mu_2 = (3, 4): S_12 = .6, M = .8, Sigma = .2, tau = .6. dtheta_1 = (1, 0), dtheta_2 = (2, 2):
    D_12 = .707107; both clients weigh a half: A = 10 + 1.5, B = 20 + 1. Alone, the second expert moves by its
    whole update (4, -2). p-bar_1 = (.6, .4), p-bar_2 = (.2, .8), m_1 = (.5, 0), m_2 = (.5, .25): p_g = (5, 8) / 13.
    """
    name, state = "block.experts.up_proj", {"A": [10.0, 1.0], "B": [20.0, 2.0]}
    before = State({f"experts/{name}.lora_{k}": torch.tensor(v).view(2, 1, 1) for k, v in state.items()})

    def sent(index: int, routing: list[float], margin: list[float], updates, regions) -> Upload:
        def keyed(values: list[list[float]]) -> dict[str, Tensor]:
            return {f"block.experts/{e}": torch.tensor(value) for e, value in enumerate(values)}

        statistics = {
            "routing": {"block.experts": torch.tensor(routing)},
            "margin": {"block.experts": torch.tensor(margin)},
        }
        return upload(client(index, LARGE, 1 + 9 * index), **statistics, region=keyed(regions), update=keyed(updates))

    first = sent(0, [0.6, 0.4], [0.5, 0.0], [[1.0, 0.0]], [[1.0, 0.0]])
    second = sent(1, [0.2, 0.8], [0.5, 0.25], [[2.0, 2.0], [4.0, -2.0]], [[3.0, 4.0], [1.0, 1.0]])
    found = fedalign(rank=1).aggregate(before, iter([first, second])).tensors
    torch.testing.assert_close(found[f"experts/{name}.lora_A"].flatten(), torch.tensor([11.5, 5.0]))
    torch.testing.assert_close(found[f"experts/{name}.lora_B"].flatten(), torch.tensor([21.0, 0.0]))
    torch.testing.assert_close(found["reference/block.experts"], torch.tensor([5 / 13, 8 / 13]))
    torch.testing.assert_close(found["consensus/block.experts"], torch.tensor([0.4, 0.6]))


def test_directions_of_the_product(olmoe_backbone: Backbone) -> None:
    """D from the formed changes of B A; what is added is still the change of A and of B."""
    method = fedalign(direction="product")
    state, uploads = random_round(method, olmoe_backbone, 3)
    after = method.aggregate(state, iter(uploads))
    before, found = own_experts(state, LAYERS[0]), own_experts(after, LAYERS[0])
    names = sorted(before)
    sizes = [before[name][0].numel() for name in names]
    for expert in (0, 1, 3, 5):
        key = f"{LAYERS[0]}/{expert}"
        sent = [part.payload for part in uploads if f"update/{key}" in part.payload.tensors]
        updates = [payload.tensors[f"update/{key}"] for payload in sent]
        directions = []
        for update in updates:
            start = {name: before[name][expert].double() for name in names}
            change = dict(zip(names, update.double().split(sizes), strict=True))
            after_it = {name: start[name] + change[name].view(start[name].shape) for name in names}
            products = [
                after_it[name[:-1] + "B"] @ after_it[name] - start[name[:-1] + "B"] @ start[name]
                for name in names
                if name.endswith("A")
            ]
            directions.append(torch.cat([product.flatten() for product in products]))
        regions = [payload.tensors[f"region/{key}"] for payload in sent]
        expected = oracle.aggregated(vector(before, expert), updates, regions, directions=directions)
        torch.testing.assert_close(vector(found, expert).double(), expected, rtol=1e-5, atol=1e-6)


def test_averaging_by_index(olmoe_backbone: Backbone) -> None:
    """Fig. 14 a: the plain mean over those who activated the expert."""
    method = fedalign(aggregation="index")
    state, uploads = random_round(method, olmoe_backbone, 4)
    after = method.aggregate(state, iter(uploads))
    for layer in LAYERS:
        before, found = own_experts(state, layer), own_experts(after, layer)
        for expert in range(EXPERTS):
            name = f"update/{layer}/{expert}"
            updates = [part.payload.tensors[name] for part in uploads if name in part.payload.tensors]
            mean = sum(updates) / len(updates) if updates else torch.zeros(1)
            torch.testing.assert_close(vector(found, expert), vector(before, expert) + mean, rtol=1e-5, atol=1e-6)


def test_fedavg_is_the_mean_of_parameters_by_size(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Gates and experts; an expert that a client did not activate counts as an unchanged copy."""
    federation = federation_of(olmoe_backbone, tmp_path, gate="averaged", aggregation="size")
    state = federation.start()
    uploads = federation.train(state)
    found = federation.method.aggregate(state, iter(uploads))
    sizes = [torch.tensor(float(part.client.examples)) for part in uploads]
    for name in GATES:
        values = [part.payload.tensors[f"gate/{name}"] for part in uploads]
        expected = weighted_mean(values, sizes, state.tensors[f"gate/{name}"])
        torch.testing.assert_close(found.tensors[f"gate/{name}"].double(), expected.double(), rtol=1e-5, atol=1e-6)
    for layer in LAYERS:
        before, after = own_experts(state, layer), own_experts(found, layer)
        for expert in range(EXPERTS):
            start = vector(before, expert)
            values = [
                start + part.payload.tensors.get(f"update/{layer}/{expert}", torch.zeros_like(start))
                for part in uploads
            ]
            expected = weighted_mean(values, sizes, start)
            torch.testing.assert_close(vector(after, expert).double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_other_adapters_are_averaged_by_size(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = federation_of(olmoe_backbone, tmp_path, targets=("q_proj",))
    state = federation.start()
    uploads = federation.train(state)
    found = federation.method.aggregate(state, iter(uploads)).tensors
    sizes = [torch.tensor(float(part.client.examples)) for part in uploads]
    names = [name for name in state.tensors if name.startswith("adapter/")]
    assert len(names) == 4
    for name in names:
        expected = weighted_mean([part.payload.tensors[name] for part in uploads], sizes, state.tensors[name])
        torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-5, atol=1e-6)


# What a client does


@pytest.mark.parametrize(
    "options", [{}, {"experts": "full"}, {"gate": "uploaded"}, {"targets": ("attention",)}], ids=str
)
def test_an_upload_is_what_the_server_expects(
    options: dict[str, object], tmp_path: Path, olmoe_backbone: Backbone
) -> None:
    """Also after a journey over the wire; experts that were not activated are not sent."""
    federation = federation_of(olmoe_backbone, tmp_path, **options)
    method, state = federation.method, federation.start()
    for number in (1, 2):
        uploads = federation.train(state, number)
        for sent in uploads:
            expected = method.expected_upload(federation.model, sent.client, Payload())
            travelled = decode(encode(sent.payload))
            check_upload(travelled, expected, client="c")
            assert ("gate" in {name.partition("/")[0] for name in expected}) == (options.get("gate") == "uploaded")
        state = method.aggregate(state, iter(uploads))


def test_only_activated_experts_are_sent(tmp_path: Path) -> None:
    """With 8 of 32 experts per token and few tokens; the uploads say which, the counts of the engine agree."""
    backbone = tiny_backbone("olmoe", num_experts=32, num_experts_per_tok=2)
    federation = Federation(backbone, fedalign(), [client(0, LARGE, 2), client(1, LARGE, 1)], tmp_path)
    state = federation.start()
    engine = LocalEngine(backbone, federation.examples, SETTINGS, federation.memory, seed=1)
    tasks = [Task(1, who, federation.method.download(state, federation.model, who)) for who in federation.clients]
    for delivery in engine.train(federation.method, federation.model, tasks):
        assert delivery.upload is not None
        assert delivery.frequency is not None
        active = {(layer, expert) for layer, expert in (delivery.frequency > 0).nonzero().tolist()}
        assert 0 < len(active) < 64
        for part in ("update", "region"):
            sent = {tuple(key.rsplit("/", 1)) for key in delivery.upload.part(part)}
            assert sent == {(LAYERS[layer], str(expert)) for layer, expert in active}
        assert sum(bool(update.any()) for update in delivery.upload.part("update").values()) > len(active) / 2


def test_the_update_is_what_training_changed(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """With a plain mean of one client's updates, the server ends up with that client's experts."""
    federation = federation_of(olmoe_backbone, tmp_path, clients=1, aggregation="index")
    method, state = federation.method, federation.start()
    with SlotModel(olmoe_backbone, [method.plan(federation.model, LARGE)]) as model:
        who = federation.clients[0]
        work = LocalWork(who, federation.examples[0], method.download(state, federation.model, who), Payload())
        cohort = Cohort(model, [work], SETTINGS, round_index=1, seed=1)
        (payload,) = method.local_update(cohort)
        own = cohort.read(0)
    after = method.aggregate(state, iter([Upload(1, who, payload)]))
    for name, value in Payload(after.tensors).part("experts").items():
        torch.testing.assert_close(value, own[name], rtol=1e-5, atol=1e-6)


def targets_of(method: FedAlignMoe, backbone: Backbone, works: list[LocalWork]):
    with SlotModel(backbone, [method.plan(backbone.info, LARGE)] * len(works)) as model:
        return method._regulariser(Cohort(model, works, SETTINGS, round_index=2, seed=1)).targets


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


def test_a_cohort_gives_what_each_client_gives_alone(tmp_path: Path) -> None:
    """Two rounds with ten steps in fp64."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    method = fedalign()
    federation = Federation(backbone, method, [client(i, LARGE, 3 + i) for i in range(3)], tmp_path)
    state = method.aggregate(federation.start(), iter(federation.train(federation.start(), 1)))
    found = []
    for size in (3, 1):
        engine = LocalEngine(
            backbone, federation.examples, replace(SETTINGS, steps=10), federation.memory, cohort_size=size, seed=1
        )
        tasks = [Task(2, who, method.download(state, federation.model, who)) for who in federation.clients]
        found.append([delivery.upload for delivery in engine.train(method, federation.model, tasks)])
    for together, alone in zip(*found, strict=True):
        assert together.tensors.keys() == alone.tensors.keys()
        for name, value in alone.tensors.items():
            torch.testing.assert_close(together.tensors[name], value, rtol=1e-8, atol=1e-8)


def test_the_backbone_is_as_it_was(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in olmoe_backbone.model.state_dict().items()}
    federation = federation_of(olmoe_backbone, tmp_path, experts="full")
    state = federation.start()
    for number in (1, 2):
        state = federation.method.aggregate(state, iter(federation.train(state, number)))
    assert all(torch.equal(value, before[name]) for name, value in olmoe_backbone.model.state_dict().items())
    assert all(not layer.observers and not layer.logit_terms for layer in olmoe_backbone.moe)


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
    experts = Payload(state.tensors).part("experts")
    memory = federation.memory.load(who.name, 2)
    deployed = method.deploy(state, model, LARGE)
    own, newcomer = (method.personalize(state, model, who, kept) for kept in (memory, Payload()))
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
    mine = method.personalize(state, federation.model, federation.clients[0], memory).tensors
    for name in GATES:
        assert torch.equal(mine[name], state.tensors[f"gate/{name}"])
        assert mine[name].any()


# Figures of a round


def test_what_is_observed(olmoe_backbone: Backbone) -> None:
    method = fedalign()
    state, uploads = random_round(method, olmoe_backbone, 4)
    seen = method.observe(method.aggregate(state, uploads), olmoe_backbone.info)
    assert [part.name.split()[0] for part in seen] == ["mean", "spread", "similarity", "share"]
    rows = [part.payload.part("routing")[LAYERS[0]].tolist() for part in uploads]
    margins = [part.payload.part("margin")[LAYERS[0]].tolist() for part in uploads]
    overlap = sum(oracle.overlap(rows, i, e) for i in range(4) for e in range(EXPERTS)) / (4 * EXPERTS)
    omega = torch.tensor(oracle.consistency_weights(rows, margins))
    names = [f"region/{LAYERS[0]}/{e}" for e in range(EXPERTS)]
    held = [[part.payload.tensors[name] for part in uploads if name in part.payload.tensors] for name in names]
    taus = [oracle.threshold(regions, 1.0) for regions in held if regions]
    spread = float(omega.std(dim=0, correction=0).mean())
    found = [float(part.values[0]) for part in seen]
    assert found == pytest.approx([overlap, spread, sum(taus) / len(taus), 7 / 8], rel=1e-5)
    assert all(part.rows == ["layer 0", "layer 1"] for part in seen)


# Bad input


def test_a_broken_upload_is_refused(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = federation_of(olmoe_backbone, tmp_path, clients=1)
    (sent,) = federation.train(federation.start())
    expected = federation.method.expected_upload(federation.model, sent.client, Payload())
    update = f"update/{LAYERS[0]}/3"
    size = sent.payload.tensors[update].numel()
    for change, told in (
        ({f"routing/{LAYERS[0]}": None}, "lacks 'routing/"),
        ({f"update/{LAYERS[0]}/8": torch.zeros(size)}, "has unknown 'update/"),
        ({update: torch.zeros(size + 1)}, "has the shape"),
        ({update: torch.full((size,), float("nan"))}, "NaN"),
        ({f"gate/{GATES[0]}": torch.zeros(8, 16)}, "has unknown 'gate/"),
    ):
        tensors = {name: value for name, value in {**sent.payload.tensors, **change}.items() if value is not None}
        with pytest.raises(UploadError, match=told):
            check_upload(Payload(tensors), expected, client="c")


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
        fedalign(**options).start(olmoe_backbone.info, [LARGE], torch.Generator())


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("regularisation", -1, r"method\.regularisation: .*got -1\.\nIt is: lambda of Eq\. 11"),
        ("fixed_threshold", 2, r"method\.fixed_threshold: .*less than or equal to 1, got 2"),
        ("gate", "shared", r"method\.gate: .*'private', 'uploaded' or 'averaged', got 'shared'"),
    ],
)
def test_options_out_of_range(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method("fedalign-moe", {option: value})


def test_a_dense_model(llama_backbone: Backbone) -> None:
    with pytest.raises(ModelError, match="FedAlign-MoE needs a mixture-of-experts model"):
        fedalign().plan(llama_backbone.info, LARGE)
