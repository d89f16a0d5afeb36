"""A dense FFN as a mixture of its own neurons: the split, and what is trained on top of it.

Each expert holds neurons that act together. It keeps the dense weights, times a scale for each neuron, plus a low-rank
correction. Only the neurons' order, the router, the scales and the factors are new, so a mixture is stored in little.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

CLUSTER_TOKENS, CLUSTER_ROUNDS, RIDGE = 4096, 6, 0.1


class Sizes(NamedTuple):
    """How an FFN is split."""

    experts: int
    active: int
    rank: int


def shares(features: np.ndarray, experts: int, seed: int) -> np.ndarray:
    """Returns neurons in the order of their experts: k-means on cosine similarity, all clusters of equal size.

    Args:
        features: [neurons, tokens], how much each neuron acts on each token, rows of length 1.
        experts: How many clusters.
        seed: Decides the first centres.
    """
    neurons = len(features)
    centres = features[np.random.default_rng(seed).permutation(neurons)[:experts]]
    for _ in range(CLUSTER_ROUNDS):
        alike = features @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T
        cluster = linear_sum_assignment(-np.repeat(alike, neurons // experts, axis=1))[1] // (neurons // experts)
        centres = np.stack([features[cluster == expert].mean(0) for expert in range(experts)])
    return np.argsort(cluster, kind="stable")


class Experts(nn.Module):
    """The experts of one layer, whose neurons and router are trained.

    Attributes:
        order: [neurons], the dense FFN's neurons in the order of their experts.
        router: [experts, width].
        scales: [3, neurons], of each neuron's gate, up and down weights.
        reads_in, reads_out: [experts, rank, width] and [experts, 2 × neurons of an expert, rank], added to gate and up.
        writes_in, writes_out: [experts, rank, neurons of an expert] and [experts, width, rank], added to down.
        balance: The routing's imbalance in the last pass; 1 is even.
    """

    order: Tensor
    gate_up: Tensor
    down: Tensor
    balance: Tensor

    def __init__(self, mlp: LlamaMLP, sizes: Sizes, order: Tensor) -> None:
        super().__init__()
        neurons, width = mlp.gate_proj.weight.shape
        self.sizes, each = sizes, neurons // sizes.experts
        split = [w.weight.detach()[order].view(sizes.experts, each, width) for w in (mlp.gate_proj, mlp.up_proj)]
        self.register_buffer("order", order)
        self.register_buffer("gate_up", torch.cat(split, 1), persistent=False)
        down = mlp.down_proj.weight.detach()[:, order].view(width, sizes.experts, each).transpose(0, 1).contiguous()
        self.register_buffer("down", down, persistent=False)
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.zeros(sizes.experts, width))
        self.scales = nn.Parameter(torch.ones(3, neurons))
        shape = (sizes.experts, sizes.rank)
        self.reads_in = nn.Parameter(torch.randn(*shape, width, generator=generator) / width**0.5)
        self.reads_out = nn.Parameter(torch.zeros(sizes.experts, 2 * each, sizes.rank))
        self.writes_in = nn.Parameter(torch.randn(*shape, each, generator=generator) / each**0.5)
        self.writes_out = nn.Parameter(torch.zeros(sizes.experts, width, sizes.rank))

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns the experts' gate and up [experts, 2 × each, width] and down [experts, width, each]."""
        experts = self.sizes.experts
        gate, up, down = self.scales.view(3, experts, -1)
        gate_up = self.gate_up * torch.cat([gate, up], 1).unsqueeze(2)
        return (
            gate_up + correction(self.reads_out, self.reads_in),
            self.down * down.unsqueeze(1) + correction(self.writes_out, self.writes_in),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mixture's output [tokens, width] and keeps `balance`, the routing's imbalance, for the loss."""
        probabilities = torch.softmax(x.float() @ self.router.T, -1)
        values, chosen = probabilities.topk(self.sizes.active, -1)
        load = torch.bincount(chosen.flatten(), minlength=self.sizes.experts) / chosen.numel()
        self.balance = self.sizes.experts * (load * probabilities.mean(0)).sum()
        gate_up, down = self.weights()
        output = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(self.sizes.experts):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(x[tokens], gate_up[expert]).chunk(2, -1)
            acted = nn.functional.linear(nn.functional.silu(gate) * up, down[expert])
            output = output.index_add(0, tokens, values[tokens, place].unsqueeze(1) * acted.float())
        return output


def correction(out: Tensor, into: Tensor) -> Tensor:
    """Returns out @ into, [experts, a, b] for [experts, a, rank] and [experts, rank, b].

    The products are added one rank after another without a matrix multiplication, whose order of additions differs
    between machines: a stored mixture is rebuilt bit by bit.
    """
    if torch.is_grad_enabled():
        return out @ into
    total = torch.zeros(*out.shape[:2], into.shape[2])
    for rank in range(out.shape[2]):
        total += out[:, :, rank : rank + 1] * into[:, rank : rank + 1, :]
    return total


@torch.no_grad()
def split(mlp: LlamaMLP, x: Tensor, sizes: Sizes, seed: int = 0) -> Experts:
    """Returns the FFN as a mixture that has not been trained.

    The router is fitted by least squares to the logarithm of the experts' output norms.

    Args:
        mlp: The dense FFN.
        x: [tokens, width], inputs that the FFN has received.
        sizes: Experts, active experts and the rank of the corrections.
        seed: Decides the sample of tokens and the first centres.
    """
    sample = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:CLUSTER_TOKENS]]
    hidden = nn.functional.silu(mlp.gate_proj(sample)) * mlp.up_proj(sample)
    acts = hidden.abs() * mlp.down_proj.weight.norm(dim=0)
    features = (acts / acts.norm(dim=0, keepdim=True).clamp_min(1e-9)).T.numpy()
    experts = Experts(mlp, sizes, torch.from_numpy(shares(features, sizes.experts, seed)))
    by_expert = hidden[:, experts.order].view(len(sample), sizes.experts, -1)
    norms = torch.einsum("tew,edw->ted", by_expert, experts.down).norm(dim=-1).clamp_min(1e-6).log()
    ones = torch.cat([sample, torch.ones(len(sample), 1)], 1)
    system = ones.T @ ones + RIDGE * torch.eye(ones.shape[1])
    fitted = torch.linalg.solve(system, ones.T @ (norms - norms.mean(1, keepdim=True)))
    experts.router.copy_(fitted[:-1].T)
    weight = torch.softmax(sample @ experts.router.T, -1).topk(sizes.active, -1).values.mean()
    experts.scales[2] = 1 / weight
    return experts
