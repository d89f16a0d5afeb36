from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.measuring.scores.metrics import (
    METRICS,
    exact_match,
    load_metrics,
    measure,
    rouge_l,
    token_f1,
)
from fedguild.measuring.scores.scores import ExampleScore, Summary
from tests.oracles import metrics as oracle
from tests.plugins import install


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("the cat sat on the mat", "a cat lay on the red mat"),
        ("The Cat, sat!", "cat sat"),
        ("b a", "a b"),
        ("", "something"),
        ("nothing alike", "other words"),
        ("one two two three", "two one two three three"),
    ],
)
def test_rouge_l_is_the_longest_common_subsequence(prediction, reference):
    assert rouge_l.score(prediction, reference) == pytest.approx(oracle.rouge_l(prediction, reference), abs=1e-12)


def test_rouge_l_of_a_hand_worked_pair():
    assert rouge_l.score("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)


def test_rouge_l_counts_equal_texts_without_latin_letters():
    assert rouge_l.score("東京", "東京 ") == 1.0
    assert rouge_l.score("東京", "大阪") == 0.0


def test_exact_match_ignores_case_and_white_space_only():
    assert exact_match.score("  Two\nwords ", "two words") == 1.0
    assert exact_match.score("two words.", "two words") == 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("The Cat, sat!", "a cat sat", 1.0),
        ("in the year 1889", "1889", 0.5),  # 1 of 3 words and 1 of 1: 2 / 4
        ("one two two", "two two three", 4 / 6),
        ("nothing", "else", 0.0),
        ("the", "a", 1.0),  # articles do not count
        ("", "something", 0.0),
    ],
)
def test_token_f1_is_that_of_squad(prediction: str, reference: str, expected: float):
    assert token_f1.score(prediction, reference) == pytest.approx(expected)


def test_macro_f1_is_the_mean_over_labels():
    """Confusion of three labels; one answer names none, one label never occurs."""
    choices = ("a", "b", "c", "d")
    pairs = [(0, 0), (0, 0), (1, 0), (1, 1), (2, 1), (None, 2), (2, 2)]
    scored = [
        ExampleScore("t", 0.0, 1.0, 2, predicted=said, choices=choices, answer=meant, measure="accuracy")
        for said, meant in pairs
    ]
    summary = Summary.of(scored)
    assert summary.macro_f1 == pytest.approx(oracle.macro_f1(pairs))
    assert summary.macro_f1 == pytest.approx((0.8 + 0.5 + 0.5) / 3)
    assert (summary.nats, summary.metric) == (0.5, "accuracy")
    other = ExampleScore("t", 1.0, 1.0, 2, predicted=0, choices=("x", "y"), answer=0, measure="accuracy")
    assert Summary.of([*scored, other]).macro_f1 is None


def test_a_metric_that_fails_or_returns_no_number_says_so():
    with pytest.raises(FedGuildError, match=r"metric 'mine' failed with TypeError: .*\n.*two texts"):
        measure({"mine": lambda text: 1.0}, "a", "b")  # type: ignore[dict-item,misc]
    with pytest.raises(FedGuildError, match="metric 'mine' returned 'good' for"):
        measure({"mine": lambda *_: "good"}, "a", "b")  # type: ignore[dict-item,return-value]


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working folder, and one that cannot be imported; nothing else that is installed is hidden."""
    (tmp_path / "my_functions.py").write_text("def length(said, wanted):\n    return len(said)\n\nword = 'text'\n")
    (tmp_path / "my_broken.py").write_text("import a_missing_package\n")
    (tmp_path / "json.py").write_text("raise ValueError('a file of the working folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_functions", "my_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "json")


@pytest.mark.usefixtures("functions")
def test_a_function_of_a_module_in_the_working_folder_is_a_metric():
    name = "my_functions:length"
    assert measure({name: METRICS.load(name)}, "four", "") == {name: 4.0}
    assert METRICS.origin(name).startswith("my_functions, SHA-256 ")
    METRICS.load("json:dumps")


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:length", "No module named 'nowhere'\n.*in the working folder"),
        ("my_functions.deeper:length", "No module named 'my_functions.deeper'"),
        ("my_functions:breadth", "module 'my_functions' has no attribute 'breadth'"),
        ("my_functions:", r"it is not module:attribute\.\n"),
        (":length", r"it is not module:attribute\.\n"),
        ("my_functions:word", "a metric is a function of two texts, not a str"),
        ("my_broken:length", r"ModuleNotFoundError: No module named 'a_missing_package' \(my_broken, line 1\)"),
    ],
)
def test_what_cannot_be_imported_as_a_metric_says_why(name: str, problem: str):
    with pytest.raises(ConfigError, match=f"The metric {name} .*cannot be used: .*{problem}"):
        METRICS.load(name)


def test_a_function_is_imported_only_where_the_config_is_this_users():
    with pytest.raises(ConfigError, match=r"'os:getcwd' is a Python function.*\n.*plug-in at the server and at every"):
        load_metrics(["os:getcwd"])


@pytest.fixture
def verses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a metric, one that returns no number, and two that cannot be used."""
    source = """
        def rhyme(prediction, reference):
            \"\"\"Whether the last letters rhyme.\"\"\"
            return int(prediction[-2:] == reference[-2:])

        def silence(prediction, reference):
            return float("nan") if prediction else None

        NUMBER = 3
    """
    entries = """
        [fedguild.metrics]
        rhyme = verses:rhyme
        silence = verses:silence
        number = verses:NUMBER
        perplexity = verses:rhyme
    """
    install(monkeypatch, tmp_path / "verses", "verses", entry_points=entries, modules={"verses.py": source})


@pytest.mark.usefixtures("verses")
def test_a_metric_of_another_package_is_listed_and_measures():
    rhyme = next(metric for metric in METRICS.found() if metric.name == "rhyme")
    assert (rhyme.title, rhyme.origin) == ("Whether the last letters rhyme", "verses 1.2")
    metrics = load_metrics(("rhyme", "exact_match"))
    assert measure(metrics, "a mouse", "the house") == {"rhyme": 1.0, "exact_match": 0.0}


@pytest.mark.usefixtures("verses")
def test_what_is_no_metric_is_refused_and_leaves_the_others_alone():
    assert {metric.name: metric.fault for metric in METRICS.checked() if metric.fault} == {
        "number": "TypeError: a metric is a function of two texts, not a int",
        "perplexity": "ValueError: perplexity is recorded as another figure",
    }
    with pytest.raises(ConfigError, match=r"The metric number \(verses 1.2\) cannot be used: TypeError"):
        load_metrics(["rouge_l", "number"])


@pytest.mark.usefixtures("verses")
@pytest.mark.parametrize(("prediction", "returned"), [("one", "nan"), ("", "None")])
def test_a_metric_returns_a_finite_number(prediction: str, returned: str):
    with pytest.raises(FedGuildError, match=f"The metric 'silence' returned {returned} for the answer '{prediction}'"):
        measure(load_metrics(["silence"]), prediction, "two")


def test_an_unknown_metric_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"evaluation.metrics: there is no metric 'rouge'\.\nDid you mean 'rouge_l'"):
        load_metrics(["rouge"])


def test_listing_the_metrics_does_not_import_torch():
    code = "import sys; from fedguild.measuring.scores.metrics import METRICS; print(*METRICS, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["exact_match", "rouge_l", "token_f1", "False"]
