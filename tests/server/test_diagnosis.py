"""Figures of what averaging does to the uploads, against the definitions, and in a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.errors import ConfigError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.measuring.log.records import ObservationRecord, RunLog
from fedguild.measuring.scores.mismatch import ROUTER, SCALE
from fedguild.model.info import LinearInfo, ModelInfo, MoeInfo
from fedguild.runs import experiment
from fedguild.runs.setup import prepare
from fedguild.server.diagnosis import IDLE, INEXACTNESS, SHRINKAGE, Diagnosis
from fedguild.server.method import Observation, Upload
from tests.oracles import diagnosis as oracle
from tests.runs.runs import assert_same, ended, small_config

EXPERTS, RANK = 3, 2
MODEL = ModelInfo(
    name="m",
    family="olmoe",
    hidden=4,
    layers=1,
    vocabulary=8,
    parameters=0,
    linears=(LinearInfo("layers.0.q_proj", "attention", 4, 4),),
    moe=(MoeInfo("layers.0.mlp", "layers.0.mlp.gate", "layers.0.mlp.experts", EXPERTS, 2, 4, 5),),
)
SHAPES = {
    "layers.0.q_proj.lora_A": (RANK, 4),
    "layers.0.q_proj.lora_B": (4, RANK),
    "layers.0.mlp.gate.lora_A": (RANK, 4),
    "layers.0.mlp.gate.lora_B": (EXPERTS, RANK),
    "layers.0.mlp.experts.up_proj.lora_A": (EXPERTS, RANK, 4),
    "layers.0.mlp.experts.up_proj.lora_B": (EXPERTS, 5, RANK),
}
GROUPS = {"attention": "q_proj", "routers": "gate", "experts": "experts.up_proj"}
EXAMPLES = (10, 30, 60)


def payload(seed: int) -> Payload:
    rng = torch.Generator().manual_seed(seed)
    return Payload.of({ADAPTER: {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}})


def figures(
    state: Payload, uploads: list[Payload], frequency: dict[int, torch.Tensor] | None = None
) -> dict[str, Observation]:
    diagnosis = Diagnosis(state, MODEL)
    budget = Budget("all", 2, RANK)
    for i, each in enumerate(uploads):
        diagnosis.look_at(Upload(1, ClientInfo(i, budget, EXAMPLES[i]), each))
    return {one.name: one for one in diagnosis.observations(frequency)}


def test_the_figures_are_those_of_the_definitions() -> None:
    state, uploads = payload(0), [payload(seed) for seed in (1, 2, 3)]
    found = figures(state, uploads)
    shares = [examples / 100 for examples in EXAMPLES]
    before = state.part(ADAPTER)
    after = [upload.part(ADAPTER) for upload in uploads]
    shrunk = dict(zip(found[SHRINKAGE].rows, found[SHRINKAGE].values.tolist(), strict=True))
    missed = dict(zip(found[INEXACTNESS].rows, found[INEXACTNESS].values.tolist(), strict=True))
    assert sorted(shrunk) == sorted(f"{group} {factor}" for group in GROUPS for factor in "AB")
    assert sorted(missed) == sorted(GROUPS)
    for group, part in GROUPS.items():
        for factor in "AB":
            (name,) = (name for name in SHAPES if name.endswith(f"{part}.lora_{factor}"))
            changes = [[(adapter[name] - before[name]).double().numpy()] for adapter in after]
            assert shrunk[f"{group} {factor}"] == pytest.approx(oracle.shrinkage(changes, shares), rel=1e-6)
        a, b = (next(name for name in SHAPES if name.endswith(f"{part}.lora_{factor}")) for factor in "AB")
        count = EXPERTS if group == "experts" else 1
        modules = [
            [
                (
                    np.reshape(one[b].double().numpy(), (count, -1, RANK))[m],
                    np.reshape(one[a].double().numpy(), (count, RANK, -1))[m],
                )
                for one in after
            ]
            for m in range(count)
        ]
        assert missed[group] == pytest.approx(oracle.inexactness(modules, shares), rel=1e-6)


def test_equal_changes_do_not_shrink_and_orthogonal_ones_by_their_number() -> None:
    """Equal uploads: 1 and 0. The squared mean of three orthogonal changes, weighed alike, is a third of theirs: 3."""
    state = Payload.of({ADAPTER: {name: torch.zeros(shape) for name, shape in SHAPES.items()}})
    equal = figures(state, [payload(1)] * 3)
    assert equal[SHRINKAGE].values.tolist() == pytest.approx([1.0] * 6)
    assert equal[INEXACTNESS].values.tolist() == pytest.approx([0.0] * 3, abs=1e-6)
    apart = []
    for client in range(3):
        tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for tensor in tensors.values():
            tensor.view(-1)[client] = 2.0
        apart.append(Payload.of({ADAPTER: tensors}))
    budget, diagnosis = Budget("all", 2, RANK), Diagnosis(state, MODEL)
    for i, each in enumerate(apart):
        diagnosis.look_at(Upload(1, ClientInfo(i, budget, 5), each))
    (shrunk, *_) = diagnosis.observations()
    assert shrunk.values.tolist() == pytest.approx([3.0] * 6)


def test_an_expert_is_idle_below_a_tenth_of_an_even_share() -> None:
    """Two clients, one layer: the first leaves out expert 2, the second nothing, and together they use it."""
    frequency = {0: torch.tensor([[1.0, 1.0, 0.0]]), 1: torch.tensor([[0.7, 0.7, 0.6]])}
    (idle,) = (one for name, one in figures(payload(0), [payload(1)], frequency).items() if name == IDLE)
    assert idle.values.tolist() == [[0.0, pytest.approx(1 / 6)]]


def test_a_tensor_that_one_client_has_in_another_rank_is_in_no_figure() -> None:
    smaller = {
        name: tensor[:1] if name.endswith("q_proj.lora_A") else tensor
        for name, tensor in payload(2).part(ADAPTER).items()
    }
    found = figures(payload(0), [payload(1), Payload.of({ADAPTER: smaller}), payload(3)])
    assert "attention A" not in found[SHRINKAGE].rows
    assert "attention" not in found[INEXACTNESS].rows
    assert "attention B" in found[SHRINKAGE].rows
    assert not figures(payload(0), [payload(1)]), "one upload alone is not averaged"


def test_a_run_reports_them_and_ends_as_without(olmoe_folder: Path, tmp_path: Path) -> None:
    settings = ("federation.rounds=1", "evaluation.max_examples=2")
    for name in ("plain", "diagnosed"):
        given = [*settings, f"evaluation.diagnostics={'true' if name == 'diagnosed' else 'false'}"]
        config = small_config(olmoe_folder, *given, base="flame/tiny-tasks")
        experiment.run(config, tmp_path / name)
    records = [one for one in RunLog(tmp_path / "diagnosed").read() if isinstance(one, ObservationRecord)]
    assert {SHRINKAGE, INEXACTNESS, IDLE} <= {record.name for record in records}
    (shrunk,) = (record for record in records if record.name == SHRINKAGE)
    assert all(value >= 1 - 1e-6 for row in shrunk.values for value in row), (
        "a mean is longer than what it is a mean of"
    )
    plain, diagnosed = ended(tmp_path / "plain"), ended(tmp_path / "diagnosed")
    new = [one for one in diagnosed.records if one.get("name") not in (SHRINKAGE, INEXACTNESS, IDLE, SCALE, ROUTER)]
    diagnosed.records[:] = new
    assert_same(diagnosed, plain)
    secure = small_config(
        olmoe_folder,
        *settings,
        "evaluation.diagnostics=true",
        "privacy.unit=client",
        "privacy.noise_multiplier=1",
        base="fedit/tiny-tasks",
    )
    with pytest.raises(ConfigError, match=r"evaluation\.diagnostics compares single uploads"):
        prepare(secure, tmp_path / "private")
