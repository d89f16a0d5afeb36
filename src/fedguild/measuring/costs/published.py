"""The papers' published cost figures, compared with ours under stated settings.

The claims are data (`measuring/costs/published_claims.py`); `compare` recomputes our figure from the model's config and
from the method itself. Papers leave settings open: whether routers have LoRA, how wide an expert is, what a megabyte
is. A figure is listed once for each plausible reading, to show which one reproduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from statistics import fmean
from typing import Any, Literal

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.errors import ModelError
from fedguild.measuring.costs.flops import Cost, cost
from fedguild.measuring.costs.traffic import exchanges
from fedguild.model.backbone import describe_architecture
from fedguild.model.info import ModelInfo
from fedguild.model.known import find_known, known_models
from fedguild.server.method import Method

Quantity = Literal[
    "parameters",
    "active parameters",
    "trainable",
    "active trainable",
    "forward FLOPs",
    "forward FLOPs of P_a rounded",
    "forward FLOPs, % of those with all experts active",
    "upload",
    "download",
]
Verdict = Literal["equal", "within 1 %", "within 2 points", "differs"]
Build = Callable[[str, Mapping[str, Any]], Method]

MIB, MB = 2**20, 10**6
TOKENS = 128  # FLAME's FLOPs are those of 128 tokens


@dataclass(frozen=True)
class Setup:
    """A federation whose costs are counted.

    Attributes:
        model: A known model.
        method: A registered method, with its options.
        budgets: (active experts, rank) of every client; costs are those of the first client, traffic is the mean over
            all.
        changes: Keys of the model's config that are overridden, with their values.
        rounds: The round whose traffic is counted.
        wire: Dtype of the numbers on the wire.
    """

    model: str
    method: str
    options: tuple[tuple[str, Any], ...] = ()
    budgets: tuple[tuple[int, int], ...] = ((0, 8),)
    changes: tuple[tuple[str, Any], ...] = ()
    rounds: int = 1
    wire: torch.dtype = torch.bfloat16

    def info(self) -> ModelInfo:
        return _info(self.model, self.changes)

    def clients(self) -> list[ClientInfo]:
        """Returns its clients in the order of the budgets, with equal numbers of examples."""
        tiers = {pair: Budget(f"b{number}", *pair) for number, pair in enumerate(dict.fromkeys(self.budgets), start=1)}
        return [ClientInfo(index, tiers[pair], 100) for index, pair in enumerate(self.budgets)]


@dataclass(frozen=True)
class Claim:
    """A published figure, and a setting under which we count it.

    Attributes:
        paper: Short name of the paper.
        where: Table or section.
        what: The method or model that the figure is about.
        last_digit: The unit of its last printed digit; figures that round to the same are equal.
        settings: The settings that the paper leaves open, in words.
        unit: Divisor of our figure.
        why: Why the published figure cannot be reproduced; empty where it can.
    """

    paper: str
    where: str
    what: str
    quantity: Quantity
    published: float
    last_digit: float
    setup: Setup
    settings: str
    unit: float = 1.0
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """A claim with our figure in the unit of the published one."""

    claim: Claim
    ours: float

    @property
    def deviation(self) -> float:
        """Relative deviation of our figure from the published one."""
        return self.ours / self.claim.published - 1

    @property
    def verdict(self) -> Verdict:
        difference = abs(self.ours - self.claim.published)
        if difference <= 0.5 * self.claim.last_digit * (1 + 1e-9):
            return "equal"
        if self.claim.quantity == "forward FLOPs, % of those with all experts active":
            return "within 2 points" if difference <= 2 else "differs"
        return "within 1 %" if abs(self.deviation) <= 0.01 else "differs"

    def record(self) -> dict[str, Any]:
        claim = self.claim
        setup = {key: value for key, value in asdict(claim.setup).items() if key != "wire"}
        return {
            "paper": claim.paper,
            "where": claim.where,
            "what": claim.what,
            "quantity": claim.quantity,
            "settings": claim.settings,
            "published": claim.published,
            "ours": self.ours,
            "deviation": self.deviation,
            "verdict": self.verdict,
            "why": claim.why,
            "setup": {
                **setup,
                "options": dict(claim.setup.options),
                "changes": dict(claim.setup.changes),
                "wire": str(claim.setup.wire).removeprefix("torch."),
            },
        }


def compare(claim: Claim, build: Build) -> Comparison:
    """Computes our figure for a claim; `build` is `fedguild.methods.build_method`."""
    return Comparison(claim, _figure(claim.quantity, claim.setup, build) / claim.unit)


def _figure(quantity: Quantity, setup: Setup, build: Build) -> float:
    """Returns a quantity of a federation: a count, FLOPs, per cent, or bytes."""
    if quantity in ("upload", "download"):
        return _traffic(setup, build)[quantity == "download"]
    counted, full = _costs(setup, build)
    figures: dict[Quantity, float] = {
        "parameters": counted.parameters,
        "active parameters": counted.active_parameters,
        "trainable": counted.trainable,
        "active trainable": counted.active_trainable,
        "forward FLOPs": counted.table_flops(TOKENS),
        "forward FLOPs of P_a rounded": 2 * TOKENS * round(counted.active_parameters, -8),
        "forward FLOPs, % of those with all experts active": 100
        * counted.table_flops(TOKENS)
        / full.table_flops(TOKENS),
    }
    return figures[quantity]


@cache
def _costs(setup: Setup, build: Build) -> tuple[Cost, Cost]:
    """Returns the cost of a client with the first budget, and with all of the model's active experts."""
    model, method = setup.info(), build(setup.method, dict(setup.options))
    active, rank = setup.budgets[0]
    plans = [method.plan(model, Budget("b", experts, rank)) for experts in (active, model.top_k)]
    budgeted, full = (cost(model, plan) for plan in plans)
    return budgeted, full


@cache
def _traffic(setup: Setup, build: Build) -> tuple[float, float]:
    method = build(setup.method, dict(setup.options))
    counted = exchanges(
        method, setup.info(), setup.clients(), rounds=setup.rounds, absences=False, wire_dtype=setup.wire
    )
    later = list(chain(*counted.later))
    return fmean(sum(one.upload.values()) for one in later), fmean(sum(one.download.values()) for one in later)


@cache
def _info(name: str, changes: tuple[tuple[str, Any], ...]) -> ModelInfo:
    known = find_known(name)
    if known is None:
        raise ModelError(f"'{name}' is not a known model.", f"Known: {', '.join(m.name for m in known_models())}.")
    return describe_architecture({**known.config, **dict(changes)}, known.hub_id)
