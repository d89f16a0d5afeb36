"""A step of each method, model and data set of the presets; in `make test-long` of each method on each model.

Presets on the embedded model run as they are, others on a tiny model of the same architecture; so does the English
model, whose weights may be absent.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.client.budget import ClientInfo
from fedguild.config import Config, axes, load_config, presets
from fedguild.core.layout import CHECKPOINTS
from fedguild.core.seeding import torch_rng
from fedguild.measuring.log.records import ClientRecord, EvaluationRecord, RoundRecord, RunLog
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import describe_config
from fedguild.model.packaged import PACKAGED
from fedguild.runs import experiment
from fedguild.runs.setup import budgets_of, check_config, fitted, prepare_data
from fedguild.server import checkpoint
from fedguild.server.method import Roster
from tests.data.writing import write_csv, write_json, write_jsonl
from tests.runs.runs import save_model
from tests.undescribed import plain

pytestmark = pytest.mark.usefixtures("small_english")

AXES = axes()
PAIRS = list(dict.fromkeys((preset.method.name, preset.model.name) for preset in presets()))
"""Every method and model that it runs on."""
ONE_STEP = [
    "federation.rounds=1",
    "training.steps=1",
    "training.epochs=null",
    "training.batch_size=2",
    "evaluation.max_examples=1",
    "evaluation.max_new_tokens=2",
]
GENERATED = "data.options={train_examples: 500, test_examples: 20}"
ROWS, FEWER = 900, 300
"""Rows of a corpus that many clients share, and of another."""
OF_EACH_KIND = ("ag_news", "commonsense", "dolly", "fedllm_bench-aya")
"""Data sets whose answers are chosen, generated, both, and whose records have an owner."""
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
    "Qwen/Qwen3-30B-A3B": "qwen3_moe",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "ibm-granite/granite-4.0-h-small": "granite small",
    "ibm-granite/granite-4.0-h-tiny": "granite tiny",
    "openai/gpt-oss-20b": "gpt_oss",
    "zai-org/GLM-4.5-Air": "glm4_moe",
    "models/smollm2-135m": "llama",
    "models/smollm2-moe": "qwen2_moe",
}
"""Hub id, or the folder that `make smollm2` writes -> architecture."""
CHEAPER = {
    "fedalign-moe": ["method.statistics_tokens=64"],
    "fed-sb": ["method.rank=4", "method.sketch_rank=4"],
    "pfl-moe": ["method.gate_epochs=0.1", "method.personal_epochs=0.1"],
}
"""Method -> what makes its step cheaper."""


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
        "qwen3_moe": save_model(
            folder / "qwen3_moe", "qwen3_moe", num_experts=16, num_experts_per_tok=8, num_hidden_layers=1
        ),
        **{
            name: save_model(
                folder / name, family, plain, dtype=torch.float32, num_experts_per_tok=active, **{number: 16}
            )
            for name, family, active, number in (
                ("qwen3_next", "qwen3_next", 10, "num_experts"),
                ("granite small", "granitemoehybrid", 10, "num_local_experts"),
                ("granite tiny", "granitemoehybrid", 6, "num_local_experts"),
                ("gpt_oss", "gpt_oss", 4, "num_local_experts"),
                ("glm4_moe", "glm4_moe", 8, "n_routed_experts"),
            )
        },
        "qwen2_moe": save_model(
            folder / "qwen2_moe", "qwen2_moe", num_experts=32, num_experts_per_tok=8, num_hidden_layers=1
        ),
    }


def has_no_global_model(config: Config) -> bool:
    model = describe_config(config.model.path)
    method = fitted(build_method(config.method.name, config.method.options), config, model)
    tiers = list(budgets_of(config, model).values())
    clients = [ClientInfo(index, tiers[index % len(tiers)], 10) for index in range(config.federation.clients)]
    state = method.start(model, Roster(tiers, clients), torch_rng(0, "start"))
    return method.deploy(state, model, tiers[0]) is None


def on_a_small_model(name: str, models: dict[str, Path]) -> list[str]:
    config = load_config(name)
    cheaper = CHEAPER.get(config.method.name, [])
    if config.model.path in PACKAGED:
        return cheaper
    small = models[STAND_INS[config.model.path]]
    return [f"model.path={small}", "model.device=cpu", "model.load_in_4bit=false", "model.dtype=float32", *cheaper]


@pytest.mark.parametrize("setups", ["on the embedded model", pytest.param("on every model", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_fits_every_model_that_it_is_offered_on(method: str, setups: str, models: dict[str, Path]) -> None:
    """Under every setup that it has there."""
    seen = set()
    for preset in presets():
        place = (preset.model.name, preset.setup.name if preset.model.name == "tiny" or "every" in setups else "")
        if preset.method.name == method and place not in seen:
            seen.add(place)
            check_config(load_config(preset.name, on_a_small_model(preset.name, models)))


@pytest.mark.parametrize("corpus", AXES.data)
@pytest.mark.parametrize("method", ["guild", "ub-smoe", "fedamole", "fedalign-moe"])
def test_a_data_set_is_split_over_the_clients_of_a_setup(method: str, corpus: str, data: dict[str, list[str]]) -> None:
    config = load_config(f"{method}/tiny-{corpus}")
    prepared = prepare_data(load_config(f"{method}/tiny-{corpus}", data[config.data.dataset]))
    assert len(prepared.clients) == config.federation.clients
    assert all(client.train for client in prepared.clients)


def test_pfl_moe_is_scored_as_itself() -> None:
    """By its clients' models on all questions, too: that of the server is a plain mean of adapters."""
    for preset in presets():
        if preset.method.name == "pfl-moe" and preset.setup.name == "fedalign-moe":
            assert load_config(preset.name).evaluation.pooled, preset.name


@pytest.mark.parametrize(
    ("method", "model"), [pytest.param(*pair, marks=() if pair[1] == "tiny" else pytest.mark.long) for pair in PAIRS]
)
def test_a_method_runs_a_step(method, model, data, models, tmp_path):
    run_a_step(f"{method}/{model}-tasks", data, models, tmp_path)


@pytest.mark.parametrize("model", [model for model in AXES.models if model != "tiny"])
def test_a_model_runs_a_step(model: str, data: dict[str, list[str]], models: dict[str, Path], tmp_path: Path) -> None:
    run_a_step(f"fedit/{model}-tasks", data, models, tmp_path)


@pytest.mark.parametrize(
    "corpus",
    [corpus if corpus in OF_EACH_KIND else pytest.param(corpus, marks=pytest.mark.long) for corpus in AXES.data],
)
def test_a_data_set_runs_a_step(corpus, data, models, tmp_path):
    run_a_step(f"fedit/tiny-{corpus}", data, models, tmp_path)


@pytest.mark.parametrize("name", AXES.cells)
def test_a_cell_with_a_file_of_its_own_runs_a_step(name, data, models, tmp_path):
    run_a_step(name, data, models, tmp_path)


def run_a_step(name: str, data: dict[str, list[str]], models: dict[str, Path], folder: Path) -> None:
    shipped = load_config(name)
    config = load_config(name, [*data[shipped.data.dataset], *on_a_small_model(name, models), *ONE_STEP])
    personal = has_no_global_model(config)
    if not personal:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"clients": False})})
    result = experiment.run(config, folder)
    assert result.scores.keys() == {budget.name for budget in config.federation.budgets if not personal}
    assert checkpoint.latest(folder / CHECKPOINTS) == 1
    records = RunLog(folder).read()
    (whole,) = [record for record in records if isinstance(record, RoundRecord)]
    trained = [record for record in records if isinstance(record, ClientRecord)]
    asked = config.federation.client_fraction * config.federation.clients
    assert len(whole.participants) == max(round(asked), 1)
    assert whole.rejected == []
    assert [record.client for record in trained] == whole.participants
    for_every_budget = METHODS.load(config.method.name).facts.costs.trains == "every budget"
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
