"""Exports of what a run merged into its backbone, in the hands of plain transformers and peft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from fedguild.client.merge_ledger import by_version
from fedguild.config import Config
from fedguild.core.errors import ModelError
from fedguild.core.payload import with_part
from fedguild.export.adapter import obstacle, write_adapter
from fedguild.export.merged import write_merged
from fedguild.export.weights import in_one_adapter
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.folding import folded
from fedguild.model.plan import AdapterPlan
from fedguild.runs import experiment
from fedguild.runs.exporting import Form, Subject, export
from fedguild.server.method import Deployment
from tests.backbones import random_adapter, tiny_model
from tests.export.conftest import BUDGETS, assert_same_logits, backbone_of, deployment_of, plain_logits, slot_logits

BaseFolder = Callable[..., Path]
EVERYTHING = ("attention", "router", "experts")

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


def merged_deployment(backbone: Backbone, plan: AdapterPlan, targets: tuple[str, ...] | None = None) -> Deployment:
    """Random factors, on two versions of random changes of other ranks."""
    merged: dict[str, Tensor] = {}
    for version, rank in ((1, 2), (2, 4)):
        change = random_adapter(
            backbone.info, AdapterPlan((Lora(rank, 1.0, targets or plan.lora.targets),)), seed=version, size=0.2
        )
        merged |= {f"{version}/{name}": value.float() for name, value in change.items()}
    return Deployment(plan, deployment_of(backbone, plan).tensors, merged)


def our_logits(backbone: Backbone, deployment: Deployment) -> Tensor:
    with backbone.merged(deployment.merged):
        return slot_logits(backbone, deployment)


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "llama"])
def test_transformers_and_peft_give_our_logits(family: str, base_folder: BaseFolder, tmp_path: Path) -> None:
    """The merged changes are far from nothing, and the backbone is left as it was."""
    base = base_folder(family)
    backbone = backbone_of(base)
    before = backbone.fingerprint()
    targets = EVERYTHING if backbone.info.moe else ("attention", "mlp")
    deployment = merged_deployment(backbone, AdapterPlan((Lora(3, 0.7, targets),)))
    ours = our_logits(backbone, deployment)
    assert (slot_logits(backbone, deployment) - ours).abs().max() > 0.05 * ours.abs().max()
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "merged", backbone, deployment)
    assert_same_logits(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), ours)
    (tmp_path / "adapter").mkdir()
    assert obstacle(backbone.info, deployment) == ""
    write_adapter(tmp_path / "adapter", backbone.info, deployment, base=str(base))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert loaded.peft_config["default"].r == 3 + 2 + 4
    assert_same_logits(plain_logits(loaded), ours)
    assert backbone.fingerprint() == before


def test_changes_that_were_folded_are_exported_in_the_merged_form(base_folder: BaseFolder, tmp_path: Path) -> None:
    """One of the two versions dense: our own logits stay, and so do those of plain transformers."""
    base = base_folder("olmoe")
    backbone = backbone_of(base)
    factors = merged_deployment(backbone, AdapterPlan((Lora(3, 0.7, EVERYTHING),)))
    versions = by_version(factors.merged)
    dense = {f"1/{name}": value for name, value in folded([versions[1]]).items()}
    deployment = replace(factors, merged={**dense, **with_part("2", versions[2])})
    ours = our_logits(backbone, deployment)
    torch.testing.assert_close(ours, our_logits(backbone, factors), rtol=1e-4, atol=1e-4)
    assert obstacle(backbone.info, deployment) == "its run folded its many changes into whole weights"
    write_merged(tmp_path, backbone, deployment)
    assert_same_logits(plain_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), ours)


def test_a_factor_in_the_middle_is_folded_before_the_changes_join() -> None:
    backbone = make_backbone(tiny_model(), None, name="tiny")
    plan = AdapterPlan((Lora(3, 0.7, EVERYTHING, middle=True, frozen=("lora_A", "lora_B")),))
    changes = merged_deployment(backbone, AdapterPlan((Lora(3, 0.7, EVERYTHING),))).merged
    deployment = Deployment(plan, deployment_of(backbone, plan).tensors, changes)
    found = in_one_adapter(deployment)
    assert (found.plan.lora.rank, found.plan.lora.middle, found.merged) == (9, False, {})
    assert_same_logits(slot_logits(backbone, found), our_logits(backbone, deployment))


def test_what_an_adapter_does_not_carry_is_named(tmp_path: Path) -> None:
    backbone = make_backbone(tiny_model(), None, name="tiny")
    beside = merged_deployment(backbone, AdapterPlan((Lora(2, 1.0, ("q_proj",)),)), ("q_proj", "v_proj"))
    assert "merged changes beside the adapter's modules" in obstacle(backbone.info, beside)
    assert "v_proj" in obstacle(backbone.info, beside)
    wide = merged_deployment(backbone, AdapterPlan((Lora(11, 1.0, ("q_proj",)),)))
    assert obstacle(backbone.info, wide) == (
        "what its run merged makes it an adapter of rank 17, beyond the model's width of 16"
    )
    with pytest.raises(ModelError, match="adapter of rank 17"):
        write_adapter(tmp_path, backbone.info, wide, base="base")


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_runs_merges_are_exported(form: Form, olmoe_folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "name": "stacked",
            "method": {"name": "fedex-lora", "rank": 2, "targets": ["attention", "experts"]},
            "model": {"path": str(olmoe_folder), "device": "cpu"},
            "data": {"options": {"train_examples": 40, "families": ["sum"]}, "partition": {"minimum": 4}},
            "federation": {"clients": 2, "rounds": 2, "budgets": BUDGETS},
            "training": {"steps": 2, "learning_rate": 0.05, "batch_size": 2},
            "evaluation": {"every": 2, "max_examples": 1, "max_new_tokens": 1},
        }
    )
    experiment.run(config, tmp_path / "run")
    assert export(tmp_path / "run", Subject("large"), tmp_path / "out", form).format == form
    restored, state, _ = experiment.restore(tmp_path / "run")
    deployment = restored.method.deploy(state, restored.backbone.info, restored.budgets[0])
    assert deployment is not None
    assert deployment.merged
    plain = AutoModelForCausalLM.from_pretrained(olmoe_folder if form == "peft" else tmp_path / "out")
    exported = PeftModel.from_pretrained(plain, tmp_path / "out") if form == "peft" else plain
    assert_same_logits(plain_logits(exported), our_logits(restored.backbone, deployment))
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("| merged into the base | the changes of 2 rounds |" in card) is (form == "merged")
    assert ("| LoRA | rank 6, scale 1," in card) is (form == "peft")
