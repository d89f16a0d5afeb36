"""Every layout of every corpus, on small files written here."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedguild.data import load_corpus
from fedguild.errors import DataError


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_json(path: Path, value: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return str(path)


def write_csv(path: Path, rows: list[list[Any]], **options: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file, **options).writerows(rows)
    return str(path)


class TestAgNews:
    rows = ((3, "Stocks rise", "Up 2 percent."), (1, "Talks, again", 'He said "yes".'))

    def test_original_csv_without_header(self, tmp_path: Path):
        path = write_csv(tmp_path / "train.csv", [list(row) for row in self.rows], quoting=csv.QUOTE_ALL)
        first, second = load_corpus("ag_news", train=path).train
        assert first.prompt == (
            "Classify this news article: World, Sports, Business or Sci/Tech.\nStocks rise Up 2 percent.\nAnswer:"
        )
        assert (first.response, first.label, first.task, first.answer) == ("Business", "Business", "ag_news", 2)
        assert first.choices == ("World", "Sports", "Business", "Sci/Tech")
        assert 'Talks, again He said "yes".' in second.prompt
        assert second.answer == 0

    def test_hub_schema_counts_from_zero(self, tmp_path: Path):
        path = write_csv(tmp_path / "train.csv", [["text", "label"], ["Stocks rise", 2], ["None", 3]])
        first, second = load_corpus("ag_news", train=path).train
        assert (first.label, second.label) == ("Business", "Sci/Tech")
        assert "\nNone\n" in second.prompt

    def test_a_class_out_of_range_names_the_row(self, tmp_path: Path):
        path = write_csv(tmp_path / "train.csv", [["text", "label"], ["a", 0], ["b", 4]])
        with pytest.raises(DataError, match=r"Row 2 of .*train\.csv has the label '4'"):
            load_corpus("ag_news", train=path)
        path = write_csv(tmp_path / "original.csv", [[1, "a", "b"], [5, "c", "d"]])
        with pytest.raises(DataError, match=r"Row 2 of .*original\.csv has the class '5'"):
            load_corpus("ag_news", train=path)


class TestSnli:
    def expect(self, path: str):
        entailed, unclear = load_corpus("snli", train=path).train
        assert entailed.prompt == 'Suppose A dog runs. Can we infer that "It moves."? Yes, No, or Maybe?\n'
        assert (entailed.response, entailed.label, entailed.answer) == ("Yes", "entailment", 0)
        assert (unclear.response, unclear.label, unclear.answer) == ("Maybe", "neutral", 1)
        assert unclear.choices == ("Yes", "Maybe", "No")

    def test_json_lines_drop_pairs_without_consensus(self, tmp_path: Path):
        rows = [
            {"gold_label": label, "sentence1": "A dog runs.", "sentence2": "It moves.", "pairID": "1"}
            for label in ("entailment", "-", "neutral")
        ]
        self.expect(write_jsonl(tmp_path / "train.jsonl", rows))

    def test_tsv_with_header(self, tmp_path: Path):
        rows = [["sentence1", "sentence2", "gold_label"]]
        rows += [["A dog runs.", "It moves.", label] for label in ("entailment", "neutral", "-")]
        self.expect(write_csv(tmp_path / "train.tsv", rows, delimiter="\t"))

    def test_hub_columns(self, tmp_path: Path):
        rows = [{"premise": "A dog runs.", "hypothesis": "It moves.", "label": label} for label in (0, -1, 1)]
        self.expect(write_jsonl(tmp_path / "train.jsonl", rows))

    def test_the_question_becomes_the_instruction_of_another_template(self, tmp_path: Path):
        rows = [{"premise": "A dog runs.", "hypothesis": "It moves.", "label": 2}]
        corpus = load_corpus("snli", train=write_jsonl(tmp_path / "a.jsonl", rows), template="plain")
        assert corpus.train[0].prompt == (
            'Suppose A dog runs. Can we infer that "It moves."? Yes, No, or Maybe?\nAnswer:'
        )

    def test_an_unknown_label(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", [{"premise": "a", "hypothesis": "b", "label": "perhaps"}])
        with pytest.raises(DataError, match="label 'perhaps'"):
            load_corpus("snli", train=path)


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
        with pytest.raises(DataError, match="Known: task, category"):
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


def commonsense_row(instruction: str, accepted: str, answer: str) -> dict[str, str]:
    instruction = f"{instruction}: why?\n\nAnswer format: {accepted}"
    return {"instruction": instruction, "input": "", "output": f"the correct answer is {answer}", "answer": answer}


class TestCommonsense:
    rows = (
        commonsense_row("Please answer the following question with true or false, question", "true/false", "false"),
        commonsense_row("Please choose the correct solution to the question", "solution1/solution2", "solution2"),
        commonsense_row(
            "Please choose the correct ending to complete the given sentence", "ending1/ending2", "ending1"
        ),
        commonsense_row("Please choose the correct answer to fill in the blank", "option1/option2", "option1"),
        commonsense_row("Please choose the correct answer to the question", "answer1/answer2/answer3", "answer3"),
        commonsense_row(
            "Please choose the correct answer to the question", "answer1/answer2/answer3/answer4", "answer2"
        ),
    )
    tasks = ("boolq", "piqa", "hellaswag", "winogrande", "social_i_qa", "arc_openbookqa")

    def test_task_from_the_instruction(self, tmp_path: Path):
        corpus = load_corpus("commonsense", train=write_json(tmp_path / "commonsense_15k.json", list(self.rows)))
        assert tuple(example.task for example in corpus.train) == self.tasks
        assert tuple(example.label for example in corpus.train) == self.tasks
        last = corpus.train[-1]
        assert last.response == "the correct answer is answer2"
        assert last.choices == tuple(f"the correct answer is answer{i}" for i in (1, 2, 3, 4))
        assert last.answer == 1
        assert last.prompt.endswith("answer1/answer2/answer3/answer4\n\n### Response:")

    def test_task_from_the_file_beside(self, tmp_path: Path):
        path = write_json(tmp_path / "mix.json", list(self.rows[4:]))
        (tmp_path / "mix.task.txt").write_text("ARC-Easy\nopenbookqa\n")
        corpus = load_corpus("commonsense", train=path)
        assert [example.task for example in corpus.train] == ["ARC-Easy", "openbookqa"]
        (tmp_path / "mix.task.txt").write_text("ARC-Easy\n")
        with pytest.raises(DataError, match=r"mix\.task\.txt names 1 tasks, but mix\.json has 2 rows"):
            load_corpus("commonsense", train=path)

    def test_task_from_the_folder_of_sets(self, tmp_path: Path):
        train = write_json(tmp_path / "train.json", list(self.rows))
        write_json(tmp_path / "dataset" / "ARC-Easy" / "test.json", [self.rows[5]] * 2)
        write_json(tmp_path / "dataset" / "boolq" / "test.json", [self.rows[0]])
        corpus = load_corpus("commonsense", train=train, test=str(tmp_path / "dataset"))
        assert [example.task for example in corpus.test] == ["ARC-Easy", "ARC-Easy", "boolq"]

    def test_label_by_answer(self, tmp_path: Path):
        path = write_json(tmp_path / "a.json", list(self.rows[:2]))
        corpus = load_corpus("commonsense", train=path, label="answer")
        assert [(example.label, example.task) for example in corpus.train] == [
            ("false", "boolq"),
            ("solution2", "piqa"),
        ]

    def test_a_record_that_accepts_anything_is_generated(self, tmp_path: Path):
        row = {"instruction": "Say why.", "input": "", "output": "because", "answer": "because"}
        (example,) = load_corpus("commonsense", train=write_json(tmp_path / "a.json", [row])).train
        assert (example.response, example.choices, example.answer) == ("because", (), None)

    def test_bad_records(self, tmp_path: Path):
        path = write_json(tmp_path / "a.json", [dict(self.rows[0], answer="maybe")])
        with pytest.raises(DataError, match=r"Row 1 of .* has the answer 'maybe'\.\nAccepted: true, false"):
            load_corpus("commonsense", train=path)
        with pytest.raises(DataError, match="Known: task, answer"):
            load_corpus("commonsense", train=path, label="set")
        with pytest.raises(DataError, match="subfolders with one: ARC-Challenge"):
            load_corpus("commonsense", train=str(tmp_path))


class TestHellaSwag:
    def row(self, activity: str, label: Any) -> dict[str, Any]:
        return {"activity_label": activity, "ctx": "A man", "endings": ["sits.", "runs.", "x", "y"], "label": label}

    def test_activities_are_labels_and_the_tail_is_other(self, tmp_path: Path):
        write_jsonl(tmp_path / "train.jsonl", [self.row(name, 1) for name in ("Golf", "Golf", "Chess")])
        write_jsonl(tmp_path / "val.jsonl", [self.row("Chess", "0"), self.row("Golf", "3")])
        write_jsonl(tmp_path / "test.jsonl", [self.row("Golf", "")])
        corpus = load_corpus("hellaswag", train=str(tmp_path), top_labels=1)
        assert [example.label for example in corpus.train] == ["Golf", "Golf", "other"]
        assert [example.label for example in corpus.test] == ["other", "Golf"]
        assert [example.response for example in corpus.test] == ["sits.", "y"]
        assert corpus.train[0].choices == ("sits.", "runs.", "x", "y")
        assert corpus.train[0].prompt == "Which ending continues the text best?\nA man\nAnswer:"

    def test_bad_rows(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", [self.row("Golf", "")])
        with pytest.raises(DataError, match=r"Row 1 .* has no label"):
            load_corpus("hellaswag", train=path)
        path = write_jsonl(tmp_path / "b.jsonl", [dict(self.row("Golf", 0), endings="sits.")])
        with pytest.raises(DataError, match="a list of at least two texts"):
            load_corpus("hellaswag", train=path)


class TestPiqa:
    rows = ({"goal": "Open a jar.", "sol1": "Twist.", "sol2": "Sing."}, {"goal": "Sit.", "sol1": "a", "sol2": "b"})

    def test_labels_in_a_file_beside(self, tmp_path: Path):
        write_jsonl(tmp_path / "train.jsonl", list(self.rows))
        write_jsonl(tmp_path / "valid.jsonl", list(self.rows[:1]))
        write_jsonl(tmp_path / "tests.jsonl", list(self.rows))
        (tmp_path / "train-labels.lst").write_text("0\n1\n")
        (tmp_path / "valid-labels.lst").write_text("1\n")
        for train in (tmp_path, tmp_path / "train.jsonl"):
            first, second = load_corpus("piqa", train=str(train)).train
            assert (first.prompt, first.response, first.label) == ("Open a jar.\nAnswer:", "Twist.", "solution1")
            assert (second.response, second.choices, second.answer) == ("b", ("a", "b"), 1)
        assert [example.response for example in load_corpus("piqa", train=str(tmp_path)).test] == ["Sing."]

    def test_labels_in_a_column(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", [dict(self.rows[0], label=1)])
        assert load_corpus("piqa", train=path).train[0].response == "Sing."

    def test_bad_labels(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", list(self.rows))
        with pytest.raises(DataError, match=r"no file a-labels\.lst beside it"):
            load_corpus("piqa", train=path)
        (tmp_path / "a-labels.lst").write_text("0\n")
        with pytest.raises(DataError, match="2 rows, but its label file has 1 labels"):
            load_corpus("piqa", train=path)
        path = write_jsonl(tmp_path / "b.jsonl", [dict(self.rows[0], label=-1)])
        with pytest.raises(DataError, match=r"Row 1 .* has no label"):
            load_corpus("piqa", train=path)


class TestMmlu:
    def folder(self, root: Path) -> str:
        for split, subject, answer in (
            ("dev", "world_history", "A"),
            ("val", "world_history", "B"),
            ("val", "anatomy", "C"),
            ("test", "anatomy", "D"),
        ):
            write_csv(root / split / f"{subject}_{split}.csv", [["What?", "1.50", "007", "None", "NA", answer]])
        return str(root)

    def test_original_folder(self, tmp_path: Path):
        corpus = load_corpus("mmlu", train=self.folder(tmp_path))
        assert [(example.label, example.response) for example in corpus.train] == [
            ("world_history", "A"),
            ("anatomy", "C"),
            ("world_history", "B"),
        ]
        assert [(example.label, example.response, example.answer) for example in corpus.test] == [("anatomy", "D", 3)]
        assert corpus.train[0].prompt == (
            "The following are multiple choice questions (with answers) about world history.\n\n"
            "What?\nA. 1.50\nB. 007\nC. None\nD. NA\nAnswer:"
        )
        assert corpus.train[0].choices == ("A", "B", "C", "D")

    def test_one_split_of_the_folder(self, tmp_path: Path):
        self.folder(tmp_path)
        corpus = load_corpus("mmlu", train=str(tmp_path / "val"), test=str(tmp_path / "test"))
        assert [example.label for example in corpus.train] == ["anatomy", "world_history"]
        assert len(corpus.test) == 1

    def test_variant_with_header(self, tmp_path: Path):
        header = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
        path = write_csv(tmp_path / "anatomy_val.csv", [header, ["What?", "a", "b", "c", "d", 2]])
        (example,) = load_corpus("mmlu", train=path).train
        assert (example.label, example.response) == ("anatomy", "C")

    def test_hub_columns(self, tmp_path: Path):
        row = {"question": "What?", "subject": "virology", "choices": ["a", "b", "c", "d"], "answer": 1}
        (example,) = load_corpus("mmlu", train=write_jsonl(tmp_path / "a.jsonl", [row])).train
        assert (example.label, example.response, example.answer) == ("virology", "B", 1)

    def test_bad_input(self, tmp_path: Path):
        with pytest.raises(DataError, match="holds no MMLU files"):
            load_corpus("mmlu", train=str(tmp_path))
        row = {"question": "What?", "subject": "virology", "choices": ["a"], "answer": 1}
        with pytest.raises(DataError, match="a list of four texts"):
            load_corpus("mmlu", train=write_jsonl(tmp_path / "a.jsonl", [row]))


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
        with pytest.raises(DataError, match=r"lacks a column for: label\.\nFound: instruction, response\. .*kind"):
            load_corpus("instructions", train=path, label_column="kind")

    def test_the_response_must_be_a_choice(self, tmp_path: Path):
        path = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "response": "b", "choices": ["c"]}])
        with pytest.raises(DataError, match=r"Row 1 .*'c'"):
            load_corpus("instructions", train=path)
