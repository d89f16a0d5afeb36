"""One's own data: each kind of file and of row is read as it should, or refused with what was found."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zipfile
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy
import pandas
import pytest

from fedguild.core.errors import ConfigError, DataError
from fedguild.data import Corpus, Example, load_corpus
from fedguild.data.given import as_file, rows_of

PAIR = {"instruction": "Name a bird.", "response": "Wren."}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def load(tmp_path: Path, content: bytes, name: str = "own.jsonl", **options: Any) -> Corpus:
    path = tmp_path / name
    path.write_bytes(content)
    return load_corpus("instructions", train=str(path), **options)


def said(example: Example) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in example.messages]


def turns(*contents: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": one, **more} for index, one in enumerate(contents)]


TWO = [("user", "a"), ("assistant", "b")]
CONVERSATIONS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("chat messages", {"messages": turns("a", "b")}, TWO),
    ("chat messages", {"Messages ": turns("a", "b"), "label": "x"}, TWO),
    ("chat messages", {"messages": json.dumps(turns("a", "b"))}, TWO),
    ("chat messages", {"messages": turns("a", "b"), "system": "s"}, [("system", "s"), *TWO]),
    ("chat messages", {"messages": [{"role": "developer", "content": "s"}, *turns("a", "b")]}, [("system", "s"), *TWO]),
    ("chat messages", {"messages": turns("a", [{"type": "text", "text": "b"}])}, TWO),
    ("chat messages", {"messages": turns("a", "b"), "prompt": "a", "completion": "b"}, TWO),
    ("chat messages", {"conversations": turns("a", "b")}, TWO),
    ("ShareGPT", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, TWO),
    ("conversational prompts", {"prompt": turns("a"), "completion": [turns("x", "b")[1]]}, TWO),
    ("conversational prompts", {"prompt": turns("a"), "completion": "b"}, TWO),
    ("conversational prompts", {"prompt": turns("a"), "completion": "b", "system": "s", "history": [["x", "y"]]},
     [("system", "s"), ("user", "x"), ("assistant", "y"), *TWO]),
    ("with a system message or a history", {**PAIR, "system": "s", "history": []},
     [("system", "s"), ("user", PAIR["instruction"]), ("assistant", PAIR["response"])]),
    ("with a system message or a history", {**PAIR, "input": "in", "system": "", "history": [["a", "b"]]},
     [*TWO, ("user", f"{PAIR['instruction']}\n\nin"), ("assistant", PAIR["response"])]),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "row", "wanted"), CONVERSATIONS)
def test_a_conversation_is_recognised(tmp_path: Path, layout: str, row: dict[str, Any], wanted: list[tuple[str, str]]):
    corpus = load(tmp_path, lines(row))
    assert said(corpus.train[0]) == wanted
    assert corpus.train[0].response == wanted[-1][1]
    assert layout in corpus.layout
    assert str(tmp_path) in corpus.layout


def test_empty_columns_of_alpaca_files_leave_the_prompt_as_it_is(tmp_path: Path):
    plain = load(tmp_path, lines(PAIR)).train
    assert load(tmp_path, lines({**PAIR, "system": None, "history": []})).train == plain


def test_plain_text_is_learned_whole(tmp_path: Path):
    corpus = load(tmp_path, lines({"text": "  It rains.\n", "label": 3}), train_on="last_turn")
    assert corpus.train == (Example("", "  It rains.\n", label="3", task="instructions", train_on="everything"),)
    assert corpus.layout.endswith("plain text (text, label)")


def test_instructions_are_written_by_the_chat_template_on_request(tmp_path: Path):
    (example,) = load(tmp_path, lines({**PAIR, "input": "in"}), template="chat").train
    assert said(example) == [("user", "Name a bird.\n\nin"), ("assistant", "Wren.")]


TIDIED: list[tuple[list[dict[str, Any]], list[tuple[str, str]], str]] = [
    (turns("a", "b", "c"), TWO, "end after the last assistant turn"),
    (turns("x", "y", "a", "b")[1:], TWO, "begin before the first user turn"),
    ([*turns("a")[:1], *turns("c", "b")], [("user", "a\n\nc"), ("assistant", "b")], "neighbouring turns"),
    ([*turns("a", "b"), *turns("x", "c")[1:]], [("user", "a"), ("assistant", "b\n\nc")], "neighbouring turns"),
    ([*turns("a", "b"), {**turns("x", "c")[1], "weight": 0}], TWO, "an answer of weight 0 beside another one"),
    ([turns("a")[0], {**turns("x", "c")[1], "weight": 0}, turns("a", "b")[1]], TWO, "an answer of weight 0"),
    ([{**turns("a")[0], "weight": 0}, *turns("c", "b")], [("user", "a\n\nc"), ("assistant", "b")], "neighbouring"),
    ([*turns("a", "b", "c"), {**turns("x", "d")[1], "weight": 0}], TWO, "end with an answer of weight 0"),
    (turns("a", "b", "  ", ""), TWO, "empty turns"),
    (turns("a", "b", "c", None), TWO, "empty turns"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "wanted", "told"), TIDIED)
def test_turns_that_do_not_alternate_are_tidied_and_counted(
    tmp_path: Path, messages: list[dict[str, Any]], wanted: list[tuple[str, str]], told: str
):
    corpus = load(tmp_path, lines({"messages": messages}, {"messages": messages}, {"messages": turns("a", "b")}))
    assert [said(one) for one in corpus.train] == [wanted, wanted, TWO]
    assert {count for reason, count in corpus.changed.items() if told in reason} == {2}
    assert not corpus.dropped


@pytest.mark.parametrize("messages", [[], turns("a"), turns("", "b"), turns("a", ""), turns("a", "b", weight=0)])
def test_a_conversation_without_an_answer_is_left_out_and_counted(tmp_path: Path, messages: list[dict[str, Any]]):
    corpus = load(tmp_path, lines({"messages": turns("a", "b")}, {"messages": messages}))
    assert len(corpus.train) == 1
    assert corpus.dropped == {"training conversations without an assistant turn that answers": 1}


def test_a_prompt_without_a_completion_is_left_out_and_counted(tmp_path: Path):
    corpus = load(tmp_path, lines(*({"prompt": turns("a"), "completion": end} for end in (turns("x", "b")[1:], []))))
    assert [said(one) for one in corpus.train] == [TWO]
    assert corpus.dropped == {"training conversations without an assistant turn that answers": 1}


def test_a_message_by_other_names_is_an_error_and_not_an_empty_turn(tmp_path: Path):
    other = [{"role": "user", "text": "a"}, *turns("x", "b")[1:]]
    with pytest.raises(DataError, match=r"Row 2 of .*, column messages: a message that says nothing .*'text': 'a'"):
        load(tmp_path, lines({"messages": turns("a", "b")}, {"messages": other}))


def test_a_column_of_messages_by_another_name_is_pointed_out(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        load(tmp_path, lines({"number": 1, "msgs": turns("a", "b")}))
    assert "data.options.messages_column=msgs" in str(caught.value.hint)


def test_calls_and_results_of_tools(tmp_path: Path):
    call = {"name": "weather", "arguments": {"days": 3, "share": 0.5}}
    openai = {"id": "c1", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    rows = [
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [openai]},
            {"role": "tool", "content": "30", "tool_call_id": "c1"},
            {"role": "assistant", "content": "b"},
        ],
        [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "30"},
            {"from": "gpt", "value": "b"},
        ],
    ]
    for row in rows:
        (example,) = load(tmp_path, lines({"conversations": row, "tools": json.dumps([{"name": "weather"}])})).train
        assert said(example) == [("user", "a"), ("assistant", ""), ("tool", "30"), ("assistant", "b")]
        function = example.messages[1].as_dict()["tool_calls"][0]["function"]
        assert function == call
        assert type(function["arguments"]["days"]) is int
        assert json.loads(example.tools) == [{"type": "function", "function": {"name": "weather"}}]


CELLS: list[tuple[bytes, str]] = [
    (b"65", "65"),
    (b"65.0", "65.0"),
    (b"1.50", "1.50"),
    (b"true", "true"),
    (b'"    return x\\n"', "    return x\n"),
    (b'"2024-01-31"', "2024-01-31"),
]


@pytest.mark.parametrize(("cell", "wanted"), CELLS)
def test_a_cell_is_the_text_that_was_written(tmp_path: Path, cell: bytes, wanted: str):
    content = b'[{"instruction": "a", "response": %s}, {"instruction": 2, "response": 0.25}]' % cell
    first, second = load(tmp_path, content, "own.json", template="plain").train
    assert (first.response, second.response, second.prompt) == (wanted, "0.25", "2\nAnswer:")


@pytest.mark.parametrize("cell", [None, float("nan"), "", "  \n"])
def test_nothing_is_left_out_and_counted(tmp_path: Path, cell: Any):
    rows = lines(
        PAIR, {**PAIR, "response": cell}, {**PAIR, "instruction": cell}, {**PAIR, "instruction": cell, "input": "x"}
    )
    corpus = load(tmp_path, rows, template="plain")
    assert [one.prompt for one in corpus.train] == [
        "Name a bird.\nAnswer:",
        f"{'' if cell is None or cell != cell else cell}\nx\nAnswer:",
    ]
    assert corpus.dropped == {"training rows without a response": 1, "training rows without an instruction": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIR, "response": ["red"]}, r"Row 2 of .*own\.jsonl, column response: a list \(\['red'\]\)"),
        ({**PAIR, "instruction": {"a": 1}}, r"column instruction: a dict \(\{'a': '1'\}\)"),
        ({**PAIR, "label": ["x"]}, r"column label: a list"),
        ({**PAIR, "label": 1.9}, r"column label: the number 1\.9\.\nAccepted: an integer or a name"),
        ({**PAIR, "choices": ["a", "b"]}, r"column choices: \['a', 'b'\]\.\nAccepted: a list that holds the response"),
    ],
)
def test_what_is_no_text_names_the_row_and_the_column(tmp_path: Path, row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        load(tmp_path, lines(PAIR, row))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (turns("a", 5), ""),
        ([{"role": "user", "content": {"a": 1}}, turns("a", "b")[1]], r"Row 2 .*column messages: a dict"),
        (
            [{"role": "teacher", "content": "a"}],
            r"a message of the role 'teacher'\.\nAccepted: system, developer, user",
        ),
        (turns("a", [{"type": "image_url", "image_url": "x"}]), r"a part of a message that is no text"),
        (["a", "b"], r"a str \(a\)\.\nAccepted: a message with role and content"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"the tool call x\.\nAccepted: a call with the name"),
        ("hello", r"the text 'hello'\.\nAccepted: a list"),
    ],
)
def test_what_is_no_message_names_the_row_and_what_was_found(tmp_path: Path, messages: Any, message: str):
    content = lines({"messages": turns("a", "b")}, {"messages": messages})
    if not message:
        assert said(load(tmp_path, content).train[1]) == [("user", "a"), ("assistant", "5")]
        return
    with pytest.raises(DataError, match=message):
        load(tmp_path, content)


def test_labels_of_a_float_column_are_the_integers_that_they_are():
    frame = pandas.DataFrame(
        {**{key: [value] * 3 for key, value in PAIR.items()}, "label": [1, None, 2], "x": [1, 2.5, 3]}
    )
    rows = rows_of(frame)["train"]
    assert [row["label"] for row in rows] == [1, None, 2]
    assert [row["x"] for row in rows] == [1.0, 2.5, 3.0]
    assert str(rows[0]["label"]) == "1"


def test_objects_of_python_are_text_or_refused(tmp_path: Path):
    rows = [{"instruction": date(2024, 1, 31), "response": datetime(2024, 1, 31, 12), "label": numpy.int64(7)}]
    (example,) = load(tmp_path, as_file(rows_of(rows)["train"])[1], template="plain").train
    assert (example.prompt, example.response, example.label) == ("2024-01-31\nAnswer:", "2024-01-31T12:00:00", "7")
    for value in (b"bytes", {1, 2}, object()):
        content = as_file(rows_of([{**PAIR, "response": value, "other": object()}])["train"])[1]
        with pytest.raises(DataError, match=r"column response: a dict \(\{'python': '"):
            load(tmp_path, content)


def test_missing_cells_of_a_frame_hold_nothing():
    frame = pandas.DataFrame(
        {"response": ["a", None], "day": [None, pandas.Timestamp(2024, 1, 31)], "label": [1, None]}
    )
    for each in (frame, frame.convert_dtypes()):
        first, second = rows_of(each)["train"]
        assert (first, second["label"], second["response"]) == ({"response": "a", "day": None, "label": 1}, None, None)


@pytest.mark.parametrize("number", [2**53 + 1, 2**53])
def test_a_label_is_the_integer_that_is_written(tmp_path: Path, number: int):
    assert load(tmp_path, lines({**PAIR, "label": number})).train[0].label == str(number)


def test_half_a_character_names_the_row(tmp_path: Path):
    whole = json.dumps({**PAIR, "response": "\N{BIRD}"})  # which JSON may spell in two halves
    assert load(tmp_path, whole.encode()).train[0].response == "\N{BIRD}"
    with pytest.raises(DataError, match=r"Row 2 of .*own\.jsonl has \\ud83d, half of a character"):
        load(tmp_path, f"{json.dumps(PAIR)}\n{whole.replace(whole[whole.index('d83d') + 4 :][:6], '')}\n".encode())


def test_a_call_by_function_call_needs_no_content(tmp_path: Path):
    call = {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}}
    result = {"role": "function", "name": "weather", "content": "30"}
    (example,) = load(tmp_path, lines({"messages": [turns("a")[0], call, result, *turns("x", "b")[1:]]})).train
    assert said(example) == [("user", "a"), ("assistant", ""), ("tool", "30"), ("assistant", "b")]


@pytest.mark.parametrize("given", [False, True])
def test_arguments_of_typed_rows_have_no_keys_of_other_rows(tmp_path: Path, given: bool):
    """Parquet's and Arrow's mappings have all keys that any row has, with nothing in them."""

    def calling(**arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": dict(arguments)}}}
        return {
            "messages": [turns("a")[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *turns("b", "c")],
            "tools": [tool],
        }

    rows = [calling(city="Ulm"), calling(days=3)]
    if given:
        train = load(tmp_path, as_file(rows_of(datasets.Dataset.from_list(rows))["train"])[1]).train
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "own.parquet"))
        train = load_corpus("instructions", train=str(tmp_path / "own.parquet")).train
    for example, wanted in zip(train, ({"city": "Ulm"}, {"days": 3}), strict=True):
        (call,) = json.loads(example.messages[1].more)["tool_calls"]
        assert call["function"]["arguments"] == wanted
        assert json.loads(example.tools)[0]["function"]["parameters"]["properties"] == wanted


def test_messages_of_a_dataset_are_conversations(tmp_path: Path):
    dataset = datasets.Dataset.from_list([{"messages": turns("a", "b")}])
    assert said(load(tmp_path, as_file(rows_of(dataset)["train"])[1]).train[0]) == TWO


FRAME = pandas.DataFrame({"instruction": ["a", "b"], "response": ["1", "x;y"]})
ROWS = FRAME.to_dict("records")


def table(separator: str, **options: Any) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=separator, **options).writerows([FRAME.columns, *FRAME.values.tolist()])
    return file.getvalue()


def zipped(content: bytes, name: str = "inner.jsonl") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def parquet(content: Any, method: str) -> bytes:
    file = io.BytesIO()
    getattr(content, method)(file)
    return file.getvalue()


FILES: list[tuple[str, Callable[[], bytes], dict[str, str]]] = [
    ("a.jsonl", lambda: lines(*ROWS), {}),
    ("a.JSONL", lambda: lines(*({key.upper(): value for key, value in row.items()} for row in ROWS)), {}),
    ("a.ndjson", lambda: b"\n" + lines(*ROWS) + b"\n", {}),
    ("a.json", lambda: lines(*ROWS), {}),
    ("a.json", lambda: json.dumps(ROWS, indent=1).encode("utf-8-sig"), {}),
    ("a.json", lambda: json.dumps({"version": 1, "data": ROWS}).encode(), {}),
    ("a.json", lambda: json.dumps(FRAME.to_dict("list")).encode(), {}),
    *(
        ("a.json", lambda orient=orient: FRAME.to_json(orient=orient).encode(), {})  # type: ignore[misc]
        for orient in ("columns", "index", "split", "records", "table")
    ),
    ("a.csv", lambda: table(",").encode(), {}),
    ("a.CSV", lambda: table(";").encode(), {}),
    ("a.csv", lambda: table("\t").encode("utf-16"), {}),
    ("a.csv", lambda: table("|").encode("utf-8-sig"), {}),
    ("a.tsv", lambda: table("\t").encode(), {}),
    ("a.csv", lambda: table(",", quotechar="'", quoting=csv.QUOTE_ALL).encode(), {"quote": "'"}),
    ("a.csv", lambda: table("#").encode("utf-16-le"), {"separator": "#", "encoding": "utf-16-le"}),
    ("a.jsonl.gz", lambda: gzip.compress(lines(*ROWS)), {}),
    ("a.csv.BZ2", lambda: bz2.compress(table(",").encode()), {}),
    ("a.json.xz", lambda: lzma.compress(lines(*ROWS)), {}),
    ("a.jsonl.zip", lambda: zipped(lines(*ROWS)), {}),
    ("a.parquet", lambda: parquet(FRAME, "to_parquet"), {}),
    ("a.feather", lambda: parquet(FRAME, "to_feather"), {}),
]


@pytest.mark.parametrize(("name", "content", "options"), FILES)
def test_a_file_is_read_whatever_its_kind(
    tmp_path: Path, name: str, content: Callable[[], bytes], options: dict[str, str]
):
    train = load(tmp_path, content(), name, template="plain", **options).train
    assert [(one.prompt, one.response) for one in train] == [("a\nAnswer:", "1"), ("b\nAnswer:", "x;y")]


def test_numbers_of_typed_files_are_integers_where_all_are_whole(tmp_path: Path):
    frame = pandas.DataFrame({"instruction": ["a", "b", "c"], "response": [1, 2.5, 3], "label": [1, None, 2]})
    train = load(tmp_path, parquet(frame, "to_parquet"), "a.parquet").train
    assert [(one.response, one.label) for one in train] == [("1.0", "1"), ("2.5", "instructions"), ("3.0", "2")]


def hub_folder(folder: Path) -> None:
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: de\n  data_files: [{split: train, path: de.jsonl}]\n"
        "- config_name: en\n  default: true\n  data_files:\n  - {split: train, path: en.jsonl}\n"
        "  - {split: test, path: more.jsonl}\n---\n"
    )
    (folder / "de.jsonl").write_bytes(lines({**PAIR, "response": "Zaunkönig"}))
    (folder / "en.jsonl").write_bytes(lines(*ROWS))
    (folder / "more.jsonl").write_bytes(lines(PAIR))


def test_folders_of_datasets(tmp_path: Path):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(tmp_path / "two")
    (tmp_path / "hub").mkdir()
    hub_folder(tmp_path / "hub")
    for name, train, test in (("one", 2, 0), ("two", 2, 1), ("hub", 2, 1), ("hub:de", 1, 0), ("hub:en@test", 1, 0)):
        corpus = load_corpus("instructions", train=str(tmp_path / name))
        assert (len(corpus.train), len(corpus.test)) == (train, test), name
    assert load_corpus("instructions", train=f"{tmp_path}/hub:de").train[0].response == "Zaunkönig"
    with pytest.raises(DataError, match=r"The folder .*hub:fr cannot be read as a dataset: .*fr"):
        load_corpus("instructions", train=f"{tmp_path}/hub:fr")


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "named",
    [
        "data_files: {private}",
        "data_files: [{{split: train, path: ../private.jsonl}}]",
        "data_files: [{{split: train, path: [own.jsonl, sub/../../*.jsonl]}}]",
        "data_files: file://{private}",
        "data_files: zip://a.jsonl::{private}.zip",
        "data_files: https://127.0.0.1:9/private.jsonl",
        "data_dir: ..",
    ],
)
def test_a_folder_names_no_files_elsewhere_as_its_data(named: str, file: str, tmp_path: Path):
    private, folder = tmp_path / "private.jsonl", tmp_path / "folder"
    private.write_bytes(lines(*ROWS))
    folder.mkdir()
    (folder / "own.jsonl").write_bytes(lines(*ROWS))
    configs = f"configs:\n- config_name: de\n  {named.format(private=private)}\n"
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: de\n  data_files: own.jsonl\n---\n")
    (folder / file).write_text(f"---\n{configs}---\n" if file == "README.md" else configs)
    for given in (folder, f"{folder}:de", f"{folder}:de@train"):
        with pytest.raises(ConfigError, match=rf"The data folder {folder} names .*, which is not in the folder"):
            load_corpus("instructions", train=str(given))


def test_several_files_and_patterns(tmp_path: Path):
    for index in range(3):
        (tmp_path / f"part-{index}.jsonl").write_bytes(lines({**PAIR, "response": str(index)}))
    (tmp_path / "part-x.txt").write_text("no table")
    wanted = ["0", "1", "2"]
    for given in (str(tmp_path / "part-*"), [str(tmp_path / "part-0.jsonl"), str(tmp_path / "part-[12].jsonl")]):
        assert [one.response for one in load_corpus("instructions", train=given).train] == wanted
    with pytest.raises(DataError, match=r"No data file matches .*q\*\.jsonl"):
        load_corpus("instructions", train=str(tmp_path / "q*.jsonl"))
    with pytest.raises(DataError, match="Several sources must be files"):
        load_corpus("instructions", train=[str(tmp_path), str(tmp_path / "part-0.jsonl")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b"instruction,response\na,b\nc,d,e\n",
            r"Row 2 of .* \(line 3\) has 3 cells, but there are 2 columns",
        ),
        ("a.csv", b'instruction,response\na,"b\n', r"a\.csv, line 2, cannot be read as csv: unexpected end of data"),
        ("a.csv", b"instruction,response,response\na,b,c\n", "two columns named 'response'"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz cannot be decompressed: "),
        ("a.json", b'{"a": {"b": [1]}, "c": 5}', r"no list of records; it holds: a, c\.\nAccepted: JSON lines"),
        ("a.json", b'[{"instruction": Infinity}]', "Infinity is not a number"),
        ("a.parquet", b"no parquet", r"a\.parquet cannot be read as parquet"),
        ("a.txt", b"x", r"is not a table\.\nAccepted file types: \.jsonl, .*, also compressed"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str, content: bytes, message: str):
    with pytest.raises(DataError, match=message):
        load(tmp_path, content, name)


def test_a_spreadsheet_without_a_package_to_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    path = tmp_path / "a.xlsx"
    path.write_bytes(zipped(b"", "xl/workbook.xml"))
    with pytest.raises(DataError, match=r"a package to read it is missing: .*\n.*pip install 'fedguild\[excel\]'"):
        load_corpus("instructions", train=str(path))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["text", " 65", "NA", "null", "1e5"], ["text", " 65", "NA", "null", "1e5"]),
        ([65, 65.0, 1.5, 10**15, "65.0"], ["65", "65", "1.5", "1000000000000000", "65.0"]),
        ([True, False], ["true", "false"]),
        ([date(2026, 11, 27), datetime(2026, 1, 1)], ["2026-11-27", "2026-01-01"]),
        ([datetime(2026, 11, 27, 9, 30), datetime(2026, 1, 1)], ["2026-11-27T09:30:00", "2026-01-01T00:00:00"]),
        ([7, None, 8, "", 9], ["7", "8", "9"]),
    ],
    ids=["text", "numbers", "booleans", "dates", "times", "gaps"],
)
def test_cells_of_a_spreadsheet(tmp_path: Path, cells: list[Any], expected: list[str]):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["Instruction", "Response"])
    for number, cell in enumerate(cells):
        book.active.append([f"row {number}", cell])
    book.create_sheet("notes").append(["another", "sheet"])
    book.save(tmp_path / "a.xlsx")
    corpus = load_corpus("instructions", train=str(tmp_path / "a.xlsx"))
    assert [one.response for one in corpus.train] == expected
    assert sum(corpus.dropped.values()) == len(cells) - len(expected)


def test_a_zst_file_is_read_or_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(DataError, match=r"own.jsonl.zst is compressed by Zstandard.*\n.*pip install zstandard"):
            load(tmp_path, b"x", "own.jsonl.zst")
    zstandard = pytest.importorskip("zstandard")
    assert load(tmp_path, zstandard.compress(lines(PAIR)), "own.jsonl.zst").train[0].response == PAIR["response"]
    with pytest.raises(DataError, match="cannot be decompressed"):
        load(tmp_path, b"x", "own.jsonl.zst")


@pytest.mark.parametrize(
    ("column", "nothing"),
    [("system", ""), ("system", " "), ("system", None), ("history", ""), ("history", "[]"), ("history", [])],
)
def test_a_first_row_without_a_system_prompt_or_history_hides_no_others(column: str, nothing: Any, tmp_path: Path):
    given = {"system": "Answer in German.", "history": [["a", "b"]]}[column]
    corpus = load(tmp_path, lines({**PAIR, column: nothing}, {**PAIR, column: given}))
    assert len(said(corpus.train[0])) == 2
    assert len(said(corpus.train[1])) > 2


def test_completions_that_are_judged_one_by_one_are_no_answers_to_learn(tmp_path: Path):
    rows = [{"prompt": "q", "completion": text, "label": good} for text, good in (("bad", False), ("good", True))]
    with pytest.raises(DataError, match="has unpaired preferences: its column label says whether"):
        load(tmp_path, lines(*rows))
    named = [{**row, "label": ("no", "yes")[row["label"]]} for row in rows]
    assert len(load(tmp_path, lines(*named)).train) == 2
    assert len(load(tmp_path, lines(*rows), label_column="label").train) == 2
