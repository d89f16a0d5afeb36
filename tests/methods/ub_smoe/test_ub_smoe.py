"""UB-SMoE against its equations: aggregation, modulation, and who gets the pseudo-gradient how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import ADAPTER, Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.measuring.costs.memory import memory
from fedguild.methods.ub_smoe import UbSmoe, UbSmoeSettings
from fedguild.methods.ub_smoe.names import PHI, PSEUDO_GRADIENT, UTILISATION
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster, Upload, client_model
from fedguild.server.validation import check_upload
from tests.backbones import random_rows
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, upload
from tests.oracles import ub_smoe as oracle
from tests.oracles.aggregation import weighted_mean

STEP_SIZE, WITHOUT = "training/step_size", "training/without_pseudo_gradient"
BLOCKS = [f"model.layers.{layer}.mlp" for layer in (0, 1)]


def ub_smoe(**options: object) -> UbSmoe:
    return UbSmoe(UbSmoeSettings(**{"rank": 2, **options}))  # type: ignore[arg-type]


def experts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if ".experts." in name}


def random_state(method: UbSmoe, model: ModelInfo, seed: int, round: int = 3) -> Payload:
    """A state from the middle of a run: everything moves, one expert's G~ is zero."""
    start = method.start(model, Roster([LARGE, MIDDLE, SMALL], [client(0, LARGE)]), torch_rng(seed, "start"))
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
    return Payload(tensors, {"version": round, "step_size": 0.1, "mean_active": 2.0})


def sent(who: ClientInfo, adapter: dict[str, Tensor], shares: Sequence[Sequence[float]], step_size: float) -> Upload:
    """An upload of a client that trained with these rates and shares [L][M]."""
    used = {block: torch.tensor(share) for block, share in zip(BLOCKS, shares, strict=False)}
    received = upload(who, adapter=adapter, utilisation=used)
    extra = {STEP_SIZE: torch.tensor(step_size), WITHOUT: torch.tensor(0.0)}
    return Upload(1, who, Payload({**received.payload.tensors, **extra}))


# Lines 9 to 13


def random_round(method: UbSmoe, model: ModelInfo, clients: int) -> tuple[Payload, list[Upload]]:
    """A state and uploads with awkward shares: nobody uses expert 6 of layer 0; client 1 saw no token at all."""
    state, rng = random_state(method, model, 1), torch_rng(clients, "round")
    uploads = []
    for index in range(clients):
        shares = torch.rand(2, 8, generator=rng)
        shares[0, 6] = 0.0
        if index == 1:
            shares.zero_()
        adapter = {name: torch.randn(value.shape, generator=rng) for name, value in state.part(ADAPTER).items()}
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


def test_a_negative_step_size_counts_as_none(olmoe_backbone: Backbone) -> None:
    """Else one client could turn every other client's idle experts uphill."""
    method = ub_smoe()
    state, uploads = random_round(method, olmoe_backbone.info, 2)
    lied = Payload({**uploads[1].payload.tensors, STEP_SIZE: torch.tensor(-50.0)})
    found = method.aggregate(state, [uploads[0], Upload(1, uploads[1].client, lied)])
    first, second = (each.client.examples for each in uploads)
    assert found.scalars["step_size"] == pytest.approx(0.1 * first / (first + second))


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
    backbone: Backbone, method: UbSmoe, state: Payload, who: Sequence[ClientInfo], settings: TrainingSettings
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


ONE_STEP = TrainingSettings(
    optimizer="sgd",
    learning_rate=1.0,
    batch_size=2,
    gradient_accumulation_steps=2,
    steps=1,
    max_grad_norm=None,
)
TEN_STEPS = TrainingSettings(
    optimizer="adamw",
    betas=(0.9, 0.95),
    eps=1e-5,
    weight_decay=0.01,
    learning_rate=0.01,
    batch_size=2,
    gradient_accumulation_steps=2,
    steps=10,
    max_grad_norm=None,
)


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
    for name, phi in state.part(PHI).items():
        slope = {
            "hinge": [oracle.hinge_slope(value, -0.4, 0.2, 0.3) for value in phi.tolist()],
            "square": [2 * 0.3 * value for value in phi.tolist()],
            "none": [0.0] * len(phi),
        }[penalty]
        torch.testing.assert_close(phi - trained[name], torch.tensor(slope), rtol=1e-4, atol=1e-6)
        outside += sum(value < -0.4 or value > 0.2 for value in phi.tolist())
    assert 0 < outside < 16


def test_phi_never_leaves_and_starts_from_the_servers(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, ub_smoe(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    method, state = federation.method, federation.start()
    for round in (1, 2):
        uploads = federation.train(state, round)
        for each in uploads:
            assert not any(name.endswith("phi") for name in each.payload.tensors)
            check_upload(each.payload, method.schema(federation.model, each.client, Payload()))
        state = method.aggregate(state, uploads)
    for who in federation.clients:
        payload = method.download(state, federation.model, who)
        for name, value in payload.part(PHI).items():
            assert value.any()
            assert torch.equal(value, state.tensors[f"phi/{name}"])
            assert torch.equal(value, method.deploy(state, federation.model, who.budget).tensors[name])
            assert torch.equal(value, client_model(method, state, federation.model, who, Payload()).tensors[name])


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


def test_a_plan_counts_the_pseudo_gradients_that_a_client_holds(olmoe_backbone: Backbone) -> None:
    with_them, without = (UbSmoe(UbSmoeSettings(pseudo_gradient=kind)) for kind in ("batch", "none"))
    state = with_them.start(olmoe_backbone.info, Roster([SMALL], [client(0, SMALL)]), torch_rng(0, "start"))
    held = sum(value.numel() for value in state.part(PSEUDO_GRADIENT).values())
    assert with_them.plan(olmoe_backbone.info, SMALL).buffers == held > 0
    assert without.plan(olmoe_backbone.info, SMALL).buffers == 0
    estimates = [
        memory(olmoe_backbone.info, method.plan(olmoe_backbone.info, SMALL), 64, dtype=torch.float32, slots=3)
        for method in (with_them, without)
    ]
    assert estimates[0].total_bytes - estimates[1].total_bytes == 3 * 4 * held


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
    phi, used = state.part(PHI), state.part(UTILISATION)
    assert phi
    assert not any(value.any() for value in phi.values())
    assert all(value.any() for value in used.values())


def test_a_fixed_phi_does_not_train(olmoe_backbone: Backbone) -> None:
    method = ub_smoe(phi="fixed", penalty_weight=5.0, phi_max=0.0)
    state = random_state(method, olmoe_backbone.info, 8)
    ((trained, _),) = train(olmoe_backbone, method, state, [client(0, LARGE)], TEN_STEPS)
    for name, value in state.part(PHI).items():
        assert torch.equal(trained[name], value)


# Figures of a round


@pytest.mark.parametrize("measure", [False, True])
def test_observations(measure: bool, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    who = [client(0, LARGE, 6), client(1, SMALL, 6)]
    federation = Federation(olmoe_backbone, ub_smoe(measure_cosine=measure), who, tmp_path)
    method, state = federation.method, federation.start()
    for round in (1, 2, 3):
        uploads = federation.train(state, round)
        for each in uploads:
            check_upload(each.payload, method.schema(federation.model, each.client, Payload()))
        state = method.aggregate(state, uploads)
        if round == 1:
            names = {figure.name for figure in method.observe(state, federation.model)}
            assert "cosine of the pseudo-gradient" not in names, "nobody had a pseudo-gradient yet"
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
        assert seen["clients that measured the cosine"].values.tolist() == [1.0, 1.0, 1.0]
        cosines = seen["cosine of the pseudo-gradient"].values
        torch.testing.assert_close(cosines, mine["cosine/values"])
        assert cosines.abs().max() <= 1


def test_a_client_with_one_example_measures_nothing(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """It trains on that example, so nothing is held out."""
    federation = Federation(olmoe_backbone, ub_smoe(measure_cosine=True), [client(0, SMALL, 1)], tmp_path)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, federation.train(state, 1))
    (found,) = federation.train(state, 2)
    assert not found.payload.tensors["cosine/measured"].any()
