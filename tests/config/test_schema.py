"""Ranges, contradictions, and the messages they get; the fingerprint; clients per budget."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from fedguild.config import Config, load_config
from fedguild.config.federation import FederationSettings
from fedguild.config.reference import as_markdown, settings_of
from fedguild.core.errors import ConfigError
from fedguild.core.score_names import SCORES, SUMMARIES

GUIDE = Path(__file__).parents[2] / "docs/guides/settings.md"


def lines_for(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("flame/tiny-tasks", overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.learning_rate=-1", "training.learning_rate: must be greater than 0, got -1"),
        ("training.learning_rate=fast", "training.learning_rate: must be a number, got 'fast'"),
        ("data.partition.alpha=.inf", "data.partition.alpha: must be a finite number, got inf"),
        ("federation.client_fraction=1.5", "federation.client_fraction: must be at most 1, got 1.5"),
        ("federation.clients=0.5", "federation.clients: must be a whole number, got 0.5"),
        ("federation.cohort_size=0", "federation.cohort_size: must be 'auto' or at least 1, got 0"),
        ("federation.cohort_size=many", "federation.cohort_size: must be 'auto' or a whole number, got 'many'"),
        ("federation.budgets=[]", "federation.budgets: must have at least 1 item(s), got []"),
        ("federation.budgets=[{name: a, rank: 0}]", "federation.budgets[0].rank: must be at least 1, got 0"),
        ("federation.budgets=[{rank: 3}]", "federation.budgets[0].name: is required"),
        ("training.warmup=1", "training.warmup: must be less than 1, got 1"),
        ("training.optimizer=lion", "training.optimizer: must be 'adamw', 'adam' or 'sgd', got 'lion'"),
        ("training=3", "training: must be a mapping of keys to values, got 3"),
        ("model.load_in_4bit=perhaps", "model.load_in_4bit: must be true or false, got 'perhaps'"),
        ("model.path=null", "model.path: must be text, got null"),
        ("data.dataset=''", "data.dataset: must not be empty, got ''"),
        ("training.betas=[0.9, 1]", "training: betas must be at least 0 and less than 1, got [0.9, 1.0]"),
        ("training.epochs=1", "training: set either epochs or steps, not both (null switches one off)"),
        ("data.split.validation=-0.1", "data.split.validation: must be at least 0, got -0.1"),
        ("data.split.test=1", "data.split.test: must be less than 1, got 1"),
        ("data.split.max_train_samples=0", "data.split.max_train_samples: must be at least 1, got 0"),
        ("data.split.test_source=server", "data.split.test_source: must be 'client' or 'corpus', got 'server'"),
        ("data.split={validation: 0.5, test: 0.5}", "data.split: validation and test together must be below 1, got 1"),
        (
            "federation.budgets=[{name: a}, {name: a}]",
            "federation: budgets must have distinct names, got a more than once",
        ),
    ],
)
def test_one_plain_line_per_setting(override: str, told: str) -> None:
    assert lines_for(override) == [f"override '{override}': {told}"]


@pytest.mark.parametrize("name", sorted({*SCORES, *SUMMARIES}))
def test_a_budget_does_not_have_the_name_of_a_mean(name: str) -> None:
    """A table's columns are budgets and means: one of them would hide the other's score."""
    (line,) = lines_for(f"federation.budgets=[{{name: a}}, {{name: {name}}}]")
    assert line.endswith(
        "federation.budgets[1].name: must not be the name of a mean (mean, mtal, trained, received, pooled), "
        f"got '{name}'"
    )
    assert load_config("flame/tiny-tasks", [f"federation.budgets=[{{name: {name}-1}}]"]).federation.budgets


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.learnign_rate", "training.learning_rate"),
        ("federation.client", "federation.clients"),
        ("data.partition.alfa", "data.partition.alpha"),
        ("sed", "seed"),
        ("learning_rate", "training.learning_rate"),
        ("federation.alpha", "data.partition.alpha"),
        ("training.lr", "training.learning_rate"),
        ("wd", "training.weight_decay"),
        ("federation.num_rounds", "federation.rounds"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, meant: str) -> None:
    told, hint = lines_for(f"{key}=1")
    assert told == f"override '{key}=1': unknown key '{key}'"
    assert hint.startswith(f"Did you mean '{meant}'?")


def test_an_unknown_key_in_a_list_and_the_keys_there() -> None:
    told, hint = lines_for("federation.budgets=[{name: a, experts: 3}]")
    assert "unknown key 'federation.budgets[0].experts'" in told
    assert "federation.budgets[0].active_experts" in hint


def test_the_message_names_the_file_that_holds_the_key(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent.yaml", tmp_path / "child.yaml"
    parent.write_text("method: flame\ntraining: {stepz: 3}\nseed: 1\n")
    child.write_text("extends: parent.yaml\nseed: -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(child))
    assert f"{parent}: unknown key 'training.stepz'" in str(caught.value)
    assert f"{child}: seed: must be at least 0, got -1" in str(caught.value)


def test_a_config_without_a_method(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"a\.yaml: method: is required"):
        load_config(str(path))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tracking=[tensorboard, wandb, wandb]", "tracking.project=x"], ("tensorboard", "wandb")),
        (["tracking.project=x", "tracking=wandb"], ("wandb",)),
        (["tracking.project=x", "tracking.tensorboard=true"], ("tensorboard",)),
        (["tracking.project=x", "tracking.tensorboard=false"], ()),
        (["tracking={trackers: [mlflow], project: x}"], ("mlflow",)),
        (["tracking.project=x"], ()),
    ],
)
def test_trackers_are_a_list_a_name_or_the_switch_of_old_configs(overrides, expected):
    config = load_config("flame/tiny-tasks", overrides)
    assert (config.tracking.trackers, config.tracking.project) == (expected, "x")
    assert Config.model_validate(yaml.safe_load(config.resolved_yaml())) == config
    options = {**config.method.options, "rank": 7, "targets": ["attention", "experts"], "of_nobody": None}
    text = config.resolved_yaml(options)
    assert Config.model_validate(yaml.safe_load(text)) == config
    assert "  # of_nobody: null\n" in text
    assert config.resolved_yaml(config.method.options) == config.resolved_yaml()
    in_python = Config.model_validate({"method": {"name": "fedit"}, "tracking": ["wandb"]})
    assert in_python.tracking.trackers == ("wandb",)


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "output=elsewhere",
        "model.device=cpu",
        "federation.cohort_size=2",
        "federation.engine={name: ray, ray: {actors: 4}}",
        "federation.save_total_limit=9",
        "evaluation.batch_tokens=512",
        "evaluation.diagnostics=true",
        "evaluation.eval_on_start=false",
        "tracking.tensorboard=true",
        "tracking={trackers: [wandb, mlflow], project: other, tags: [a]}",
        "training.learning_rate=0.005",
    ],
)
def test_the_fingerprint_ignores_what_changes_no_result(override: str) -> None:
    plain = load_config("flame/tiny-tasks")
    assert plain.training.learning_rate == 0.005
    assert load_config("flame/tiny-tasks", [override]).fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "method.temperature=3",
        "model.dtype=float16",
        "data.max_samples=5",
        "evaluation.split=validation",
        "federation.over_selection=0.5",
        "federation.retries=1",
        "federation.deadline_seconds=60",
        "federation.straggler_policy=next_round",
    ],
)
def test_the_fingerprint_sees_what_changes_results(override: str) -> None:
    plain = load_config("flame/tiny-tasks").fingerprint()
    assert len(plain) == 64
    assert load_config("flame/tiny-tasks", [override]).fingerprint() != plain


def tiers(clients: int, **shares: float) -> list[str]:
    budgets = [{"name": name, "share": share} for name, share in shares.items()]
    settings = FederationSettings.model_validate({"clients": clients, "budgets": budgets})
    return [tier.name for tier in settings.budget_per_client()]


def test_equal_shares_deal_the_tiers_in_turn() -> None:
    assert tiers(6, a=1, b=1, c=1, d=1) == ["a", "b", "c", "d", "a", "b"]
    assert tiers(3, a=0.1, b=0.1, c=0.1) == ["a", "b", "c"]


def test_unequal_shares_are_met_exactly_and_spread_out() -> None:
    assert Counter(tiers(32, a=75, b=12.5, c=6.25, d=6.25)) == {"a": 24, "b": 4, "c": 2, "d": 2}
    assert tiers(4, a=3, b=1) == ["a", "a", "b", "a"]


def test_every_setting_has_help_and_stands_in_the_guide() -> None:
    settings = settings_of(Config)
    assert all(setting.help for setting in settings)
    by_key = {setting.key: setting for setting in settings}
    assert by_key["federation.budgets[].rank"].accepts == "whole number ≥ 1"
    assert by_key["federation.cohort_size"].accepts == "`auto`, or whole number ≥ 1"
    assert by_key["federation.client_fraction"].accepts == "number > 0 and ≤ 1"
    assert by_key["method.name"].default == "required"
    assert by_key["data.max_samples"].default == "null"
    assert as_markdown(settings) in GUIDE.read_text("utf-8"), (
        "docs/guides/settings.md is out of date: replace its table by "
        "`python -c 'from fedguild.config import Config; from fedguild.config.reference import *; "
        "print(as_markdown(settings_of(Config)))'`"
    )
