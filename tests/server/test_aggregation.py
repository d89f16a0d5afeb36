import pytest
import torch

from fedguild.core.errors import UploadError
from fedguild.server.aggregation import WeightedMean, pad_rank, rank_axis, truncate_rank
from tests.oracles.aggregation import mean_over_holders, seeded, weighted_mean


def mean_of(values, weights, fallback):
    mean = WeightedMean()
    for value, weight in zip(values, weights, strict=True):
        mean.add({"x": value}, weight)
    return mean.result({"x": fallback})["x"]


@pytest.mark.parametrize("weight_shape", [(4,), (4, 3), (4, 1, 5), (1, 3), (4, 3, 5), (1,)])
def test_weights_over_leading_dimensions(weight_shape):
    values = [seeded(4, 3, 5, seed=c) for c in range(6)]
    weights = [(seeded(*weight_shape, seed=50 + c) - 0.3).clamp(min=0) for c in range(6)]
    weights = [
        weight * (torch.arange(weight_shape[0]) != 2).reshape(-1, *[1] * (weight.dim() - 1)) for weight in weights
    ]
    fallback = seeded(4, 3, 5, seed=99)
    expected = weighted_mean(values, weights, fallback)
    torch.testing.assert_close(mean_of(values, weights, fallback), expected, rtol=1e-5, atol=1e-6)


def test_two_clients_by_hand():
    first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    found = mean_of([first, second], [torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0])], torch.full((2, 2), -1.0))
    assert found.tolist() == [[2.0, 3.0], [-1.0, -1.0]]


def test_a_single_client_and_agreeing_clients_come_back_bit_by_bit():
    value = seeded(5, 7, seed=1)
    assert torch.equal(mean_of([value], [3.7], torch.zeros(5, 7)), value)
    assert torch.equal(mean_of([value, value, value], [3.7, 0.1, 12.0], torch.zeros(5, 7)), value)


def test_no_client_and_zero_weights_keep_the_fallback_bit_by_bit():
    fallback = seeded(3, 2, seed=4)
    untouched = WeightedMean().result({"x": fallback})["x"]
    assert torch.equal(untouched, fallback)
    assert untouched.data_ptr() != fallback.data_ptr()
    found = mean_of([seeded(3, 2, seed=5), seeded(3, 2, seed=6)], [0.0, torch.zeros(3)], fallback)
    assert torch.equal(found, fallback)
    assert found.data_ptr() != fallback.data_ptr()


@pytest.mark.parametrize("scale", [1e-60, 1e-30, 1e30, 1e60])
def test_the_scale_of_the_weights_cancels(scale):
    values = [seeded(8, seed=c) for c in range(4)]
    expected = mean_of(values, [1.0, 2.0, 3.0, 4.0], torch.zeros(8))
    found = mean_of(values, [scale, 2 * scale, 3 * scale, 4 * scale], torch.zeros(8))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_many_clients_accumulate_in_fp32_whatever_they_send():
    values = [torch.full((2,), 1.0 + c / 128, dtype=torch.bfloat16) for c in range(101)]
    found = mean_of(values, [1.0] * 101, torch.zeros(2))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((2,), 1.0 + 50 / 128), rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor([1.0, -1.0, 1.0])])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(UploadError, match="weight of 'x' is negative, NaN or infinite"):
        WeightedMean().add({"x": torch.ones(3)}, weight)


@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones(3, 1), torch.ones(0)])
def test_weights_that_do_not_fit_are_refused(weight):
    with pytest.raises(ValueError, match=r"do not fit the leading dimensions of 'x' \[3\]"):
        WeightedMean().add({"x": torch.ones(3)}, weight)


def test_shapes_that_disagree_are_refused():
    mean = WeightedMean()
    mean.add({"x": torch.ones(3)}, 1.0)
    with pytest.raises(ValueError, match=r"'x' has the shape \[1\], but had \[3\] before"):
        mean.add({"x": torch.ones(1)}, 1.0)
    with pytest.raises(ValueError, match="'x' has the shape"):
        mean.result({"x": torch.ones(1)})
    with pytest.raises(ValueError, match="No fallback for the added tensors x"):
        mean.result({"y": torch.ones(1)})


def adapter(rank: int, seed: int) -> dict[str, torch.Tensor]:
    return {
        "q.lora_A": seeded(rank, 5, seed=seed),
        "q.lora_B": seeded(4, rank, seed=seed + 1),
        "experts.up_proj.lora_A": seeded(3, rank, 5, seed=seed + 2),
        "experts.up_proj.lora_B": seeded(3, 4, rank, seed=seed + 3),
        "block.output_scale": seeded(seed=seed + 4),
    }


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_truncation_keeps_the_first_rows_and_columns(rank):
    tensors = adapter(4, seed=0)
    found = truncate_rank(tensors, rank)
    assert torch.equal(found["q.lora_A"], tensors["q.lora_A"][:rank])
    assert torch.equal(found["q.lora_B"], tensors["q.lora_B"][:, :rank])
    assert torch.equal(found["experts.up_proj.lora_A"], tensors["experts.up_proj.lora_A"][:, :rank])
    assert torch.equal(found["experts.up_proj.lora_B"], tensors["experts.up_proj.lora_B"][:, :, :rank])
    assert found["block.output_scale"] is tensors["block.output_scale"]


def test_ranks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"'q\.lora_A' has the rank 2; it cannot be truncated to 3"):
        truncate_rank(adapter(2, 0), 3)
    with pytest.raises(ValueError, match=r"'q\.lora_A' has the rank 2; it cannot be padded to 1"):
        pad_rank(adapter(2, 0), 1)


@pytest.mark.parametrize("ranks", [(1,), (1, 1), (1, 4, 2), (3, 3, 1, 2)])
def test_each_rank_row_is_averaged_over_its_holders(ranks):
    clients = [adapter(rank, seed=10 * c) for c, rank in enumerate(ranks)]
    weights = [float(2 + c) for c in range(len(ranks))]
    fallback = adapter(5, seed=77)
    mean = WeightedMean()
    for client, weight in zip(clients, weights, strict=True):
        held = pad_rank({name: torch.ones_like(tensor) for name, tensor in client.items()}, 5)
        mean.add(pad_rank(client, 5), {name: weight * held[name] for name in held})
    found = mean.result(fallback)
    for name in fallback:
        by_row = as_rows(name, fallback[name])
        expected = mean_over_holders([as_rows(name, client[name]).tolist() for client in clients], weights, len(by_row))
        rows = [by_row[i] if row is None else torch.tensor(row) for i, row in enumerate(expected)]
        torch.testing.assert_close(as_rows(name, found[name]), torch.stack(rows), rtol=1e-5, atol=1e-6)


def as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[rank, everything else]; one row for a tensor without a rank."""
    axis = rank_axis(name)
    return tensor.reshape(1, -1) if axis is None else tensor.movedim(axis, 0).flatten(1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("first", [True, False])
def test_what_has_no_weight_may_be_anything(wrong, first):
    """For the whole tensor, and for one expert of three; the others are their clients' weighted mean."""
    good, bad = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.full((3, 2), wrong)
    fallback = torch.zeros(3, 2)
    members = [(bad, 0.0), (good, 2.0)] if first else [(good, 2.0), (bad, 0.0)]
    assert torch.equal(mean_of(*zip(*members, strict=True), fallback), good)
    partly = good.clone()
    partly[1] = wrong
    members = [(partly, torch.tensor([1.0, 0.0, 1.0])), (good, torch.tensor([1.0, 1.0, 0.0]))]
    assert torch.equal(mean_of(*zip(*(members if first else members[::-1]), strict=True), fallback), good)
    assert torch.equal(mean_of([bad], [0.0], fallback), fallback)
