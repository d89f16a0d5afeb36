"""One torch optimizer per client: what a cohort's optimizer has to equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings


class ClientOptimizer:
    """`torch.optim.AdamW`, `Adam` or `SGD` over one client's own tensors, clipped by torch.

    Output scales get no weight decay.
    """

    def __init__(self, tensors: Mapping[str, Tensor], settings: TrainingSettings) -> None:
        self.tensors = dict(tensors)
        scales = [tensor for name, tensor in self.tensors.items() if name.endswith("output_scale")]
        others = [tensor for name, tensor in self.tensors.items() if not name.endswith("output_scale")]
        groups = [
            {"params": others, "weight_decay": settings.weight_decay},
            {"params": scales, "weight_decay": 0.0},
        ]
        self.optimizer = self._make([group for group in groups if group["params"]], settings)

    @staticmethod
    def _make(groups: list[dict[str, object]], settings: TrainingSettings) -> torch.optim.Optimizer:
        if settings.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum)
        kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, lr=1.0, betas=settings.betas, eps=settings.eps)

    def step(
        self,
        grads: Mapping[str, Tensor],
        rate: float,
        clip_norm: float | None,
        updated: Mapping[str, Tensor] | None = None,
    ) -> float:
        """Updates the tensors; returns the gradient's norm before clipping."""
        before = {
            name: [whole.detach().clone() for whole in self._changing(self.tensors[name])] for name in updated or {}
        }
        for name, tensor in self.tensors.items():
            tensor.grad = grads[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(
            list(self.tensors.values()), float("inf") if clip_norm is None else clip_norm
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for name, kept in (updated or {}).items():
            now = self._changing(self.tensors[name])
            old = before[name] + [torch.zeros_like(value) for value in now[len(before[name]) :]]
            for value, previous in zip(now, old, strict=True):
                value.detach()[~kept] = previous[~kept]
        return float(norm)

    def _changing(self, tensor: Tensor) -> list[Tensor]:
        """Returns a tensor, and its moments as far as there are any."""
        state = self.optimizer.state[tensor]
        kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        return [tensor, *(state[kind] for kind in kinds if state.get(kind) is not None)]
