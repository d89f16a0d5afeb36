"""Whole runs with differential privacy: what they record, when clients stop, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.cli.results import show_run
from fedguild.config import Config, load_config
from fedguild.core.errors import ConfigError
from fedguild.core.layout import CHECKPOINTS
from fedguild.core.progress import Silent
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.records import ClientRecord, PrivacyRecord, RoundRecord, RoutingRecord, RunLog
from fedguild.privacy.dp.accounting import Release, epsilon
from fedguild.privacy.dp.ledger import FILE, Ledger
from fedguild.report.html import write_report
from fedguild.report.tables import privacy_grid
from fedguild.runs import experiment
from fedguild.runs.exporting import Subject, export
from fedguild.runs.privacy_accounts import PrivacyAccounts
from fedguild.runs.setup import check_config
from fedguild.server import checkpoint
from fedguild.server.round import RoundSetup
from tests.runs.runs import Killed, assert_same, ended, kill_at, load_models_once, small_config

METHOD = ("method.targets=[q_proj]", "method.rank_by_budget=false", "federation.clients=3", "evaluation.max_examples=4")
EXAMPLE = ("privacy.unit=example", "privacy.public=[sizes]")
LOCAL = ("privacy.unit=client", "privacy.clip=0.1")
CENTRAL = (*LOCAL, "privacy.trust_model=central")


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    load_models_once(monkeypatch, "runs.setup.preparation")


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.losses: list[float] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def step(self, done: int, total: int, loss: float) -> None:
        self.losses.append(loss)


def private_config(model: Path, *overrides: str) -> Config:
    return small_config(model, *METHOD, *overrides, base="fedit/tiny-tasks")


def spent(folder: Path) -> list[PrivacyRecord]:
    return [record for record in RunLog(folder).read() if isinstance(record, PrivacyRecord)]


def test_a_run_per_example_records_its_guarantee_and_goes_on_after_a_kill(olmoe_folder, tmp_path, monkeypatch, capsys):
    config = private_config(olmoe_folder, *EXAMPLE, "privacy.noise_multiplier=1.2", "federation.rounds=2")
    progress = Lines()
    experiment.run(config, tmp_path / "whole", progress=progress)
    records = RunLog(tmp_path / "whole").read()
    first, last = spent(tmp_path / "whole")
    sizes = experiment.prepare_data(config).sizes()["train"]
    for client, found in zip(last.clients, last.epsilon, strict=True):
        assert found == epsilon([Release(1.2, 4, min(1.0, 2 / sizes[client]))], last.delta)
    assert all(early < late for early, late in zip(first.epsilon, last.epsilon, strict=True))
    assert last.noise_multiplier == [1.2] * 3
    trained = [record for record in records if isinstance(record, ClientRecord)]
    assert [record.examples for record in trained] == sizes * 2
    assert {(record.steps, record.tokens, record.train_loss, record.seconds) for record in trained} == {
        (2, None, None, None)
    }
    assert not any(isinstance(record, RoutingRecord) for record in records)
    assert all(loss != loss for loss in progress.losses)  # NaN
    assert any("DP-SGD" in line for line in progress.lines)
    assert any("Whoever knows the config can take it away again" in line for line in progress.lines)

    with monkeypatch.context() as patch:
        kill_at(patch, "fedguild.server.intake.require_quorum", 2)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "killed")
    experiment.resume(tmp_path / "killed")
    assert_same(ended(tmp_path / "killed"), ended(tmp_path / "whole"))

    run = load_run(write_report(tmp_path / "whole").parent)
    grid = privacy_grid(run)
    assert grid is not None
    assert [row[1].text for row in grid.rows] == [f"{value:.3f}" for value in last.epsilon]
    export(tmp_path / "whole", Subject("large"), tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| differential privacy | per example, ε up to {max(last.epsilon):.3f} at δ = 1e-05. " in card
    assert len(run.guarantee) >= 6
    assert all(sentence in card for sentence in run.guarantee)
    show_run(tmp_path / "whole", as_json=True)
    assert json.loads(capsys.readouterr().out)["privacy"]["epsilon"] == last.epsilon
    show_run(tmp_path / "whole", as_json=False)
    assert "Differential privacy per example after round 2" in capsys.readouterr().out
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Differential privacy per example after round 2" in page
    assert "by DP-SGD in the client&#39;s training" in page


def test_a_client_whose_budget_is_spent_stops_and_the_run_ends(olmoe_folder: Path, tmp_path: Path) -> None:
    """Sampling decides who pays; 2.5 rounds' worth is two rounds."""
    two, three = (epsilon([Release(4.0, rounds)], 1e-5) for rounds in (2, 3))
    config = private_config(
        olmoe_folder,
        *CENTRAL,
        "privacy.noise_multiplier=4",
        f"privacy.max_epsilon={(two + three) / 2}",
        "federation.rounds=9",
        "federation.client_fraction=0.6",
        "evaluation.every=9",
    )
    progress = Lines()
    result = experiment.run(config, tmp_path, progress=progress)
    records = spent(tmp_path)
    asked = [record.participants for record in RunLog(tmp_path).read() if isinstance(record, RoundRecord)]
    counts = [sum(client in participants for participants in asked) for client in range(3)]
    assert counts == [2, 2, 2]
    assert records[-1].epsilon == [two] * 3
    assert records[-1].stopped == [0, 1, 2]
    assert result.rounds == len(asked) < 9
    assert result.stopped == "every client's privacy budget is spent"
    assert result.scores.keys() == {budget.name for budget in config.federation.budgets}
    assert any("Every client's privacy budget is spent" in line for line in progress.lines)
    again = experiment.resume(tmp_path)
    assert (again.rounds, again.scores) == (result.rounds, result.scores)
    ledger = Ledger(tmp_path / FILE)
    assert all(sum(release.times for release in ledger.releases(f"client-{c:03d}").values()) == 2 for c in range(3))


def test_a_run_ends_before_a_round_of_fewer_clients_than_its_quorum(olmoe_folder: Path, tmp_path: Path) -> None:
    """A client with more examples spends less: the one that could go on would be aggregated alone."""
    given = (*EXAMPLE, "privacy.noise_multiplier=6", "federation.rounds=3", "training.steps=8")
    sizes = experiment.prepare_data(private_config(olmoe_folder, *given)).sizes()["train"]
    one, two = (sorted(epsilon([Release(6.0, steps, min(1.0, 2 / n))], 1e-5) for n in sizes) for steps in (8, 16))
    budget = (two[0] + two[1]) / 2
    assert one[1] < budget, "two can afford the first round"
    result = experiment.run(private_config(olmoe_folder, *given, f"privacy.max_epsilon={budget}"), tmp_path)
    assert result.rounds == 1
    assert result.stopped == "all but 1 of the clients' privacy budgets are spent, and the quorum is 2"
    assert len(spent(tmp_path)[-1].stopped) == 2


def test_a_run_lets_its_accounts_decide_about_further_attempts(olmoe_folder, tmp_path, monkeypatch):
    asked: list[Any] = []

    def stopping(number: int, state: Any, clients: Any, setup: RoundSetup, *_: Any) -> None:
        asked.append(setup.again)
        raise Killed

    monkeypatch.setattr("fedguild.runs.experiment.run_round", stopping)
    config = private_config(olmoe_folder, *LOCAL, "privacy.noise_multiplier=6", "federation.retries=2")
    with pytest.raises(Killed):
        experiment.run(config, tmp_path)
    assert asked[0].__func__ is PrivacyAccounts.again
    assert asked[0].__self__.ledger.path == tmp_path / FILE


def test_a_target_is_kept_by_local_noise_and_sizes_are_withheld(olmoe_folder: Path, tmp_path: Path) -> None:
    config = private_config(olmoe_folder, *LOCAL, "privacy.target_epsilon=30", "federation.rounds=2")
    experiment.run(config, tmp_path / "local")
    records = spent(tmp_path / "local")
    assert all(29.5 < value <= 30 for value in records[-1].epsilon)
    assert records[-1].stopped == [0, 1, 2]
    trained = [record for record in RunLog(tmp_path / "local").read() if isinstance(record, ClientRecord)]
    assert {(record.examples, record.tokens, record.training_flops) for record in trained} == {(None, None, None)}
    plain = private_config(olmoe_folder, "federation.rounds=2")
    experiment.run(plain, tmp_path / "plain")
    noised, expected = ended(tmp_path / "local").state, ended(tmp_path / "plain").state
    assert not any(torch.equal(noised.tensors[name], value) for name, value in expected.tensors.items())
    assert not (tmp_path / "plain" / FILE).exists()


def test_secret_sampling_charges_everybody(olmoe_folder: Path, tmp_path: Path) -> None:
    settings = ("privacy.noise_multiplier=6", "privacy.sampling=secret", "federation.client_fraction=0.4")
    config = private_config(olmoe_folder, *CENTRAL, *settings, "federation.rounds=2", "evaluation.every=2")
    experiment.run(config, tmp_path)
    assert spent(tmp_path)[-1].epsilon == [epsilon([Release(3.0, 2, drawn=1, drawn_from=3)], 1e-5)] * 3


@pytest.mark.parametrize(
    ("overrides", "base", "message"),
    [
        (
            ["privacy.unit=client", "privacy.noise_multiplier=1"],
            "flame/tiny-tasks",
            "sends how often a client's tokens",
        ),
        (["privacy.unit=example", "privacy.noise_multiplier=1"], "smoe-llb/tiny-tasks", "couples its examples"),
        (["privacy.unit=client", "privacy.noise_multiplier=1"], "fed-sb/tiny-tasks", "sends gradients"),
        ([*CENTRAL, "privacy.noise_multiplier=1"], "flexlora/tiny-tasks", "is no mean"),
        ([*CENTRAL, "privacy.noise_multiplier=1"], "fedit/tiny-tasks-ranks", "of unequal shapes"),
        (
            [*CENTRAL, "privacy.noise_multiplier=1", "federation.aggregator=median"],
            "fedit/tiny-tasks",
            "federation.aggregator",
        ),
        ([*LOCAL, "privacy.noise_multiplier=1", "evaluation.clients=true"], "fedit/tiny-tasks", "evaluation.clients"),
        (["privacy.unit=example", "privacy.noise_multiplier=1"], "fedit/tiny-tasks", "is not public"),
        (
            [*CENTRAL, "privacy.noise_multiplier=1", "privacy.sampling=secret", "federation.over_selection=0.5"],
            "fedit/tiny-tasks",
            "over-selection draws more",
        ),
    ],
)
def test_what_no_account_would_hold_is_refused_before_anything_loads(overrides, base, message):
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(base, overrides))


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"clip": 2.0}, "unit is none"),
        ({"unit": "client"}, "either noise_multiplier or target_epsilon"),
        ({"unit": "client", "noise_multiplier": 1, "target_epsilon": 1}, "either noise_multiplier or target_epsilon"),
        ({"unit": "client", "noise_multiplier": 1, "sampling": "secret"}, "is about central noise"),
        ({"unit": "client", "noise_multiplier": 1, "sample_rate": 0.5}, "is about the unit example"),
        ({"unit": "client", "noise_multiplier": 0}, "greater than 0"),
        ({"unit": "client", "noise_multiplier": 1, "public": ["losses"]}, "public"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(privacy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("fedit/tiny-tasks", [f"privacy.{key}={value}" for key, value in privacy.items()])


MEDIAN_OF_THREE = (1 - 3**0.5 / torch.pi) ** 0.5
"""Standard deviation of the median of three standard normal values."""


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        pytest.param(CENTRAL, lambda sizes: 1 / len(sizes), id="central: sigma C / n"),
        pytest.param(
            LOCAL, lambda sizes: sum(size**2 for size in sizes) ** 0.5 / sum(sizes), id="local: that of a weighted mean"
        ),
        pytest.param(
            (*LOCAL, "federation.aggregator=median"), lambda sizes: MEDIAN_OF_THREE, id="local, with a robust rule"
        ),
    ],
)
def test_the_noise_in_what_is_published_is_the_noise_that_is_accounted(settings, share, olmoe_folder, tmp_path):
    """Measured in the states of six rounds in which nobody learns anything."""
    public = "privacy.public=[sizes]"
    quiet = ("training.learning_rate=1e-30", "federation.rounds=6", "federation.save_total_limit=7", public)
    quiet = (*quiet, "method.targets=[attention]")
    config = private_config(olmoe_folder, *settings, *quiet, "privacy.noise_multiplier=1.5", "evaluation.every=6")
    experiment.run(config, tmp_path)
    states = [
        checkpoint.load(tmp_path / CHECKPOINTS, number, fingerprint=config.fingerprint()).state for number in range(7)
    ]
    drawn = torch.cat(
        [
            torch.cat([(after.tensors[name] - before.tensors[name]).flatten() for name in sorted(after.tensors)])
            for before, after in pairwise(states)
        ]
    )
    accounted = config.privacy.clip * spent(tmp_path)[-1].noise_multiplier[0]
    assert accounted == pytest.approx(0.15)
    sizes = experiment.prepare_data(config).sizes()["train"]
    error = 1 / (2 * len(drawn)) ** 0.5
    assert error < 0.012
    assert float(drawn.std()) == pytest.approx(share(sizes) * accounted, rel=4 * error)
    assert abs(float(drawn.mean())) < 4 * float(drawn.std()) / len(drawn) ** 0.5
    first, second = drawn.chunk(6)[:2]
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / len(first) ** 0.5
