"""A run on conversations: told, trained, scored, continued in the console, exported with its template."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import fedguild
from fedguild.config import load_config
from fedguild.core.errors import DataError
from fedguild.core.progress import Silent
from fedguild.data.rendering import PLAIN_TEMPLATE
from fedguild.runs import experiment
from fedguild.runs.api.generating import open_generator
from fedguild.runs.api.inputs import gather
from fedguild.runs.setup import prepare

BIRDS = [
    {"messages": [{"role": "user", "content": f"Name bird {n}."}, {"role": "assistant", "content": f"Robin {n}."}] * 2}
    for n in range(24)
]
SMALL = (
    *("federation.clients=2", "federation.rounds=1", "training.steps=2", "data.partition={scheme: iid, minimum: 3}"),
    *("data.max_length=96", "evaluation.max_new_tokens=8", "evaluation.max_examples=2"),
)


class Told(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_on_conversations(tmp_path: Path):
    told = Told()
    file = tmp_path / "birds.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in BIRDS))
    overrides = [*SMALL, "data.dataset=instructions", f"data.train={file}", "data.chat_template=plain"]
    result = fedguild.run("fedit/tiny-tasks", *overrides, output=tmp_path / "run", progress=told)
    assert f"Data: {file}: chat messages (messages)." in told.lines
    assert not [line for line in told.lines if line.startswith("Warning")]
    assert result.scores
    generator = open_generator(tmp_path / "run")
    assert generator.template == "chat"
    assert all("###" not in piece for piece in generator.stream("Name bird 3.", max_new_tokens=4))
    exported = fedguild.export_model(result, tmp_path / "adapter")
    assert AutoTokenizer.from_pretrained(exported.folder).chat_template == PLAIN_TEMPLATE


def test_a_leak_is_warned_of(tmp_path: Path):
    told = Told()
    rows = [{"instruction": f"Name bird {n % 4}.", "response": "Robin."} for n in range(24)]
    config = load_config("fedit/tiny-tasks", [*SMALL, "data.dataset=instructions", "data.partition.minimum=3"])
    given = gather(rows)
    prepare(given.config(config, []), tmp_path, told, data=given.data)
    (line,) = [line for line in told.lines if line.startswith("Warning")]
    assert "held-out examples have the prompt of a training example" in line


def test_a_missing_template_is_told_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedguild.runs.setup.preparation.load_backbone", lambda **_: pytest.fail("loaded"))
    with pytest.raises(DataError, match=r"has no chat template\.\nSet data\.chat_template"):
        fedguild.run("fedit/tiny-tasks", *SMALL, dataset=BIRDS, output=tmp_path / "run")
    assert experiment.CONFIG not in {path.name for path in (tmp_path / "run").iterdir()}
