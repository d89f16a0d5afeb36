"""Exports of mixtures of experts whose family has no description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fedguild.export.adapter import obstacle, write_adapter
from fedguild.export.merged import write_merged
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from tests.export.conftest import assert_same_logits, deployment_of, plain_logits, slot_logits
from tests.undescribed import UNDESCRIBED, as_backbone, plain

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


@pytest.mark.parametrize("family", UNDESCRIBED)
def test_exports_give_our_logits(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an adapter of peft on the published model, and merged into its weights, under its published names."""
    model = plain(family, torch.float32)
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    model.save_pretrained(base)
    backbone = as_backbone(model, monkeypatch)
    backbone.tokenizer = None
    targets = tuple(sorted({linear.group for linear in backbone.info.linears}))
    deployment = deployment_of(backbone, AdapterPlan((Lora(3, 0.7, targets),)))
    ours = slot_logits(backbone, deployment)
    for folder in (adapter, merged):
        folder.mkdir()
    refused = obstacle(backbone.info, deployment)
    assert bool(refused) == (family == "nemotron_h"), refused
    if not refused:
        write_adapter(adapter, backbone.info, deployment, base=str(base))
    write_merged(merged, backbone, deployment)
    published = AutoModelForCausalLM.from_pretrained(base)
    assert (plain_logits(published) - ours).abs().max() > 0.01 * ours.abs().max()
    if not refused:
        assert_same_logits(plain_logits(PeftModel.from_pretrained(published, adapter)), ours)
    loaded, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same_logits(plain_logits(loaded), ours)
