"""A dispatch mode in which large tensors have shapes but no values, to run a server half without its memory.

Inside `ShapesOnly` every tensor of more than `limit` values lies on torch's meta device, whatever creates it. Smaller
tensors are real, so counts, assignments and other small decisions are computed as usual. If one is computed from a
tensor without values, its values are arbitrary: numbers above 0 and up to 1, the integer 1, True.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 2**18
"""Maximum number of values of a real tensor: 1 MB in fp32."""
META = torch.device("meta")
_EQUAL = torch.ops.aten.equal.default


class ShapesOnly(TorchDispatchMode):
    """Keeps tensors of more than `limit` values on the meta device; `limit` 0 leaves only single values real.

    Attributes:
        made_up: Whether any value so far was arbitrary, so that decisions based on it may be wrong.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = max(limit, 1)
        self.made_up = False
        self._results: dict[Any, Any] = {}
        self._rng = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        tensors = list(_tensors((args, *options.values())))
        if not tensors and _makes(func):
            return self._made(func, args, options)
        if not any(tensor.is_meta for tensor in tensors):
            return _mapped(func(*args, **options), self._emptied)
        if func is _EQUAL:
            self.made_up = True
            return args[0].shape == args[1].shape
        if _writes(func):
            self.made_up |= not args[0].is_meta
            return args[0]
        return self._sketched(func, args, options)

    def _made(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Returns the result of a function without tensor arguments; draws random values only if it is small."""
        sketch = func(*args, **{**_without_generator(options), "device": META})
        return sketch if sketch.numel() > self.limit else func(*args, **options)

    def _emptied(self, tensor: Tensor) -> Tensor:
        return _without_values(tensor) if tensor.numel() > self.limit else tensor

    def _sketched(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Returns an operation's results without values; the same operation on the same shapes runs once."""
        if isinstance(options.get("device"), torch.device):
            options["device"] = META
        key = (func, _described(args), _described(tuple(options.items())))
        if key not in self._results:
            sketched = {name: _mapped(value, _without_values) for name, value in _without_generator(options).items()}
            self._results[key] = _OWN.get(func, func)(*_mapped(args, _without_values), **sketched)
        return _mapped(self._results[key], self._another)

    def _another(self, tensor: Tensor) -> Tensor:
        if tensor.numel() <= self.limit:
            self.made_up = True
            if tensor.dtype.is_floating_point:
                return 1 - torch.rand(tensor.shape, dtype=tensor.dtype, generator=self._rng)
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _least_squares(matrix: Tensor, right: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Returns the shapes of lstsq of [.., m, n] and [.., m, k]; torch has no meta kernel for it."""
    solution = matrix.mT @ right
    return solution, solution.new_empty(0), solution.new_empty(0), solution.new_empty(0)


_OWN = {torch.ops.aten.linalg_lstsq.default: _least_squares}


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _mapped(value: Any, change: Any) -> Any:
    """Returns a value, or a tuple or list of values, with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _described(value: Any) -> Any:
    """Returns a hashable description of what determines an operation's shapes."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(_described(item) for item in value)
    return repr(value)


def _without_generator(options: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the generator from the arguments: the meta device draws nothing."""
    return {name: None if isinstance(value, torch.Generator) else value for name, value in options.items()}


def _without_values(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=META)


@cache
def _makes(func: Any) -> bool:
    """Whether an operation creates a tensor on a given device."""
    return any(argument.name == "device" for argument in func._schema.arguments)


@cache
def _writes(func: Any) -> bool:
    """Whether an operation writes values into its first argument, and changes nothing else of it."""
    arguments = func._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write and torch.Tag.inplace_view not in func.tags
