from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from fedguild.core.errors import ConfigError, DataError
from fedguild.data.example import Example
from fedguild.measuring.scores.tasks import Scoring, evaluate, parse_label

CHOICE = Example("pick:", "aab", "", "pick", ("aab", "b"), 0)
TALK = Example("talk:", "cc dd", "", "talk")


@pytest.fixture
def model(table_model):
    """Slot 0 finds `a` likely and `b` not, slot 1 the other way round; they reply differently."""
    losses = torch.full((2, 260), 0.5)
    losses[0, ord("a")], losses[0, ord("b")] = 0.25, 2.0
    losses[1, ord("a")], losses[1, ord("b")] = 2.0, 0.25
    return table_model(
        losses,
        [
            {"pick:": " b, or aab", "talk:": " cc dd", "lk:": "cut"},
            {"pick:": " AAB it is", "talk:": " cc", "lk:": "cut"},
        ],
    )


def test_choices_by_mean_likelihood(model, tokenizer):
    first, second = evaluate(model, [[CHOICE], [CHOICE]], tokenizer, max_tokens=64)
    # per token with the space and the end: aab (.5+.25+.25+2+.5)/5 = .7 < b (.5+2+.5)/3 = 1
    assert (first.examples[0].predicted, first.overall.accuracy) == (0, 1.0)
    # aab (.5+2+2+.25+.5)/5 = 1.05 > b (.5+.25+.5)/3
    assert (second.examples[0].predicted, second.overall.accuracy) == (1, 0.0)
    assert first.overall.metrics == {}
    assert first.examples[0].generated is None
    assert first.overall.perplexity == pytest.approx(math.exp(0.7))
    assert second.overall.perplexity == pytest.approx(math.exp(1.05))


def test_the_sum_favours_short_choices(model, tokenizer):
    first, _ = evaluate(model, [[CHOICE], []], tokenizer, max_tokens=64, scoring=Scoring(length_normalization="sum"))
    assert first.examples[0].predicted == 1  # 3.5 against 3.0


def test_choices_by_generation(model, tokenizer):
    first, second = evaluate(
        model, [[CHOICE], [CHOICE]], tokenizer, max_tokens=64, max_new_tokens=32, scoring=Scoring(choices="generation")
    )
    assert (first.examples[0].predicted, first.overall.accuracy) == (1, 0.0)
    assert (second.examples[0].predicted, second.overall.accuracy) == (0, 1.0)
    assert second.examples[0].generated == "AAB it is"
    assert first.overall.perplexity == pytest.approx(math.exp(0.7))


def test_responses_by_generation(model, tokenizer):
    first, second = evaluate(model, [[TALK], [TALK]], tokenizer, max_tokens=64, max_new_tokens=32)
    assert (first.overall.metrics, first.overall.score) == ({"exact_match": 1.0, "rouge_l": 1.0}, 1.0)
    assert second.overall.metrics["rouge_l"] == second.overall.score == pytest.approx(2 / 3)
    assert second.overall.metrics["exact_match"] == 0.0
    assert second.overall.accuracy is None
    assert second.overall.perplexity == pytest.approx(math.exp(0.5))
    _, exact = evaluate(
        model, [[], [TALK]], tokenizer, max_tokens=64, max_new_tokens=32, scoring=Scoring(responses="exact_match")
    )
    assert exact.overall.score == 0.0


def test_kinds_mix_and_keep_their_order(model, tokenizer):
    wrong = replace(CHOICE, answer=1, task="flip")
    examples = [TALK, CHOICE, wrong, CHOICE]
    first, second = evaluate(model, [examples, examples[::-1]], tokenizer, max_tokens=64, max_new_tokens=32)
    assert [score.task for score in first.examples] == ["talk", "pick", "flip", "pick"]
    assert [score.primary for score in first.examples] == [1.0, 1.0, 0.0, 1.0]
    assert first.overall.score == pytest.approx(0.75)
    assert first.overall.accuracy == pytest.approx(2 / 3)
    assert list(first.by_task) == ["flip", "pick", "talk"]
    assert (first.by_task["pick"].count, first.by_task["pick"].accuracy) == (2, 1.0)
    assert first.by_task["talk"].metrics["rouge_l"] == 1.0
    assert [score.task for score in second.examples] == ["pick", "flip", "pick", "talk"]
    assert [score.primary for score in second.examples] == pytest.approx([0.0, 1.0, 0.0, 2 / 3])


def test_perplexity_weighs_tokens_not_examples(model, tokenizer):
    first, _ = evaluate(model, [[CHOICE, TALK], []], tokenizer, max_tokens=64, max_new_tokens=32)
    pick, talk = first.examples
    assert (pick.response_tokens, talk.response_tokens) == (len(" aab") + 1, len(" cc dd") + 1)
    assert first.overall.perplexity == pytest.approx(math.exp((5 * 0.7 + 7 * 0.5) / 12))


def test_a_slot_without_examples_has_no_scores(model, tokenizer):
    _, second = evaluate(model, [[CHOICE], []], tokenizer, max_tokens=64)
    assert second.overall.count == 0
    assert second.examples == ()
    assert second.overall.metrics == {}
    assert second.overall.metric == ""
    known = ("count", "metrics", "metric")
    assert all(value is None for name, value in asdict(second.overall).items() if name not in known)


def test_batches_stay_within_the_bound(model, tokenizer):
    evaluate(model, [[CHOICE] * 5, [TALK] * 3], tokenizer, max_tokens=64, max_new_tokens=8, batch_tokens=40)
    assert len(model.batch_sizes) > 2
    assert max(model.batch_sizes) <= 40


def test_a_long_prompt_loses_its_beginning_before_generation(model, tokenizer):
    first, _ = evaluate(model, [[TALK], []], tokenizer, max_tokens=8, max_new_tokens=5)
    assert first.examples[0].generated == "cut"


def test_diverged_models_have_infinite_perplexity(table_model, tokenizer):
    broken = table_model(torch.full((1, 260), 1e4), [{"talk:": ""}])
    (scores,) = evaluate(broken, [[TALK]], tokenizer, max_tokens=64, max_new_tokens=8)
    assert scores.overall.perplexity == math.inf
    assert scores.overall.score == 0.0


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (replace(CHOICE, answer=2), "task 'pick' has 2 choices, but its answer is 2"),
        (replace(CHOICE, answer=None), "an index from 0 to 1"),
        (replace(TALK, answer=0), "task 'talk' has 0 choices, but its answer is 0"),
    ],
)
def test_an_answer_outside_the_choices_is_an_error(model, tokenizer, example, message):
    with pytest.raises(DataError, match=message):
        evaluate(model, [[example], []], tokenizer, max_tokens=64)


def test_new_tokens_must_leave_room_for_a_prompt(model, tokenizer):
    with pytest.raises(ConfigError, match="max_new_tokens is 64"):
        evaluate(model, [[TALK], []], tokenizer, max_tokens=64, max_new_tokens=64)


@pytest.mark.parametrize(
    ("text", "choices", "named"),
    [
        ("Yes", ("Yes", "No"), 0),
        ("the correct answer is Answer2.", ("answer1", "answer2"), 1),
        ("I know nothing", ("Yes", "No"), None),
        ("No, not yes", ("yes", "no"), 1),
        ("New York City", ("New", "New York", "York"), 1),
        ("answer10", ("answer1", "answer10"), 1),
        ("C++ of course", ("C", "C++"), 1),
        ("", ("a",), None),
    ],
)
def test_parse_label(text, choices, named):
    assert parse_label(text, choices) == named
