"""Payloads in bf16 and int8: what is lost, what stays exact, what it costs, and that every engine loses the same."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.accounting import bytes_by_part, count_traffic, size_bytes
from fedguild.core.codec import (
    SMALLEST_SHRUNK,
    Codec,
    decode,
    encode,
    expand,
    shrink,
    shrunk_shapes,
    through,
    through_all,
)
from fedguild.core.errors import ConfigError, UploadError
from fedguild.core.payload import Payload


def payload() -> Payload:
    rng = torch.Generator().manual_seed(1)
    return Payload(
        {
            "adapter/large": torch.randn(64, 96, generator=rng),
            "adapter/stacked": torch.randn(4, 32, 24, generator=rng) * torch.logspace(-6, 6, 32)[:, None],
            "adapter/small": torch.randn(8, 8, generator=rng),
            "adapter/vector": torch.randn(SMALLEST_SHRUNK, generator=rng),
            "merge/1/x.lora_A": torch.randn(64, 64, generator=rng),
            "counts/tokens": torch.arange(4096).reshape(64, 64),
        },
        {"round": 3, "loss": 0.25},
    )


EXACT = ("adapter/small", "adapter/vector", "merge/1/x.lora_A", "counts/tokens")


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_is_small_counted_or_merged_stays_exact(codec: Codec) -> None:
    sent, got = payload(), through(payload(), codec)
    assert got.scalars == sent.scalars
    assert set(got.tensors) == set(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor) is (name in EXACT)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_payloads_that_are_gone_before_the_next_keep_their_values(codec: Codec) -> None:
    """A tensor that takes the place of another in memory, and so has its id, is not taken for it."""
    values = [float(number) for number in range(1, 9)]
    got = through_all((Payload({"a/x": torch.full((64, 64), value)}) for value in values), codec)
    assert [float(one.tensors["a/x"][0, 0]) for one in got] == values


def test_bf16_rounds_to_the_nearest() -> None:
    sent, got = payload(), through(payload(), "bf16")
    for name in ("adapter/large", "adapter/stacked"):
        assert torch.equal(got.tensors[name], sent.tensors[name].to(torch.bfloat16).float())


def test_int8_is_within_half_a_step_of_its_rows_largest_value() -> None:
    sent, got = payload(), through(payload(), "int8")
    for name in ("adapter/large", "adapter/stacked"):
        for row, rounded in zip(sent.tensors[name].flatten(0, -2), got.tensors[name].flatten(0, -2), strict=True):
            step = max(abs(value) for value in row.tolist()) / 127
            for value, found in zip(row.tolist(), rounded.tolist(), strict=True):
                assert abs(value - found) <= step / 2 * 1.0001


def test_int8_by_hand() -> None:
    row = torch.zeros(SMALLEST_SHRUNK // 64, 64)
    row[0, :4] = torch.tensor([127.0, -63.6, 0.4, 0.6])
    small = shrink(Payload({"a/x": row}), "int8")
    assert small.tensors["a/x#int8"][0, :4].tolist() == [127, -64, 0, 1]
    assert small.tensors["a/x#scale"][:2].tolist() == [[1.0], [0.0]]
    assert torch.equal(expand(small).tensors["a/x"][1:], row[1:])


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_bytes_are_counted_as_they_travel(codec: Codec) -> None:
    sent = payload()
    encoded = encode(shrink(sent, codec))
    assert size_bytes(shrunk_shapes(sent, codec)) == len(encoded)
    traffic = count_traffic(1, 0, sent, sent, codec)
    assert traffic.upload_bytes == traffic.download_bytes == len(encoded)
    assert traffic.upload_by_part == bytes_by_part(shrink(sent, codec))
    found = expand(decode(encoded))
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        name: tensor.tolist() for name, tensor in through(sent, codec).tensors.items()
    }


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_is_not_finite_is_still_not_finite(codec: Codec, broken: float) -> None:
    tensor = torch.ones(64, 64)
    tensor[3, 5] = broken
    assert not through(Payload({"a/x": tensor}), codec).tensors["a/x"].isfinite().all()


@pytest.mark.parametrize(
    "scale", [None, torch.ones(64), torch.ones(64, 2), torch.ones(64, 1, dtype=torch.int64), torch.ones(1, 1)]
)
def test_int8_without_a_fitting_scale_is_refused(scale: torch.Tensor | None) -> None:
    tensors = {"a/x#int8": torch.zeros(64, 64, dtype=torch.int8)}
    if scale is not None:
        tensors["a/x#scale"] = scale
    with pytest.raises(UploadError, match="'a/x' came in int8 without a scale for each of its rows"):
        expand(Payload(tensors))


def test_an_unknown_codec_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="no codec 'fp16'"):
        shrink(payload(), "fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "names", [("a/x", "a/x#bf16"), ("a/x#bf16", "a/x#int8", "a/x#scale"), ("a/x#int8", "a/x#scale", "a/x")]
)
def test_a_tensor_that_comes_in_two_dtypes_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UploadError, match="The tensor 'a/x' came twice, in two dtypes"):
        expand(Payload({name: torch.ones(2, 1) for name in names}))
