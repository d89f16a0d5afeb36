"""Dropout on LoRA's input: whose masks, when, how much, how random, and without a value from the host."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.dropout import Dropout, mix64
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.runtime import Pass
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone
from tests.oracles import dropout as oracle


class Rated(Dropout):
    """Dropout that is always called with the same rates."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def __call__(self, hidden, layer, current):
        return super().__call__(hidden, layer, current, self.rates)


ONES = torch.ones(2, 3, 500)
MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_it_does_nothing_until_seeded_and_nothing_when_switched_off():
    dropout = Rated([0.5, 0.5])
    current = Pass((1, 1), None, None, 1)
    assert torch.equal(dropout(ONES, "layer", current), ONES)
    dropout.seed([1, 2])
    assert not torch.equal(dropout(ONES, "layer", current), ONES)
    dropout.seed(None)
    assert torch.equal(dropout(ONES, "layer", current), ONES)


def test_masks_belong_to_a_client_not_to_its_place_or_padding():
    """The same client's tokens get the same masks in another slot and beside other padding."""
    pair = Rated([0.5, 0.5])
    pair.seed([1, 2])
    in_pair = pair(ONES, "layer", Pass((1, 1), MASK, None, 1))
    alone = Rated([0.5])
    alone.seed([2])
    by_itself = alone(ONES[1:, :1], "layer", Pass((1,), None, None, 1))
    assert torch.equal(in_pair[1, :1], by_itself[0])
    assert torch.equal(in_pair[1, 1:], ONES[1, 1:])


def test_masks_differ_by_layer_and_step():
    dropout, current = Rated([0.5]), Pass((2,), None, None, 1)
    dropout.seed([1])
    first, other = dropout(ONES, "a", current), dropout(ONES, "b", current)
    assert torch.equal(first, dropout(ONES, "a", current))
    assert not torch.equal(first, other)
    dropout.seed([2])
    assert not torch.equal(first, dropout(ONES, "a", current))


def test_only_linear_layers_of_a_slot_with_a_rate_are_hit():
    """A dense model, whose products' sizes do not depend on what another slot computes."""
    backbone = tiny_backbone("llama")
    plan = AdapterPlan((Lora(4, 1.0, ("attention",)),))
    rows = [Encoded(tuple(ids), 1) for ids in random_rows([8, 6], 1)]
    adapter = random_adapter(backbone.info, plan, 1)
    with SlotModel(backbone, [plan, plan.with_lora(dropout=0.5)]) as model, torch.no_grad():
        model.load(0, adapter)
        model.load(1, adapter)
        quiet = model.token_losses(collate([rows, rows], PAD)).view(2, -1)
        model.dropout.seed([3, 4])
        noisy = model.token_losses(collate([rows, rows], PAD)).view(2, -1)
    assert torch.equal(quiet[0], noisy[0])
    assert (quiet[1] - noisy[1]).abs().max() > 0.01


@pytest.mark.parametrize("features", [1, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_element_against_python_integers(features, dtype):
    """Three slots of other rates with padding, and a slot without rows."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    slots, rates, seeds = [0, 0, 2, 3], (0.5, 0.9, 0.25, 0.0), (2**63 - 1, 7, 0, 12345)
    hidden = torch.randn(4, 4, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    dropout = Rated(rates)
    dropout.seed(seeds)
    out = dropout(hidden, "a layer", Pass((2, 0, 1, 1), mask, None, 1))
    for slot, (rate, seed) in enumerate(zip(rates, seeds, strict=True)):
        rows = [row for row, own in enumerate(slots) if own == slot]
        real = hidden[rows][mask[rows]]
        if len(real):
            expected = torch.tensor(oracle.dropped(real.double().tolist(), seed, "a layer", rate), dtype=torch.float64)
            found = out[rows][mask[rows]]
            assert torch.equal(found == 0, expected == 0)
            assert torch.allclose(found.double(), expected, rtol=2 * torch.finfo(dtype).eps)
    assert torch.equal(out[~mask], hidden[~mask])


def test_the_generator_gives_its_published_first_outputs():
    """Seed 1234567, as in the reference implementations of SplitMix64."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    generator = oracle.SplitMix64(1234567)
    assert [generator.next() for _ in published] == published
    states = torch.tensor([(1234567 + n * oracle.GAMMA) % 2**64 for n in range(1, 5)], dtype=torch.uint64).view(
        torch.int64
    )
    assert mix64(states).view(torch.uint64).tolist() == published


def test_gradients_reach_what_is_kept_and_only_that():
    dropout, current = Rated([0.5]), Pass((1,), None, None, 1)
    dropout.seed([1])
    hidden = torch.ones(1, 3, 50, requires_grad=True)
    out = dropout(hidden, "layer", current)
    out.sum().backward()
    assert torch.equal(hidden.grad, out.detach())


class Recorded(TorchDispatchMode):
    """The names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_layer_draws_nothing_on_the_host_and_waits_for_no_value():
    """After a pass's first layer: no random operation, no value read, no copy, the same operations for any slots."""
    counts = []
    for slots in (1, 8):
        dropout, current = Rated([0.5] * slots), Pass((1,) * slots, torch.ones(slots, 3).bool(), None, 1)
        dropout.seed(range(slots))
        hidden = torch.ones(slots, 3, 50)
        dropout(hidden, "first", current)
        with Recorded() as recorded:
            dropout(hidden, "second", current)
        counts.append(len(recorded.names))
        assert not [
            name for name in recorded.names if any(w in name for w in ("rand", "bernoulli", "_local", "copy", "nonz"))
        ]
    assert counts[0] == counts[1]


def test_it_runs_on_a_device_without_values():
    """On `meta`, reading a value raises."""
    dropout, current = Rated([0.5, 0.1]), Pass((1, 1), torch.ones(2, 3, device="meta").bool(), None, 1)
    dropout.seed([1, 2])
    assert dropout(torch.ones(2, 3, 50, device="meta"), "layer", current).device.type == "meta"


TOKENS, FEATURES = 256, 1024


def bits(seed: int, layer: str = "layer", tokens: int = TOKENS) -> torch.Tensor:
    """[tokens, FEATURES], 1 for an element that is kept at rate 1/2 and -1 for one that is not, by `Dropout`."""
    dropout = Rated([0.5])
    dropout.seed([seed])
    out = dropout(torch.ones(1, tokens, FEATURES), layer, Pass((1,), None, None, 1))[0]
    return out - 1


def deviations(signs: torch.Tensor) -> float:
    """The sum of independent signs in standard deviations."""
    return abs(float(signs.double().sum())) / math.sqrt(signs.numel())


def test_masks_are_uncorrelated_between_neighbours_layers_and_seeds():
    """Each sum is of about 2¹⁸ signs; 4.5 standard deviations happen to one in 150,000."""
    one = bits(1)
    products = {
        "rate": one,
        "next feature": one[:, 1:] * one[:, :-1],
        "feature after next": one[:, 2:] * one[:, :-2],
        "halves": one[:, : FEATURES // 2] * one[:, FEATURES // 2 :],
        "next token": one[1:] * one[:-1],
        "next token and feature": one[1:, 1:] * one[:-1, :-1],
        "tokens apart": one[128:] * one[:128],
        "other layer": one * bits(1, "layer2"),
        "next seed": one * bits(2),
        "seed with one high bit changed": one * bits(1 + 2**62),
        "mirrored": one * one.flip(1),
        "transposed": one[:, :TOKENS] * one[:, :TOKENS].T * (1 - torch.eye(TOKENS)),
    }
    assert {name: round(deviations(signs), 2) for name, signs in products.items() if deviations(signs) > 4.5} == {}
