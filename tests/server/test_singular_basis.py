"""The basis that a client trains in, against the singular value decomposition of the product formed in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.engines.local import LocalEngine
from fedguild.methods import build_method
from fedguild.methods.guild import Guild
from fedguild.model.backbone import Backbone
from fedguild.server.engine import Task
from fedguild.server.low_rank import Factors, by_module
from fedguild.server.method import Roster
from fedguild.server.singular_basis import Basis, bases_of, basis_of, in_basis, out_of_basis
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, SMALL, Federation, client
from tests.oracles import guild as oracle

STEPS = TrainingSettings(optimizer="adam", learning_rate=0.05, batch_size=2, steps=3, max_grad_norm=1.0)
ALONE: dict[str, Any] = {"rank": 2, "mix": 0}


def factors(*leading: int, rank: int = 3, inputs: int = 7, outputs: int = 5, seed: int = 0) -> Factors:
    drawn = torch.Generator().manual_seed(seed)
    down = torch.randn(*leading, rank, inputs, generator=drawn)
    return Factors(down, torch.randn(*leading, outputs, rank, generator=drawn))


def moved(pair: Factors, basis: Basis) -> Factors:
    tensors = in_basis({"module.lora_A": pair.down, "module.lora_B": pair.up}, {"module": basis})
    return Factors(tensors["module.lora_A"], tensors["module.lora_B"])


def up_to_signs(pair: Factors) -> tuple[Tensor, Tensor]:
    """Both factors with the sign of every rank such that A's entry of the largest magnitude is positive."""
    signs = pair.down.gather(-1, pair.down.abs().argmax(-1, keepdim=True)).sign()
    return pair.down * signs, pair.up * signs.mT


@pytest.mark.parametrize("norm", [1.0, 2.5])
def test_the_factors_are_those_of_the_singular_value_decomposition(norm: float) -> None:
    pair = factors()
    found = up_to_signs(moved(pair, basis_of(pair, norm)))
    down, up = oracle.refactored(pair.down.tolist(), pair.up.tolist(), norm)
    expected = up_to_signs(Factors(torch.tensor(down), torch.tensor(up)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["of rank 3", "of fewer outputs than ranks", "B = 0, as at the start"])
def test_a_is_orthogonal_whatever_b_is_and_the_product_stays(case: str) -> None:
    pair = factors(4, outputs=2 if "fewer" in case else 5)
    pair = Factors(pair.down, pair.up * 0) if "B = 0" in case else pair
    found = moved(pair, basis_of(pair, 2.0))
    torch.testing.assert_close(found.down @ found.down.mT, (4 * torch.eye(3)).expand(4, 3, 3), rtol=1e-5, atol=1e-5)
    gram = found.up.mT @ found.up
    torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), rtol=1e-5, atol=1e-5)
    assert bool((gram.diagonal(dim1=-2, dim2=-1).diff() <= 1e-5).all())
    torch.testing.assert_close(found.up @ found.down, pair.up @ pair.down, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["equal rows", "a row of zeros", "not a number", "more ranks than inputs"])
def test_where_there_is_no_basis_the_factors_stay(case: str) -> None:
    """Of a module's experts, only those without one."""
    pair = factors(2, inputs=2 if case.startswith("more") else 7)
    if case == "equal rows":
        pair.down[1, 2] = pair.down[1, 0]
    elif case == "a row of zeros":
        pair.down[1, 2] = 0
    elif case == "not a number":
        pair.up[1, 0, 0] = torch.nan
    basis = basis_of(pair, 2.0)
    assert torch.equal(basis.there[1], torch.eye(3, dtype=torch.float64))
    assert torch.equal(basis.back[1], torch.eye(3, dtype=torch.float64))
    assert torch.equal(basis.there[0], torch.eye(3, dtype=torch.float64)) == case.startswith("more")


def test_there_and_back(olmoe_backbone: Backbone) -> None:
    """Of every module of a model, routed experts included; what is not LoRA is not touched."""
    state = Guild(Guild.Settings(rank=2)).start(olmoe_backbone.info, Roster([LARGE]), torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(1)
    theta = {
        name: value + torch.randn(value.shape, generator=drawn) / 10 for name, value in state.part(ADAPTER).items()
    }
    bases = bases_of(theta, 2.5)
    there = in_basis({**theta, "other": torch.ones(3)}, bases)
    back = out_of_basis(there, bases)
    assert back.keys() == {*theta, "other"}
    for name, value in theta.items():
        assert not torch.allclose(there[name], value)
        torch.testing.assert_close(back[name], value, rtol=1e-5, atol=1e-5)
    assert bool((back["other"] == 1).all())


def test_a_client_trains_as_in_flame_from_other_factors_of_the_same_model(olmoe_backbone, tmp_path):
    """In the second round, where B is not 0: FLAME's training of theta in its basis, and what it trained taken back."""
    clients = (client(0, LARGE, 4), client(1, SMALL, 5))
    ours = Federation(olmoe_backbone, Guild(Guild.Settings(**ALONE)), clients, tmp_path / "a")
    flame = build_method("flame", {"rank": 2, "temperature": 0, "rescaler": "none"})
    theirs = Federation(olmoe_backbone, flame, clients, tmp_path / "b")

    def trained(federation: Federation, state: Payload) -> list[dict[str, Tensor]]:
        engine = LocalEngine(federation.backbone, federation.examples, STEPS, federation.memory, seed=1)
        tasks = [Task(2, who, federation.method.download(state, federation.model, who)) for who in clients]
        found = [delivery.upload for delivery in engine.train(federation.method, federation.model, tasks)]
        return [sent.part(ADAPTER) for sent in found if sent is not None]

    start = ours.start()
    drawn = torch.Generator().manual_seed(3)
    theta = {
        name: value + torch.randn(value.shape, generator=drawn) / 10 for name, value in start.part(ADAPTER).items()
    }
    bases = bases_of(theta, 5)
    uploads = trained(ours, Payload({**start.tensors, **with_part(ADAPTER, theta)}))
    expected = trained(theirs, Payload({**theirs.start().tensors, **with_part(ADAPTER, in_basis(theta, bases))}))
    plain = trained(theirs, Payload({**theirs.start().tensors, **with_part(ADAPTER, theta)}))
    for sent, other, received in zip(uploads, expected, plain, strict=True):
        for name, value in out_of_basis(other, bases).items():
            torch.testing.assert_close(sent[name], value, rtol=1e-6, atol=1e-6)
        assert any(not torch.allclose(sent[name], value, atol=1e-3) for name, value in received.items())


def test_the_server_gets_what_it_would_get_by_refactoring_its_state_itself(olmoe_backbone, tmp_path):
    """Two rounds: FLAME whose server sets theta to its basis before each round has Guild's global product."""
    clients = (client(0, LARGE, 4), client(1, SMALL, 5))
    ours = Federation(olmoe_backbone, Guild(Guild.Settings(**ALONE)), clients, tmp_path / "a")
    flame = build_method("flame", {"rank": 2, "temperature": 0, "rescaler": "none"})
    theirs = Federation(olmoe_backbone, flame, clients, tmp_path / "b")
    states = [ours.start(), theirs.start()]
    for round in (1, 2):
        theta = states[1].part(ADAPTER)
        again = in_basis(theta, bases_of(theta, ours.method.settings.basis_norm))
        states[1] = Payload({**states[1].tensors, **with_part(ADAPTER, again)})
        states = [
            federation.method.aggregate(state, iter(federation.train(state, round)))
            for federation, state in zip((ours, theirs), states, strict=True)
        ]
    found, expected = (by_module(state.part(ADAPTER)) for state in states)
    for module, pair in expected.items():
        product = pair.up @ pair.down
        assert float((found[module].up @ found[module].down - product).norm() / product.norm()) < 2e-3, module
    assert any(bool(pair.up.any()) for pair in expected.values())


@pytest.mark.parametrize("case", ["fewer outputs than ranks", "one rank trained"])
def test_rounding_does_not_choose_the_basis(case: str) -> None:
    """Where some singular values are 0, the next representable number of an entry gives the same rows."""
    pair = factors(outputs=2 if case.startswith("fewer") else 5, rank=4, inputs=9)
    if case.startswith("one"):
        pair.up[:, 1:] = 0
    near = Factors(pair.down.clone(), pair.up.clone())
    near.up[0, 0] = torch.nextafter(near.up[0, 0], torch.tensor(torch.inf))
    near.down[0, 0] = torch.nextafter(near.down[0, 0], torch.tensor(torch.inf))
    one, other = (up_to_signs(moved(each, basis_of(each, 1.0))) for each in (pair, near))
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("in_fp64")
def test_clients_of_one_cohort_that_received_different_models_have_bases_of_their_own(tmp_path: Path) -> None:
    """Late clients train what they received: each upload is what the client sends when it trains alone."""
    clients = (client(0, LARGE, 4), client(1, SMALL, 5))
    backbone, method = tiny_backbone("olmoe", dtype=torch.float64), Guild(Guild.Settings(**ALONE))
    federation = Federation(backbone, method, clients, tmp_path)
    states = []
    for seed in (1, 2):
        start, drawn = federation.start(), torch.Generator().manual_seed(seed)
        theta = {
            name: value + torch.randn(value.shape, generator=drawn) / 10 for name, value in start.part(ADAPTER).items()
        }
        states.append(Payload({**start.tensors, **with_part(ADAPTER, theta)}))
    engine = LocalEngine(federation.backbone, federation.examples, STEPS, federation.memory, seed=1, cohort_size=2)
    tasks = [
        Task(1, who, federation.method.download(state, federation.model, who))
        for who, state in zip(clients, states, strict=True)
    ]
    together = list(engine.train(federation.method, federation.model, tasks))
    for task, delivery in zip(tasks, together, strict=True):
        (alone,) = engine.train(federation.method, federation.model, [task])
        assert delivery.upload is not None
        assert alone.upload is not None
        for name, value in alone.upload.part(ADAPTER).items():
            torch.testing.assert_close(delivery.upload.part(ADAPTER)[name], value, rtol=1e-9, atol=1e-12)
