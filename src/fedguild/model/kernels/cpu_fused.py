"""RMS norms, rotary embeddings and SiLU gates of a frozen model on a CPU, in Numba: each in one pass over its values.

torch computes them operation by operation, five to eight of them forward and more backward, each with its own tensor
(docs/decisions/0020). Here a value is read once, and what the backward pass can recompute is not kept.

Everything is fp32; `fused` leaves other tensors to the module's own code. A row's result depends neither on the other
rows nor on the number of threads. The exponential function is a polynomial, exact to a few units in the last place.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedguild.model.kernels import has_plain_values
from fedguild.model.kernels.library import Library
from fedguild.model.kernels.threads import EVERYTHING, Kernel, bits_as_float, floats, in_order, next_piece

LEAST_ELEMENTS = 1 << 13
"""Elements that are worth a piece of their own."""
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.3)
"""The exponential function is taken between them, where it is a normal number."""
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
"""Coefficients of (eˣ - 1 - x) / x² within ln 2 / 2 of 0 (Cephes' expf; Moshier, 1989)."""
ONE, HALF = np.float32(1), np.float32(0.5)
SHUT = np.float32(-100)
"""Below it a gate lets nothing through: its SiLU is less than 1e-36."""


@cache
def numba() -> Library:
    return Library(_Norm.apply, _Rotary.apply, _Gate.apply, _Product.apply, _takes)


def _takes(values: Tensor) -> bool:
    return has_plain_values(values) and values.numel() > 0


class _Norm(torch.autograd.Function):
    """w · x / √(mean x² + ε) of every row x of [..., H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        out, scales = torch.empty_like(hidden), hidden.new_empty(hidden.shape[:-1])
        count, width = scales.numel(), hidden.shape[-1]
        given = (hidden, weight, out, scales)
        _norm.run((*_addresses(given), count, width, _bits(epsilon)), most_pieces=_pieces(hidden))
        ctx.save_for_backward(hidden, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scales = ctx.saved_tensors
        gradient, out = grads[0].contiguous(), torch.empty_like(hidden)
        given = (hidden, weight, gradient, scales, out)
        _norm_back.run((*_addresses(given), scales.numel(), hidden.shape[-1]), most_pieces=_pieces(hidden))
        along = gradient * hidden * scales[..., None] if ctx.needs_input_grad[1] else None
        return out, None if along is None else along.reshape(-1, along.shape[-1]).sum(dim=0), None


class _Rotary(torch.autograd.Function):
    """x · cos + rotate_half(x) · sin of the query [B, h, T, d] and the key, with cos and sin [B or 1, T, d]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(query, cos, sin, backward=False), _rotated(key, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        of_query, of_key = (_rotated(grad, cos, sin, backward=True) for grad in grads)
        return of_query, of_key, None, None


class _Product(torch.autograd.Function):
    """silu(a) · b of tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        left, right = _as_rows(left), _as_rows(right)
        ctx.save_for_backward(left, right)
        return _gate_of(left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        d_left, d_right = left.new_empty(left.shape), left.new_empty(left.shape)
        _gate_back(left, right, grads[0], d_left, d_right)
        return d_left, d_right


class _Gate(torch.autograd.Function):
    """silu(a) · b of z = [a, b], [n, 2·I]."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = _as_rows(both)
        ctx.save_for_backward(both)
        return _gate_of(*both.chunk(2, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        out: Tensor = both.new_empty(both.shape)
        (left, right), (d_left, d_right) = both.chunk(2, dim=1), out.chunk(2, dim=1)
        _gate_back(left, right, grads[0], d_left, d_right)
        return out


def _gate_of(left: Tensor, right: Tensor) -> Tensor:
    """Returns silu(a) · b for a and b [..., I], laid out as by `_as_rows` or as halves of one tensor."""
    out, width = left.new_empty(left.shape), left.shape[-1]
    numbers = (*_addresses((left, right, out)), out.numel() // width, width, *map(_step, (left, right, out)))
    _gated.run(numbers, most_pieces=_pieces(out))
    return out


def _gate_back(left: Tensor, right: Tensor, gradient: Tensor, d_left: Tensor, d_right: Tensor) -> None:
    """Writes the gradients of a and b [..., I] of silu(a) · b."""
    gradient = _as_rows(gradient)
    rows, width = left.numel() // left.shape[-1], left.shape[-1]
    given = (left, right, gradient, d_left, d_right)
    _gated_back.run((*_addresses(given), rows, width, *map(_step, given)), most_pieces=_pieces(left))


def _rotated(values: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """Returns the values [B, h, T, d] rotated, or their gradient rotated back, in the same layout."""
    values = values if values.stride(3) == 1 else values.contiguous()
    out = torch.empty_like(values)
    numbers = (
        *_addresses((values, out, cos, sin)),
        *values.shape,
        *values.stride()[:3],
        *out.stride()[:3],
        0 if len(cos) == 1 else cos.stride(0),
        1 if backward else 0,
    )
    _turned.run(numbers, most_pieces=_pieces(values))
    return out


def _addresses(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def _as_rows(values: Tensor) -> Tensor:
    """Returns values [..., I] whose rows lie at equal distances; unchanged if there is one leading dimension."""
    plain = values.is_contiguous() or (values.dim() == 2 and values.stride(1) == 1)
    return values if plain else values.contiguous()


def _step(values: Tensor) -> int:
    """Returns the distance of two rows of `_as_rows`, in elements."""
    return values.shape[-1] if values.is_contiguous() else values.stride(-2)


def _pieces(values: Tensor) -> int:
    return -(-values.numel() // LEAST_ELEMENTS)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@njit(inline="always")
def _exp(x):
    """Returns eˣ = 2ⁿ times a polynomial of the rest, with n the integer nearest to x / ln 2."""
    x = min(HIGHEST, max(LOWEST, x))  # the lowest for what is not a number
    n = np.floor(x * LOG2_E + HALF)
    x = x - n * LN2_HIGH - n * LN2_LOW
    p = ((((P0 * x + P1) * x + P2) * x + P3) * x + P4) * x + P5
    return (p * x * x + x + ONE) * bits_as_float((np.int32(n) + np.int32(127)) << np.int32(23))


@Kernel
def _norm(numbers):
    given = carray(numbers, 9)
    pieces = given[1]
    x, w = carray(floats(given[2]), EVERYTHING), carray(floats(given[3]), EVERYTHING)
    out, scales = carray(floats(given[4]), EVERYTHING), carray(floats(given[5]), EVERYTHING)
    n, width, epsilon = given[6], np.uint64(given[7]), bits_as_float(np.int32(given[8]))
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for i in range(n * piece // pieces, n * (piece + 1) // pieces):
            at = np.uint64(i) * width
            total = np.float32(0)
            for k in range(width):
                total += x[at + k] * x[at + k]
            scale = ONE / np.sqrt(total / np.float32(width) + epsilon)
            scales[i] = scale
            for k in range(width):
                out[at + k] = w[k] * (x[at + k] * scale)


@Kernel
def _norm_back(numbers):
    """The gradient of x: s (w dy - x s² mean(w dy x))."""
    given = carray(numbers, 9)
    pieces = given[1]
    x, w = carray(floats(given[2]), EVERYTHING), carray(floats(given[3]), EVERYTHING)
    dy, scales = carray(floats(given[4]), EVERYTHING), carray(floats(given[5]), EVERYTHING)
    out, n, width = carray(floats(given[6]), EVERYTHING), given[7], np.uint64(given[8])
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for i in range(n * piece // pieces, n * (piece + 1) // pieces):
            at = np.uint64(i) * width
            total = np.float32(0)
            for k in range(width):
                total += w[k] * dy[at + k] * x[at + k]
            scale = scales[i]
            along = total / np.float32(width) * scale * scale
            for k in range(width):
                out[at + k] = scale * (w[k] * dy[at + k] - x[at + k] * along)


@in_order
def _turned(numbers):
    """Of the halves: x₁ cos₁ - x₂ sin₁ and x₂ cos₂ + x₁ sin₂; backward x₁ cos₁ + x₂ sin₂ and x₂ cos₂ - x₁ sin₁."""
    given = carray(numbers, 18)
    pieces = given[1]
    x, out = carray(floats(given[2]), EVERYTHING), carray(floats(given[3]), EVERYTHING)
    cos, sin = carray(floats(given[4]), EVERYTHING), carray(floats(given[5]), EVERYTHING)
    batch, heads, tokens, half = given[6], given[7], given[8], np.uint64(given[9] // 2)
    x_batch, x_head, x_token = given[10], given[11], given[12]
    out_batch, out_head, out_token = given[13], given[14], given[15]
    table_batch, backward = given[16], given[17]
    n = batch * tokens
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for i in range(n * piece // pieces, n * (piece + 1) // pieces):
            b, t = i // tokens, i % tokens
            c = np.uint64(b * table_batch + t * given[9])
            for h in range(heads):
                at = np.uint64(b * x_batch + h * x_head + t * x_token)
                to = np.uint64(b * out_batch + h * out_head + t * out_token)
                if backward:
                    for k in range(half):
                        first, second = x[at + k], x[at + half + k]
                        out[to + k] = first * cos[c + k] + second * sin[c + half + k]
                        out[to + half + k] = second * cos[c + half + k] - first * sin[c + k]
                else:
                    for k in range(half):
                        first, second = x[at + k], x[at + half + k]
                        out[to + k] = first * cos[c + k] - second * sin[c + k]
                        out[to + half + k] = second * cos[c + half + k] + first * sin[c + half + k]


@in_order
def _gated(numbers):
    given = carray(numbers, 10)
    pieces = given[1]
    a, b = carray(floats(given[2]), EVERYTHING), carray(floats(given[3]), EVERYTHING)
    out, n, width = carray(floats(given[4]), EVERYTHING), given[5], np.uint64(given[6])
    a_row, b_row, out_row = given[7], given[8], given[9]
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for i in range(n * piece // pieces, n * (piece + 1) // pieces):
            of_a, of_b, to = np.uint64(i * a_row), np.uint64(i * b_row), np.uint64(i * out_row)
            for k in range(width):
                value = max(a[of_a + k], SHUT)
                out[to + k] = value / (ONE + _exp(-value)) * b[of_b + k]


@in_order
def _gated_back(numbers):
    """With s = 1 / (1 + e⁻ᵃ): da = dy b s (1 + a (1 - s)), db = dy a s."""
    given = carray(numbers, 14)
    pieces = given[1]
    a, b = carray(floats(given[2]), EVERYTHING), carray(floats(given[3]), EVERYTHING)
    dy = carray(floats(given[4]), EVERYTHING)
    da, db = carray(floats(given[5]), EVERYTHING), carray(floats(given[6]), EVERYTHING)
    n, width = given[7], np.uint64(given[8])
    a_row, b_row, dy_row, da_row, db_row = given[9], given[10], given[11], given[12], given[13]
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for i in range(n * piece // pieces, n * (piece + 1) // pieces):
            of_a, of_b, of_dy = np.uint64(i * a_row), np.uint64(i * b_row), np.uint64(i * dy_row)
            to_a, to_b = np.uint64(i * da_row), np.uint64(i * db_row)
            for k in range(width):  # two loops, as one that writes to both is not computed in vectors
                value = max(a[of_a + k], SHUT)
                db[to_b + k] = dy[of_dy + k] * (value / (ONE + _exp(-value)))
            for k in range(width):
                value = max(a[of_a + k], SHUT)
                share = ONE / (ONE + _exp(-value))
                da[to_a + k] = dy[of_dy + k] * b[of_b + k] * share * (ONE + value * (ONE - share))
