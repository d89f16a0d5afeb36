"""A round of the methods for mixtures of experts on every described family."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from fedguild.core.errors import ModelError
from fedguild.model.backbone import describe_config
from fedguild.runs import experiment
from tests.families import DESCRIBED, tiny_model
from tests.runs.runs import ended, save_model, small_config

ORDINARY = {("gpt_oss", "flame"), ("gpt_oss", "ub-smoe"), ("nemotron_h", "fedit"), ("nemotron_h", "fedalign-moe")}
OPTIONS = (
    "federation.rounds=1",
    "evaluation.max_examples=2",
    "method.targets=[router, experts]",
    "training.learning_rate=0.01",
)
METHODS = {
    "flame": OPTIONS,
    "fedit": OPTIONS,
    "fedalign-moe": (*OPTIONS[:2], "method.experts=full"),
    "ub-smoe": OPTIONS,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def saved(family: str) -> Path:
        if family not in folders:
            folders[family] = save_model(tmp_path_factory.mktemp(family) / family, family, make=tiny_model)
        return folders[family]

    return saved


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(*pair, marks=() if pair in ORDINARY else pytest.mark.long)
        for pair in itertools.product(DESCRIBED, METHODS)
    ],
)
def test_a_round_trains_routers_and_experts(
    family: str, method: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, options = folder_of(family), METHODS[method]
    model = describe_config(str(folder))
    budgets = [f"{{name: b{active}, active_experts: {active}, rank: 2}}" for active in {model.top_k, 1}]
    options = (*options, f"federation.budgets=[{', '.join(budgets)}]")
    base = f"{method}/tiny-tasks"
    if method == "ub-smoe" and model.moe[0].routing != "softmax":
        with pytest.raises(ModelError, match="needs a router that is a softmax over all experts"):
            experiment.run(small_config(folder, *options, base=base), tmp_path / "refused")
        options = (*options, "method.modulation=none", "method.gating=native")
    experiment.run(small_config(folder, *options, base=base), tmp_path)
    state = ended(tmp_path).state.tensors
    changed = {name for name, tensor in state.items() if name.endswith(("lora_B", "delta")) and tensor.any()}
    for moe in model.moe:
        assert any(moe.router in name for name in changed) is (method != "fedalign-moe")  # its gates are private
        assert all(any(f"{moe.experts}.{each}" in name for name in changed) for each in moe.projections)
