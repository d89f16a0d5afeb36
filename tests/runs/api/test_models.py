"""`fedguild.load_model` and `fedguild generate`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedguild
from fedguild.cli import app
from fedguild.config import load_config
from fedguild.core.errors import CheckpointError, ConfigError
from fedguild.core.payload import Payload
from fedguild.data.example import ELSEWHERE
from fedguild.data.rendering import encode_prompt
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from fedguild.runs.scoring import evaluated_plan
from fedguild.server.method import Deployment, client_model, excerpt_of

pytestmark = pytest.mark.usefixtures("loaded_alone")
PROMPT = "3 + 4 ="
EXPORT_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "export.md"


def ours(folder: Path, budget: str = "", client: int | None = None) -> tuple[list[int], Any]:
    """The continuation of the prompt as the evaluation of a run would generate it."""
    restored, state, number = experiment.restore(folder)
    method, info = restored.method, restored.backbone.info
    deployment: Deployment | None
    if client is None:
        tier = next(one for one in restored.budgets if one.name == budget)
        deployment = method.deploy(state, info, tier)
    else:
        member = restored.clients[client]
        tier, memory = member.budget, restored.memory.load(member.name, number + 1)
        deployment = client_model(method, excerpt_of(method, state, info, member), info, member, memory or Payload())
    assert deployment is not None
    tokenizer = restored.backbone.tokenizer
    with SlotModel(restored.backbone, [evaluated_plan(restored, tier, deployment)]) as slots:
        slots.load(0, deployment.tensors)
        return slots.generate([[encode_prompt(PROMPT, tokenizer)]], 6)[0][0], tokenizer


@pytest.mark.parametrize(
    ("method", "budget", "client"),
    [("ub-smoe", "small", None), ("ub-smoe", "large", None), ("fedamole", "", 1), ("pfl-moe", "", 2)],
)
def test_a_model_generates_what_the_run_would(routed_runs, method, budget, client):
    expected, tokenizer = ours(routed_runs[method], budget, client)
    chosen = {"budget": budget} if client is None else {"client": f"client-{client:03d}"}
    model = fedguild.load_model(routed_runs[method], **chosen)
    ids = torch.tensor([encode_prompt(PROMPT, tokenizer)])
    out = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id
    assert (out[: out.index(end)] if end in out else out) == expected


def test_models_that_are_not_there(routed_runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no global one\.\nName a client"):
        fedguild.load_model(routed_runs["fedamole"])
    with pytest.raises(ConfigError, match="Give either --budget or --client"):
        fedguild.load_model(routed_runs["ub-smoe"], "small", "client-000")
    with pytest.raises(ConfigError, match="The run has no budget 'smal'"):
        fedguild.load_model(routed_runs["ub-smoe"], "smal")
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        fedguild.load_model(tmp_path)


@pytest.mark.long
def test_the_harness_scores_a_model_as_the_guide_shows(routed_runs: dict[str, Path], tmp_path: Path) -> None:
    harness = pytest.importorskip("lm_eval")
    (code,) = re.findall(r"```python\n(import lm_eval\n.*?)```", EXPORT_GUIDE.read_text(), re.S)
    rows = [{"question": f"{a} + 1 =", "choices": [str(a + 1), str(a + 2)], "answer": 0} for a in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code = code.replace("runs/ub-smoe-tiny-tasks", str(routed_runs["ub-smoe"])).replace("b4", "small")
    found: dict[str, Any] = {}
    exec(code.replace("sums.jsonl", str(tmp_path / "sums.jsonl")), found)
    assert harness is found["lm_eval"]
    (scores,) = found["results"]["results"].values()
    model = fedguild.load_model(routed_runs["ub-smoe"], "small")
    right = sum(better(model, row["question"], *row["choices"]) for row in rows)
    assert scores["acc,none"] == right / len(rows)


def better(model: Any, question: str, right: str, wrong: str) -> bool:
    sums = []
    for answer in (right, wrong):
        before, whole = (model.tokenizer.encode(text) for text in (question, f"{question} {answer}"))
        with torch.no_grad():
            logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        sums.append(sum(float(logs[place - 1, whole[place]]) for place in range(len(before), len(whole))))
    return sums[0] > sums[1]


def generate(*arguments: object, said: str = "") -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=said)


def test_the_command_prints_the_answer(routed_runs: dict[str, Path]) -> None:
    expected, tokenizer = ours(routed_runs["ub-smoe"], "small")
    arguments = (routed_runs["ub-smoe"], "--budget", "small", "--max-new-tokens", 6, "--raw")
    result = generate(*arguments, PROMPT)
    assert result.exit_code == 0, result.output
    answer = tokenizer.decode(expected, skip_special_tokens=True)
    assert result.stdout == f"{answer}\n"
    several = generate(*arguments, said=f"{PROMPT}\n\n{PROMPT}\n")
    assert several.stdout == f"{answer}\n{answer}\n"


def test_the_command_samples_by_its_seed_and_uses_the_template(routed_runs: dict[str, Path]) -> None:
    from fedguild.runs.api.generating import open_generator

    generator = open_generator(routed_runs["fedamole"], client="client-000")
    one, same, other = ("".join(generator.stream("Hi", 8, temperature=1.5, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    seen: list[list[int]] = []
    generator.model.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["input_ids"][0].tolist()), with_kwargs=True
    )
    templated = type(generator)(generator.model, "alpaca")
    "".join(templated.stream("Hi", 1))
    assert "### Instruction:\nHi\n\n### Response:" in generator.model.tokenizer.decode(seen[0])


CHATS = "conversations by the chat template 12345678, train_on all_turns, special_tokens text"
PROMPTS = "prompts by the template of the corpus, special_tokens text"


@pytest.mark.parametrize(
    ("said", "settings", "template"),
    [
        (CHATS, [], "chat"),
        (PROMPTS, [], "alpaca"),
        ("", [], ""),
        ("", ["data.chat_template=plain"], "chat"),
        ("", ["data.template=plain"], "plain"),
        (None, [], ""),
    ],
)
def test_a_server_takes_the_template_of_its_sites(said, settings, template, tmp_path, monkeypatch):
    """Their data is not here, but they say how their texts are written; not in a private run."""
    from fedguild.runs.api import generating

    config = load_config("fedit/tiny-tasks", ["data.dataset=instructions", *settings])
    if said is not None:
        (tmp_path / "members.json").write_text(json.dumps({"0": {"texts": said}}))
    run = SimpleNamespace(
        config=config,
        folder=tmp_path,
        data=SimpleNamespace(corpus=ELSEWHERE),
        backbone=SimpleNamespace(info=SimpleNamespace(seq2seq=None)),
    )
    monkeypatch.setattr(generating, "load_attached", lambda *_: (None, run))
    generator = generating.open_generator(tmp_path)
    assert generator.template == template
    if not template:
        with pytest.raises(ConfigError, match=r"The template of the run's prompts is not known(.|\n)*with --raw"):
            "".join(generator.stream("Hi"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"prompt": "", "raw": True}, "The prompt is empty"),
        ({"temperature": float("nan")}, "temperature is 0, or at least 0.001, got nan"),
        ({"temperature": 1e-300}, "temperature is 0, or at least 0.001, got 1e-300"),
        ({"temperature": float("inf")}, "got inf"),
        ({"seed": 2**63}, "The seed of the sampling is at least 0 and below"),
    ],
)
def test_what_cannot_be_generated_from_is_refused(routed_runs, wrong, told):
    from fedguild.runs.api.generating import open_generator

    with pytest.raises(ConfigError, match=told):
        "".join(open_generator(routed_runs["ub-smoe"]).stream(**{"prompt": "Hi", **wrong}))
