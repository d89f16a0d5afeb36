"""UB-SMoE against its equations: aggregation, modulation, and who gets the pseudo-gradient how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoeConfig

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.optimizer import OptimizerSettings
from fedguild.client.schedule import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.errors import ConfigError, ModelError
from fedguild.methods import UbSmoe, build_method
from fedguild.methods.common import ADAPTER
from fedguild.methods.ub_smoe import PHI, PSEUDO_GRADIENT, STEP_SIZE, UTILISATION, WITHOUT, UbSmoeSettings
from fedguild.model.backbone import Backbone, describe
from fedguild.model.moe.view import find_moe_layers
from fedguild.model.plan import ModelInfo, trainable_shapes
from fedguild.model.runtime import Runtime
from fedguild.model.slots import SlotModel
from fedguild.packing import pack, unpack
from fedguild.payload import Payload, with_part
from fedguild.seeding import torch_rng
from fedguild.server.method import Observing, State, Upload
from fedguild.server.validation import check_upload
from fedguild.wire.accounting import bytes_by_part, size_bytes
from tests.backbones import random_rows, tiny_backbone
from tests.client.clients import distance, flat
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, upload
from tests.oracles import ub_smoe as oracle
from tests.oracles.aggregation import weighted_mean

BLOCKS = [f"model.layers.{layer}.mlp" for layer in (0, 1)]
MIB = 2**20


def ub_smoe(**options: object) -> UbSmoe:
    return UbSmoe(UbSmoeSettings(**{"rank": 2, **options}))  # type: ignore[arg-type]


def experts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if ".experts." in name}


def random_state(method: UbSmoe, model: ModelInfo, seed: int, round: int = 3) -> State:
    """A state from the middle of a run: everything moves, one expert's G~ is zero."""
    start = method.start(model, [LARGE, MIDDLE, SMALL], torch_rng(seed, "start"))
    rng = torch_rng(seed, "state")
    sizes = {ADAPTER: 0.2, PHI: 0.5, PSEUDO_GRADIENT: 0.5}
    tensors = {
        name: torch.randn(value.shape, generator=rng) * sizes.get(name.partition("/")[0], 0.0)
        if value.is_floating_point()
        else value
        for name, value in start.tensors.items()
    }
    for name, value in tensors.items():
        if name.startswith(PSEUDO_GRADIENT):
            value[5] = 0.0
    return State(tensors, {"version": round, "step_size": 0.1, "mean_active": 2.0})


def sent(who: ClientInfo, adapter: dict[str, Tensor], shares: Sequence[Sequence[float]], step_size: float) -> Upload:
    """An upload of a client that trained with these rates and shares [L][M]."""
    used = {block: torch.tensor(share) for block, share in zip(BLOCKS, shares, strict=False)}
    received = upload(who, adapter=adapter, utilisation=used)
    extra = {STEP_SIZE: torch.tensor(step_size), WITHOUT: torch.tensor(0.0)}
    return Upload(1, who, Payload({**received.payload.tensors, **extra}))


# Lines 9 to 13


def test_two_clients_by_hand() -> None:
    """|D| = 10, 30, K = 2, 1: p = (1/4, 3/4), K-bar = 1.25, M = 2, u* = 0.625; eta Gamma = (0.2 + 3 · 0.4) / 4 = 0.35.

    Theta: expert 0: (4 + 3 · 8) / 4 = 7, expert 1: (8 + 3 · 0) / 4 = 2; attention (2 + 3 · 6) / 4 = 5.
    Eq. 15 from Theta = (0.5, 2): (0.5 - 7) / 0.35 = -18.571, 0. Eq. 12: u = (1, 0.25).
    Eq. 13: tanh(0.625 - 1) = -0.35835, tanh(2.5 - 1) = 0.90515. Eq. 14 at zeta = 0.8 from phi = (0.5, -0.5):
    0.2 · -0.35835 + 0.8 · 0.5 = 0.32833, 0.2 · 0.90515 - 0.4 = -0.21897.
    """
    method = ub_smoe(momentum=0.8)
    expert, query = f"{BLOCKS[0]}.experts.up_proj.lora_A", "model.layers.0.self_attn.q_proj.lora_A"

    def trained(experts: list[float], attention: float) -> dict[str, Tensor]:
        return {expert: torch.tensor(experts).view(2, 1, 1), query: torch.tensor([[attention]])}

    first = sent(client(0, MIDDLE, 10), trained([4.0, 8.0], 2.0), [[1.0, 1.0]], 0.2)
    second = sent(client(4, SMALL, 30), trained([8.0, 0.0], 6.0), [[1.0, 0.0]], 0.4)
    before = State(
        {
            **with_part(ADAPTER, trained([0.5, 2.0], 0.0)),
            **with_part(PHI, {f"{BLOCKS[0]}.phi": torch.tensor([0.5, -0.5])}),
            **with_part(UTILISATION, {BLOCKS[0]: torch.zeros(2)}),
        },
        {"version": 6, "step_size": 9.0, "mean_active": 1.25},
    )
    found = method.aggregate(before, iter([first, second]))
    tensors = {name: value.flatten().tolist() for name, value in found.tensors.items()}
    assert tensors[f"adapter/{expert}"] == pytest.approx([7.0, 2.0])
    assert tensors[f"adapter/{query}"] == pytest.approx([5.0])
    assert tensors[f"pseudo_gradient/{expert}"] == pytest.approx([-18.5714, 0.0], rel=1e-5)
    assert f"pseudo_gradient/{query}" not in tensors
    assert tensors[f"utilisation/{BLOCKS[0]}"] == pytest.approx([1.0, 0.25])
    assert tensors[f"phi/{BLOCKS[0]}.phi"] == pytest.approx([0.32833, -0.21897], rel=1e-4)
    assert tensors["server/holders"] == [0, 4]
    assert found.scalars == {
        "version": 7,
        "step_size": pytest.approx(0.35, rel=1e-6),
        "mean_active": pytest.approx(1.25),
    }


def random_round(method: UbSmoe, model: ModelInfo, clients: int) -> tuple[State, list[Upload]]:
    """A state and uploads with awkward shares: nobody uses expert 6 of layer 0; client 1 saw no token at all."""
    state, rng = random_state(method, model, 1), torch_rng(clients, "round")
    uploads = []
    for index in range(clients):
        shares = torch.rand(2, 8, generator=rng)
        shares[0, 6] = 0.0
        if index == 1:
            shares.zero_()
        adapter = {
            name: torch.randn(value.shape, generator=rng)
            for name, value in Payload(state.tensors).part(ADAPTER).items()
        }
        budget = (LARGE, MIDDLE, SMALL)[index % 3]
        uploads.append(sent(client(index, budget, 3 + 5 * index), adapter, shares.tolist(), 0.1 * (index + 1)))
    return state, uploads


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_the_server_is_the_slow_one(clients: int, olmoe_backbone: Backbone) -> None:
    method = ub_smoe()
    state, uploads = random_round(method, olmoe_backbone.info, clients)
    found = method.aggregate(state, iter(uploads))
    examples = [each.client.examples for each in uploads]
    weights = [torch.tensor(float(n)) for n in examples]
    step_size = sum(n * 0.1 * (i + 1) for i, n in enumerate(examples)) / sum(examples)
    assert found.scalars["step_size"] == pytest.approx(step_size, rel=1e-6)
    for name, before in state.tensors.items():
        part, _, rest = name.partition("/")
        if part == ADAPTER:
            expected = weighted_mean([each.payload.tensors[name] for each in uploads], weights, before)
        elif part == PSEUDO_GRADIENT:
            expected = (state.tensors[f"adapter/{rest}"] - found.tensors[f"adapter/{rest}"]) / step_size
        elif part in (UTILISATION, PHI):
            block = rest.removesuffix(".phi")
            shares = [each.payload.tensors[f"utilisation/{block}"].tolist() for each in uploads]
            rate = oracle.utilisation(shares, examples)
            assert rate is not None
            values = rate if part == UTILISATION else oracle.modulation(before.tolist(), rate, 2.0, 0.9, 1e-6)
            expected = torch.tensor(values)
        else:
            continue
        torch.testing.assert_close(found.tensors[name].double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_a_round_without_tokens_leaves_phi(olmoe_backbone: Backbone) -> None:
    method = ub_smoe()
    state, uploads = random_round(method, olmoe_backbone.info, 2)
    found = method.aggregate(state, [uploads[1]])
    assert all(torch.equal(value, found.tensors[name]) for name, value in state.tensors.items() if "phi/" in name)
    assert method.aggregate(state, []) is state


def test_the_mean_of_active_experts_is_over_all_clients(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """(4 · 10 + 1 · 30 + 2 · 20) / 60, also after a round that only client 1 took part in."""
    who = [client(0, LARGE, 10), client(1, SMALL, 30), client(2, MIDDLE, 20)]
    federation = Federation(olmoe_backbone, ub_smoe(), who, tmp_path)
    state = federation.start()
    after = federation.method.aggregate(state, federation.train(state, 1, who=(1,)))
    expected = oracle.mean_active([(10, 4), (30, 1), (20, 2)])
    assert [each.scalars["mean_active"] for each in (state, after)] == pytest.approx([expected, expected])
    assert after.tensors["server/holders"].tolist() == [1]


# The client


def train(
    backbone: Backbone, method: UbSmoe, state: State, who: Sequence[ClientInfo], settings: TrainingSettings
) -> list[tuple[dict[str, Tensor], Payload]]:
    """Trains clients in one cohort; returns each one's trainables, phi included, and upload."""
    with SlotModel(backbone, [method.plan(backbone.info, each.budget) for each in who]) as model:
        work = []
        for each in who:
            rows = random_rows([4 + (each.index + i) % 5 for i in range(each.examples)], each.index)
            examples = [Encoded(tuple(row), 2) for row in rows]
            work.append(LocalWork(each, examples, method.download(state, backbone.info, each), Payload()))
        cohort = Cohort(model, work, settings, round_index=4, seed=1)
        uploads = method.local_update(cohort)
        return [(cohort.read(slot), upload) for slot, upload in enumerate(uploads)]


CLIENTS = [client(0, LARGE, 7), client(1, SMALL, 3), client(2, MIDDLE, 5), client(3, SMALL, 9)]
ONE_STEP = TrainingSettings(OptimizerSettings("sgd"), learning_rate=1.0, batch_size=2, accumulation=2, steps=1)
TEN_STEPS = TrainingSettings(
    OptimizerSettings("adamw", (0.9, 0.95), 1e-5, 0.01), learning_rate=0.01, batch_size=2, accumulation=2, steps=10
)
VARIANTS = [{}, {"modulation": "preserve", "pseudo_gradient": "token"}, {"gating": "native", "scaling": "linear"}]
NEEDED = (2, 3, 1)
"""Fewest active experts with which the loss moves phi in each variant."""


@pytest.mark.parametrize(("options", "needed"), zip(VARIANTS, NEEDED, strict=True), ids=str)
def test_gradients_in_a_cohort_equal_those_alone(
    options: dict[str, object], needed: int, olmoe_backbone: Backbone
) -> None:
    """The modified gradient of Eq. 16, phi's included, is what one step of SGD at rate 1 subtracts."""
    method = ub_smoe(**options)
    state = random_state(method, olmoe_backbone.info, 2)
    start = method.deploy(state, olmoe_backbone.info, LARGE).tensors

    def gradient(trained: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: start[name] - value for name, value in trained.items()}

    together = train(olmoe_backbone, method, state, CLIENTS, ONE_STEP)
    for each, (found, _) in zip(CLIENTS, together, strict=True):
        ((alone, _),) = train(olmoe_backbone, method, state, [each], ONE_STEP)
        assert distance(flat(gradient(found)), flat(gradient(alone))) < 1e-5
        phi = {name: value for name, value in gradient(alone).items() if name.endswith("phi")}
        assert all(value.any() for value in phi.values()) is (each.budget.active_experts >= needed)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_ten_steps_in_a_cohort_equal_those_alone(options: dict[str, object]) -> None:
    exact = tiny_backbone("olmoe", dtype=torch.float64)
    before = exact.fingerprint()
    method = ub_smoe(**options)
    state = random_state(method, exact.info, 3)
    together = train(exact, method, state, CLIENTS, TEN_STEPS)
    for each, (found, uploaded) in zip(CLIENTS, together, strict=True):
        ((alone, expected),) = train(exact, method, state, [each], TEN_STEPS)
        assert all(distance(found[name], value) < 1e-8 for name, value in alone.items())
        torch.testing.assert_close(dict(uploaded.tensors), dict(expected.tensors), rtol=1e-8, atol=1e-12)
    assert exact.fingerprint() == before


@pytest.mark.parametrize("scaling", ["none", "root", "linear", "inverse_root", "log"])
def test_an_inactive_expert_steps_along_its_pseudo_gradient(scaling: str, olmoe_backbone: Backbone) -> None:
    """One step of SGD at rate 1 with one active expert; clipping at 2, rho by hand for K-bar = 2, K_c = 1."""
    rho = {"none": 1.0, "root": 2**0.5, "linear": 2.0, "inverse_root": 2**-0.5, "log": 1.0986123}[scaling]
    method, who = ub_smoe(scaling=scaling), client(1, SMALL, 1)
    state = random_state(method, olmoe_backbone.info, 4)
    ((trained, uploaded),) = train(olmoe_backbone, method, state, [who], ONE_STEP)
    known, checked = Payload(state.tensors), 0
    for block in BLOCKS:
        share = uploaded.tensors[f"utilisation/{block}"]
        names = [name for name in experts_of(known.part(ADAPTER)) if name.startswith(f"{block}.")]
        clipped = oracle.clipped([known.part(PSEUDO_GRADIENT)[name] for name in names], 2.0)
        for name, pseudo in zip(names, clipped, strict=True):
            moved = known.part(ADAPTER)[name] - trained[name]
            idle = share == 0
            assert idle.any()
            torch.testing.assert_close(moved[idle], rho * pseudo[idle], rtol=1e-4, atol=1e-5)
            checked += int((~idle).sum())
    assert checked


@pytest.mark.parametrize("penalty", ["hinge", "square", "none"])
def test_the_regulariser_pulls_phi_back(penalty: str, olmoe_backbone: Backbone) -> None:
    """With one active expert the NLL gives phi no gradient, so a step of SGD at rate 1 shows Eq. 11's alone."""
    method = ub_smoe(penalty=penalty, penalty_weight=0.3, phi_min=-0.4, phi_max=0.2)
    state = random_state(method, olmoe_backbone.info, 5)
    ((trained, _),) = train(olmoe_backbone, method, state, [client(1, SMALL)], ONE_STEP)
    outside = 0
    for name, phi in Payload(state.tensors).part(PHI).items():
        slope = {
            "hinge": [oracle.hinge_slope(value, -0.4, 0.2, 0.3) for value in phi.tolist()],
            "square": [2 * 0.3 * value for value in phi.tolist()],
            "none": [0.0] * len(phi),
        }[penalty]
        torch.testing.assert_close(phi - trained[name], torch.tensor(slope), rtol=1e-4, atol=1e-6)
        outside += sum(value < -0.4 or value > 0.2 for value in phi.tolist())
    assert 0 < outside < 16


def test_the_penalty_is_equation_11(olmoe_backbone: Backbone) -> None:
    method = ub_smoe(penalty_weight=0.3, phi_min=-0.4, phi_max=0.2)
    state = random_state(method, olmoe_backbone.info, 6)
    phi = Payload(state.tensors).part(PHI)
    with SlotModel(olmoe_backbone, [method.plan(olmoe_backbone.info, SMALL)] * 2) as model:
        work = [LocalWork(client(i, SMALL), (), Payload(), Payload()) for i in range(2)]
        cohort = Cohort(model, work, ONE_STEP, round_index=1, seed=0)
        cohort.load(1, phi)
        found = method.penalty(cohort).tolist()
    assert found == pytest.approx([0.0, oracle.hinge([p.tolist() for p in phi.values()], -0.4, 0.2, 0.3)], rel=1e-5)


def test_phi_never_leaves_and_starts_from_the_servers(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, ub_smoe(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    method, state = federation.method, federation.start()
    for round in (1, 2):
        uploads = federation.train(state, round)
        for each in uploads:
            assert not any(name.endswith("phi") for name in each.payload.tensors)
            check_upload(each.payload, method.expected_upload(federation.model, each.client, Payload()), client="c")
        state = method.aggregate(state, uploads)
    for who in federation.clients:
        payload = method.download(state, federation.model, who)
        for name, value in payload.part(PHI).items():
            assert value.any()
            assert torch.equal(value, state.tensors[f"phi/{name}"])
            assert torch.equal(value, method.deploy(state, federation.model, who.budget).tensors[name])
            assert torch.equal(value, method.personalize(state, federation.model, who, Payload()).tensors[name])


def test_phi_acts_in_the_deployed_model(olmoe_backbone: Backbone) -> None:
    method = ub_smoe()
    state = random_state(method, olmoe_backbone.info, 7)
    deployment = method.deploy(state, olmoe_backbone.info, MIDDLE)
    assert deployment.plan.active_experts == 2
    routed = []
    for factor in (1.0, 0.0):
        with SlotModel(olmoe_backbone, [deployment.plan]) as model, model.collect_routing() as statistics:
            scaled = {n: v * factor if n.endswith("phi") else v for n, v in deployment.tensors.items()}
            model.load(0, scaled)
            model.generate([random_rows([9, 9], 0)], 2)
            routed.append(statistics.counts.clone())
    assert not torch.equal(*routed)


# Who gets the pseudo-gradient how


PARTICIPANTS = [(0, 1, 2), (0, 2), (1, 2), (0, 1, 2)]


def run(backbone: Backbone, folder: Path, participants: Sequence[Sequence[int]], **options: object):
    """Four rounds with unequal participation; returns the states and each download's (round, client) -> payload."""
    who = [client(0, LARGE), client(1, SMALL), client(2, MIDDLE, 6)]
    federation = Federation(backbone, ub_smoe(**options), who, folder)
    state, states, downloads = federation.start(), [], {}
    for round, asked in enumerate(participants, start=1):
        for index in asked:
            downloads[round, index] = federation.method.download(state, federation.model, who[index])
        state = federation.method.aggregate(state, federation.train(state, round, who=asked))
        states.append(state)
    return states, downloads


def assert_same_bits(found: State, expected: State) -> None:
    assert found.scalars == expected.scalars
    assert found.tensors.keys() == expected.tensors.keys()
    assert [name for name, value in expected.tensors.items() if not torch.equal(found.tensors[name], value)] == []


def test_a_derived_pseudo_gradient_is_the_sent_one(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Both ways give the same run, bit by bit, also where clients sit rounds out."""
    derived, few = run(olmoe_backbone, tmp_path / "a", PARTICIPANTS)
    sent, many = run(olmoe_backbone, tmp_path / "b", PARTICIPANTS, send_pseudo_gradient="always")
    for left, right in zip(derived, sent, strict=True):
        assert_same_bits(left, right)
    got = {key for key, payload in few.items() if payload.part(PSEUDO_GRADIENT)}
    assert got == {(3, 1), (4, 0)}
    assert all(payload.part(PSEUDO_GRADIENT) for payload in many.values())
    assert any(value.any() for value in many[2, 0].part(PSEUDO_GRADIENT).values())
    for key in few:
        same = few[key].tensors.keys() == many[key].tensors.keys()
        assert same is (key in got)
        if same:
            assert size_bytes(few[key]) == size_bytes(many[key])


def test_a_client_that_lost_its_memory_trains_on(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Without G~ in that round, as in the first; it says so, and has the next one again."""
    who = [client(0, LARGE), client(1, SMALL)]
    federation = Federation(olmoe_backbone, ub_smoe(), who, tmp_path)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, federation.train(state, 1))
    for path in (tmp_path / "clients" / "client-001").iterdir():
        path.unlink()
    uploads = federation.train(state, 2)
    assert [float(each.payload.tensors[WITHOUT]) for each in uploads] == [0.0, 1.0]
    state = method.aggregate(state, uploads)
    assert float(state.tensors["server/lost"]) == 1.0
    assert [float(each.payload.tensors[WITHOUT]) for each in federation.train(state, 3)] == [0.0, 0.0]


def test_a_stale_memory_is_not_used(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The newest memory is lost, an older round's is left: its Theta is not the one that G~ starts from."""
    federation = Federation(olmoe_backbone, ub_smoe(), [client(0, SMALL)], tmp_path)
    method, state = federation.method, federation.start()
    for round in (1, 2):
        state = method.aggregate(state, federation.train(state, round))
    (tmp_path / "clients" / "client-000" / "round-00002.memory").unlink()
    (found,) = federation.train(state, 3)
    assert float(found.payload.tensors[WITHOUT]) == 1.0


def test_a_client_whose_upload_failed_is_sent_the_buffer(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Its memory is there, but the server counts on those only who delivered."""
    results = []
    for mode in ("when_needed", "always"):
        federation = Federation(
            olmoe_backbone, ub_smoe(send_pseudo_gradient=mode), [client(0, LARGE), client(1, SMALL)], tmp_path / mode
        )
        method, state = federation.method, federation.start()
        state = method.aggregate(state, federation.train(state, 1)[:1])
        assert method.download(state, federation.model, federation.clients[1]).part(PSEUDO_GRADIENT)
        results.append(method.aggregate(state, federation.train(state, 2)))
    assert_same_bits(*results)


def test_a_checkpoint_changes_no_bit(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    expected, _ = run(olmoe_backbone, tmp_path / "a", PARTICIPANTS)
    federation = Federation(
        olmoe_backbone, ub_smoe(), [client(0, LARGE), client(1, SMALL), client(2, MIDDLE, 6)], tmp_path / "b"
    )
    state = federation.start()
    for round, asked in enumerate(PARTICIPANTS, start=1):
        state = State(*unpack(pack(state.tensors, state.scalars)))
        state = federation.method.aggregate(state, federation.train(state, round, who=asked))
    assert_same_bits(state, expected[-1])


# Traffic of the real model


@pytest.fixture(scope="module")
def olmoe_1b_7b() -> ModelInfo:
    """OLMoE-1B-7B's shape on meta tensors: its real expert width is 1024."""
    config = OlmoeConfig(
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return describe(model, "OLMoE-1B-7B", find_moe_layers(model, "olmoe", Runtime()))


def real_state(method: UbSmoe, model: ModelInfo) -> State:
    """A state after a round that client 0 took part in, in bf16 on meta tensors."""
    shapes = trainable_shapes(model, method.plan(model, Budget("b4", 8, 20)))

    def meta(names: list[str]) -> dict[str, Tensor]:
        return {name: torch.empty(shapes[name], dtype=torch.bfloat16, device="meta") for name in names}

    lora = [name for name in shapes if not name.endswith(".phi")]
    return State(
        {
            **with_part(ADAPTER, meta(lora)),
            **with_part(PHI, meta([name for name in shapes if name.endswith(".phi")])),
            **with_part(PSEUDO_GRADIENT, meta([name for name in lora if ".experts." in name])),
            "server/holders": torch.tensor([0]),
        },
        {"version": 1, "step_size": 0.1, "mean_active": 3.75},
    )


def test_the_traffic_of_a_round_is_the_papers(olmoe_1b_7b: ModelInfo) -> None:
    """Table 15: 370 MB up and 730 MB down; the wire's own count, 2 bytes per parameter, in MiB."""
    who = ClientInfo(0, Budget("b1", 1, 6), 100)
    paper = UbSmoe(UbSmoeSettings(send_pseudo_gradient="always"))
    names = paper.expected_upload(olmoe_1b_7b, who, Payload())
    up = Payload({name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in names.items()})
    down = paper.download(real_state(paper, olmoe_1b_7b), olmoe_1b_7b, who)
    assert size_bytes(up) / MIB == pytest.approx(370, abs=0.5)
    assert size_bytes(down) / MIB == pytest.approx(730, abs=0.5)
    assert bytes_by_part(down)[PSEUDO_GRADIENT] == 2 * 16 * 64 * 3 * 20 * (2048 + 1024)
    ours = ub_smoe(rank=20)
    saved = ours.download(real_state(ours, olmoe_1b_7b), olmoe_1b_7b, who)
    assert size_bytes(saved) <= 0.52 * size_bytes(down)
    newcomer = ours.download(real_state(ours, olmoe_1b_7b), olmoe_1b_7b, ClientInfo(1, who.budget, 100))
    assert size_bytes(newcomer) == size_bytes(down)


# Each mechanism off (Table 6)


def test_without_pseudo_gradients_nothing_of_them_is_left(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """An expert that the client never activated comes back as it went."""
    federation = Federation(olmoe_backbone, ub_smoe(pseudo_gradient="none"), [client(0, SMALL, 1)], tmp_path)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, federation.train(state, 1))
    assert not any(name.startswith(PSEUDO_GRADIENT) for name in state.tensors)
    (found,) = federation.train(state, 2)
    assert not (tmp_path / "clients").exists()
    for block in BLOCKS:
        idle = found.payload.tensors[f"utilisation/{block}"] == 0
        assert idle.any()
        for name, value in found.payload.part(ADAPTER).items():
            if name.startswith(f"{block}.experts"):
                before = state.tensors[f"adapter/{name}"]
                assert torch.equal(value[idle], before[idle])
                assert not torch.equal(value[~idle], before[~idle])


def test_without_modulation_there_is_no_phi(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, ub_smoe(modulation="none"), [client(0, MIDDLE)], tmp_path)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, federation.train(state, 1))
    assert not any("phi" in name for name in state.tensors)
    plan = method.plan(olmoe_backbone.info, MIDDLE)
    with SlotModel(olmoe_backbone, [plan]):
        assert all(layer.chooser is not None for layer in olmoe_backbone.moe)
    native = ub_smoe(modulation="none", gating="native").plan(olmoe_backbone.info, MIDDLE)
    with SlotModel(olmoe_backbone, [native]):
        assert all(layer.chooser is None for layer in olmoe_backbone.moe)


def test_without_the_utilisation_update_phi_stays_zero(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, ub_smoe(utilisation_update=False), [client(0, MIDDLE)], tmp_path)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, federation.train(state, 1))
    phi, used = Payload(state.tensors).part(PHI), Payload(state.tensors).part(UTILISATION)
    assert phi
    assert not any(value.any() for value in phi.values())
    assert all(value.any() for value in used.values())


def test_a_fixed_phi_does_not_train(olmoe_backbone: Backbone) -> None:
    method = ub_smoe(phi="fixed", penalty_weight=5.0, phi_max=0.0)
    state = random_state(method, olmoe_backbone.info, 8)
    ((trained, _),) = train(olmoe_backbone, method, state, [client(0, LARGE)], TEN_STEPS)
    for name, value in Payload(state.tensors).part(PHI).items():
        assert torch.equal(trained[name], value)


# Figures of a round


@pytest.mark.parametrize("measure", [False, True])
def test_observations(measure: bool, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    who = [client(0, LARGE, 6), client(1, SMALL, 6)]
    federation = Federation(olmoe_backbone, ub_smoe(measure_cosine=measure), who, tmp_path)
    method, state = federation.method, federation.start()
    assert isinstance(method, Observing)
    for round in (1, 2, 3):
        uploads = federation.train(state, round)
        for each in uploads:
            check_upload(each.payload, method.expected_upload(federation.model, each.client, Payload()), client="c")
        state = method.aggregate(state, uploads)
    seen = {figure.name: figure for figure in method.observe(state, federation.model)}
    assert seen["expert utilisation"].values.shape == (2, 3)
    assert seen["phi against utilisation"].values.shape == (3, 3)
    assert (seen["phi against utilisation"].values[:, 0] < 0).all()
    assert seen["clients that lost their memory"].values.tolist() == [0.0]
    assert ("cosine of the pseudo-gradient" in seen) is measure
    if measure:
        mine = uploads[1].payload.tensors
        assert mine["cosine/measured"][2] == mine["cosine/measured"][:2].sum()
        assert mine["cosine/measured"][2] > 0
        assert not uploads[0].payload.tensors["cosine/measured"].any()
        cosines = seen["cosine of the pseudo-gradient"].values
        torch.testing.assert_close(cosines, mine["cosine/values"])
        assert cosines.abs().max() <= 1


# Bad input


@pytest.mark.parametrize("active", [0, 5])
def test_a_budget_beyond_the_models_top_k(active: int, olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=rf"'x' has active_experts {active}, but tiny olmoe runs 4 of 8"):
        ub_smoe().start(olmoe_backbone.info, [LARGE, Budget("x", active, 2)], torch.Generator())


def test_a_dense_model(llama_backbone: Backbone) -> None:
    with pytest.raises(ModelError, match="UB-SMoE needs a mixture-of-experts model"):
        ub_smoe().plan(llama_backbone.info, LARGE)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("targets", ["attention"], r"method\.targets: .*must include experts, which UB-SMoE balances"),
        ("momentum", 1.5, r"method\.momentum: .*got 1\.5\.\nIt is: zeta of Eq\. 14"),
        ("scaling", "cubic", r"method\.scaling: .*'inverse_root' or 'log', got 'cubic'"),
        ("modulation", "all", r"method\.modulation: .*'candidate', 'preserve' or 'none', got 'all'"),
    ],
)
def test_options_out_of_range(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method("ub-smoe", {option: value})
