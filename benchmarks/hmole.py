"""A training step with FedAMoLE's mixture of LoRA experts against plain LoRA's on the same dense model.

Run: python benchmarks/hmole.py
Prints the ratio mixture / plain of one client and of a fused cohort of eight; the aim is at most
1.3. A pool of 30 experts per module over ten clients, each expert with two of them, two to eight
per client; both adapters have rank 8 on the query and value projections, and no dropout unless given.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

import torch
from models import Size, rows
from timing import add_device, keep_freed_pages, machine, medians
from transformers import LlamaConfig, LlamaForCausalLM

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded, collate
from fedguild.methods.fedamole.mixture import MixtureOfLora
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel

DENSE = Size(hidden=512, width=1376, layers=4, experts=0, vocabulary=512, tokens=128)
TARGETS = ("q_proj", "v_proj")
RANK, SCALE, BALANCE = 8, 2.0, 1e-3
POOL, CLIENTS, HOLDERS, LEAST, MOST = 30, 10, 2, 2, 8


def main() -> None:
    """Measures one client and a cohort of eight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dropout", type=float, default=0.0)
    add_device(parser)
    arguments = parser.parse_args()
    keep_freed_pages()
    print(machine(arguments.device, arguments.dtype))
    for clients, repeats in ((1, 3 * arguments.repeats), (8, arguments.repeats)):
        measure(clients, repeats, arguments.dropout, (arguments.device, arguments.dtype))


def measure(clients: int, repeats: int, dropout: float, where: tuple[torch.device, torch.dtype]) -> None:
    """Prints one cohort's ratio."""
    batches = [rows(DENSE, 1, seed) for seed in range(clients)]
    lora = AdapterPlan((Lora(RANK, SCALE, TARGETS, dropout=dropout),))
    part = MixtureOfLora(TARGETS, RANK, SCALE, experts=POOL, capacity=MOST, top_k=2, dropout=dropout)
    mixture = AdapterPlan((part,))
    seconds = medians(
        {
            "plain": step_of(dense_backbone(*where), lora, batches),
            "mixture": step_of(dense_backbone(*where), mixture, batches),
        },
        repeats=repeats,
        warmup=3,
    )
    print(
        f"{clients} client(s): plain LoRA {1e3 * seconds['plain']:.1f} ms, mixture {1e3 * seconds['mixture']:.1f} ms, "
        f"ratio {seconds['mixture'] / seconds['plain']:.2f}",
        flush=True,
    )


def dense_backbone(device: torch.device, dtype: torch.dtype) -> Backbone:
    """Returns a random Llama."""
    config = LlamaConfig(
        vocab_size=DENSE.vocabulary,
        hidden_size=DENSE.hidden,
        intermediate_size=DENSE.width,
        num_hidden_layers=DENSE.layers,
        num_attention_heads=DENSE.hidden // 64,
        num_key_value_heads=DENSE.hidden // 64,
    )
    torch.manual_seed(0)
    return make_backbone(LlamaForCausalLM(config).to(device, dtype), None, name="random")


def step_of(backbone: Backbone, plan: AdapterPlan, batches: Sequence[Sequence[Encoded]]) -> Callable[[], None]:
    """Returns one training step (forward, backward, Adam) of all clients at once."""
    model = SlotModel(backbone, [plan] * len(batches))
    for trainable in model.trainables.values():
        trainable.stored.detach().normal_(0, 0.02)
    mixture = model.attached.get(MixtureOfLora)
    if mixture is not None:
        for index, module in enumerate(mixture.modules):
            for slot, ids in enumerate(assignment(index)[: len(batches)]):
                mixture.assign(slot, {module: ids})
    optimizer = SlotOptimizer(model.trainables, TrainingSettings(optimizer="adam"))
    counts = [sum(len(row.input_ids) - 1 for row in rows) for rows in batches]

    def step() -> None:
        optimizer.zero_grad()
        model.dropout.seed(range(len(batches)))
        losses = model.token_losses(collate(batches, 0))
        loss = torch.stack([part.mean() for part in losses.split(counts)])
        if mixture is not None:
            loss = loss + BALANCE * mixture.balance_loss()
        loss.sum().backward()
        optimizer.step([1e-4] * len(batches))

    return step


def assignment(seed: int) -> list[list[int]]:
    """Returns each client's experts of a module: every expert with two clients, each client with two to eight."""
    rng = random.Random(seed)
    while True:
        held: list[list[int]] = [[] for _ in range(CLIENTS)]
        for expert in range(POOL):
            for client in rng.sample([c for c in range(CLIENTS) if len(held[c]) < MOST], HOLDERS):
                held[client].append(expert)
        if min(map(len, held)) >= LEAST:
            return held


if __name__ == "__main__":
    main()
