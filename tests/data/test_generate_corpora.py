"""Every layout of the corpora whose answers are generated, on small files written here."""

from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import DataError
from fedguild.core.seeding import numpy_rng
from fedguild.data import load_corpus, partition
from tests.data.writing import write_csv, write_json, write_jsonl


class TestDolly:
    hub = ({"instruction": "Name it.", "context": "A cat.", "response": " Cat ", "category": "closed_qa"},)
    alpagasus = ({"instruction": "Name it.", "input": "A cat.", "output": "Cat", "category": "closed_qa"},)

    @pytest.mark.parametrize("rows", [hub, alpagasus])
    @pytest.mark.parametrize("write", [write_jsonl, write_json])
    def test_both_spellings_in_both_forms(self, tmp_path: Path, rows: Any, write: Any):
        (example,) = load_corpus("dolly", train=write(tmp_path / "train.json", list(rows))).train
        assert "### Instruction:\nName it.\n\n### Input:\nA cat.\n\n### Response:" in example.prompt
        assert (example.response, example.label, example.task) == ("Cat", "closed_qa", "closed_qa")
        assert (example.choices, example.answer) == ((), None)

    def test_a_record_without_a_response_is_dropped(self, tmp_path: Path):
        rows = [dict(self.hub[0]), dict(self.hub[0], response="")]
        assert len(load_corpus("dolly", train=write_json(tmp_path / "train.json", rows)).train) == 1


class TestAlpaca:
    def test_the_opening_word_is_the_label_and_the_tail_is_other(self, tmp_path: Path):
        words = ["Write", "write", "List", "list", "Sing"]
        rows = [{"instruction": f"{word} it.", "input": "", "output": "ok"} for word in words]
        train = write_json(tmp_path / "train.json", rows)
        test = write_json(tmp_path / "test.json", [*rows[:1], *rows[4:]])
        corpus = load_corpus("alpaca", train=train, test=test, top_labels=2)
        assert [example.label for example in corpus.train] == ["write", "write", "list", "list", "other"]
        assert [example.label for example in corpus.test] == ["write", "other"]


class TestNaturalInstructions:
    def folder(self, path: Path, sizes: dict[str, int]) -> str:
        for name, size in sizes.items():
            instances = [{"id": f"{name}-{i}", "input": f"{name} {i}", "output": ["yes", "si"]} for i in range(size)]
            task = {"Categories": ["Questions"], "Definition": [f"Do {name}."], "Instances": instances}
            write_json(path / f"{name}.json", task)
        return str(path)

    def test_new_form(self, tmp_path: Path):
        example = load_corpus("natural_instructions", train=self.folder(tmp_path / "tasks", {"task1": 2})).train[1]
        assert "### Instruction:\nDo task1.\n\n### Input:\ntask1 1\n\n" in example.prompt
        assert (example.response, example.label, example.task) == ("yes", "task1", "task1")

    def test_old_form_and_category(self, tmp_path: Path):
        task = {"Definition": "Do it.", "Categories": "Logic", "Instances": [{"input": "a", "output": "b"}]}
        path = write_json(tmp_path / "task7.json", task)
        (example,) = load_corpus("natural_instructions", train=path, label="category").train
        assert (example.response, example.label, example.task) == ("b", "Logic", "task7")
        assert "### Instruction:\nDo it." in example.prompt

    def test_the_largest_tasks_are_kept_and_the_test_follows(self, tmp_path: Path):
        train = self.folder(tmp_path / "train", {"a": 1, "b": 3, "c": 2})
        test = self.folder(tmp_path / "test", {"a": 9, "b": 1, "c": 1})
        corpus = load_corpus("natural_instructions", train=train, test=test, max_tasks=2)
        assert [example.task for example in corpus.train] == ["b", "b", "b", "c", "c"]
        assert [example.task for example in corpus.test] == ["b", "c"]

    def test_bad_tasks(self, tmp_path: Path):
        path = write_json(tmp_path / "a.json", {"Definition": "x", "Examples": []})
        with pytest.raises(DataError, match=r"a\.json lacks: Instances\.\nFound: Definition, Examples\. Expected"):
            load_corpus("natural_instructions", train=path)
        path = write_json(tmp_path / "b.json", {"Definition": "x", "Instances": [{"input": "a"}]})
        with pytest.raises(DataError, match="Instance 1"):
            load_corpus("natural_instructions", train=path)
        with pytest.raises(DataError, match="Input should be 'task' or 'category', got 'domain'"):
            load_corpus("natural_instructions", train=path, label="domain")
        (tmp_path / "d.json").write_text("{")
        with pytest.raises(DataError, match=r"d\.json cannot be read as JSON"):
            load_corpus("natural_instructions", train=str(tmp_path / "d.json"))
        path = write_json(tmp_path / "c.json", [1])
        with pytest.raises(DataError, match="holds a JSON list"):
            load_corpus("natural_instructions", train=path)
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match="no task files"):
            load_corpus("natural_instructions", train=str(tmp_path / "empty"))


class TestTeleQuad:
    def qa(self, question: str, *answers: str, **more: Any) -> dict[str, Any]:
        return {"question": question, "answers": [{"text": text, "answer_start": 0} for text in answers], **more}

    def squad(self, *qas: dict[str, Any]) -> dict[str, Any]:
        return {"version": "1", "data": [{"docid": "36.300", "paragraphs": [{"context": "X2.", "qas": list(qas)}]}]}

    def test_squad_format(self, tmp_path: Path):
        content = self.squad(
            self.qa("What?", "an interface", "X2"), self.qa("Who?"), self.qa("No?", "x", is_impossible=True)
        )
        path = write_json(tmp_path / "a.json", content)
        (example,) = load_corpus("telequad", train=path).train
        assert example.prompt.endswith("### Instruction:\nWhat?\n\n### Context:\nX2.\n\n### Response:")
        assert (example.response, example.task) == ("an interface", "telequad")
        assert (example.label, example.document) == ("36.300", "36.300")
        kept = load_corpus("telequad", train=path, impossible=True).train
        assert [example.response for example in kept] == ["an interface", "x"]

    def test_bad_documents(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"lacks: data\.\nFound: rows\."):
            load_corpus("telequad", train=write_json(tmp_path / "a.json", {"rows": []}))
        with pytest.raises(DataError, match=r"'36' of .* has no paragraphs"):
            load_corpus("telequad", train=write_json(tmp_path / "b.json", {"data": [{"docid": "36"}]}))
        broken = {"data": [{"title": "t", "paragraphs": [{"context": "c"}]}]}
        with pytest.raises(DataError, match=r"A paragraph of 't' .* lacks qas"):
            load_corpus("telequad", train=write_json(tmp_path / "c.json", broken))


class TestInstructions:
    def test_usual_names(self, tmp_path: Path):
        rows = [{"prompt": "Say hi.", "completion": "hi", "choices": ["ho", "hi"]}]
        (example,) = load_corpus("instructions", train=write_jsonl(tmp_path / "a.jsonl", rows), template="plain").train
        assert (example.prompt, example.response) == ("Say hi.\nAnswer:", "hi")
        assert (example.choices, example.answer) == (("ho", "hi"), 1)
        assert (example.label, example.task, example.document) == ("instructions", "instructions", "")

    def test_own_names(self, tmp_path: Path):
        rows = [["ask", "given", "tell", "kind", "set", "page"], ["Say hi.", "loud", "HI", "greet", "talk", "p1"]]
        path = write_csv(tmp_path / "a.csv", rows)
        columns = {"instruction": "ask", "input": "given", "response": "tell", "label": "kind", "task": "set"}
        options = {f"{name}_column": column for name, column in columns.items()}
        (example,) = load_corpus("instructions", train=path, template="plain", document_column="page", **options).train
        assert (example.prompt, example.response) == ("Say hi.\nloud\nAnswer:", "HI")
        assert (example.label, example.task, example.document) == ("greet", "talk", "p1")

    def test_a_named_column_must_exist(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "response": "b"}])
        with pytest.raises(DataError, match=r"has no column kind\.\nFound: instruction, response\."):
            load_corpus("instructions", train=path, label_column="kind")

    def test_the_response_must_be_a_choice(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "response": "b", "choices": ["c"]}])
        with pytest.raises(DataError, match=r"Row 1 .*'c'"):
            load_corpus("instructions", train=path)


class TestFedLLMBench:
    def test_every_client_keeps_its_records(self, tmp_path: Path):
        users = {
            f"user {n}": [{"instruction": f"Say {i}.", "response": f"{n}"} for i in range(n + 1)] for n in range(5)
        }
        corpus = load_corpus("fedllm_bench", train=write_json(tmp_path / "aya.json", users))
        parts = partition("label", corpus.train, 5, rng=numpy_rng(0, "partition"))
        owners = [{corpus.train[index].document for index in part} for part in parts]
        assert sorted(map(len, parts)) == [1, 2, 3, 4, 5]
        assert sorted(owner for (owner,) in owners) == sorted(users)
        assert "### Instruction:\nSay 0.\n\n### Response:" in corpus.train[0].prompt

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"a": 3}, "The client 'a' of .* has a int"),
            (
                {"a": [{"instruction": "x", "chosen": "y"}]},
                "Record 1 of the client 'a' .* lacks .*\nFound: instruction, chosen",
            ),
            ([1], "holds a JSON list"),
        ],
    )
    def test_what_is_no_such_file(self, tmp_path: Path, content: Any, message: str):
        with pytest.raises(DataError, match=message):
            load_corpus("fedllm_bench", train=write_json(tmp_path / "a.json", content))

    def test_it_is_not_on_the_hub(self):
        with pytest.raises(DataError, match="is no dataset of the hub"):
            load_corpus("fedllm_bench", train="rui-ye/FedLLM-Bench", test="a/b")


def test_an_input_that_is_there_may_be_left_out(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "Answer.", "input": "Why?", "output": "So."}])
    (both,) = load_corpus("instructions", train=path).train
    (only,) = load_corpus("instructions", train=path, input_column="").train
    (other,) = load_corpus("instructions", train=path, instruction_column="input", input_column="").train
    assert "Why?" in both.prompt
    assert "Why?" not in only.prompt
    assert "Answer." not in other.prompt
    assert "### Instruction:\nWhy?\n" in other.prompt
