"""A vocabulary as large as a real model's, everything else tiny: every method takes a step whose logits fill chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.methods import METHODS, build_method
from fedguild.model import chunked_loss
from tests.backbones import tiny_backbone
from tests.methods.federation import Federation
from tests.methods.test_matrix import CASES, CLIENTS, SGD_STEP

WORDS = 50_000


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_step_in_chunks_of_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone is new, so the first pass in chunks is the method's own. The update is that of whole logits."""
    found = []
    for rows in (4, WORDS):
        monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", rows * WORDS * 4)
        backbone = tiny_backbone(CASES[name].family, vocab_size=WORDS)
        backbone.tokenizer.encode = lambda text, **_: [1 + ord(letter) % 31 for letter in text]
        federation = Federation(backbone, build_method(name, CASES[name].options), CLIENTS, tmp_path / str(rows))
        found.append(federation.train(federation.start(), settings=SGD_STEP))
    for ours, whole in zip(*found, strict=True):
        assert ours.payload.tensors.keys() == whole.payload.tensors.keys()
        for key, value in whole.payload.tensors.items():
            torch.testing.assert_close(ours.payload.tensors[key], value, rtol=1e-4, atol=1e-5)
