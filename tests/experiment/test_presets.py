"""Every preset that ships fits its data and its model; one per (method with options, model) runs a step.

In `make test` one of each method does, on the embedded model; the others do in `make test-long`.

Tiny presets run as they are, others on a tiny model of the same architecture; so does the English model, whose weights
may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedguild import experiment
from fedguild.client.budget import ClientInfo
from fedguild.config import Config, load_config, presets
from fedguild.config.loading import PRESETS_FOLDER
from fedguild.layout import CHECKPOINTS
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import describe_config
from fedguild.model.packaged import PACKAGED
from fedguild.runs.log import ClientRecord, EvaluationRecord, RoundRecord, RunLog
from fedguild.seeding import torch_rng
from fedguild.server import checkpoint
from fedguild.setup import budgets_of, check_config, fitted, prepare_data
from tests.data.writing import write_csv, write_json, write_jsonl
from tests.experiment.runs import save_model

pytestmark = pytest.mark.usefixtures("small_english")

SHIPPED = {preset.name: load_config(preset.name) for preset in presets()}
"""Name -> the preset's config."""
ONE_STEP = [
    "federation.rounds=1",
    "training.steps=1",
    "training.epochs=null",
    "training.batch_size=2",
    "evaluation.max_examples=1",
    "evaluation.max_new_tokens=2",
]
GENERATED = "data.options={train_examples: 200, test_examples: 20}"
ROWS, FEWER = 900, 300
"""Rows of a corpus that many clients share, and of another."""
CATEGORIES = ("open_qa", "closed_qa", "brainstorming", "summarization")
CLASSES = ("entailment", "neutral", "contradiction")
VERBS = ("Write", "Name", "Sort", "Count", "Explain")
STAND_INS = {
    "allenai/OLMo-1B-hf": "olmo",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek",
    "google/switch-base-16": "switch",
    "huggyllama/llama-7b": "llama",
    "meta-llama/Llama-2-7b-hf": "llama",
    "meta-llama/Llama-3.2-1B": "llama",
    "meta-llama/Llama-3.2-3B": "llama",
    "mistralai/Mistral-7B-v0.3": "llama",
    "Qwen/Qwen2.5-0.5B": "qwen2",
}
"""Hub id -> architecture."""
CHEAPER = {
    "fedalign-moe": ["method.statistics_tokens=64"],
    "fed-sb": ["method.rank=4", "method.sketch_rank=4"],
    "pfl-moe": ["method.gate_epochs=0.1", "method.personal_epochs=0.1"],
}
"""Method -> what makes its step cheaper."""


def first_of_each(keys: Iterable[tuple[str, tuple[object, ...]]]) -> list[str]:
    """Returns, for each key, the name that it comes with first."""
    first: dict[tuple[object, ...], str] = {}
    for name, key in keys:
        first.setdefault(key, name)
    return list(first.values())


RUN = first_of_each(
    (name, (config.method.name, json.dumps(config.method.options, sort_keys=True), config.model.path))
    for name, config in SHIPPED.items()
)
"""One preset per (method with options, model)."""
DEALT = first_of_each(
    (name, (config.data.model_dump_json(), config.federation.clients, config.seed)) for name, config in SHIPPED.items()
)
"""One preset per way of dealing data to clients."""
AS_IT_IS = {name.split("/")[0]: name for name in RUN if SHIPPED[name].model.path not in PACKAGED}.values()
"""One preset of each method on a real model, in its own dtype; for bfloat16 a CPU compiles a kernel for every shape."""
SOON = first_of_each((name, (SHIPPED[name].method.name,)) for name in RUN if SHIPPED[name].model.path == "embedded")
"""One preset of each method on the embedded model: what runs in `make test`."""


def english(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Presets on the English model differ from others in their data."""
    return (pytest.mark.long,) if "/english-" in name else ()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Corpus -> overrides that name small local files in its layout."""
    folder = tmp_path_factory.mktemp("data")
    dolly = [
        {"instruction": f"Add {i}.", "context": "", "response": str(i), "category": CATEGORIES[i % len(CATEGORIES)]}
        for i in range(ROWS)
    ]
    alpaca = [
        {"instruction": f"{VERBS[i % len(VERBS)]} {i}.", "input": "x" * (i % 3), "output": str(i)} for i in range(ROWS)
    ]
    choices = [
        {
            "instruction": "Please answer the following question with true or false, question: is "
            f"{i} even?\n\nAnswer format: true/false",
            "input": "",
            "output": f"the correct answer is {str(i % 2 == 0).lower()}",
            "answer": str(i % 2 == 0).lower(),
        }
        for i in range(FEWER)
    ]
    questions = {
        "data": [
            {"docid": f"document {d}", "paragraphs": [{"context": f"Number {d}.", "qas": [_question(d, i)]}]}
            for d in range(ROWS // 10)
            for i in range(10)
        ]
    }
    pairs = [
        {"sentence1": f"There are {i}.", "sentence2": "There are some.", "gold_label": CLASSES[i % 3]}
        for i in range(FEWER)
    ]
    for task in range(10):
        instances = [{"input": f"{i}", "output": [f"{i + task}"]} for i in range(40)]
        write_json(folder / f"tasks/task{task}.json", {"Definition": [f"Add {task}."], "Instances": instances})
    news = [[1 + i % 4, f"Title {i}", f"Text {i}"] for i in range(FEWER)]
    texts = [
        {"ctx": f"Count to {i}.", "endings": ["One", "Two"], "label": i % 2, "activity_label": VERBS[i % len(VERBS)]}
        for i in range(FEWER)
    ]
    goals = [{"goal": f"Reach {i}.", "sol1": "Add.", "sol2": "Take.", "label": i % 2} for i in range(FEWER)]
    exam: list[list[object]] = [["question", "subject", "choice0", "choice1", "choice2", "choice3", "answer"]]
    exam += [[f"{i}?", VERBS[i % len(VERBS)], "1", "2", "3", "4", i % 4] for i in range(FEWER)]
    users = {f"user {n}": [{"instruction": f"Add {n} {i}.", "response": f"{i}"} for i in range(4)] for n in range(237)}
    return {
        "tasks": [GENERATED],
        "instructions": [f"data.train={write_jsonl(folder / 'alpaca.jsonl', alpaca)}"],
        "fedllm_bench": [f"data.train={write_json(folder / 'users.json', users)}"],
        "snli": [
            f"data.train={write_jsonl(folder / 'snli.jsonl', pairs)}",
            f"data.test={write_jsonl(folder / 'snli.test.jsonl', pairs[:40])}",
        ],
        "natural_instructions": [f"data.train={folder / 'tasks'}"],
        "dolly": [f"data.train={write_jsonl(folder / 'dolly.jsonl', dolly)}"],
        "alpaca": [f"data.train={write_jsonl(folder / 'alpaca.jsonl', alpaca)}"],
        "commonsense": [
            f"data.train={write_json(folder / 'commonsense.json', choices)}",
            f"data.test={write_json(folder / 'commonsense.test.json', choices[:40])}",
        ],
        "telequad": [f"data.train={write_json(folder / 'telequad.json', questions)}"],
        "hellaswag": [
            f"data.train={write_jsonl(folder / 'hellaswag.jsonl', texts)}",
            f"data.test={write_jsonl(folder / 'hellaswag.test.jsonl', texts[:40])}",
        ],
        "piqa": [
            f"data.train={write_jsonl(folder / 'piqa.jsonl', goals)}",
            f"data.test={write_jsonl(folder / 'piqa.test.jsonl', goals[:40])}",
        ],
        "mmlu": [
            f"data.train={write_csv(folder / 'mmlu.csv', exam)}",
            f"data.test={write_csv(folder / 'mmlu.test.csv', exam[:41])}",
        ],
        "ag_news": [
            f"data.train={write_csv(folder / 'train.csv', news)}",
            f"data.test={write_csv(folder / 'test.csv', news[:40])}",
        ],
    }


def _question(document: int, number: int) -> dict[str, object]:
    return {"question": f"Which is the number plus {number}?", "answers": [{"text": str(document + number)}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> folder of a random model with as many active experts as the real one."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "olmoe": save_model(folder / "olmoe", num_experts=16, num_experts_per_tok=8, num_hidden_layers=1),
        "llama": save_model(folder / "llama", "llama", num_hidden_layers=1),
        "deepseek": save_model(folder / "deepseek", "deepseek_v2 greedy", num_experts_per_tok=6),
        "switch": save_model(folder / "switch", "switch", num_experts=16),
        "olmo": save_model(folder / "olmo", "olmo", num_hidden_layers=1),
        "qwen2": save_model(folder / "qwen2", "qwen2", num_hidden_layers=1),
    }


def test_every_file_of_the_folder_is_a_preset() -> None:
    assert len(SHIPPED) >= 16
    assert {PRESETS_FOLDER / f"{name}.yaml" for name in SHIPPED} == set(PRESETS_FOLDER.rglob("*.y*ml"))
    assert {name.split("/")[0] for name in SHIPPED} == set(METHODS)


def has_no_global_model(config: Config) -> bool:
    """Whether every client of a config has a model of its own, and nobody a global one."""
    model = describe_config(config.model.path)
    method = fitted(build_method(config.method.name, config.method.options), config, model)
    tiers = list(budgets_of(config, model).values())
    clients = [ClientInfo(index, tiers[index % len(tiers)], 10) for index in range(config.federation.clients)]
    state = method.enroll(method.start(model, tiers, torch_rng(0, "start")), model, clients)
    return method.deploy(state, model, tiers[0]) is None


def on_a_small_model(preset: str, models: dict[str, Path]) -> list[str]:
    """Returns the overrides that give a preset on a real model a small one of its architecture."""
    model = SHIPPED[preset].model.path
    if model in PACKAGED:
        return []
    stand_in = [f"model.path={models[STAND_INS[model]]}", "model.device=cpu", "model.load_in_4bit=false"]
    return stand_in if preset in AS_IT_IS else [*stand_in, "model.dtype=float32"]


@pytest.mark.parametrize("preset", [pytest.param(name, marks=english(name)) for name in SHIPPED])
def test_a_preset_fits_its_model(preset: str, models: dict[str, Path]) -> None:
    cheaper = CHEAPER.get(SHIPPED[preset].method.name, [])
    config = load_config(preset, [*on_a_small_model(preset, models), *cheaper])
    assert config.method.name == preset.split("/")[0]
    check_config(config)


@pytest.mark.parametrize("corpus", ["ag_news", "snli", "dolly", "natural_instructions", "hellaswag", "commonsense"])
def test_every_method_has_a_preset_on_the_english_model_for_every_set(corpus: str) -> None:
    """Dealt as for one of the papers' four methods, which the preset stands beside."""
    configs = {method: SHIPPED[f"{method}/english-{corpus}"] for method in METHODS}
    for method, config in configs.items():
        assert (config.method.name, config.data.corpus, config.model.path) == (method, corpus, "english")
    dealt = {method: (config.data.model_dump_json(), config.federation.clients) for method, config in configs.items()}
    beside = {dealt[method] for method in ("flame", "ub-smoe", "fedamole", "fedalign-moe")}
    assert [method for method in METHODS if dealt[method] not in beside] == []


def test_pfl_moe_is_scored_as_itself() -> None:
    """By its clients' models on all questions, too: that of the server is a plain mean of adapters."""
    presets = {name: config for name, config in SHIPPED.items() if name.startswith("pfl-moe/")}
    assert presets
    assert not [name for name, config in presets.items() if not config.evaluation.pooled]


@pytest.mark.parametrize("preset", DEALT)
def test_a_preset_deals_its_data(preset: str, data: dict[str, list[str]]) -> None:
    config = load_config(preset, data[SHIPPED[preset].data.corpus])
    dealt = prepare_data(config)
    assert len(dealt.clients) == config.federation.clients
    assert all(client.train for client in dealt.clients)


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=pytest.mark.long if "/english-" in name or name not in SOON else ()) for name in RUN],
)
def test_a_preset_runs_a_step(preset: str, data: dict[str, list[str]], models: dict[str, Path], tmp_path: Path) -> None:
    shipped = SHIPPED[preset]
    cheaper = CHEAPER.get(shipped.method.name, [])
    config = load_config(preset, [*data[shipped.data.corpus], *on_a_small_model(preset, models), *ONE_STEP, *cheaper])
    personal = has_no_global_model(config)
    if not personal and preset not in AS_IT_IS:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"clients": False})})
    result = experiment.run(config, tmp_path)
    assert result.scores.keys() == {budget.name for budget in config.federation.budgets if not personal}
    assert checkpoint.latest(tmp_path / CHECKPOINTS) == 1
    records = RunLog(tmp_path).read()
    (whole,) = [record for record in records if isinstance(record, RoundRecord)]
    trained = [record for record in records if isinstance(record, ClientRecord)]
    asked = config.federation.participation * config.federation.clients
    assert len(whole.participants) == asked
    assert whole.rejected == []
    assert [record.client for record in trained] == whole.participants
    for_every_budget = METHODS.load(config.method.name).costs.trains == "every budget"
    trainings = len(config.federation.budgets) if for_every_budget else 1
    assert {record.steps for record in trained} == {trainings}
    assert all(record.train_loss > 0 for record in trained)
    if personal:
        scored = [record for record in records if isinstance(record, EvaluationRecord) and record.scope == "client"]
        assert len(scored) == 2 * config.federation.clients
        return
    scores = [record for record in records if isinstance(record, EvaluationRecord) and record.scope == "budget"]
    assert {record.examples for record in scores} == {1}
    own = {budget.name: budget.active_experts for budget in config.federation.budgets}
    assert all(own[record.name] in (0, record.active_experts) for record in scores)
