from __future__ import annotations

import dataclasses
import json
import math
from statistics import fmean, stdev

import pytest

from fedguild.cli.output import show_grids, show_json
from fedguild.core.errors import ConfigError
from fedguild.measuring.log.folder import Run, load_run
from fedguild.report.comparison import compare
from fedguild.report.summary import comparison_summary, run_summary
from fedguild.report.tables import run_table
from tests.report.runs import write_run

Runs = dict[str, list[Run]]


def final(run: Run, budget: str) -> float:
    return run.scored("budget", 6)[budget].score


def test_cells_are_mean_and_sample_deviation_over_seeds(runs: Runs) -> None:
    table = compare(runs, "fedit-ranks")
    scores = [final(run, "b4") for run in runs["flame"]]
    cell = table.row("flame").spread("b4")
    assert cell is not None
    assert (cell.mean, cell.std, cell.count) == (fmean(scores), stdev(scores), 3)
    assert table.columns == ("b1", "b2", "b3", "b4", "mean")
    assert table.best("b4") == "flame"
    assert table.smallest is not None
    assert table.smallest.name == "b4"
    assert table.seeds == (0, 1, 2)
    assert table.warnings == ()


def test_differences_are_paired_by_seed_whatever_the_order(runs: Runs) -> None:
    expected = [final(a, "b4") - final(b, "b4") for a, b in zip(runs["flame"], runs["fedit-ranks"], strict=True)]
    shuffled = {"flame": runs["flame"], "fedit-ranks": runs["fedit-ranks"][::-1]}
    for order in (runs, shuffled):
        difference = compare(order, "fedit-ranks").difference("flame", "b4")
        assert difference is not None
        assert difference.mean == pytest.approx(fmean(expected))
        assert difference.std == pytest.approx(stdev(expected))


def test_costs_stand_beside_the_scores(runs: Runs) -> None:
    table = compare(runs, "fedit-ranks")
    flame, ranks = table.row("flame"), table.row("fedit-ranks")
    assert flame.training_flops["b4"] < flame.training_flops["b1"]
    assert ranks.training_flops["b4"] == pytest.approx(ranks.training_flops["b1"])
    assert flame.cost is not None
    uploads = [sum(r.upload_bytes for r in run.clients) / 8 for run in runs["flame"]]
    assert flame.cost.upload_bytes == pytest.approx(fmean(uploads))
    assert flame.run_seconds == pytest.approx(6 * 4.6)
    grid = table.score_grid()
    assert grid.rows[0][4].note == "386 GFLOP trained"
    assert grid.header[4].note == "1 expert, 3.30 MFLOP"
    assert grid.rows[2][0].line == "flame \u2212 fedit-ranks"
    assert "386 G" in [cell.text for cell in table.cost_grid().rows[0]]


def test_other_metrics_are_compared_too(runs: Runs) -> None:
    """Those beside the score: the mean over the budgets, by seed."""
    table = compare(runs, "fedit-ranks")
    grid = table.metric_grid()
    assert grid is not None
    assert [cell.text for cell in grid.header] == ["Method", "Perplexity", "ROUGE\u2011L"]
    means = {label: [fmean(final(run, f"b{n}") for n in range(1, 5)) for run in runs[label]] for label in runs}
    values = [mean + 0.05 for mean in means["flame"]]
    assert grid.rows[0][2].text == f"{fmean(values):.3f} ± {stdev(values):.3f}"
    apart = fmean(means["flame"]) - fmean(means["fedit-ranks"])
    assert grid.rows[2][0].line == "flame \u2212 fedit-ranks"
    assert grid.rows[2][2].text.startswith(f"{apart:+.3f}")
    metrics = table.to_json()["methods"][0]["metrics"]
    assert metrics["rouge_l"]["mean"] == pytest.approx(fmean(values))


def test_other_seeds_are_left_out_of_the_pairs_and_warned_of(runs: Runs) -> None:
    table = compare({"flame": runs["flame"], "fedit-ranks": runs["fedit-ranks"][1:]})
    difference = table.difference("flame", "b4")
    assert difference is not None
    assert difference.count == 2
    assert table.warnings == ("The methods were run with different seeds: flame 0, 1, 2; fedit-ranks 1, 2.",)
    apart = compare({"flame": runs["flame"][:1], "fedit-ranks": runs["fedit-ranks"][1:]})
    assert apart.difference("flame", "b4") is None
    assert "–" in [cell.text for cell in apart.score_grid().rows[2]]


@pytest.mark.parametrize("change", [{"active_experts": 8}, {"inference_flops_per_token": 3.4e6}])
def test_unequal_inference_is_warned_of(runs: Runs, change: dict[str, float]) -> None:
    dear = [
        dataclasses.replace(
            run, evaluations=[e.model_copy(update=change) if e.name == "b4" else e for e in run.evaluations]
        )
        for run in runs["flame"]
    ]
    table = compare({"flame": dear, "fedit-ranks": runs["fedit-ranks"]})
    assert not table.equal_inference
    assert table.warnings == ("Budget b4 was not scored at equal inference FLOPs in all runs.",)
    assert not any("infer" in sentence for sentence in comparison_summary(table))


def test_what_cannot_be_compared(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"'flamme'.*\n.*Did you mean 'flame'"):
        compare(runs, "flamme")
    with pytest.raises(ConfigError, match="two runs of one seed"):
        compare({"flame": [runs["flame"][0], runs["flame"][0]]})
    with pytest.raises(ConfigError, match="none given for fedit"):
        compare({"flame": runs["flame"], "fedit": []})


def test_the_outcome_in_words(runs: Runs) -> None:
    lead, *others = comparison_summary(compare(runs, "fedit-ranks"))
    flame, ranks = (fmean(final(run, "b4") for run in runs[label]) for label in ("flame", "fedit-ranks"))
    assert lead.startswith(f"At the smallest budget, b4 (1 active expert), flame scores {flame:.3f} and fedit-ranks ")
    assert f"{ranks:.3f} in exact match: +{flame - ranks:.3f}\u00a0[+0." in lead
    assert lead.endswith("over 3 seeds; the 95 % interval excludes 0.")
    assert others[0].startswith("Averaged over the 4 budgets the difference is +0.1")
    assert "49% of the FLOPs in training" in others[1]
    assert "1.7 times the bytes" in others[1]


def test_a_lead_whose_interval_includes_zero_is_called_so(runs: Runs) -> None:
    shift = [-0.1, 0.3, -0.1]
    noisy = [
        dataclasses.replace(
            run, evaluations=[e.model_copy(update={"score": e.score + shift[run.seed]}) for e in run.evaluations]
        )
        for run in runs["flame"]
    ]
    lead = comparison_summary(compare({"noisy": noisy, "flame": runs["flame"]}))[0]
    assert lead.endswith("the 95 % interval includes 0, so these seeds do not tell them apart.")
    for count, told in ((1, "from one seed, so chance is not ruled out."), (2, "from 2 seeds, too few to decide.")):
        few = comparison_summary(compare({label: members[:count] for label, members in runs.items()}))[0]
        assert few.endswith(told)


@pytest.mark.parametrize("columns", ["", "100"])
def test_a_printed_table_loses_no_figure(
    runs: Runs, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe is as wide as the table; on a screen that is not, cells are folded."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    grid = compare({f"the method {label} at its best rate": members for label, members in runs.items()}).score_grid()
    show_grids(grid)
    printed = capsys.readouterr().out
    assert "…" not in printed
    for text in (cell.text for row in grid.rows for cell in row[1:]):
        assert all(word in printed for word in text.split()), text
    if columns:
        assert max(map(len, printed.splitlines())) <= int(columns)


def test_a_lead_that_was_chosen_among_several_is_called_so(runs: Runs) -> None:
    lead = comparison_summary(compare({**runs, "again": runs["flame"]}, "fedit-ranks"))[0]
    assert lead.endswith("the 95 % interval excludes 0, not corrected for the choice of the best of 2.")


def test_a_metric_that_is_infinite_under_one_seed_is_compared_and_printed(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverged(run: Run) -> Run:
        update = {"metrics": {"perplexity": math.inf}}
        return dataclasses.replace(run, evaluations=[one.model_copy(update=update) for one in run.evaluations])

    table = compare({"flame": [diverged(runs["flame"][0]), *runs["flame"][1:]], "fedit-ranks": runs["fedit-ranks"]})
    grid = table.metric_grid()
    assert grid is not None
    assert grid.rows[0][1].text == "inf"
    show_json(table.to_json())
    found = json.loads(capsys.readouterr().out)["methods"][0]["metrics"]["perplexity"]
    assert (found["mean"], found["std"]) == (None, None)


def test_the_outcome_of_a_run_in_words(run: Run) -> None:
    table = run_table(run)
    lead, smallest, own = run_summary(table)
    assert own == "On their own data the clients' own models score 0.655 on average."
    scored = f"After 6 rounds, flame scores {table.mean:.3f} in exact match on average over 4 budgets"
    assert lead.startswith(f"{scored}, up from 0.264 ")
    for before, told in ((0.9, "down from 0.900"), (table.mean, f"the same as {table.mean:.3f}")):
        lead = run_summary(dataclasses.replace(table, mean_before=before))[0]
        assert lead.startswith(f"{scored}, {told} before training")
    best, score = table.rows[0].score, table.rows[3].score
    assert smallest.startswith(f"The smallest budget, b4 (1 active expert), reaches {score:.3f}, {score / best:.0%}")


def test_the_outcome_of_a_run_with_models_of_the_clients_own(run: Run, personal_run: Run) -> None:
    lead, received = run_summary(run_table(personal_run))
    assert "fedamole scores 0.655 on average over the clients" in lead
    assert received == "As received next, their models score 0.555."


@pytest.fixture(scope="module")
def personal_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two methods without a global model, two seeds each; the second trains with all experts."""
    root = tmp_path_factory.mktemp("personal")

    def written(name: str, seed: int) -> Run:
        dear = name == "random"
        return load_run(write_run(root / name / str(seed), name=name, seed=seed, personal=True, rank_budget=dear))

    runs = {name: [written(name, seed) for seed in (0, 1)] for name in ("fedamole", "random")}
    worse = [e.model_copy(update={"score": e.score - 0.25}) for e in runs["random"][1].evaluations]
    return {**runs, "random": [runs["random"][0], dataclasses.replace(runs["random"][1], evaluations=worse)]}


def test_a_comparison_without_global_models(personal_runs: Runs) -> None:
    table = compare(personal_runs, "random")
    assert table.columns == ("mtal", "received")
    assert table.warnings == ()
    difference = table.difference("fedamole", "mtal")
    assert difference is not None
    assert (difference.mean, difference.count) == (pytest.approx(0.125), 2)
    assert [cell.text for cell in table.score_grid().header] == ["Method", "MTAL", "As received"]
    assert "under each budget" not in table.score_grid().title
    assert table.score_grid().rows[2][0].line == "fedamole \u2212 random"
    lead, costs = comparison_summary(table)
    assert lead.startswith("On the clients' own data, fedamole scores 0.655 and random 0.530: +0.125")
    assert costs.startswith("With fedamole, the average client spends ")
    assert "of the FLOPs in training" in costs
