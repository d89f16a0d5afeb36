"""The scale convention of the methods of unequal ranks: common, own, or a number, the same words for all."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from fedguild.client.budget import Budget
from fedguild.config import load_config
from fedguild.config.table import table_cells, tables
from fedguild.core.errors import ConfigError
from fedguild.methods import build_method
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster
from tests.backbones import random_adapter, tiny_backbone
from tests.methods.federation import LARGE, SMALL, client

DEFAULTS = {
    "fedit": "common",
    "hetlora": "common",
    "flexlora": "own",
    "flora": "own",
    "florist": "own",
    "trivial": "own",
}
"""Every method of unequal ranks -> its default, which keeps what it computed."""
RANKED = {"fedit": {"rank": 4, "rank_by_budget": True}, "hetlora": {"rank": 4}, "flexlora": {"rank": 4}}
"""Where the highest rank is the server's; elsewhere it is `highest_rank`."""


def scale(name: str, rank: int, **options: object) -> float:
    ranks = RANKED.get(name, {"highest_rank": 4})
    method = build_method(name, {"alpha": 6.0, "targets": ["attention"], **ranks, **options})
    return method.plan(tiny_backbone("olmoe").info, Budget("one", 4, rank)).lora.scale


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_three_conventions(name: str) -> None:
    """alpha = 6, highest rank 4: common 1.5 for all, own 6 / r_c, 2 is 2."""
    for rank in (1, 3, 4):
        assert scale(name, rank, scale="common") == 1.5
        assert scale(name, rank, scale="own") == 6.0 / rank
        assert scale(name, rank, scale=2) == 2.0
        assert scale(name, rank) == scale(name, rank, scale=DEFAULTS[name])


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("wrong", ["mine", 0, -1.0, None])
def test_other_conventions_are_refused(name: str, wrong: object) -> None:
    with pytest.raises((ConfigError, ValidationError)):
        build_method(name, {"scale": wrong})


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_budget_above_the_highest_rank_has_no_common_scale(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has rank 5, but (the global adapter has rank|method\.highest_rank is) 4"):
        scale(name, 5, scale="common")


@pytest.mark.parametrize("name", ["hetlora", "flexlora", "trivial"])
def test_a_budget_runs_its_model_at_its_own_scale(name: str) -> None:
    """The deployed model's change of a weight is the plan's scale times B A of what is deployed."""
    backbone = tiny_backbone("olmoe")
    ranks = {"rank": 3} if name in RANKED else {}
    method = build_method(name, {**ranks, "alpha": 6.0, "scale": "own", "targets": ["q_proj"]})
    state = method.start(backbone.info, Roster([LARGE, SMALL], [client(0, LARGE)]), torch.Generator().manual_seed(0))
    tokens = torch.arange(3, 13)[None]
    for budget in (LARGE, SMALL):
        deployed = method.deploy(state, backbone.info, budget)
        assert deployed is not None
        assert deployed.plan.lora.scale == 6.0 / budget.rank
        tensors = random_adapter(backbone.info, deployed.plan, 1)
        outputs = []
        for factor in (1.0, 6.0 / budget.rank):
            plan = deployed.plan if factor == 1.0 else deployed.plan.with_lora(scale=1.0)
            scaled = {n: v * factor if n.endswith("lora_B") else v for n, v in tensors.items()}
            with SlotModel(backbone, [plan]) as model, torch.no_grad():
                model.load(0, scaled)
                outputs.append(backbone.model(input_ids=tokens).logits)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


OF_RANKS = ("flame/", "ub-smoe/", "guild/")


@pytest.mark.parametrize("table", [table for table in tables() if table.name.startswith(OF_RANKS)])
def test_the_rows_of_a_table_share_one_convention(table) -> None:
    """In every column of FLAME's, UB-SMoE's and Guild's tables."""
    found: dict[str, set[object]] = {}
    for cell in table_cells(table.name, table.load()):
        config = load_config(cell.preset, [], between=cell.layers)
        if config.method.name in DEFAULTS and (
            config.method.name != "fedit" or config.method.options.get("rank_by_budget")
        ):
            options = build_method(config.method.name, config.method.options).settings
            found.setdefault(cell.column, set()).add(options.scale)
    assert all(len(conventions) == 1 for conventions in found.values()), found
