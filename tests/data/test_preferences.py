"""Preference pairs: recognised, read into pairs of conversations or texts, and encoded with exact masks."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import DataError
from fedguild.data import Corpus, Example, load_corpus
from fedguild.data.batches import Encoded
from fedguild.data.rendering import PLAIN_TEMPLATE, count_cut, encode
from fedguild.data.view import view_of
from fedguild.model.packaged import EMBEDDED
from fedguild.model.pretrained import load_tokenizer


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = turn("user", "q"), turn("assistant", "good"), turn("assistant", "bad")
HUMAN = "\n\nHuman: a\n\nAssistant: b\n\nHuman: q\n\nAssistant:"
BOTH = {"chosen": "good", "rejected": "bad"}
Said = list[tuple[str, str]]
CONVERSATIONS: list[tuple[dict[str, Any], Said]] = [
    ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [("user", "q")]),  # TRL, explicit
    ({"prompt": [turn("system", "s"), ASKED], "chosen": [GOOD], "rejected": [BAD]}, [("system", "s"), ("user", "q")]),
    ({"prompt": json.dumps([ASKED]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])}, [("user", "q")]),
    ({"prompt": [ASKED], **BOTH}, [("user", "q")]),
    ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [("user", "q")]),  # TRL, implicit
    (  # UltraFeedback
        {
            "prompt": "q",
            "messages": [ASKED, GOOD],
            "chosen": [ASKED, GOOD],
            "rejected": [ASKED, BAD],
            "score_chosen": 8.5,
        },
        [("user", "q")],
    ),
    ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, [("user", "q")]),
    ({"system": "s", "question": "q", **BOTH}, [("system", "s"), ("user", "q")]),  # Orca
    ({"system": "s", "input": "q", **BOTH}, [("system", "s"), ("user", "q")]),
    (  # LLaMA-Factory
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        [("user", "q")],
    ),
    ({"Instruction": "q", "history": [["a", "b"]], **BOTH}, [("user", "a"), ("assistant", "b"), ("user", "q")]),
]
TEXTS: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("preference pairs (prompt", {"prompt": "q", **BOTH}, "q\nAnswer:", "good", "bad"),
    ("preference pairs (PROMPT", {"PROMPT": "q", "Chosen": 65, "Rejected": 1.5}, "q\nAnswer:", "65", "1.5"),
    ("preference pairs (instruction, input", {"instruction": "q", "input": "", **BOTH}, "q\nAnswer:", "good", "bad"),
    ("the prompt in both", {"chosen": f"{HUMAN} I do", "rejected": f"{HUMAN} I don't"}, HUMAN, " I do", " I don't"),
    ("the prompt in both", {"chosen": "Sky: blue", "rejected": "Sky: black"}, "Sky:", " blue", " black"),
]


def load(tmp_path: Path, *rows: dict[str, Any], **options: Any) -> Corpus:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_corpus("instructions", train=str(path), template="plain", **options)


def said(example: Example | None) -> Said:
    return [] if example is None else [(one.role, one.content) for one in example.messages]


@pytest.mark.parametrize(("row", "asked"), CONVERSATIONS)
def test_pairs_of_conversations(row: dict[str, Any], asked: Said, tmp_path: Path) -> None:
    corpus = load(tmp_path, row)
    assert "conversational preference pairs (" in corpus.layout
    (example,) = corpus.train
    assert said(example) == [*asked, ("assistant", "good")]
    assert said(example.rejected) == [*asked, ("assistant", "bad")]
    assert not [*corpus.dropped, *corpus.changed]
    assert example.response == "good"


@pytest.mark.parametrize(("layout", "row", "prompt", "chosen", "rejected"), TEXTS)
def test_pairs_of_texts(
    layout: str, row: dict[str, Any], prompt: str, chosen: str, rejected: str, tmp_path: Path
) -> None:
    corpus = load(tmp_path, row)
    assert layout in corpus.layout
    (example,) = corpus.train
    assert example.rejected is not None
    assert (example.prompt, example.response, example.rejected.response) == (prompt, chosen, rejected)
    assert example.rejected.prompt == prompt


def test_pairs_of_which_nothing_can_be_learned_are_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", **BOTH},
        {"prompt": "q", "chosen": "good", "rejected": "good"},
        {"prompt": "q", "chosen": "good", "rejected": None},
        {"prompt": "q", "chosen": " ", "rejected": "bad"},
        {"prompt": None, **BOTH},
    ]
    corpus = load(tmp_path, *rows)
    assert len(corpus.train) == 1
    assert corpus.dropped == {
        "training pairs of the same answer twice": 1,
        "training pairs that lack an answer": 2,
        "training pairs without a prompt": 1,
    }
    talks = [
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [turn("user", "another"), BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED]},
    ]
    corpus = load(tmp_path, *talks)
    assert len(corpus.train) == 1
    assert sorted(corpus.dropped.values()) == [1, 1, 1]


def test_a_column_of_pairs_may_be_left_out(tmp_path: Path) -> None:
    corpus = load(tmp_path, {"prompt": "q", **BOTH}, response_column="chosen")
    assert "instructions and responses" in corpus.layout
    assert corpus.train[0].rejected is None
    with pytest.raises(DataError, match=r"Row 1 of .*own.jsonl, column chosen: a dict"):
        load(tmp_path, {"prompt": "q", "chosen": {"a": 1}, "rejected": "bad"})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = load_tokenizer(EMBEDDED)
    found.chat_template = PLAIN_TEMPLATE
    return found


def learned(row: Encoded, tokenizer: Any) -> str:
    return str(tokenizer.decode([row.input_ids[at] for at in row.targets], skip_special_tokens=False))


def test_only_what_follows_the_shared_turns_is_learned(tmp_path: Path, tokenizer: Any) -> None:
    before = [turn("user", "one"), turn("assistant", "two"), turn("user", "three")]
    after = [turn("assistant", "four"), turn("user", "five"), turn("assistant", "six")]
    corpus = load(tmp_path, {"chosen": [*before, *after], "rejected": [*before, turn("assistant", "seven")]})
    chosen, rejected = encode(corpus.train[0], tokenizer, 512).rows
    end = tokenizer.eos_token
    assert learned(chosen, tokenizer).replace(" ", "") == f"four{end}six{end}"
    assert learned(rejected, tokenizer).replace(" ", "") == f"seven{end}"
    start = min(chosen.prompt_length, rejected.prompt_length)
    assert chosen.input_ids[:start] == rejected.input_ids[:start]


def test_both_texts_lose_the_same_beginning(tmp_path: Path, tokenizer: Any) -> None:
    """The likelihoods are compared, so both answers are read after the same prompt."""
    words = " ".join(f"word{number}" for number in range(40))
    (example,) = load(tmp_path, {"prompt": words, "chosen": "yes", "rejected": "no no no no no no no no"}).train
    whole = encode(example, tokenizer, 512)
    cut = encode(example, tokenizer, 64)
    assert cut.rejected is not None
    assert len(cut.rejected.input_ids) == 64
    assert cut.input_ids[: cut.prompt_length] == cut.rejected.input_ids[: cut.rejected.prompt_length]
    assert cut.input_ids[cut.prompt_length :] == whole.input_ids[whole.prompt_length :]
    counted = count_cut([(example, cut)], tokenizer, 64)
    assert (counted.texts, counted.prompts, counted.responses) == (2, 2, 0)


def test_the_view_has_both_texts_of_a_pair(tmp_path: Path, tokenizer: Any) -> None:
    corpus = load(tmp_path, *({"prompt": f"q {number % 2}", **BOTH} for number in range(3)))
    view = view_of(corpus, [], {}, tokenizer, 64, shown=2)
    assert (view.train, len(view.lengths), view.duplicates.train) == (3, 6, 1)
    texts = ["".join(piece.text for piece in shown if piece.learned) for shown in view.shown]
    assert ["good" in texts[0], "bad" in texts[1]] == [True, True]
