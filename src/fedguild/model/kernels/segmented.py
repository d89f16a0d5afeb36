"""Products of rows sorted by group with each group's own matrices, in Triton.

Two kernels, for every product of LoRA in a layer's experts, forward and backward:

- `segmented_rows`: each row times its group's matrix, scaled, added to what is there. It computes s · A x and adds B of
  it to the frozen product in place. In the backward pass it computes s · Bᵀ dy and adds Aᵀ of it to dx in place.
- `segmented_outer`: each group's left rows transposed times its right rows, for the gradients of A and B.

The ends of the groups are read on the device: the host launches as many tiles as there could be, and surplus ones
return at once. Sums are in fp32 (fp64 for fp64). Every element of a result is written once, by one program, in one
order of summation, so results are reproducible bit for bit. A rank at which a slot's scale is 0 is masked: it adds
nothing and gets a gradient of zero, whatever is stored there.

bf16 and fp16 run on tensor cores, fp32 without the rounding to TF32, fp64 without `tl.dot`, so that every dtype works
on every GPU. Triton's interpreter multiplies bf16 wrongly, so there bf16 is converted to fp32 first.

The splitting at the rank-r intermediate is that of Zhu et al., LoRAFusion, EuroSys 2026, Section 3; grouping by adapter
that of Chen et al., Punica, MLSys 2024, Section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_BLOCK = 64
"""Largest number of rows of a tile in half precision; in fp32 and fp64 half and a quarter of it."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Segments:
    """The tiles of rows sorted by group, on the device.

    A tile has up to `height` rows of one group.

    Attributes:
        ends: [G] int32, where each group's rows end.
        tile_ends: [G] int32, where each group's tiles end.
        group_of_tile: [T] int32, G for surplus tiles.
        height: Rows of a tile.
    """

    ends: Tensor
    tile_ends: Tensor
    group_of_tile: Tensor
    height: int

    @classmethod
    def of(cls, ends: Tensor, rows: int, dtype: torch.dtype) -> Segments:
        """Returns the tiles of `rows` sorted rows in groups that end at `ends` [G]; waits for nothing on the device."""
        groups = ends.shape[0]
        height = row_block(rows, groups, dtype)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        tile_ends = ((sizes + (height - 1)) // height).cumsum(0, dtype=torch.int32)
        tiles = torch.arange(min(rows, -(-rows // height) + groups), device=ends.device, dtype=torch.int32)
        return cls(ends, tile_ends, torch.searchsorted(tile_ends, tiles, right=True, out_int32=True), height)


def row_block(rows: int, groups: int, dtype: torch.dtype) -> int:
    """Returns the rows of a tile, from the mean size of a group."""
    cut = {torch.float32: 2, torch.float64: 4}.get(dtype, 1)
    return _block(-(-rows // max(1, groups)), ROW_BLOCK // cut)


def segmented_rows(
    rows: Tensor,
    matrices: Sequence[Tensor],
    segments: Segments,
    *,
    total: Tensor | None = None,
    scale: Tensor | None = None,
    summed: bool = False,
) -> Tensor:
    """Returns the rows times their group's matrix, of each of p projections (1 or 2).

    Args:
        rows: [n, in], common to the projections, or [n, p·in], one for each side by side.
        matrices: [G, in, out] of each projection, with equal strides.
        total: [n, p·out] that the product is added to in place; None for zeros.
        scale: [S, out] factor on the columns, for group expert · S + slot that of its slot; 0 masks a column.
        summed: Whether the projections' products are added up; `total` and the result are then [n, out].

    Returns:
        `total`, or a new tensor in the rows' dtype.
    """
    parts = len(matrices)
    groups, inner, outer = matrices[0].shape
    columns = outer if summed else outer * parts
    out = rows.new_empty(rows.shape[0], columns) if total is None else total
    if out.numel() == 0 or out.device.type == "meta":
        return out
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    exact = rows.dtype not in HALF
    block_n = _block(outer, 16 if rows.dtype is torch.float64 else 64 if exact else 128)
    block_k = _block(inner, 16 if rows.dtype is torch.float64 else 32 if exact else 64)
    grid = (segments.group_of_tile.shape[0] * -(-outer // block_n) * (1 if summed else parts),)
    first, last = matrices[0], matrices[-1]
    assert first.stride() == last.stride(), "the matrices of the projections have equal strides"
    with torch.cuda.device_of(rows):
        _rows_kernel[grid](
            rows,
            first,
            last,
            out,
            rows if scale is None else scale,
            segments.ends,
            segments.tile_ends,
            segments.group_of_tile,
            groups,
            inner,
            outer,
            rows.stride(0),
            0 if rows.shape[1] == inner else inner,
            *first.stride(),
            out.stride(0),
            out.stride(1),
            0 if scale is None else scale.stride(0),
            1 if scale is None else scale.shape[0],
            ADDS=total is not None,
            SCALED=scale is not None,
            TERMS=parts if summed else 1,
            PARTS=1 if summed else parts,
            **_arithmetic(rows.dtype),
            BLOCK_M=segments.height,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
        )
    return out


def segmented_outer(
    left: Tensor, right: Tensor, segments: Segments, *, weight: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b]; zeros for an empty group.

    Args:
        left: [n, a].
        right: [n, b].
        weight: [n, 1] or [n], factor on each row; None for 1.
        dtype: Dtype of the result; the rows' own by default.
    """
    groups, a, b = segments.ends.shape[0], left.shape[1], right.shape[1]
    out = torch.empty(groups, a, b, dtype=dtype or left.dtype, device=left.device)
    if out.numel() == 0 or out.device.type == "meta":
        return out
    left = left if left.stride(1) == 1 else left.contiguous()
    right = right if right.stride(1) == 1 else right.contiguous()
    narrow = left.dtype is torch.float64
    block_a, block_b = _block(a, 16 if narrow else 64), _block(b, 16 if narrow else 64)
    with torch.cuda.device_of(left):
        _outer_kernel[(groups * -(-a // block_a) * -(-b // block_b),)](
            left,
            right,
            left if weight is None else weight,
            out,
            segments.ends,
            a,
            b,
            left.stride(0),
            right.stride(0),
            0 if weight is None else weight.stride(0),
            WEIGHTED=weight is not None,
            **_arithmetic(left.dtype),
            BLOCK_A=block_a,
            BLOCK_B=block_b,
            BLOCK_M=segments.height,
        )
    return out


def _block(size: int, largest: int) -> int:
    """Returns a power of two that covers a size, at least 16 and at most `largest`."""
    return max(16, min(largest, 1 << max(0, size - 1).bit_length()))


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """Returns the kernel's constants for multiplication in a dtype."""
    return {
        "DOT": dtype is not torch.float64,
        "UPCAST": dtype is torch.bfloat16 and triton.knobs.runtime.interpret,
        "SUM": tl.float64 if dtype is torch.float64 else tl.float32,
    }


@triton.jit
def _product(a, b, sums, DOT: tl.constexpr, UPCAST: tl.constexpr):
    """Returns the sums [m, n] plus a [m, k] times b [k, n]."""
    if DOT:
        if UPCAST:
            sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(a, b, sums, input_precision="ieee")
    else:
        sums += tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    return sums


@triton.jit
def _rows_kernel(
    rows_at,
    first_at,
    last_at,
    out_at,
    scale_at,
    ends_at,
    tile_ends_at,
    group_of_tile_at,
    groups,
    inner,
    outer,
    row_stride,
    row_part,
    group_stride,
    inner_stride,
    outer_stride,
    out_stride,
    out_column,
    scale_stride,
    slots,
    ADDS: tl.constexpr,
    SCALED: tl.constexpr,
    TERMS: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of rows, one block of columns, one projection; neighbouring programs share the rows."""
    columns = tl.cdiv(outer, BLOCK_N)
    program = tl.program_id(0)
    tile = program // (columns * PARTS)
    part = (program // columns) % PARTS
    group = tl.load(group_of_tile_at + tile)
    if group >= groups:
        return
    end = tl.load(ends_at + group)
    start = tl.load(ends_at + group - 1, mask=group > 0, other=0)
    first_tile = tl.load(tile_ends_at + group - 1, mask=group > 0, other=0)
    row = start + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_group = row < end
    row = row.to(tl.int64)
    column = (program % columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_matrix = column < outer
    wide_group = group.to(tl.int64)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM)
    for term in tl.static_range(TERMS):
        if TERMS == 1:
            place = part
            matrix_at = first_at
            if part > 0:
                matrix_at = last_at
        else:
            place = term
            matrix_at = first_at if term == 0 else last_at
        for begin in range(0, inner, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            a = tl.load(
                rows_at + row[:, None] * row_stride + (place * row_part + k)[None, :],
                mask=in_group[:, None] & (k < inner)[None, :],
                other=0.0,
            )
            b = tl.load(
                matrix_at + wide_group * group_stride + k[:, None] * inner_stride + column[None, :] * outer_stride,
                mask=(k < inner)[:, None] & in_matrix[None, :],
                other=0.0,
            )
            sums = _product(a, b.to(a.dtype), sums, DOT, UPCAST)
    if SCALED:
        factor = tl.load(scale_at + (group % slots) * scale_stride + column, mask=in_matrix, other=0.0).to(SUM)
        sums = tl.where(factor[None, :] == 0.0, 0.0, sums * factor[None, :])
    at = out_at + row[:, None] * out_stride + (part * outer + column)[None, :] * out_column
    inside = in_group[:, None] & in_matrix[None, :]
    if ADDS:
        sums += tl.load(at, mask=inside, other=0.0).to(SUM)
    tl.store(at, sums.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _outer_kernel(
    left_at,
    right_at,
    weight_at,
    out_at,
    ends_at,
    a,
    b,
    left_stride,
    right_stride,
    weight_stride,
    WEIGHTED: tl.constexpr,
    DOT: tl.constexpr,
    UPCAST: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One block of one group's result; the group's rows in their order."""
    of_a, of_b = tl.cdiv(a, BLOCK_A), tl.cdiv(b, BLOCK_B)
    program = tl.program_id(0)
    group = program // (of_a * of_b)
    i = (program // of_b) % of_a * BLOCK_A + tl.arange(0, BLOCK_A)
    j = program % of_b * BLOCK_B + tl.arange(0, BLOCK_B)
    end = tl.load(ends_at + group)
    start = tl.load(ends_at + group - 1, mask=group > 0, other=0)
    sums = tl.zeros((BLOCK_A, BLOCK_B), dtype=SUM)
    for begin in range(start, end, BLOCK_M):
        row = begin + tl.arange(0, BLOCK_M)
        in_group = row < end
        row = row.to(tl.int64)
        left = tl.load(
            left_at + row[None, :] * left_stride + i[:, None], mask=in_group[None, :] & (i < a)[:, None], other=0.0
        )
        if WEIGHTED:
            weight = tl.load(weight_at + row * weight_stride, mask=in_group, other=0.0)
            left = (left.to(SUM) * weight[None, :].to(SUM)).to(left.dtype)
        right = tl.load(
            right_at + row[:, None] * right_stride + j[None, :], mask=in_group[:, None] & (j < b)[None, :], other=0.0
        )
        sums = _product(left, right, sums, DOT, UPCAST)
    at = out_at + group.to(tl.int64) * a * b + i[:, None] * b + j[None, :]
    tl.store(at, sums.to(out_at.dtype.element_ty), mask=(i < a)[:, None] & (j < b)[None, :])
