"""Robust estimates over the clients that hold a value, and centered clipping with its memory of the last round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config.federation import FederationSettings
from fedguild.core.errors import UploadError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.server import checkpoint
from fedguild.server.method import Upload
from fedguild.server.optimizer import LAST_CHANGE, own_state
from fedguild.server.robust import ITERATIONS, RobustMean, _moved, robust_centre
from fedguild.server.round import Outcome, Passage, RoundSetup, filtered
from tests.oracles import robust as oracle

Centre = Literal["trimmed_mean", "median"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("trim", [0.1, 0.2, 0.45])
def test_robust_centres_are_those_of_the_definitions(count: int, trim: float) -> None:
    values = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
    equal = [torch.tensor(3.0)] * count
    found = robust_centre(values, equal, torch.zeros(3, 4), "median", trim).double()
    torch.testing.assert_close(found, oracle.median(values))
    found = robust_centre(values, equal, torch.zeros(3, 4), "trimmed_mean", trim).double()
    torch.testing.assert_close(found, oracle.trimmed_mean(values, trim))


def test_tensors_of_unequal_shapes_have_no_robust_centre() -> None:
    with pytest.raises(UploadError, match="differ in shape"):
        robust_centre([torch.ones(2), torch.ones(3)], [torch.ones(())] * 2, torch.ones(2), "median", 0.2)


@pytest.mark.parametrize("robust", ["median", "trimmed_mean"])
@pytest.mark.parametrize("shapes", [[1, 1, 1], [3, 1, 1], [1, 4, 1], [1, 1, 2], [3, 4, 2]])
def test_a_centre_over_the_holders_leaves_out_all_others(shapes: list[int], robust: Centre) -> None:
    """Experts, ranks and single values with weights of their own; where nobody is a holder the value stays."""
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, 2, generator=rng) for _ in range(6)]
    weights = [torch.rand(shapes, generator=rng) * 10.0 ** (place - 3) for place in range(6)]
    weights = [weight * (torch.rand(shapes, generator=rng) < 0.6) for weight in weights]
    for weight in weights:
        weight.view(-1)[0] = 0.0
    spoilt = [
        value.where((weight > 0).expand(3, 4, 2), torch.nan) for value, weight in zip(values, weights, strict=True)
    ]
    before = torch.randn(3, 4, 2, generator=rng)
    found = robust_centre(spoilt, weights, before, robust, 0.2)
    torch.testing.assert_close(found.double(), oracle.over_holders(values, weights, before, robust, 0.2))
    assert torch.equal(found.view(-1)[0], before.view(-1)[0])


@pytest.mark.parametrize("weight", [1e-30, 1e9])
def test_two_of_eight_stay_within_the_honest_values_whatever_weight_they_claim(weight: float) -> None:
    rng = torch.Generator().manual_seed(1)
    honest = torch.randn(6, 50, generator=rng)
    values = [*honest, torch.full((50,), -1e6), torch.full((50,), 1e6 * weight)]
    weights = [torch.tensor(float(size)) for size in (5, 40, 7, 90, 20, 20)] + [torch.tensor(weight)] * 2
    found = robust_centre(values, weights, torch.zeros(50), "trimmed_mean", 0.2)
    assert bool((found >= honest.min(dim=0).values).all())
    assert bool((found <= honest.max(dim=0).values).all())


# Centered clipping

EXAMPLES = (10, 20, 0, 40, 50)
NAMES = {"adapter/x": (4, 3), "adapter/y.lora_B": (2, 5)}


def passage(state: Payload) -> Passage:
    unused: Any = None
    setup = RoundSetup(
        build_method("fedprox", {}), unused, unused, FederationSettings(), 0, [RobustMean("centered_clipping")]
    )
    return Passage(setup, Outcome(1, state, []), own_state(state), 5, unused)


def uploads(state: Payload, changes: list[dict[str, Tensor]]) -> list[Upload]:
    own = own_state(state)
    return [
        Upload(1, ClientInfo(index, Budget("all", 0, 2), EXAMPLES[index]), Payload(changed(own, change)), own)
        for index, change in enumerate(changes)
    ]


def changed(state: Payload, change: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + change[name] for name, value in state.tensors.items()}


def drawn(rng: torch.Generator) -> list[dict[str, Tensor]]:
    """Four honest changes around a common one, and a far one."""
    common = {name: torch.randn(shape, generator=rng) for name, shape in NAMES.items()}
    scales = (0.3, 0.5, 0.4, 0.2, 100.0)
    return [
        {name: value + scale * torch.randn(value.shape, generator=rng) for name, value in common.items()}
        for scale in scales
    ]


def test_centered_clipping_is_the_loop_of_the_paper_and_goes_on_from_the_last_round(tmp_path: Path) -> None:
    """Three rounds, with the state saved and read again between two of them, as a kill would have it."""
    rng = torch.Generator().manual_seed(5)
    state = Payload({name: torch.randn(shape, generator=rng) for name, shape in NAMES.items()})
    remembered = torch.zeros(sum(value.numel() for value in state.tensors.values()), dtype=torch.float64)
    for number in range(1, 4):
        changes = drawn(rng)
        flat = [torch.cat([change[name].flatten() for name in NAMES]).double() for change in changes]
        before = torch.cat([state.tensors[name].flatten() for name in NAMES]).double()
        remembered = oracle.centered_clipping(flat, EXAMPLES, remembered, ITERATIONS)
        state = filtered(passage(state))(uploads(state, changes))
        after = torch.cat([state.tensors[name].flatten() for name in NAMES]).double()
        torch.testing.assert_close(after - before, remembered, atol=2e-5, rtol=1e-4)
        assert state.part(LAST_CHANGE).keys() == NAMES.keys()
        assert own_state(state).tensors.keys() == NAMES.keys()
        checkpoint.save(tmp_path, number, state, fingerprint="f")
        state = checkpoint.load(tmp_path, number, fingerprint="f").state


def test_without_its_memory_a_round_ends_elsewhere() -> None:
    rng = torch.Generator().manual_seed(5)
    state = Payload({name: torch.randn(shape, generator=rng) for name, shape in NAMES.items()})
    state = filtered(passage(state))(uploads(state, drawn(rng)))
    changes = drawn(rng)
    found = [filtered(passage(each))(uploads(each, changes)) for each in (state, own_state(state))]
    assert not torch.equal(found[0].tensors["adapter/x"], found[1].tensors["adapter/x"])


def test_of_a_part_that_stays_with_the_server_a_client_begins_from_its_own() -> None:
    """As FedAMoLE's and FedMoE's pools: the memory has the state's names, the download its own."""
    state = Payload({"server/pool/a": torch.zeros(3), f"{LAST_CHANGE}/server/pool/a": torch.ones(3)})
    who, got = ClientInfo(0, Budget("all", 0, 2), 1), Payload({"pool/a": torch.zeros(3)})
    sent = Upload(1, who, Payload({"pool/a": torch.full((3,), 2.0)}), got)
    moved = _moved(sent, state.part(LAST_CHANGE))
    assert torch.equal(moved.tensors["pool/a"], torch.ones(3))


def test_what_nobody_trained_keeps_its_memory_and_lower_ranks_begin_from_theirs() -> None:
    """As the other factor of RoLoRA; and a client whose download has fewer ranks."""
    state = Payload({"adapter/a": torch.zeros(3), "adapter/y.lora_B": torch.zeros(2, 4)})
    memory = {f"{LAST_CHANGE}/adapter/a": torch.ones(3), f"{LAST_CHANGE}/adapter/y.lora_B": torch.full((2, 4), 2.0)}
    state = Payload({**state.tensors, **memory})
    lower = Payload({"adapter/y.lora_B": torch.zeros(2, 4)})
    sent = [
        Upload(1, ClientInfo(0, Budget("all", 0, 2), 1), Payload({"adapter/y.lora_B": torch.full((2, 4), 2.0)}), lower)
    ]
    after = filtered(passage(state))(sent)
    assert torch.equal(after.tensors["adapter/y.lora_B"], torch.full((2, 4), 2.0)), "a client at v is not drawn in"
    assert torch.equal(after.part(LAST_CHANGE)["adapter/a"], torch.ones(3))
    assert torch.equal(after.tensors["adapter/a"], torch.zeros(3))
