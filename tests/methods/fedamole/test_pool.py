"""Experts one by one and in stacks: ids keep their values, whatever order the names come in."""

from __future__ import annotations

import pytest
import torch

from fedguild.methods.fedamole.pool import held_experts, single_experts, stacked_experts

HELD = {"model.layers.0.q_proj": (2, 10, 7), "model.layers.10.q_proj": (0,)}


def stacks() -> dict[str, torch.Tensor]:
    """Stacks of three and of one expert; the first row of each leaf says whose it is."""
    return {
        f"{module}.experts.{leaf}": torch.tensor([[float(expert), position] for expert in ids])
        for position, leaf in enumerate(("lora_A", "lora_B"))
        for module, ids in HELD.items()
    }


def test_an_expert_is_named_by_its_id() -> None:
    single = single_experts(stacks(), HELD)
    assert len(single) == 8
    assert single["model.layers.0.q_proj.experts.10.lora_B"].tolist() == [10.0, 1.0]
    assert single["model.layers.10.q_proj.experts.0.lora_A"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("reverse", [False, True])
def test_stacks_are_in_the_order_of_the_ids_and_end_in_zeros(reverse: bool) -> None:
    """2, 7, 10 as numbers: not as the codec sorts their names."""
    single = dict(sorted(single_experts(stacks(), HELD).items(), reverse=reverse))
    assert held_experts(single) == {module: tuple(sorted(ids)) for module, ids in HELD.items()}
    found = stacked_experts(single, rows=4)
    assert found["model.layers.0.q_proj.experts.lora_A"].tolist() == [[2, 0], [7, 0], [10, 0], [0, 0]]
    assert found["model.layers.10.q_proj.experts.lora_B"].tolist() == [[0, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4)])
def test_leaves_of_any_shape(shape: tuple[int, ...]) -> None:
    """Also of a pool that is full: back and forth are the same."""
    pool = {"m.experts.leaf": torch.randn(3, *shape)}
    single = single_experts(pool, {"m": range(3)})
    assert torch.equal(stacked_experts(single, rows=3)["m.experts.leaf"], pool["m.experts.leaf"])
    assert stacked_experts(single, rows=5)["m.experts.leaf"].shape == (5, *shape)
    assert not stacked_experts(single, rows=5)["m.experts.leaf"][3:].any()
