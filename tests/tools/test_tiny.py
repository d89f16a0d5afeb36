"""The embedded checkpoint: it loads as any other, is small, and knows the families it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeForCausalLM

from fedguild.data.corpora import tasks
from fedguild.model.packaged import EMBEDDED, PACKAGED
from tools.tiny.build import build
from tools.tiny.pretrain import Recipe
from tools.tiny.scoring import exact_match

CHECKPOINT = PACKAGED[EMBEDDED]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def held_out(name: str, count: int) -> Any:
    return tasks.load(train_examples=0, test_examples=count, families=(name,), seed=17).test


def test_it_is_a_small_olmoe(model: Any) -> None:
    assert isinstance(model, OlmoeForCausalLM)
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (16, 8)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (128, 4)
    assert model.config.norm_topk_prob is False
    assert model.config.max_position_embeddings >= 1024
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_900_000


def test_the_folder_stays_under_8_megabytes() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 8_000_000
    assert (CHECKPOINT / "README.md").read_text().count("python -m tools.tiny.build") == 1


@pytest.mark.parametrize("name", tasks.SEEN)
def test_it_knows_the_seen_families(model: Any, tokenizer: Any, name: str) -> None:
    assert exact_match(model, tokenizer, held_out(name, 64), active_experts=8) >= 0.9


def test_the_unseen_families_are_left_to_be_learned(model: Any, tokenizer: Any) -> None:
    scores = [exact_match(model, tokenizer, held_out(name, 64), active_experts=8) for name in tasks.UNSEEN]
    assert sum(scores) / len(scores) <= 0.3


def test_exact_match_agrees_with_greedy_generation(model: Any, tokenizer: Any) -> None:
    examples = [*held_out("reverse", 12), *held_out("repeated", 12), *held_out("rotate", 12)]
    right = 0
    for example in examples:
        prompt = tokenizer(example.prompt, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :].tolist()
        ended = tokenizer.eos_token_id in ids
        right += ended and tokenizer.decode(ids, skip_special_tokens=True).strip() == example.response
    assert 0 < right < len(examples)
    assert exact_match(model, tokenizer, examples, active_experts=8) == pytest.approx(right / len(examples))


def test_the_tokenizer_covers_every_byte_and_keeps_digits_apart(tokenizer: Any) -> None:
    assert len(tokenizer) <= 1024
    everything = "".join(map(chr, range(0x250))) + "".join(map(chr, range(0x4E00, 0x4F00)))
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert len(tokenizer.encode(" 2024")) == 4
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == tokenizer.bos_token_id


@pytest.mark.long
def test_the_command_rebuilds_a_checkpoint_and_its_card(tmp_path: Path) -> None:
    recipe = Recipe(steps=2, batch_size=8, english_every=2)
    first, second = (build(tmp_path / name, recipe=recipe, seed=1, examples=4) for name in ("first", "second"))
    assert first == second
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    assert "--steps 2 --seed 1" in (tmp_path / "first" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "first").config.num_experts == 16
