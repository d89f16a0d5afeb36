"""Memory of a backbone on several GPUs, against counts by hand."""

from __future__ import annotations

import torch

from fedguild.measuring.costs.memory import memory
from tests.measuring.costs.test_flops import EXPERTS, FLAME, HIDDEN, LAYERS, OLMOE, VOCABULARY, WIDTH
from tools.several_gpus import fewest_gpus, layer_parameters, rank_bytes

LAYER = 4 * HIDDEN**2 + EXPERTS * HIDDEN + EXPERTS * 3 * HIDDEN * WIDTH


def test_a_rank_holds_its_part_the_rest_and_two_layers():
    clients = memory(OLMOE, FLAME, 1024, dtype=torch.bfloat16, checkpointing=True).cohort_bytes
    rest = OLMOE.parameters - LAYERS * LAYER
    assert rest - 2 * VOCABULARY * HIDDEN < 1e6, "embeddings, head and norms"
    assert rank_bytes(OLMOE, FLAME, 1024, 1) == 2 * OLMOE.parameters + clients
    largest = max(layer_parameters(OLMOE))
    assert rank_bytes(OLMOE, FLAME, 1024, 4) == 2 * (rest + LAYERS * LAYER // 4 + 2 * largest) + clients


def test_the_fewest_gpus():
    need = {count: rank_bytes(OLMOE, FLAME, 1024, count) for count in (1, 2, 64)}
    assert fewest_gpus(OLMOE, FLAME, 1024, int(need[1] / 0.9) + 1) == 1
    assert fewest_gpus(OLMOE, FLAME, 1024, int(need[2] / 0.9) + 1) == 2
    assert fewest_gpus(OLMOE, FLAME, 1024, int(need[64] / 0.9) - 1) is None
