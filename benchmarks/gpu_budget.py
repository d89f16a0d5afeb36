"""A budget of milliseconds for each part of a training step on a GPU, computed from counted FLOPs and bytes.

Run: python benchmarks/gpu_budget.py (needs no GPU, and measures nothing)
A part takes the longer of its products at the GPU's bf16 rate and its traffic at the memory's bandwidth, each times a
fraction that kernels reach in practice; the fractions are assumptions. Traffic counts what a part reads and writes in
tensors that do not fit the cache. `docs/decisions/0016` has the table.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from fedguild.measuring.costs.flops import cost
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.storage import padded_rank
from fedguild.model.backbone import describe_config
from fedguild.model.plan import AdapterPlan

PEAK, BANDWIDTH = 989e12, 4.8e12
"""An H200's published dense bf16 FLOP/s and bytes a second."""
OF_PEAK = {"dense": 0.75, "grouped": 0.65, "attention": 0.55, "low rank": 0.25}
OF_BANDWIDTH = 0.8


@dataclass(frozen=True)
class Part:
    """One part of a step, forward and backward.

    Attributes:
        name: What it is.
        flops: Multiplications and additions of its products.
        traffic: Bytes it reads and writes.
        kind: Which fraction of the peak its products reach.
        before: Bytes without the kernels of this release, where they are more.
    """

    name: str
    flops: float
    traffic: float
    kind: str = "dense"
    before: float | None = None

    def milliseconds(self, traffic: float | None = None) -> float:
        """Returns its time, with the traffic given or its own."""
        moved = self.traffic if traffic is None else traffic
        return 1e3 * max(self.flops / (OF_PEAK[self.kind] * PEAK), moved / (OF_BANDWIDTH * BANDWIDTH))


def parts(clients: int, tokens: int, rank: int) -> tuple[list[Part], float]:
    """Returns the parts of OLMoE-1B-7B's step, and the FLOPs that `fedguild.measuring.costs` counts for it."""
    model = describe_config("olmoe-1b-7b")
    plan = AdapterPlan((Lora(rank, 1.0, ("attention", "experts")),), 8)
    counted = cost(model, plan)
    total = counted.training_flops(clients * tokens, tokens)
    moe = model.moe[0]
    layers, hidden, width, active = len(model.moe), model.hidden, moe.width, 8
    n, r = clients * tokens, padded_rank(rank, torch.bfloat16)
    pairs = n * active
    wide, narrow, token = 2.0 * pairs * hidden, 2.0 * pairs * width, 2.0 * n * hidden
    trained = clients * counted.trainable * r / rank
    attention_trained = clients * layers * 4 * r * 2 * hidden
    expert_trained = trained - attention_trained
    projections = 4 * n * 4 * hidden * hidden
    low = 6 * pairs * r * 3 * (hidden + width)
    # Forward: x; gate and up, read and written; h; y, read and written. Backward: dy twice; dh, read and written; h; dz
    # twice; dx, read and written; x for gate and for up.
    low_traffic = (1 + 2 + 2 + 2 + 2) * wide + (4 + 1 + 2 + 1 + 2 + 2) * narrow
    temporaries = 4 * wide + 6 * narrow
    frozen_traffic = 5 * wide + 8 * narrow
    of_attention = 6 * n * r * 8 * hidden
    return [
        Part("attention's projections", layers * projections, layers * 10 * token),
        Part("attention itself", layers * 3.5 * 2 * tokens * hidden * n, layers * 12 * token, "attention"),
        Part("LoRA of attention", layers * of_attention, layers * 46 * token, "low rank", layers * 54 * token),
        Part(
            "experts' frozen products",
            layers * 4 * pairs * 3 * hidden * width,
            layers * frozen_traffic,
            "grouped",
        ),
        Part(
            "experts' LoRA",
            layers * low,
            layers * low_traffic,
            "low rank",
            layers * (low_traffic + temporaries),
        ),
        Part("gather and combine", 0, layers * (5 * wide + 4 * token)),
        Part("SwiGLU and routing weights", 0, layers * 17 * narrow, before=layers * 29 * narrow),
        Part("norms", 0, layers * 4 * 5 * token, before=layers * 4 * 40 * token),
        Part("rotary embedding", 0, layers * 8 * token, before=layers * 32 * token),
        Part("residuals and their gradients", 0, layers * 10 * token),
        Part("router and dispatch", layers * 4 * n * hidden * moe.num_experts, layers * (4 * token + 60 * 8 * pairs)),
        Part("head", 4 * n * hidden * model.vocabulary, 4 * token),
        Part("cross-entropy", 0, 5 * 2 * n * model.vocabulary, before=17 * 2 * n * model.vocabulary),
        Part("casts of the factors", 0, 6 * trained),
        Part("reading factors, writing gradients", 0, 8 * expert_trained + 8 * attention_trained),
        Part("clipping", 0, 4 * trained, before=20 * trained),
        Part("AdamW", 0, 28 * trained),
    ], total


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=20)
    given = parser.parse_args()
    listed, flops = parts(given.clients, given.tokens, given.rank)
    tokens = given.clients * given.tokens
    print("| part | TFLOP | GB | ms | ms without the kernels |")
    print("| --- | ---: | ---: | ---: | ---: |")
    sums = [0.0, 0.0]
    for part in listed:
        times = part.milliseconds(), part.milliseconds(part.before)
        sums = [total + time for total, time in zip(sums, times, strict=True)]
        print(
            f"| {part.name} | {part.flops / 1e12:.1f} | {part.traffic / 1e9:.1f} | {times[0]:.1f} | "
            f"{f'{times[1]:.1f}' if part.before else ''} |"
        )
    print(f"| together | {flops / 1e12:.1f} counted | | {sums[0]:.1f} | {sums[1]:.1f} |")
    for name, total in zip(("with", "without"), sums, strict=True):
        print(f"{name} the kernels: {flops / PEAK / total * 1e3:.0%} of peak, {tokens / total * 1e3:,.0f} tokens/s")
    print(f"40 % of peak is {flops / PEAK / 0.4 * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
