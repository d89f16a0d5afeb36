"""A whole run on an encoder-decoder model with experts."""

from __future__ import annotations

import pytest

from fedguild.runs import experiment
from tests.runs.runs import ended, save_model, small_config

ONE_EXPERT = "federation.budgets=[{name: all, active_experts: 1, rank: 3}]"
ENCODER, DECODER = "encoder.block.1.layer.1.mlp.experts", "decoder.block.1.layer.2.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(
        tmp_path_factory.mktemp("models") / "switch", "switch", initializer_factor=1.0, expert_capacity=1024
    )


@pytest.mark.parametrize(
    "method", [pytest.param("name: fedit", marks=pytest.mark.long), "name: flame", "name: fedalign-moe, experts: full"]
)
def test_a_run_trains_both_sides_and_evaluates(folder, tmp_path, method):
    options = ("federation.rounds=2", "training.steps=8", "training.learning_rate=0.02", ONE_EXPERT)
    experiment.run(small_config(folder, *options, f"method={{{method}}}", base="fedit/tiny-tasks"), tmp_path)
    done = ended(tmp_path)
    trained = {name for name, tensor in done.state.tensors.items() if bool(tensor.any())}
    for module in (f"{ENCODER}.up_proj", f"{DECODER}.down_proj"):
        assert any(name.endswith((f"{module}.lora_B", f"{module}.delta")) for name in trained)
    losses = {
        number: [
            record["train_loss"]
            for record in done.records
            if (record["kind"], record.get("round")) == ("client", number)
        ]
        for number in (1, 2)
    }
    assert all(later < earlier for earlier, later in zip(losses[1], losses[2], strict=True))
    assert {record["round"] for record in done.records if record["kind"] == "evaluation"} == {0, 1, 2}
    for record in done.records:
        if record["kind"] == "routing":
            assert all(sum(layer) == pytest.approx(1.0, abs=1e-5) for client in record["frequency"] for layer in client)
