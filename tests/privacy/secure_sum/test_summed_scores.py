"""Secure sums of scores: against the statistics of the single ones, and what is withheld."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest

from fedguild.client.budget import Budget
from fedguild.core.errors import QuorumError
from fedguild.core.payload import Payload
from fedguild.engines.secure import SecureEngine
from fedguild.federation.sum_log import SumLog
from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.server.secure_round import SecureAggregation
from fedguild.server.secure_scores import summed_scores
from tests.privacy.secure_sum.test_runs import Guild

RUN = "0" * 32


@pytest.fixture
def guild(olmoe_folder, tmp_path):
    return lambda *overrides, place=".", **more: Guild(olmoe_folder, tmp_path / place, *overrides, **more)


class Sites(SecureEngine):
    """Sites that have scored a model; `peers` of a server."""

    def __init__(self, scores, *, examples=None, told=None, log=None, measures=None):
        super().__init__(None, [Budget("all", 1, 1)], len(scores))
        self.scores, self.examples, self.told, self.measures = scores, examples or {}, told or {}, measures or {}
        self.once = None if log is None else log.training(RUN, 1, Payload())
        self.facts = {}

    def summed(self, *clients):
        among = clients or tuple(self.scores)
        for client in among:
            told = self.told.get(client, b"this model")
            examples, measures = self.examples.get(client, 9), self.measures.get(client, [0])
            self.clients.keep_score(client, 1, self.scores[client], examples, measures, told, self.once)
        rules = SecureAggregation(RUN, [], 0.6, 3, "omit")
        return summed_scores(rules, 1, self, among, self.facts.update)


@pytest.mark.parametrize(
    "scores", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.1, 0.7, 0.25], [1 / 3] * 5, [0.0, 1.0, 0.0, 1.0, 0.5, 0.123]]
)
def test_mean_and_deviation_are_those_of_the_single_scores(scores):
    found = Sites(dict(enumerate(scores))).summed()
    assert found.mean == pytest.approx(fmean(scores), abs=1e-7)
    assert found.deviation == pytest.approx(stdev(scores), abs=1e-4)


def test_a_client_without_examples_does_not_count():
    found = Sites(dict(enumerate([0.2, 0.4, 0.9, 0.7])), examples={3: 0}).summed()
    assert found.mean == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize(
    ("measures", "examples", "found"),
    [
        ({}, {}, (0,)),
        ({0: [1], 1: [1], 2: [1], 3: [1]}, {}, (1,)),
        ({2: [0, 2]}, {}, (0, 2)),  # one client's examples are of two kinds
        ({2: [2]}, {2: 0}, (0,)),  # it has scored none
    ],
)
def test_the_sum_says_which_metrics_the_scores_are_of(measures, examples, found):
    sites = Sites(dict(enumerate([0.2, 0.4, 0.6, 0.8])), measures=measures, examples=examples)
    assert sites.summed().measures == found


@pytest.mark.parametrize(
    ("scores", "examples", "reason"),
    [
        ([0.5, 0.5], {}, "2 client(s) have scored, and at least 3"),
        ([0.5, 0.1, 0.2], {1: 0}, "2 client(s) have a score, and at least 3 have to be behind a mean"),
        ([0.5, 0.1, 0.2, 40.0], {}, "not those of scores from 0 to 1"),
    ],
)
def test_what_is_withheld(scores, examples, reason):
    sites = Sites(dict(enumerate(scores)), examples=examples)
    with pytest.raises(QuorumError) as raised:
        sites.summed()
    assert reason in str(raised.value)


def test_a_client_that_was_asked_for_another_score_is_left_out():
    sites = Sites(dict(enumerate([0.5, 0.1, 0.3, 0.9])), told={3: b"another model"})
    assert sites.summed().mean == pytest.approx(0.3, abs=1e-7)
    assert "told to train something else" in sites.facts["dropped"]["3"]


def test_two_sums_that_would_tell_one_score_are_not_both_opened(tmp_path):
    sites = Sites(dict(enumerate([0.5, 0.1, 0.3, 0.9])), log=SumLog(tmp_path / "sums.jsonl", 3))
    sites.summed()
    assert sites.summed().mean == pytest.approx(0.45, abs=1e-7)
    with pytest.raises(QuorumError, match=r"would tell 1 client\(s\) apart from the others"):
        sites.summed(0, 1, 2)


def test_a_run_whose_server_has_no_data_sees_the_mean_of_the_scores_alone(guild):
    """The mean and deviation are those that a run with disclosed scores records of each."""
    sent = []

    def noted(message, answer):
        sent.extend([answer.metadata] if message.kind == "score" else [])
        return answer

    found = {}
    for name, overrides, accept in (
        ("summed", (), {}),
        ("single", ("federation.secure_disclose=[scores]",), {index: {"disclose": ["scores"]} for index in range(4)}),
    ):
        four = guild(*overrides, accept=accept, place=name)
        for client in range(4):
            four.answering(client, noted)
        four.serve(server_evaluation=False)
        found[name] = [
            one for one in RunLog(four.folder / "server/state/run").read() if isinstance(one, EvaluationRecord)
        ]
        if name == "summed":
            assert sent == [{}] * len(sent)
            assert sent
            assert [entry["of"] for entry in four.audited("session") if "of" in entry] == ["scores, client, test"] * 2
            assert (four.folder / "server/state/run/report.html").is_file()
    assert {one.scope for one in found["summed"]} == {"summary"}
    single = [one for one in found["single"] if one.scope == "summary"]
    assert len(single) == len(found["summed"]) == 2
    for one, other in zip(found["summed"], single, strict=True):
        assert (one.name, one.round, one.split) == (other.name, other.round, other.split)
        assert one.score == pytest.approx(other.score, abs=1e-7)
        assert one.metric == other.metric == "accuracy and exact_match"
        assert one.metrics["deviation"] == pytest.approx(other.metrics["deviation"], abs=1e-4)


def test_scores_of_too_few_are_withheld_and_the_run_goes_on(guild):
    refusing = {index: {"requests": ["train"]} for index in (1, 2)}
    four = guild(accept=refusing)
    four.serve(server_evaluation=False)
    assert four.lines.says("Round 1: the clients' scores are withheld: 2 client(s) have scored")
    assert not [one for one in RunLog(four.folder / "server/state/run").read() if isinstance(one, EvaluationRecord)]
