"""Changes folded into a dense one: the sum, in an order of its own, by one rounded operation after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedguild.core.errors import ModelError
from fedguild.model import folding
from fedguild.model.folding import dense_sizes, folded
from fedguild.model.weight_changes import changes, with_changes


def versions(shape: tuple[int, ...], out: int, inner: int) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(4)
    return [
        {
            "m.lora_A": torch.randn(*shape, rank, inner, generator=rng),
            "m.lora_B": torch.randn(*shape, out, rank, generator=rng),
        }
        for rank in (3, 1, 4)
    ]


def one_by_one(found: list[dict[str, torch.Tensor]], shape: tuple[int, ...], out: int, inner: int) -> np.ndarray:
    """Every element in fp32, each product and each sum rounded, in numpy."""
    total = np.zeros((*shape, out, inner), np.float32)
    for version in found:
        up, down = version["m.lora_B"].numpy(), version["m.lora_A"].numpy()
        for rank in range(up.shape[-1]):
            total += (up[..., :, rank, None] * down[..., rank, None, :]).astype(np.float32)
    return total


@pytest.mark.parametrize("piece", [1, 20, 100, 1 << 17])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_the_sum_of_all_versions_to_the_bit(shape, piece, monkeypatch):
    """In pieces of any size, at once or in two steps."""
    monkeypatch.setattr(folding, "PIECE", piece)
    found = versions(shape, 6, 7)
    whole = folded(found)["m.change"]
    assert np.array_equal(whole.numpy(), one_by_one(found, shape, 6, 7))
    assert torch.equal(folded([folded(found[:2]), found[2]])["m.change"], whole)
    exact = sum(version["m.lora_B"].double() @ version["m.lora_A"].double() for version in found)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5)
    assert dense_sizes(found) == dense_sizes([folded(found)]) == {"m": whole.numel()}


def test_a_module_that_changes_in_some_versions_alone():
    first, second = versions((), 6, 7)[:2]
    later = {name.replace("m.", "n."): value for name, value in second.items()}
    whole = folded([folded([first]), later])
    assert whole.keys() == {"m.change", "n.change"}
    assert torch.equal(whole["m.change"], folded([first])["m.change"])


def test_a_dense_change_is_added_to_its_weight():
    whole, weight = folded(versions((), 6, 7)), torch.ones(12, 7)
    found = changes({f"3/{name}": value for name, value in whole.items()})
    assert torch.equal(with_changes(weight, ["other", "m"], found), torch.cat([weight[:6], 1 + whole["m.change"]]))
    with pytest.raises(ModelError, match=r"A change \[6, 7\] does not fit m \[12, 7\]"):
        with_changes(weight, ["m"], found)
