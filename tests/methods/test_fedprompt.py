"""FedPrompt: where the prompt starts, its mean, FedPrompt-FT, and what travels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from fedguild.config import load_config, presets
from fedguild.data.rendering import encode_prompt
from fedguild.methods.fedprompt import FedPrompt, FedPromptSettings
from fedguild.model.backbone import Backbone
from fedguild.model.packaged import PACKAGED
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD
from tests.methods.federation import LARGE, SMALL, Federation, client

NAME = "soft_prompt"
TEXT_IDS = [1, 7, 9, 4]


def fedprompt(**options: object) -> FedPrompt:
    return FedPrompt(FedPromptSettings(**{"tokens": 4, "text": "Answer.", **options}))


@pytest.fixture
def backbone(olmoe_backbone: Backbone) -> Backbone:
    """The small OLMoE with a tokenizer that knows one text."""
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END, encode=lambda *_, **__: list(TEXT_IDS))
    return replace(olmoe_backbone, tokenizer=tokenizer)


def test_the_start_is_the_texts_embeddings_and_never_travels(backbone: Backbone, tmp_path: Path) -> None:
    """Without learning, every client sends the rows that it has read itself; the first download is empty."""
    federation = Federation(backbone, fedprompt(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    state, method = federation.start(), federation.method
    assert not state.part("adapter")
    assert not method.download(state, federation.model, federation.clients[0]).tensors
    rows = backbone.model.get_input_embeddings().weight[TEXT_IDS]
    sent = federation.train(state, learning_rate=0.0)
    for part in sent:
        assert torch.equal(part.payload.tensors[f"adapter/{NAME}"], rows)
    deployment = method.deploy(state, federation.model, LARGE)
    with SlotModel(backbone, [deployment.plan]) as model:
        model.load(0, deployment.tensors)
        assert torch.equal(model.read(0)[NAME], rows)
    later = method.aggregate(state, sent)
    assert torch.equal(method.download(later, federation.model, federation.clients[0]).part("adapter")[NAME], rows)


def test_the_presets_count_their_texts_tokens() -> None:
    tokenizers = {
        name: AutoTokenizer.from_pretrained(str(folder))
        for name, folder in PACKAGED.items()
        if (folder / "tokenizer.json").exists()
    }
    counted = 0
    for preset in presets():
        if preset.method.name != "fedprompt":
            continue
        config = load_config(preset.name)
        if config.model.path in tokenizers:
            settings = FedPromptSettings(**config.method.options)
            assert settings.tokens == len(encode_prompt(settings.text, tokenizers[config.model.path])), preset.name
            counted += 1
    assert counted
