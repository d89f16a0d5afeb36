"""Fed-SB: frozen factors from the clients' gradient, and a small matrix between them whose mean is exact."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.export.weights import folded
from fedguild.methods import build_method
from fedguild.methods.fed_sb import FedSB, initial_factors
from fedguild.methods.fed_sb.basis import HOLDERS
from fedguild.model.plan import adapter_shapes
from fedguild.model.slots import SlotModel
from fedguild.model.targets import targeted_shapes
from fedguild.server.method import Roster, Upload
from tests.backbones import PAD, random_rows, tiny_backbone, tiny_model
from tests.measuring.costs.test_flops import OLMOE
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.oracles.fed_sb import start, update, weighted_mean
from tests.oracles.sketches import weight_gradients

TARGETS = ["attention", "router", "experts"]
ETA = 0.05
ONE_STEP = TrainingSettings(optimizer="adam", learning_rate=0.05, batch_size=2, steps=1, max_grad_norm=None)


def fed_sb(**options) -> FedSB:
    method = build_method("fed-sb", {"rank": 2, "targets": TARGETS, "step_size": ETA, **options})
    assert isinstance(method, FedSB)
    return method


def part(state: Payload, name: str) -> dict[str, Tensor]:
    return state.part(name)


def sent(index: int, examples: int, tensors: dict[str, Tensor], name: str = "adapter", lost: bool = False) -> Upload:
    return Upload(1, client(index, LARGE, examples), Payload(with_part(name, tensors), {"lost": lost}))


def like(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    rng = torch_rng(seed, "like")
    return {name: torch.randn(value.shape, generator=rng) for name, value in tensors.items()}


@pytest.fixture
def federation(olmoe_backbone, tmp_path) -> Federation:
    who = [client(0, LARGE, 4), client(1, SMALL, 7), client(2, MIDDLE, 5)]
    return Federation(olmoe_backbone, fed_sb(), who, tmp_path)


def begun(federation: Federation, who=None) -> Payload:
    """The state after the round that finds A and B."""
    state = federation.start()
    return federation.method.aggregate(state, iter(federation.train(state, 1, who)))


# Lines 2 to 4: the first round


@pytest.mark.parametrize("family", ["olmoe", "llama"])
@pytest.mark.parametrize("kind", ["dense", "sketch"])
def test_the_first_round_against_the_oracle(kind, family, tmp_path):
    """Two clients with a batch each: p_c-mean, sign and SVD of gradients from plain models; fp64, every matrix.

    A sketch of rank 16, as wide as the model, loses nothing.
    """
    backbone = tiny_backbone(family, dtype=torch.float64)
    method = fed_sb(start=kind, sketch_rank=16, targets=TARGETS if family == "olmoe" else ["attention", "mlp"])
    who = [client(0, MIDDLE, 1), client(1, SMALL, 2)]
    federation = Federation(backbone, method, who, tmp_path)
    state = federation.start()
    found = method.aggregate(state, iter(federation.train(state, settings=ONE_STEP)))
    assert found.scalars["stage"] == "training"
    shapes = targeted_shapes(backbone.info, method.plan(backbone.info, LARGE).lora.targets)
    plain = tiny_model(family, dtype=torch.float64)
    slow = [
        weight_gradients(
            plain,
            backbone.info,
            federation.examples[each.index],
            each.budget.active_experts if family == "olmoe" else None,
            shapes,
        )
        for each in who
    ]
    unseen = compared = 0
    for module, shape in shapes.items():
        mean = weighted_mean([own[module] for own in slow], [1, 2])
        up, middle, down = (found.tensors[name].double() for name in names_of(module))
        for expert in range(shape[0]) if len(shape) == 3 else (...,):
            if not mean[expert].any():
                unseen += 1
                assert not middle[expert].any()
                continue
            strong = mean[expert].abs() > 1e-5 * mean[expert].abs().max()
            product, expected = update(up[expert], middle[expert], down[expert]), start(mean[expert], 2, ETA)
            if bool(strong.all()):  # the sign of what rounding decides is anybody's
                compared += 1
                torch.testing.assert_close(product, expected, rtol=1e-3, atol=1e-4 * ETA, msg=module)
            eye = torch.eye(2, dtype=torch.float64)
            torch.testing.assert_close(up[expert].mT @ up[expert], eye, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(down[expert] @ down[expert].mT, eye, rtol=1e-5, atol=1e-5)
    assert compared > 0.7 * sum(math.prod(shape[:-2]) for shape in shapes.values()) - unseen
    assert (unseen > 0) == (family == "olmoe")


def names_of(module: str) -> tuple[str, str, str]:
    return f"basis/{module}.lora_B", f"adapter/{module}.lora_R", f"basis/{module}.lora_A"


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 6, 9)])
def test_initial_factors_against_the_oracle(shape):
    gradient = torch.randn(shape, generator=torch_rng(1, "gradient"))
    up, middle, down = initial_factors(gradient, 3, ETA, torch_rng(2, "start"))
    for index in range(shape[0]) if len(shape) == 3 else (...,):
        product = update(up[index], middle[index], down[index])
        torch.testing.assert_close(product, start(gradient[index], 3, ETA), rtol=1e-4, atol=1e-6)
        values = middle[index].diagonal()
        assert torch.equal(middle[index], values.diag())
        assert values.tolist() == sorted(values.tolist(), reverse=True)


def test_an_expert_without_a_gradient_starts_with_orthonormal_factors_and_no_update():
    gradient = torch.randn(3, 6, 5, generator=torch_rng(1, "gradient"))
    gradient[1] = 0.0
    up, middle, down = initial_factors(gradient, 2, ETA, torch_rng(2, "start"))
    assert not middle[1].any()
    assert middle[[0, 2]].flatten(1).any(dim=1).all()
    torch.testing.assert_close(up.mT @ up, torch.eye(2).expand(3, 2, 2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(down @ down.mT, torch.eye(2).expand(3, 2, 2), rtol=1e-5, atol=1e-5)


def test_the_model_starts_off_the_published_one(federation):
    """Fed-SB alone does: B R A is not zero after the first round, and moves the loss against the gradient."""
    before, after = federation.start(), begun(federation)
    losses = []
    rows = [Encoded(row.input_ids, 2) for row in federation.examples[1]]
    for state in (before, after):
        deployment = federation.method.deploy(state, federation.model, SMALL)
        with SlotModel(federation.backbone, [deployment.plan]) as model, torch.no_grad():
            model.load(0, deployment.tensors)
            losses.append(float(model.token_losses(collate([rows], PAD)).mean()))
    updates = [value.any() for value in part(after, "adapter").values()]
    assert sum(map(bool, updates)) == len(updates)
    assert not any(value.any() for value in federation.method.deploy(before, federation.model, SMALL).tensors.values())
    assert losses[1] < losses[0]


# Lines 6 to 8: training


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_the_aggregate_is_the_mean_of_the_dense_updates(weights, federation):
    """mean_c(B R_c A) = B mean_c(R_c) A, of linear layers, routers and every expert."""
    state, method = begun(federation), fed_sb(weights=weights)
    examples = (2, 7, 4)
    trained = [like(part(state, "adapter"), index) for index in range(3)]
    uploads = [sent(i, n, own) for i, (n, own) in enumerate(zip(examples, trained, strict=True))]
    found = method.aggregate(state, iter(uploads))
    shares = [float(n) if weights == "size" else 1.0 for n in examples]
    for name, middle in part(found, "adapter").items():
        up, down = (found.tensors[f"basis/{name.replace('lora_R', leaf)}"] for leaf in ("lora_B", "lora_A"))
        expected = weighted_mean([update(up, own[name], down) for own in trained], shares)
        torch.testing.assert_close(update(up, middle, down), expected, rtol=1e-5, atol=1e-6)


# What A and B cost


def test_a_and_b_are_sent_once(federation):
    """To everybody after the first round, then only to a client that was not there when they were sent."""
    method, model = federation.method, federation.model
    state = begun(federation, who=(0, 1))
    assert all(method.download(state, model, who).part("basis") for who in federation.clients)
    state = method.aggregate(state, iter(federation.train(state, 2, (0, 2))))
    assert state.tensors[HOLDERS].tolist() == [0, 2]
    assert [bool(method.download(state, model, who).part("basis")) for who in federation.clients] == [
        False,
        True,
        False,
    ]
    state = method.aggregate(state, iter(federation.train(state, 3, (1,))))
    assert state.tensors[HOLDERS].tolist() == [0, 1, 2]
    always = fed_sb(send_basis="always")
    assert all(always.download(state, model, who).part("basis") for who in federation.clients)


def test_a_and_b_are_written_once(federation):
    """A client's memory is of the round in which it got them, and serves all later ones."""
    state = begun(federation)
    for round in (2, 3, 4):
        state = federation.method.aggregate(state, iter(federation.train(state, round)))
        for who in federation.clients:
            assert [path.name for path in (federation.memory.folder / who.name).iterdir()] == ["round-00002.memory"]


def test_what_a_client_keeps_is_what_it_would_receive(federation, tmp_path):
    """A round with A and B from memory gives the bits of one in which they are sent again."""
    state = begun(federation)
    state = federation.method.aggregate(state, iter(federation.train(state, 2)))
    kept = federation.train(state, 3)
    again = Federation(federation.backbone, fed_sb(send_basis="always"), federation.clients, tmp_path / "again")
    for ours, theirs in zip(kept, again.train(state, 3), strict=True):
        for name, value in theirs.payload.tensors.items():
            assert torch.equal(ours.payload.tensors[name], value)


def test_a_client_that_lost_a_and_b_does_not_count_and_gets_them_again(federation):
    state = begun(federation)
    method, model = federation.method, federation.model
    state = method.aggregate(state, iter(federation.train(state, 2)))
    shutil.rmtree(federation.memory.folder / federation.clients[1].name)
    uploads = federation.train(state, 3)
    assert [upload.payload.scalars["lost"] for upload in uploads] == [False, True, False]
    after = method.aggregate(state, iter(uploads))
    without = method.aggregate(state, iter([uploads[0], uploads[2]]))
    for name, value in part(without, "adapter").items():
        assert torch.equal(part(after, "adapter")[name], value)
    assert after.tensors[HOLDERS].tolist() == [0, 2]
    assert method.download(after, model, federation.clients[1]).part("basis")
    again = federation.train(after, 4)
    assert not any(upload.payload.scalars["lost"] for upload in again)


def test_a_gradient_that_comes_late_counts_for_nothing(federation):
    """In round 2 A and B are there already, and its sender does not have them: they are still to be sent."""
    late = federation.train(federation.start(), 1, (0,))
    state = begun(federation, who=(1, 2))
    method, model = federation.method, federation.model
    uploads = federation.train(state, 2, (1, 2))
    after, without = (method.aggregate(state, iter(sent)) for sent in (uploads + late, uploads))
    assert after.tensors[HOLDERS].tolist() == [1, 2]
    assert all(torch.equal(after.tensors[name], value) for name, value in without.tensors.items())
    assert method.download(after, model, federation.clients[0]).part("basis")
    assert not any(upload.payload.scalars["lost"] for upload in federation.train(after, 3))


# What becomes of the model


def test_r_folds_into_a(federation):
    """The exported pair of factors is the same model as B R A."""
    deployment = federation.method.deploy(begun(federation), federation.model, LARGE)
    plain = folded(deployment)
    assert not plain.plan.lora.middle
    assert not plain.plan.lora.frozen
    assert {name: tuple(value.shape) for name, value in plain.tensors.items()} == adapter_shapes(
        federation.model, plain.plan
    )
    rows = collate([[Encoded(tuple(row), 1) for row in random_rows([9, 6], 4)]], PAD)
    losses = []
    for each in (deployment, plain):
        with SlotModel(federation.backbone, [each.plan]) as model, torch.no_grad():
            model.load(0, each.tensors)
            losses.append(model.token_losses(rows))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    assert folded(plain) == plain


def test_a_rank_beyond_a_matrix_is_refused(olmoe_backbone):
    with pytest.raises(ConfigError, match=r"method\.rank is 9, but model\.layers\.0\.mlp\.gate has 8 outputs"):
        fed_sb(rank=9).plan(olmoe_backbone.info, LARGE)
    assert fed_sb(rank=8).plan(olmoe_backbone.info, LARGE).rank == 8


# Where A and B come from


def test_the_gradients_are_sent_whole_where_they_are_small_enough(olmoe_backbone):
    """Bytes of all adapted weights in fp32: exact up to the limit, and from the next byte on a sketch."""
    model = olmoe_backbone.info
    shapes = targeted_shapes(model, tuple(TARGETS)).values()
    size = 4 * sum(math.prod(shape) for shape in shapes)
    for limit, expected in ((size, "dense"), (size - 1, "sketch"), (0, "sketch")):
        method = fed_sb(dense_limit_bytes=limit)
        assert method.start_on(model) == expected
        who, state = client(0, LARGE), method.start(model, Roster([LARGE]), torch_rng(0, "start"))
        expecting = method.schema(model, who, method.download(state, model, who))
        leaves = {name.rpartition(".")[2] for name in expecting.tensors}
        assert leaves == ({"delta"} if expected == "dense" else {"lora_A", "lora_B"})
    for kind in ("dense", "sketch", "random"):
        assert fed_sb(start=kind, dense_limit_bytes=0).start_on(model) == kind


def test_olmoe_sends_sketches():
    """Its gradients are 27 GB."""
    assert fed_sb(rank=20, targets=["attention", "experts"]).start_on(OLMOE) == "sketch"
