"""Soft prompts of several slots against plain models behind one prompt, one row at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ConfigError, ModelError
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.measuring.scores.likelihood import Candidates, candidate_losses
from fedguild.methods.fedptuning.encoded_prompt import EncodedPrompt, encoded_prompt
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.soft_prompt import SoftPrompt, widened
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD, random_rows, tiny_backbone, tiny_model
from tests.oracles import soft_prompt as oracle
from tests.oracles.soft_prompt import PromptedModel

FAMILIES = ("olmoe", "mixtral", "deepseek_v2 greedy", "llama", "qwen2")
LENGTHS = ((5, 9, 4), (), (7,), (6, 3))
"""Rows of four slots; the second has none."""
TOKENS = 3


def plan(*parts: object) -> AdapterPlan:
    return AdapterPlan((*tuple(parts),))  # type: ignore[arg-type]


def prompts(hidden: int, count: int = len(LENGTHS)) -> list[Tensor]:
    return [
        torch.randn(TOKENS, hidden, generator=torch_rng(slot, "prompt"), dtype=torch.float64) for slot in range(count)
    ]


def encoded_rows() -> list[list[Encoded]]:
    return [
        [Encoded(tuple(row), 2) for row in random_rows(list(lengths), slot)] for slot, lengths in enumerate(LENGTHS)
    ]


def loaded(backbone: Backbone, own: list[Tensor]) -> SlotModel:
    model = SlotModel(backbone, [plan(SoftPrompt(len(own[0])))] * len(own))
    for slot, prompt in enumerate(own):
        model.load(slot, {"soft_prompt": prompt})
    return model


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients(family: str, attention: str) -> None:
    """fp64: each slot's rows as its own plain model has them, whatever the padding and the company."""
    backbone = tiny_backbone(family, dtype=torch.float64, attn_implementation=attention)
    plain = tiny_model(family, dtype=torch.float64, attn_implementation=attention).requires_grad_(False)
    own, rows = prompts(backbone.info.hidden), encoded_rows()
    with loaded(backbone, own) as model:
        losses = model.token_losses(collate(rows, PAD))
        losses.square().sum().backward()
        gradient = model.trainables["soft_prompt"].stored.grad
        assert gradient is not None
    expected = []
    for slot, slot_rows in enumerate(rows):
        prompt = own[slot].clone().requires_grad_(True)
        alone = [PromptedModel(plain, prompt).losses(row.input_ids, row.prompt_length) for row in slot_rows]
        expected += alone
        if alone:
            torch.cat(alone).square().sum().backward()
            torch.testing.assert_close(gradient[slot], prompt.grad, rtol=1e-8, atol=1e-10)
        else:
            assert gradient[slot].abs().max() == 0
    torch.testing.assert_close(losses, torch.cat(expected), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_behind_one_prompt(family: str) -> None:
    """Several candidates in a row get what each gets alone; the prompt's positions count in no likelihood."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    plain, own = tiny_model(family, dtype=torch.float64), prompts(backbone.info.hidden, 2)
    texts = random_rows([4, 1, 3, 2, 6, 2, 1], 9)
    rows = [
        [Candidates(tuple(texts[0]), (tuple(texts[1]), tuple(texts[2]), tuple(texts[3])))],
        [
            Candidates(tuple(texts[4]), (tuple(texts[5]),)),
            Candidates(tuple(texts[2]), (tuple(texts[6]), tuple(texts[3]))),
        ],
    ]
    with loaded(backbone, own) as model:
        found = candidate_losses(model, rows, 4096, PAD)
    for slot, slot_rows in enumerate(rows):
        for row, losses in zip(slot_rows, found[slot], strict=True):
            for response, loss in zip(row.responses, losses, strict=True):
                alone = PromptedModel(plain, own[slot]).losses([*row.prompt, *response], len(row.prompt))
                assert loss == pytest.approx(float(alone.sum().detach()), rel=1e-9)


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family: str, tokens: int) -> None:
    backbone, plain = tiny_backbone(family), tiny_model(family)
    own = [prompt[:tokens].float() for prompt in prompts(backbone.info.hidden, 3)]
    texts = [random_rows([1, 6, 3], 1), [], random_rows([4, 2], 2)]
    with loaded(backbone, own) as model:
        found = model.generate(texts, 8)
    expected = [
        [PromptedModel(plain, own[slot]).greedy(text, 8, END) for text in slot_texts]
        for slot, slot_texts in enumerate(texts)
    ]
    assert found == expected
    assert len({tuple(text) for slot in found for text in slot}) > 2


def test_virtual_tokens_are_routed_and_counted(olmoe_backbone: Backbone) -> None:
    """3 of them before each row: 3 · 3 + 18, 0, 3 + 7 and 2 · 3 + 9 tokens, each with 4 experts in both layers."""
    with loaded(olmoe_backbone, prompts(16)) as model, model.collect_routing() as statistics:
        model.token_losses(collate(encoded_rows(), PAD))
    assert statistics.tokens.tolist() == [27, 0, 10, 15]
    assert statistics.counts.sum(dim=2).tolist() == [[108, 0, 40, 60]] * 2


def test_a_widened_batch_by_hand() -> None:
    """Rows [5, 6, 7] and [8, 9], responses from the second token on; two positions in front."""
    batch = collate([[Encoded((5, 6, 7), 1)], [Encoded((8, 9), 1)]], PAD)
    assert batch.predict_at.tolist() == [0, 1, 3]
    wide = widened(batch, 2)
    assert wide.input_ids.tolist() == [[0, 0, 5, 6, 7], [0, 0, 8, 9, PAD]]
    assert wide.mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert wide.predict_at.tolist() == [2, 3, 7]
    assert wide.targets.tolist() == [6, 7, 9]
    assert (wide.rows_per_slot, wide.position_ids, wide.segments) == ((1, 1), None, None)


# Where a prompt starts


def with_text(backbone: Backbone, ids: list[int]) -> Backbone:
    """The backbone with a tokenizer that has one text."""
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END, encode=lambda text, **_: [1, *ids] if text else [])
    return Backbone(**{**vars(backbone), "tokenizer": tokenizer})


@pytest.mark.parametrize(("count", "expected"), [(3, [1, 7, 9]), (2, [1, 7]), (8, [1, 7, 9, 1, 7, 9, 1, 7])])
def test_a_prompt_starts_from_its_texts_embeddings(count: int, expected: list[int], llama_backbone: Backbone) -> None:
    backbone = with_text(llama_backbone, [7, 9])
    with SlotModel(backbone, [plan(SoftPrompt(count, "Answer."))] * 2) as model:
        table = backbone.model.get_input_embeddings().weight
        for slot in range(2):
            assert torch.equal(model.read(slot)["soft_prompt"], table[expected])


# P-tuning's encoder


def encoder(hidden: int, seed: int, width: int = 5) -> dict[str, Tensor]:
    part = EncodedPrompt(TOKENS, width, hidden)
    info = tiny_backbone("llama").info
    rng = torch_rng(seed, "encoder")
    return {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in part.shapes(info).items()}


def by_the_equation(tensors: dict[str, Tensor]) -> Tensor:
    layers = [
        (tensors[f"prompt_encoder.layers.{k}.weight"], tensors[f"prompt_encoder.layers.{k}.bias"]) for k in range(3)
    ]
    return oracle.encode(tensors["prompt_encoder.embedding"], layers)


def test_an_encoder_trains_as_the_prompt_that_it_makes() -> None:
    backbone = tiny_backbone("llama", dtype=torch.float64)
    plain, rows = tiny_model("llama", dtype=torch.float64).requires_grad_(False), encoded_rows()
    tensors = [encoder(16, slot) for slot in range(len(rows))]
    with SlotModel(backbone, [plan(EncodedPrompt(TOKENS, 5, 16))] * len(rows)) as model:
        for slot, own in enumerate(tensors):
            model.load(slot, own)
        losses = model.token_losses(collate(rows, PAD))
        losses.sum().backward()
        gradients = {name: trainable.stored.grad for name, trainable in model.trainables.items()}
    expected = []
    for slot, slot_rows in enumerate(rows):
        own = {name: value.clone().requires_grad_(True) for name, value in tensors[slot].items()}
        torch.testing.assert_close(encoded_prompt(own), by_the_equation(own), rtol=1e-10, atol=1e-12)
        alone = [
            PromptedModel(plain, by_the_equation(own)).losses(row.input_ids, row.prompt_length) for row in slot_rows
        ]
        expected += alone
        if alone:
            torch.cat(alone).sum().backward()
            for name, value in own.items():
                torch.testing.assert_close(gradients[name][slot], value.grad, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(losses, torch.cat(expected), rtol=1e-8, atol=1e-10)


def test_an_encoder_starts_as_torch_does(llama_backbone: Backbone) -> None:
    part, rng = EncodedPrompt(400, 64, 16), torch_rng(0, "start")
    start = {name: part.initial(name, shape, rng) for name, shape in part.shapes(llama_backbone.info).items()}
    assert start["prompt_encoder.embedding"].std() == pytest.approx(1, rel=0.05)
    for layer, inputs in enumerate((16, 64, 64)):
        for kind in ("weight", "bias"):
            largest = start[f"prompt_encoder.layers.{layer}.{kind}"].abs().max()
            assert largest <= inputs**-0.5
            assert largest > 0.75 * inputs**-0.5


# Bad input


def test_prompts_of_unlike_length(llama_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="same number of tokens"):
        SlotModel(llama_backbone, [plan(SoftPrompt(2)), plan(SoftPrompt(3))])


def test_encoders_of_unlike_width(llama_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="share the width"):
        SlotModel(llama_backbone, [plan(EncodedPrompt(2, 3, 16)), plan(EncodedPrompt(2, 4, 16))])


def test_an_encoder_for_another_model(llama_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="made for hidden size 8; tiny llama has 16"):
        trainable_shapes(llama_backbone.info, plan(EncodedPrompt(2, 3, 8)))


def test_a_text_without_a_token(llama_backbone: Backbone) -> None:
    backbone = with_text(llama_backbone, [])
    backbone.tokenizer.encode = lambda *_, **__: []
    with pytest.raises(ConfigError, match=r"text '\\n' has no token"):
        SlotModel(backbone, [plan(SoftPrompt(2, "\n"))])


def test_an_encoder_decoder_model() -> None:
    backbone = tiny_backbone("switch")
    with pytest.raises(ModelError, match=r"needs a causal model, but tiny switch is(.|\n)*fedit"):
        SlotModel(backbone, [plan(SoftPrompt(2))])
    SlotModel(backbone, [AdapterPlan((Lora(1, 1.0, ("attention",)),))]).close()
