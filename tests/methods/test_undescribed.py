"""Methods on mixtures of experts whose family has no description: each trains, or names the families that have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedguild.client.budget import Budget
from fedguild.config import Config, load_config
from fedguild.core.errors import ModelError
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import Backbone
from fedguild.model.families import FAMILIES
from fedguild.runs.setup import fitted
from tests.backbones import END, PAD, is_released
from tests.families import tiny_backbone
from tests.methods.federation import Federation, client
from tests.methods.test_matrix import CASES, SGD_STEP
from tests.undescribed import UNDESCRIBED, as_backbone, plain

LARGE, SMALL = Budget("large", 0, 3), Budget("small", 0, 1)
CLIENTS = (client(0, LARGE, 4), client(1, SMALL, 5), client(2, SMALL, 3))
TWO_STEPS = SGD_STEP.model_copy(update={"steps": 2})
"""In the first step, LoRA's A has no gradient."""


def letters(text: str, **_: Any) -> list[int]:
    """Encodes a soft prompt's text."""
    return [1 + ord(letter) % 31 for letter in text]


@pytest.fixture(scope="module")
def backbone() -> Iterator[Backbone]:
    with pytest.MonkeyPatch.context() as patch:
        found = as_backbone(plain("gpt_oss", torch.float32), patch)
        found.tokenizer.encode = letters
        yield found


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config("fedit/tiny-tasks", [f"federation.clients={len(CLIENTS)}"])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_trains_or_names_the_families_that_have_what_it_needs(
    name: str, backbone: Backbone, config: Config, tmp_path: Path
) -> None:
    """With its default targets, which are fitted to the model; experts and routers are as before."""
    given = {option: value for option, value in CASES[name].options.items() if option not in ("targets", "gate")}
    method, before = build_method(name, given), backbone.fingerprint()
    if method.facts.needs_experts:
        with pytest.raises(ModelError) as refused:
            fitted(method, config, backbone.info)
        assert all(part in str(refused.value) for part in (method.title, "'gpt_oss'", *FAMILIES))
        return
    federation = Federation(backbone, fitted(method, config, backbone.info), CLIENTS, tmp_path)
    start = federation.start()
    for upload in federation.train(start, settings=TWO_STEPS):
        sent = upload.payload.tensors
        assert all(".self_attn." in key or "prompt" in key for key in sent), sorted(sent)
        assert any(not torch.equal(value, start.tensors.get(key, torch.empty(0))) for key, value in sent.items())
    assert backbone.fingerprint() == before


@pytest.mark.parametrize("family", [*UNDESCRIBED, "deepseek_v4", "falcon_mamba", "gemma4_unified_text", "gpt2"])
def test_clients_of_every_family_train(
    family: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine's own sizes of cohorts and passes.

    The config of Mamba, of DeepSeek-V4 and of Gemma 4 has no width of a head; GPT-2 has no linear layers.
    """
    if not is_released(family):
        pytest.skip(f"this transformers is too old for {family}")
    if family in UNDESCRIBED:
        backbone = as_backbone(plain(family, torch.float32), monkeypatch)
        assert backbone.info.undescribed
    else:
        backbone = tiny_backbone(family)
        backbone.tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END, encode=letters)
    method = build_method("fedprompt", {"tokens": 2}) if family == "gpt2" else build_method("fedit", {"rank": 2})
    federation = Federation(backbone, fitted(method, config, backbone.info), CLIENTS, tmp_path)
    for upload in federation.train(federation.start(), settings=TWO_STEPS):
        trained = [value for key, value in upload.payload.tensors.items() if key.endswith(("lora_B", "prompt"))]
        assert any(value.any() for value in trained)
