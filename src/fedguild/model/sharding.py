"""Frozen layers sharded over the ranks of a backbone, with torch's FSDP2 (docs/decisions/0018).

Every rank holds its part of each layer's weights, split along the first axis (experts, or outputs), and all of the
embeddings, the last norm and the head. A layer is gathered before it runs and released after it, in forward and
backward. Adapters are not parameters of the model, so every rank has complete adapters of its own clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from fedguild.core.errors import ModelError
from fedguild.model.ranks import Direction, Event, Ranks


def shard(model: Any, layers: Sequence[nn.Module], ranks: Ranks) -> None:
    """Shards a frozen model's layers over the ranks and moves it to this rank's device, layer by layer.

    Every rank calls it; the weights are those of rank 0, and those of the others may be on `meta`. From then on a
    forward pass of the model, and a backward pass through it, is one of all ranks; see `Ranks`.

    Args:
        model: A model of transformers.
        layers: Its layers, in the order in which they run.

    Raises:
        ModelError: the model has no layers.
    """
    if not layers:
        raise ModelError(f"{type(model).__name__} has no layers that can be sharded.", "Use one GPU for each actor.")
    ShardedPasses(model, layers, ranks).attach()


class ShardedPasses:
    """The passes of a model whose layers are sharded; see `shard`."""

    def __init__(self, model: Any, layers: Sequence[nn.Module], ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._stacks = _stacks(model, layers)
        self._gathered: list[list[Any]] = []
        self._in_backward: set[int] = set()

    def attach(self) -> None:
        """Shards the layers and hooks the agreement of the ranks into the model's passes."""
        from torch.distributed.device_mesh import init_device_mesh  # these take long to import
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        ranks, model = self._ranks, self._model
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for stack, (owner, layers) in enumerate(self._stacks):
            owner.register_forward_pre_hook(partial(self._before_forward, stack), prepend=True)
            sharded: list[Any] = []
            for layer in layers:
                self._place(layer)
                layer.register_forward_hook(partial(self._before_backward, stack))  # ahead of FSDP's own
                sharded.append(fully_shard(layer, mesh=mesh, reshard_after_forward=True))
            self._gathered.append(sharded)
            for before, each in zip([sharded[0], *sharded], sharded, strict=False):
                each.set_modules_to_backward_prefetch([before])  # explicit: the default depends on earlier passes
        self._place(model, skipped=lambda tensor: isinstance(tensor, DTensor))
        whole = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
        fully_shard(model, mesh=mesh, ignored_params=whole, reshard_after_forward=True)
        fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined] # else a stack that runs first is the root
        model.get_input_embeddings().register_forward_hook(_with_gradient)
        ranks.empty = self._empty

    def _place(self, module: nn.Module, skipped: Callable[[Tensor], bool] = lambda _: False) -> None:
        """Puts a module's weights and buffers on this rank's device, with rank 0's values; tied ones stay tied."""
        placed: dict[int, tuple[Tensor, Tensor]] = {}
        for owner in module.modules():
            for store in (owner._parameters, owner._buffers):
                for name, tensor in store.items():
                    if tensor is None or skipped(tensor):
                        continue
                    if id(tensor) not in placed:
                        placed[id(tensor)] = tensor, self._received(tensor)
                    store[name] = placed[id(tensor)][1]  # type: ignore[assignment]

    def _received(self, tensor: Tensor) -> Tensor:
        device = self._ranks.device
        value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
        value = value.contiguous()
        if value.numel():
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)  # bytes: not every backend knows every dtype
        return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value

    def _before_forward(self, stack: int, *_: Any) -> None:
        self._ranks.take(Event(Direction.FORWARD, stack))

    def _before_backward(self, stack: int, module: nn.Module, args: Any, output: Any) -> None:
        """Starts a backward pass of all ranks when a gradient reaches a layer's output."""
        if not torch.is_grad_enabled():
            return
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, stack))

    def _begin_backward(self, stack: int, gradient: Tensor) -> None:
        if stack not in self._in_backward:
            self._ranks.take(Event(Direction.BACKWARD, stack))
            self._in_backward.add(stack)
            Variable._execution_engine.queue_callback(self._in_backward.clear)

    def _empty(self, event: Event) -> None:
        """Gathers and releases every layer of a stack in the order of a pass."""
        layers = self._gathered[event.stack]
        for layer in layers if event.direction is Direction.FORWARD else reversed(layers):
            layer.unshard()
            layer.reshard()


def _stacks(model: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Returns each module that runs a list of layers, with the layers: one in a causal model, else two."""
    names = {id(module): name for name, module in model.named_modules()}
    by_owner: dict[str, list[nn.Module]] = {}
    for layer in layers:
        owner = names[id(layer)].rsplit(".", 2)[0]
        by_owner.setdefault(owner, []).append(layer)
    return [(model.get_submodule(owner), own) for owner, own in by_owner.items()]


def _with_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    """Gives the embeddings a gradient, so that a backward pass runs through every layer whatever is trained."""
    if torch.is_grad_enabled() and not output.requires_grad and output.is_floating_point():
        output.requires_grad_()


def own_part(weight: Tensor) -> tuple[Tensor, slice]:
    """Returns the part of a weight that this rank holds, and its range of the first axis."""
    if not hasattr(weight, "to_local"):
        return weight, slice(None)
    local: Tensor = weight.to_local()
    rows = weight.shape[0]
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    each = -(-rows // mesh.size())
    start = min(rows, each * mesh.get_local_rank())
    return local, slice(start, start + local.shape[0])
