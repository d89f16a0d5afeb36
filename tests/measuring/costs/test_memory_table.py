"""Estimates of memory against a recorded table, `estimates.csv`: whoever changes the estimate changes figures.

Record it anew with `python -m tests.measuring.costs.test_memory_table`, and say in the changelog why it changed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
import torch

from fedguild.client.budget import Budget
from fedguild.measuring.costs.memory import PLAIN, StepForm, largest_cohort, memory
from fedguild.methods import build_method
from fedguild.model.backbone import DTYPES, describe_config

TABLE = Path(__file__).with_name("estimates.csv")
FREE = 139 * 2**30
"""Bytes of an H200; a cohort may take 60 % of what the weights leave."""
CASES = [
    ("flame", "olmoe-1b-7b", 20, 8),
    ("flame", "qwen3-30b-a3b", 20, 8),
    ("ffa-lora", "mixtral-8x7b", 8, 2),
    ("fed-sb", "olmoe-1b-7b", 20, 8),
    ("rolora", "deepseek-v2-lite", 16, 6),
    ("fedavg", "deepseek-v2-lite", 16, 6),
]
"""Method, model, rank and active experts; FedAvg trains the experts in full, as dense changes."""
DAILY = ("ffa-lora", "fed-sb", "fedavg")
"""Methods whose cases are compared in `make test`, the others in `make test-long`."""
OPTIONS = {"fedavg": {"experts": "full"}}
SETTINGS = [("bfloat16", False, 512), ("bfloat16", True, 8192), ("float32", False, 8192)]


FORMS = {
    "accumulated": StepForm(accumulation=4),
    "packed for an attention that pads": StepForm(padded_tokens=3 * 8192),
    "DP-SGD": StepForm(examples=16),
}
"""How steps are taken, beside the plain form: in the second round, in bf16 with checkpointing."""
PLACES = [
    *product(SETTINGS, [("plain", PLAIN)], (1, 2), (1, 8)),
    *product(SETTINGS[1:2], FORMS.items(), (2,), (1, 8)),
]


def estimates(cases: Iterable[tuple[str, str, int, int]] = CASES) -> Iterator[dict[str, str]]:
    """Yields a row for each case, dtype, checkpointing and number of tokens; cohorts of 1 and 8, in rounds 1 and 2.

    Then for each other form of a step.
    """
    for name, path, rank, active in cases:
        method = build_method(name, OPTIONS.get(name, {}))
        model, budget = describe_config(path), Budget("all", active, rank)
        plan = method.plan(model, budget)
        for (dtype, checkpointing, tokens), (form_name, form), round_index, slots in PLACES:
            beside = plan.beside_in(round_index)
            own = {"dtype": DTYPES[dtype], "checkpointing": checkpointing, "beside": beside, "form": form}
            need = memory(model, plan, tokens, slots=slots, **own)
            free = int(0.6 * (FREE - need.weights_bytes))
            key = (name, path, dtype, checkpointing, tokens, form_name, round_index, slots)
            names = ("method", "model", "dtype", "checkpointing", "tokens", "form", "round", "clients")
            size = largest_cohort(model, plan, tokens, 64, free, **own)
            yield {
                **{what: str(value) for what, value in zip(names, key, strict=True)},
                **{what: str(value) for what, value in asdict(need).items()},
                "total_bytes": str(need.total_bytes),
                "cohort_on_an_h200": str(size),
            }


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=" ".join(case[:2]), marks=[] if case[0] in DAILY else pytest.mark.long)
        for place, case in enumerate(CASES)
    ],
)
def test_the_estimates_are_the_recorded_ones(place):
    with TABLE.open(newline="") as file:
        recorded = list(csv.DictReader(file))
    assert len(recorded) == len(CASES) * len(PLACES)
    own = recorded[place * len(PLACES) : (place + 1) * len(PLACES)]
    for ours, row in zip(estimates([CASES[place]]), own, strict=True):
        assert ours == row


def test_logits_take_a_chunk_whatever_the_clients_and_words():
    model, plan = describe_config("qwen3-30b-a3b"), build_method("flame", {}).plan
    plan = plan(model, Budget("all", 8, 8))
    one, eight = (memory(model, plan, 8192, dtype=torch.bfloat16, slots=slots) for slots in (1, 8))
    logits = 8 * one.activations_bytes - eight.activations_bytes
    assert logits == 7 * 2 * (256 * 2**20 // (4 * model.vocabulary)) * 4 * model.vocabulary
    assert one.cohort_bytes < 2 * 4 * 8192 * model.vocabulary + one.optimizer_bytes * 2 + 40 * 2**30
    assert eight.weights_bytes == one.weights_bytes
    assert eight.optimizer_bytes == 8 * one.optimizer_bytes


@pytest.mark.parametrize(("rank", "stored"), [(20, 24), (24, 24), (1, 8)])
def test_ranks_are_counted_as_they_are_stored(rank, stored):
    model = describe_config("olmoe-1b-7b")
    method = build_method("fedit", {"rank": rank, "targets": ["experts"]})
    plan = method.plan(model, Budget("all", 8, rank))
    held = memory(model, plan, 1, dtype=torch.bfloat16)
    assert held.gradients_bytes == 4 * 16 * 64 * 3 * stored * (2048 + 1024)


def test_the_first_round_of_fed_sb_holds_its_gradients_beside_the_adapter():
    model, budget = describe_config("olmoe-1b-7b"), Budget("all", 8, 20)
    sizes = {}
    for start in ("dense", "sketch", "random"):
        method = build_method("fed-sb", {"start": start})
        plan = method.plan(model, budget)
        assert plan.beside_in(2) is None
        first = memory(model, plan, 512, dtype=torch.bfloat16, beside=plan.beside_in(1))
        sizes[start] = first.cohort_bytes
    weights = 16 * (4 * 2048**2 + 64 * 3 * 2048 * 1024)
    assert sizes["dense"] > 16 * weights, "a change, its gradient and two sums of each weight, in fp32"
    assert sizes["dense"] > 2 * sizes["sketch"] > 4 * sizes["random"]


if __name__ == "__main__":
    with TABLE.open("w", newline="") as file:
        rows = list(estimates())
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
