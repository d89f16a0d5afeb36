"""Plans as plain values: every method's plan comes back equal, and nothing else is built."""

from __future__ import annotations

import json

import pytest

from fedguild.client.budget import Budget
from fedguild.core.errors import FedGuildError
from fedguild.engines.plain_plans import CLASS, plain_plan, plan_from_plain
from fedguild.methods import METHODS, build_method
from tests.methods.test_matrix import CASES


@pytest.mark.parametrize("label", sorted(CASES))
def test_every_methods_plan_comes_back_equal(label, olmoe_backbone, llama_backbone):
    case = CASES[label]
    model = (llama_backbone if case.family == "llama" else olmoe_backbone).info
    method = build_method(label.partition(" ")[0], case.options)
    budget = Budget("all", 2 if model.moe else 0, 2)
    plan = type(method)(method.settings.fitted(model, 4, exact=True)).plan(model, budget)
    plain = plain_plan(plan)
    json.dumps(plain)
    again = plan_from_plain(plain)
    assert again == plan
    assert again.cohort_key == plan.cohort_key
    assert label.partition(" ")[0] in METHODS


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fedguild.nowhere:Part", "does not know fedguild.nowhere:Part"),
        ("os:system", "os:system is no part of an adapter"),
        ("fedguild.model.info:LinearInfo", "LinearInfo is no part of an adapter"),
    ],
)
def test_only_parts_are_built(name, reason):
    fields = {"name": "a", "group": "mlp", "inputs": 1, "outputs": 1} if "Linear" in name else {}
    with pytest.raises(FedGuildError, match=reason):
        plan_from_plain({"parts": ({CLASS: name, **fields},), "active_experts": None})
