"""The mismatch of layers at a budget's active experts, against its definition, and in a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fedguild.measuring.log.records import ObservationRecord, RunLog
from fedguild.measuring.scores.likelihood import Candidates, candidate_losses
from fedguild.measuring.scores.mismatch import ROUTER, SCALE, Mismatch
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from tests.backbones import PAD, TOP_K, lora_plan, random_adapter, random_rows, tiny_backbone
from tests.oracles import diagnosis as oracle
from tests.oracles.experts import adapted_experts
from tests.oracles.routing import route_token
from tests.runs.runs import save_model, small_config

BUDGETS = (1, 2, TOP_K)
SCALE_OF_LORA = 0.5


def rows_of(lengths: list[int], seed: int) -> list[Candidates]:
    return [Candidates(tuple(row[:-2]), (tuple(row[-2:-1]), tuple(row[-1:]))) for row in random_rows(lengths, seed)]


def test_the_figures_are_those_of_the_definitions() -> None:
    """Three budgets with LoRA and output scales of their own; y by token, with every expert's weights formed."""
    backbone = tiny_backbone(dtype=torch.float64)
    plans = [
        lora_plan(2, SCALE_OF_LORA, ("attention", "router", "experts"), k, output_scale="per_layer") for k in BUDGETS
    ]
    adapters = [random_adapter(backbone.info, plan, seed) for seed, plan in enumerate(plans)]
    rows = [rows_of([5, 9], 1), rows_of([7], 2), rows_of([4, 6, 8], 3)]
    seen: list[dict[str, torch.Tensor]] = [{} for _ in backbone.moe]
    hooks = []
    with SlotModel(backbone, plans) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        for layer, own in zip(backbone.moe, seen, strict=True):

            def note(_: object, args: tuple[torch.Tensor, ...], output: torch.Tensor, own: dict = own) -> None:
                current = backbone.runtime.current
                assert current is not None
                own["hidden"], own["output"] = args[0].detach(), output.detach()
                own["slot"] = current.slot_of_token(len(output), output.device)
                keep = current.keep(len(output))
                own["keep"] = torch.ones(len(output), dtype=torch.bool) if keep is None else keep

            def note_logits(_: object, __: object, output: tuple[torch.Tensor, ...], own: dict = own) -> None:
                own["logits"] = output[0].detach()

            hooks += [layer.experts.register_forward_hook(note), layer.router.register_forward_hook(note_logits)]
        mismatch = Mismatch(backbone.moe, len(plans))
        with mismatch.observing():
            losses = candidate_losses(model, rows, 10_000, PAD)
        for hook in hooks:
            hook.remove()
        assert not any(layer.observers for layer in backbone.moe)
        assert losses == candidate_losses(model, rows, 10_000, PAD), "looking changes nothing"
        found = {one.name: one for one in mismatch.observations(["b1", "b2", "b3"])}
    assert list(found[SCALE].columns) == list(found[ROUTER].columns) == ["b1", "b2", "b3"]
    for index, (layer, own) in enumerate(zip(backbone.moe, seen, strict=True)):
        assert not bool(own["keep"].all()), "some of it is padding"
        full = _outputs(backbone, layer, own, adapters)
        for slot in range(len(plans)):
            places = [at for at in range(len(full)) if own["slot"][at] == slot and own["keep"][at]]
            scale, left = oracle.mismatch([own["output"][at].numpy() for at in places], [full[at] for at in places])
            assert float(found[SCALE].values[index, slot]) == pytest.approx(scale, rel=1e-6)
            assert float(found[ROUTER].values[index, slot]) == pytest.approx(left, rel=1e-6, abs=1e-6)
    first, *_, last = found[ROUTER].values.mT.tolist()
    assert min(first) > 0.05
    assert last == pytest.approx([0.0, 0.0], abs=1e-6), "at all experts a factor repairs all there is"


def _outputs(backbone, layer, own, adapters) -> list[np.ndarray]:
    """Every token's y by the oracles of the experts and of the routing."""
    frozen = layer.frozen()
    gate, up = frozen.gate_up.double().chunk(2, dim=1)
    lora = {
        name: tuple(
            torch.stack([adapter[f"{layer.info.experts}.{name}.lora_{factor}"] for adapter in adapters])
            for factor in "AB"
        )
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    outputs = []
    for at in range(len(own["hidden"])):
        routing = route_token(own["logits"][at].tolist(), TOP_K)
        outputs.append(
            adapted_experts(
                own["hidden"][at : at + 1],
                torch.tensor([list(routing.values())], dtype=torch.float64),
                torch.tensor([list(routing)]),
                own["slot"][at : at + 1],
                None,
                (gate, up, frozen.down.double()),
                lora,
                torch.full((len(adapters),), SCALE_OF_LORA, dtype=torch.float64),
                {},
            )[0]
            .detach()
            .numpy()
        )
    return outputs


def test_a_run_reports_them_with_every_evaluation(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    settings = ("federation.rounds=2", "evaluation.every=2", "evaluation.max_examples=2", "evaluation.diagnostics=true")
    experiment.run(small_config(model, *settings, base="flame/tiny-tasks"), tmp_path / "run")
    records = [one for one in RunLog(tmp_path / "run").read() if isinstance(one, ObservationRecord)]
    found = {one.name: one for one in records if one.name in (SCALE, ROUTER)}
    assert sum(one.name in found for one in records) == len(found) == 2
    for one in found.values():
        assert one.round == 2
        assert one.columns == ["large", "small"]
        assert all(math.isfinite(value) and value >= 0 for row in one.values for value in row)
    assert all(large < small for large, small in found[ROUTER].values), "the fewer experts, the farther"
