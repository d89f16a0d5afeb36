"""Every layout of the corpora whose answers are chosen, on small files written here."""

import csv
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import DataError
from fedguild.data import load_corpus
from tests.data.writing import write_csv, write_json, write_jsonl


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
        with pytest.raises(DataError, match="Input should be 'task' or 'answer', got 'set'"):
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

    def test_bad_input(self, tmp_path: Path):
        with pytest.raises(DataError, match="holds no MMLU files"):
            load_corpus("mmlu", train=str(tmp_path))
        row = {"question": "What?", "subject": "virology", "choices": ["a"], "answer": 1}
        with pytest.raises(DataError, match="a list of four texts"):
            load_corpus("mmlu", train=write_jsonl(tmp_path / "a.jsonl", [row]))
