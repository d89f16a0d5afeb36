"""Work of an evaluation, counted: passes, tokens, casts; and the batch that fits a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedguild.data.conversation import conversation
from fedguild.data.example import Example
from fedguild.measuring.costs.memory import cached_values, evaluation_batch_tokens, evaluation_bytes
from fedguild.measuring.scores.batching import Item, token_batches
from fedguild.measuring.scores.generation import generate_texts
from fedguild.measuring.scores.likelihood import Candidates, candidate_losses
from fedguild.model.backbone import describe_config
from fedguild.model.moe import view
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import lora_plan, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.data.chat_templates import tokenizer_of
from tests.data.test_rendering import messages_of

TARGETS = ("attention", "router", "experts")


@contextmanager
def slots_on(backbone, *active: int) -> Iterator[SlotModel]:
    """Slots with adapters far from zero, and these active experts."""
    plans = [lora_plan(4, 1.0, TARGETS, experts) for experts in active]
    with SlotModel(backbone, plans) as model:
        for slot, plan in enumerate(plans):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        yield model


@contextmanager
def passes_of(backbone) -> Iterator[list[int]]:
    """Collects the tokens of each forward pass of the backbone."""
    tokens: list[int] = []
    hook = backbone.model.register_forward_pre_hook(
        lambda _, args, given: tokens.append((given["input_ids"] if "input_ids" in given else args[0]).numel()),
        with_kwargs=True,
    )
    yield tokens
    hook.remove()


@pytest.fixture(scope="module")
def endless():
    """A backbone whose texts never end."""
    backbone = tiny_backbone("olmoe")
    backbone.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    return backbone


def test_choices_score_as_in_plain_transformers(olmoe_backbone):
    """Choices of unequal length behind one prompt, in a batch with others, against one text at a time."""
    plain = tiny_model("olmoe")
    prompts, answers = random_rows([9, 3, 14], 1), random_rows([1, 6, 2, 4, 3, 3, 5, 1, 1, 7, 2, 2], 2)
    rows = [
        Candidates(tuple(prompt), tuple(map(tuple, answers[4 * index : 4 * index + 4])))
        for index, prompt in enumerate(prompts)
    ]
    untrained = AdapterPlan(lora_plan(4, 1.0, TARGETS).parts)
    with SlotModel(olmoe_backbone, [untrained]) as model:
        (scores,) = candidate_losses(model, [rows], batch_tokens=8192, pad_id=0)
    for row, losses in zip(rows, scores, strict=True):
        for response, loss in zip(row.responses, losses, strict=True):
            with torch.no_grad():
                likelihood = plain(torch.tensor([[*row.prompt, *response]])).logits[0].log_softmax(-1)
            at = torch.arange(len(response)) + len(row.prompt) - 1
            assert loss == pytest.approx(-likelihood[at, torch.tensor(response)].sum().item(), abs=1e-5)


def test_the_choices_of_all_slots_share_a_pass_and_their_prompts(olmoe_backbone):
    row = Candidates(tuple(range(3, 23)), ((3,), (4,), (5, 6), (7, 8)))
    with slots_on(olmoe_backbone, 1, 2, 4) as model, passes_of(olmoe_backbone) as tokens:
        candidate_losses(model, [[row], [row], [row]], batch_tokens=8192, pad_id=0)
    assert tokens == [3 * (20 + 6)], "each slot runs its prompt once"


def decode_steps(lengths: list[int], new_tokens: int, batch_tokens: int) -> int:
    """Returns the passes for prompts of these lengths, if no text ends early: one for each new token of a batch."""
    items = [Item(0, index, length + new_tokens) for index, length in enumerate(lengths)]
    return new_tokens * len(token_batches(items, batch_tokens))


def test_generation_takes_as_many_passes_as_estimated(endless):
    lengths = [[3, 9, 5], [9, 4]]
    prompts = [random_rows(each, slot) for slot, each in enumerate(lengths)]
    tokenizer = SimpleNamespace(
        encode=lambda text, **_: prompts[int(text[0])][int(text[1])],
        decode=lambda tokens, **_: " ".join(map(str, tokens)),
        eos_token_id=None,
    )
    examples = [
        [Example(f"{slot}{index}", "", label="", task="") for index in range(len(each))]
        for slot, each in enumerate(lengths)
    ]
    texts, counts = {}, {}
    with slots_on(endless, 2, 4) as model:
        for batch_tokens in (26, 8192):
            with passes_of(endless) as tokens:
                texts[batch_tokens] = generate_texts(
                    model, examples, tokenizer, max_tokens=64, max_new_tokens=4, batch_tokens=batch_tokens
                )
            counts[batch_tokens] = len(tokens)
            assert len(tokens) == decode_steps([length for each in lengths for length in each], 4, batch_tokens)
    assert counts == {26: 12, 8192: 4}
    assert texts[26] == texts[8192]
    assert all(len(text.split()) == 4 for each in texts[26] for text in each)


CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)


class FactorCasts(TorchDispatchMode):
    """Counts the casts of tensors of some shapes from fp32."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.casts = shapes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in CASTS and args[0].dtype is torch.float32 is not out.dtype:
            self.casts += args[0].shape in self.shapes
        return out


def test_an_evaluation_casts_the_factors_once():
    backbone = tiny_backbone("olmoe", dtype=torch.bfloat16)
    backbone.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    with slots_on(backbone, 2, 4) as model:
        shapes = {tensor.stored.shape for tensor in model.loaded.values()}
        casts = []
        for new in (5, 2):
            with torch.inference_mode(), FactorCasts(shapes) as counted:
                model.generate([random_rows([5, 3], 0), random_rows([4], 1)], new)
            casts.append(counted.casts)
        assert casts == [len(model.loaded), 0]
        model.load(0, random_adapter(backbone.info, model.plans[0], 7))
        with torch.inference_mode(), FactorCasts(shapes) as counted:
            model.generate([random_rows([5, 3], 0), []], 2)
        assert counted.casts == len(model.loaded), "other values are cast anew"


def test_no_layer_of_a_generation_asks_the_device_how_many_pairs_it_has(endless, monkeypatch):
    asked = []

    def spy(*arguments):
        asked.append(arguments[6])
        return dispatch(*arguments)

    dispatch = view.dispatch
    monkeypatch.setattr(view, "dispatch", spy)
    with slots_on(endless, 2, 4) as model:
        model.generate([random_rows([5, 3], 0), random_rows([4], 1)], 3)
    layers = len(endless.info.moe)
    assert asked == [2 * 8 + 4 * 4] * layers + [2 * 2 + 4] * 2 * layers


def test_prompts_that_do_not_fit_are_continued_in_halves(endless, monkeypatch):
    prompts = [random_rows([5, 3, 4], 0), [], random_rows([4, 6], 1)]
    sizes = []

    def small(rows, given, new):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return generate(rows, given, new)

    with slots_on(endless, 2, 4, 1) as model:
        expected, generate = model.generate(prompts, 3), model._generate
        monkeypatch.setattr(model, "_generate", small)
        assert model.generate(prompts, 3) == expected
        assert sizes == [5, 2, 3, 1, 2]
        monkeypatch.setattr(model, "_generate", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(prompts, 3)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("olmoe-1b-7b", 16 * 2 * 2048),
        ("qwen3-30b-a3b", 48 * 2 * 4 * 128),
        ("mixtral-8x7b", 32 * 2 * 1024),
        ("deepseek-v2-lite", 27 * 16 * (192 + 128)),
    ],
)
def test_keys_and_values_of_a_token(model, values):
    assert cached_values(describe_config(model)) == values


RAMP = tuple(20 + index * 364 // 1500 for index in range(1501))


def test_olmoe_takes_a_tenth_of_the_decode_steps_on_an_h200():
    """Four budgets on 1,501 prompts (a tenth of Dolly), 128 new tokens, against batches of 8,192 tokens."""
    model = describe_config("olmoe-1b-7b")
    lengths = [min(length, 384) for length in RAMP] * 4
    assert len(lengths) == 4 * 1501
    adapters = 4 * 198_000_000 * (4 + 2)
    free = 139 * 2**30 - 2 * model.parameters - adapters
    plan = lora_plan(20, 0.8, TARGETS, 8)
    tokens = evaluation_batch_tokens(model, plan, dtype=torch.bfloat16, free=int(0.6 * free))
    assert tokens * evaluation_bytes(model, plan, dtype=torch.bfloat16) <= 0.6 * free
    assert tokens == (2**31 - 1) // (8 * 2048), "32-bit indices are the limit, not memory"
    before, now = (decode_steps(lengths, 128, size) for size in (8192, tokens))
    assert now <= before / 10
    long = evaluation_batch_tokens(model, plan, dtype=torch.bfloat16, free=2**30, row_tokens=8192)
    assert long == 2**30 // (evaluation_bytes(model, plan, dtype=torch.bfloat16) + 8192 * (1 + 2)), "the mask's rows"
    assert evaluation_batch_tokens(model, plan, dtype=torch.bfloat16, free=2**50, row_tokens=2**20) == 2**11 - 1
    half = evaluation_batch_tokens(model, plan, dtype=torch.bfloat16, free=2**30)
    assert 0.9 < half * evaluation_bytes(model, plan, dtype=torch.bfloat16) / 2**30 <= 1


def test_eager_attention_takes_a_row_of_scores_for_every_head_of_a_layer():
    model, plan = describe_config("gpt-oss-20b"), AdapterPlan(())
    one, thousand = (evaluation_bytes(model, plan, dtype=torch.bfloat16, row_tokens=row) for row in (0, 1000))
    assert thousand - one == 1000 * (1 + 2 + 64 * (2 + 4 + 4))
    tokens = evaluation_batch_tokens(model, plan, dtype=torch.bfloat16, free=2**50, row_tokens=2**20)
    assert tokens == (2**31 - 1) // (64 * 2**20)


def test_an_answer_ends_where_its_turn_ends() -> None:
    """The turn's end may be another token than the end of a text, and what follows it is no answer."""
    tokenizer = tokenizer_of("gemma")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    answer = tokenizer.encode("The nightingale.", add_special_tokens=False)
    model = SimpleNamespace(generate=lambda prompts, _: [[[*answer, end, *answer] for _ in row] for row in prompts])
    example = conversation(messages_of("Which bird sings?", "The nightingale."))
    texts = generate_texts(model, [[example]], tokenizer, max_tokens=90, max_new_tokens=40, batch_tokens=200)
    assert texts == [["The nightingale."]]
