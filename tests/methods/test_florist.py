"""FLoRIST: how many singular triplets a threshold keeps, and what the next round starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.merge_ledger import VERSION
from fedguild.core.accounting import bytes_by_part
from fedguild.core.payload import ADAPTER
from fedguild.core.seeding import torch_rng
from fedguild.methods.florist import Florist, FloristSettings, at_rank, thresholded
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.low_rank import Factors, by_module, decompose, named, stack, weighted_product
from fedguild.server.merge_history import merges
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.oracles.florist import by_the_papers_route, cut, kept_ranks
from tests.oracles.low_rank import dense_product

EVERYTHING = ("attention", "router", "experts")
WHO = [client(0, LARGE, 4), client(1, MIDDLE, 5), client(2, SMALL, 3)]


def florist(**options: object) -> Florist:
    return Florist(FloristSettings(**{"alpha": 6.0, "targets": EVERYTHING, **options}))


def random_factors(*shape: int, seed: int = 0) -> Factors:
    """[*leading, rank, out, in] -> factors of random values, the singular values far apart."""
    *leading, rank, outputs, inputs = shape
    rng = torch_rng(seed, "factors")
    sizes = torch.logspace(1, -1, rank)
    down = torch.randn(*leading, rank, inputs, generator=rng) * sizes[:, None]
    return Factors(down, torch.randn(*leading, outputs, rank, generator=rng))


def dense(factors: Factors) -> Tensor:
    return dense_product(factors.down, factors.up)


@pytest.mark.parametrize("threshold", [1e-6, 0.5, 0.9, 0.99, 1.0])
def test_a_threshold_keeps_as_many_triplets_as_the_paper(threshold: float) -> None:
    for seed in range(5):
        whole = random_factors(6, 9, 7, seed=seed)
        found = thresholded(decompose(whole), threshold)
        if threshold < 1.0:
            assert found.rank == kept_ranks(dense(whole), threshold)
            torch.testing.assert_close(dense(found), cut(dense(whole), threshold), rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(dense(found), dense(whole), rtol=1e-4, atol=1e-4)


def test_singular_values_are_those_of_the_papers_small_matrix() -> None:
    parts = [random_factors(rank, 9, 7, seed=rank) for rank in (1, 2, 3)]
    found = decompose(stack((part, 1.0) for part in parts)).s
    expected = by_the_papers_route([part.down for part in parts], [part.up for part in parts])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_of_one_tensor_have_their_own_p() -> None:
    """The tensor has the largest; a cut expert is exactly what it would be alone."""
    whole = random_factors(5, 6, 9, 7)
    whole.down[0, 1:] = 0.0
    whole.up[2] = 0.0
    found = thresholded(decompose(whole), 0.9)
    counts = [kept_ranks(matrix, 0.9) for matrix in dense(whole)]
    assert counts[0] == counts[2] == 1
    assert len(set(counts)) > 1
    assert found.rank == max(counts)
    for expert, count in enumerate(counts):
        assert not found.up[expert, :, count:].any()
        assert not found.down[expert, count:].any()
        torch.testing.assert_close(dense(found)[expert], cut(dense(whole)[expert], 0.9), rtol=1e-4, atol=1e-4)


def test_a_product_of_zeros_gets_one_rank_of_nothing() -> None:
    zeros = Factors(torch.randn(3, 7, generator=torch_rng(0, "zeros")), torch.zeros(9, 3))
    found = thresholded(decompose(zeros), 0.9)
    assert found.rank == 1
    assert found.down.isfinite().all()
    assert not (found.up @ found.down).any()


def test_a_round_merges_the_cut_stack(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, florist(threshold=0.7), WHO, tmp_path)
    state = federation.start()
    uploads = federation.train(state)
    after = federation.method.aggregate(state, iter(uploads))
    weights = [who.examples / 12 * 6.0 / who.budget.rank for who in WHO]
    parts = [(sent.payload.part(ADAPTER), weight) for sent, weight in zip(uploads, weights, strict=True)]
    found = by_module({name.removeprefix("1/"): value for name, value in merges(after).items()})
    stacks = dict(weighted_product(parts))
    assert found.keys() == stacks.keys()
    for module, stacked in stacks.items():
        exact = dense(stacked).reshape(-1, stacked.up.shape[-2], stacked.down.shape[-1])
        assert found[module].rank == max(kept_ranks(matrix, 0.7) for matrix in exact)
        cuts = torch.stack([cut(matrix, 0.7) for matrix in exact]).reshape(dense(found[module]).shape)
        torch.testing.assert_close(dense(found[module]), cuts, rtol=1e-3, atol=1e-5)
    assert any(found[module].rank < stacked.rank for module, stacked in stacks.items())
    sent = bytes_by_part(federation.method.download(after, federation.model, WHO[0]))
    assert sent["merge"] == 4 * sum(pair.down.numel() + pair.up.numel() for pair in found.values())


def test_every_budget_runs_the_whole_pair(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Merged or beside the weights, the model says the same."""
    said = {}
    for next_round in ("merge", "truncate"):
        method = florist(next_round=next_round, threshold=0.95)
        federation = Federation(olmoe_backbone, method, WHO, tmp_path / next_round)
        state = federation.start()
        state = method.aggregate(state, iter(federation.train(state)))
        for budget in (LARGE, SMALL):
            deployment = method.deploy(state, federation.model, budget)
            with olmoe_backbone.merged(deployment.merged), SlotModel(olmoe_backbone, [deployment.plan]) as model:
                model.load(0, deployment.tensors)
                with torch.no_grad():
                    tokens = torch.arange(3, 13)[None]
                    said[next_round, budget.name] = olmoe_backbone.model(input_ids=tokens, use_cache=False).logits
    first = said["merge", "large"]
    for logits in said.values():
        torch.testing.assert_close(logits, first, rtol=1e-4, atol=1e-4)


def test_truncation_keeps_no_history(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, florist(next_round="truncate", threshold=0.99), WHO, tmp_path)
    state = federation.start()
    before = federation.method.deploy(state, federation.model, LARGE)
    assert before is not None
    assert not any(value.any() for value in before.tensors.values())
    for round in (1, 2):
        state = federation.method.aggregate(state, iter(federation.train(state, round)))
        assert merges(state) == {}
        assert state.scalars[VERSION] == 0
        sent = federation.method.download(state, federation.model, WHO[2])
        assert bytes_by_part(sent).keys() == {"pair", "header"}
    assert not (tmp_path / "merges").exists()


@pytest.mark.parametrize("rank", [1, 2, 6])
def test_a_client_continues_from_the_pair_at_its_rank(rank: int) -> None:
    """`scale` times its product is the pair's best approximation; the ranks beyond the pair can train."""
    pair = thresholded(decompose(random_factors(5, 6, 9, 7)), 0.9)
    assert 1 < pair.rank < 6
    fresh = {"q.lora_A": torch.randn(5, rank, 7, generator=torch_rng(1, "fresh")), "q.lora_B": torch.zeros(5, 9, rank)}
    start = at_rank(named({"q": pair}), fresh, 0.5)
    assert {name: value.shape for name, value in start.items()} == {name: value.shape for name, value in fresh.items()}
    held = min(rank, pair.rank)
    expected = dense(Factors(pair.down[:, :held], pair.up[..., :held]))
    torch.testing.assert_close(
        0.5 * dense_product(start["q.lora_A"], start["q.lora_B"]), expected, rtol=1e-5, atol=1e-5
    )
    assert (start["q.lora_A"].abs().sum(-1) > 0).all()
