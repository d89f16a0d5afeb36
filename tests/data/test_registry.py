"""Loading by name: where the data is looked for, and what bad input gets."""

import inspect
import json
import socket
from pathlib import Path
from typing import Any

import datasets
import pytest

from fedguild.config import load_config
from fedguild.core.errors import DataError
from fedguild.data import CORPORA, TEMPLATES, load_corpus
from fedguild.runs.setup import prepare_data

ROW = {"instruction": "Name it.", "context": "", "response": "Cat", "category": "qa"}


def write(path: Path, count: int = 1, row: dict[str, Any] = ROW) -> str:
    path.write_text("".join(json.dumps({**row, "instruction": f"{i}"}) + "\n" for i in range(count)))
    return str(path)


def numbers(examples: Any) -> list[int]:
    return [int(example.prompt.split("\n")[0]) for example in examples]


@pytest.mark.parametrize("name", CORPORA)
def test_a_spec_tells_the_truth(name: str):
    spec = CORPORA.load(name)
    assert spec.name == name
    parameters = inspect.signature(spec.read or spec.generate).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"seed"}
    assert set(spec.options) == keywords
    assert spec.template in TEMPLATES
    assert spec.layouts or spec.generate


def test_unknown_names_list_the_known_ones(tmp_path: Path):
    with pytest.raises(DataError, match=r"no corpus 'doly'\.\nDid you mean 'dolly'\?.*snli"):
        load_corpus("doly")
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"'alpaca' has no option 'top_label'\.\nDid you mean 'top_labels'"):
        load_corpus("alpaca", train=path, top_label=1)
    with pytest.raises(DataError, match=r"'dolly' has no option 'colour'\.\nIt takes no options"):
        load_corpus("dolly", train=path, colour="red")
    with pytest.raises(DataError, match="no prompt template 'chatt'"):
        load_corpus("dolly", train=path, template="chatt")


@pytest.mark.parametrize(
    ("name", "option", "value", "said"),
    [
        ("tasks", "train_examples", "abc", "Input should be a valid integer"),
        ("tasks", "train_examples", None, "Input should be a valid integer"),
        ("tasks", "families", "sum", "'str' instances are not allowed as a Sequence value"),
        ("alpaca", "top_labels", "abc", "Input should be a valid integer"),
        ("instructions", "label_column", 5, "Input should be a valid string"),
        ("natural_instructions", "max_tasks", "x", "Input should be a valid integer"),
        ("natural_instructions", "label", "colour", "Input should be "),
    ],
)
def test_an_option_of_another_type_is_told_with_what_it_is(name: str, option: str, value: Any, said: str):
    with pytest.raises(DataError, match=rf"data\.options\.{option}: {said}.*, got {value!r}\.\n{option}: "):
        load_corpus(name, **{option: value})


@pytest.mark.parametrize("option", ["train", "name", "seed", "limit", "test_limit"])
def test_a_setting_of_the_data_is_no_option_of_a_corpus(option: str):
    config = load_config("fedit/tiny-tasks", [f"data.options.{option}=5"])
    with pytest.raises(DataError, match=f"The corpus 'tasks' has no option '{option}'"):
        prepare_data(config)


def test_wrong_columns_list_found_and_expected(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row={"instruction": "a", "answer": "b"})
    expected = r"a\.jsonl lacks a column for: context, response, category\.\nFound: instruction, answer\. "
    with pytest.raises(
        DataError, match=expected + "Expected: instruction, context or input, response or output, category"
    ):
        load_corpus("dolly", train=path)


@pytest.mark.parametrize("name", ["missing/train.jsonl", "./missing", "missing"])
def test_a_missing_file_is_named(name: str):
    with pytest.raises(DataError, match=f"{name} does not exist"):
        load_corpus("dolly", train=name)


def test_files_that_are_no_table(tmp_path: Path):
    for name, content, message in (
        ("a.jsonl", "", "is empty"),
        ("b.json", "[]", "holds no records"),
        ("c.json", "{", "cannot be read as json"),
        ("d.csv", "a,b\n1,2,3,4\n5\n6,7,8,9,10\n", r"\(line 2\) has 4 cells, but there are 2 columns: a, b"),
        ("e.docx", "x", r"is not a table\.\nAccepted file types: \.jsonl"),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(DataError, match=rf"{path.name} {message}"):
            load_corpus("dolly", train=str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2\n{"a": 3}\n', "a.jsonl cannot be read as json: line 3, column 8: Expecting"),
        ("a.jsonl", b'{"a": 1e400}\n{"a": 2, "a": 3}\n', "json: line 2: an object has a key twice: a, a"),
        ("a.jsonl", b'{"a": 1}\n[2]\n{"a":', "line 2: a row must be a JSON object, but this is '[2]'"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', "a.json cannot be read as json: line 2, column 7: Expecting ':'"),
        ("a.json", b'{"a": 1}\n{"a": x}\n', "line 2, column 7: Expecting value"),
        ("a.jsonl", '{"a": "x"}\n{"a": "caf\xe9"}'.encode("latin-1"), "a.jsonl, line 2: the byte 0xe9 at position 11"),
        ("a.csv", "instruction,response\nx,\xdf".encode("latin-1"), "a.csv, line 2: the byte 0xdf at position 3"),
        ("a.csv", "instruction,response\n".encode("utf-16"), "a.csv holds no records"),
    ],
)
def test_a_fault_of_a_file_is_told_with_its_line_and_encoding(tmp_path: Path, name: str, content: bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_corpus("instructions", train=str(path))
    assert message in str(caught.value)
    assert "Extra data" not in str(caught.value)


def test_no_corpus_takes_a_list_or_a_fraction_for_a_text_or_a_label(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", row={**ROW, "response": ["Cat"]})
    with pytest.raises(
        DataError, match=r"Row 1 of .*a\.jsonl, column response: a list \(\['Cat'\]\)\.\nAccepted: text"
    ):
        load_corpus("dolly", train=path)
    table = tmp_path / "b.jsonl"
    table.write_text('{"text": "a", "label": 1.0}\n{"text": "b", "label": 1.9}\n')
    with pytest.raises(DataError, match=r"Row 2 of .* has the label '1\.9'\.\nAccepted: a label from 0 to 3"):
        load_corpus("ag_news", train=str(table))


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes("instruction,response\nSay it.,yes\n".encode("utf-8-sig"))
    assert [example.response for example in load_corpus("instructions", train=str(path)).train] == ["yes"]


def test_what_is_left_out_is_counted(tmp_path: Path):
    rows = [{**ROW, "response": "x" if number % 3 else ""} for number in range(9)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    corpus = load_corpus("dolly", train=str(path), limit=4)
    assert corpus.dropped == {"training rows without a response": 3, "training examples above the limit of 4": 2}
    assert load_corpus("dolly", train=str(path)).dropped == {"training rows without a response": 3}


def test_a_corpus_without_a_hub_dataset_needs_a_file():
    with pytest.raises(DataError, match=r"'telequad' has no dataset of its own .*\nAccepted: a JSON object"):
        load_corpus("telequad")


def test_a_folder_gives_both_splits(tmp_path: Path):
    write(tmp_path / "x_train.jsonl", 3)
    write(tmp_path / "x_test.jsonl", 2)
    write(tmp_path / "x_dev.jsonl", 1)
    corpus = load_corpus("dolly", train=str(tmp_path))
    assert (len(corpus.train), len(corpus.test)) == (3, 2)
    assert load_corpus("dolly", train=str(tmp_path / "x_train.jsonl")).test == ()
    assert (
        len(load_corpus("dolly", train=str(tmp_path / "x_train.jsonl"), test=str(tmp_path / "x_dev.jsonl")).test) == 1
    )


def test_ambiguous_and_empty_folders(tmp_path: Path):
    with pytest.raises(DataError, match="has no split named train; it holds: nothing"):
        load_corpus("dolly", train=str(tmp_path))
    write(tmp_path / "a_train.jsonl")
    write(tmp_path / "b.train.jsonl")
    with pytest.raises(DataError, match=r"Both a_train\.jsonl and b\.train\.jsonl in .* could be the 'train' split"):
        load_corpus("dolly", train=str(tmp_path))


def test_limits_draw_without_replacement_by_seed(tmp_path: Path):
    train, test = write(tmp_path / "a.jsonl", 50), write(tmp_path / "b.jsonl", 40)

    def load(seed: int) -> tuple[list[int], list[int]]:
        corpus = load_corpus("dolly", train=train, test=test, limit=10, test_limit=5, seed=seed, template="plain")
        return numbers(corpus.train), numbers(corpus.test)

    first, first_test = load(0)
    assert len(set(first)) == 10
    assert len(set(first_test)) == 5
    assert first == sorted(first)
    assert load(0) == (first, first_test)
    assert load(1)[0] != first
    with pytest.raises(DataError, match="at least 1, but is 0"):
        load_corpus("dolly", train=train, limit=0)


def test_local_files_need_no_network_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lookups: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: lookups.append(arguments))
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    folder = tmp_path / "data"
    folder.mkdir()
    load_corpus("dolly", train=write(folder / "a.jsonl"))
    assert lookups == []
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]
    assert not cache.exists()


def test_parquet(tmp_path: Path):
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list([{**ROW, "instruction": str(i)} for i in range(3)]).to_parquet(path)
    assert numbers(load_corpus("dolly", train=path, template="plain").train) == [0, 1, 2]


class TestTasks:
    def test_takes_no_file(self, tmp_path: Path):
        with pytest.raises(DataError, match="is generated, not read"):
            load_corpus("tasks", train=str(tmp_path))
        with pytest.raises(DataError, match="is generated, not read"):
            load_corpus("tasks", template="alpaca")


class TestHub:
    """The hub's functions are replaced: no test touches the network."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
            calls.append((name, config, split, revision))
            return datasets.Dataset.from_list([{**ROW, "instruction": "1"}] * (3 if split == "train" else 2))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train", "validation"])
        return calls

    def test_default_dataset_with_its_test_split(self, asked: list[tuple[Any, ...]]):
        corpus = load_corpus("dolly")
        assert (len(corpus.train), len(corpus.test)) == (3, 2)
        assert asked == [
            ("databricks/databricks-dolly-15k", None, "train", None),
            ("databricks/databricks-dolly-15k", None, "validation", None),
        ]

    def test_config_and_split(self, asked: list[tuple[Any, ...]]):
        corpus = load_corpus("dolly", train="me/mine:small@train[:10]")
        assert corpus.test == ()
        assert asked == [("me/mine", "small", "train[:10]", None)]

    def test_the_default_revision_and_config_are_filled_in(self, asked: list[tuple[Any, ...]]):
        with pytest.raises(DataError, match="ybisk/piqa lacks a column for: goal, sol1, sol2"):
            load_corpus("piqa", train="ybisk/piqa")
        with pytest.raises(DataError, match="cais/mmlu:all@test lacks a column"):
            load_corpus("mmlu", train="cais/mmlu@test")
        assert [call[1:] for call in asked] == [(None, "train", "refs/convert/parquet"), ("all", "test", None)]

    def test_a_missing_split_lists_those_there(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["all", "test"])
        with pytest.raises(DataError, match=r"a/b has no split named dev\+validation or .*; it has: all, test\.\nName"):
            load_corpus("mmlu", train="a/b")

    def test_unreachable(self, monkeypatch: pytest.MonkeyPatch):
        def fail(*_: Any, **__: Any) -> None:
            raise ConnectionError("Couldn't reach 'fancyzhx/ag_news' on the Hub")

        monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
        monkeypatch.setattr(datasets, "load_dataset", fail)
        expected = (
            r"fancyzhx/ag_news cannot be read from the Hugging Face hub: Couldn't reach[\s\S]*give local files instead"
        )
        with pytest.raises(DataError, match=expected):
            load_corpus("ag_news")
        with pytest.raises(DataError, match="a/b@train cannot be read"):
            load_corpus("ag_news", train="a/b@train")

    def test_corpora_that_locally_are_no_single_table(self, monkeypatch: pytest.MonkeyPatch):
        squad = {"title": "t", "context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}}
        natural = [{"task_name": name, "definition": "d", "inputs": "i", "targets": "o"} for name in "aab"]
        commonsense = {"instruction": "Why?\n\nAnswer format: a/b", "output": "the correct answer is b", "answer": "b"}
        mmlu = {"question": "q", "subject": "law", "choices": list("abcd"), "answer": 3}
        rows = {"me/squad": [squad], "me/natural": natural, "me/commonsense": [commonsense], "me/mmlu": [mmlu]}
        monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: datasets.Dataset.from_list(rows[name]))
        (example,) = load_corpus("telequad", train="me/squad@train").train
        assert (example.response, example.document) == ("a", "t")
        tasks = load_corpus("natural_instructions", train="me/natural@train", max_tasks=1).train
        assert [example.task for example in tasks] == ["a", "a"]
        assert load_corpus("commonsense", train="me/commonsense@train").train[0].answer == 1
        assert load_corpus("mmlu", train="me/mmlu@train").train[0].label == "law"
