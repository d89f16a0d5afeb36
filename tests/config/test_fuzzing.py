"""Mistakes in a config, in every setting: each is a message, never a library's traceback."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest

from fedguild.config import load_config
from fedguild.config.reference import settings_of
from fedguild.config.schema import Config
from fedguild.core.errors import FedGuildError
from fedguild.federation.site import ServerSettings, SiteSettings, load_server, load_site
from fedguild.methods import METHODS, build_method
from fedguild.runs.experiment import callbacks_of

VALUES = (
    *(
        "null",
        "true",
        "x",
        '""',
        "[]",
        "{}",
        "[[]]",
        "{a: b}",
        "{1: 2}",
        "-1",
        "0",
        "1.5",
        "1e400",
        ".nan",
        "1" + "0" * 30,
    ),
    *("2020-01-01", '"\\0"', "[1, {}]", "[null]", "!!binary aGk=", "!!set {a, b}", "!!python/object:os.system x", "*a"),
    *('"a\\nb"', "{? [a] : b}", "[{name: null}]", '"%s{}"', "/dev/null", "&a [*a]", "12:30:45", '"\\ud800"'),
)
TEXTS = ("", "- a", "x", "[", "\t", "a: b: c", "---\na: 1\n---\nb: 2", "%YAML 9", "<<: 1", "[a]: 1", "1: 2", "null: 1")
SECTIONS = (
    "method",
    "model",
    "data",
    "federation",
    "training",
    "privacy",
    "evaluation",
    "tracking",
    "callbacks",
    "new",
)


def written(key: str, value: str) -> str:
    """A YAML text with one dotted key."""
    parts = key.split(".")
    return "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts))[:-1] + f" {value}\n"


def message_of(call) -> str:
    """What the user reads; empty if there is no mistake."""
    try:
        call()
    except FedGuildError as error:
        return str(error).encode().decode()
    return ""


def test_every_setting_of_a_run_of_a_site_and_of_a_server(tmp_path: Path) -> None:
    rng, mistakes = random.Random(0), 0
    run = {"extends": "fedit/tiny-tasks"}
    for schema, file, above, load in (
        (Config, "run.yaml", run, lambda: load_config(str(tmp_path / "run.yaml"))),
        (SiteSettings, "site.yaml", {"client": "0", "server": "a:1"}, lambda: load_site(tmp_path)),
        (ServerSettings, "server.yaml", {}, lambda: load_server(tmp_path)),
    ):
        keys = [setting.key for setting in settings_of(schema)]
        for key in (*keys, *SECTIONS):
            for value in rng.sample(VALUES, 2):
                rest = "".join(f"{name}: {given}\n" for name, given in above.items() if name != key)
                (tmp_path / file).write_text(rest + written(key, value), "utf-8")
                mistakes += bool(message_of(load))
        for text in TEXTS:
            (tmp_path / file).write_text(text)
            mistakes += bool(message_of(load))
    assert mistakes > 300


@pytest.mark.parametrize("option", ["monitor", "metric", "patience", "min_delta", "mode"])
@pytest.mark.parametrize("value", [True, [], {}, {"a": 1}, b"x", -1, float("nan")])
def test_every_option_of_a_callback(option: str, value: object) -> None:
    given = {"callbacks": [{"name": "early-stopping", option: value}]}
    assert message_of(lambda: callbacks_of(load_config("fedit/tiny-tasks", [given]))) or value is True


@pytest.mark.parametrize("name", ["fedit", "flame", "fedamole", "ub-smoe"])
def test_every_option_of_a_method(name: str) -> None:
    options = [option.key for option in settings_of(METHODS.load(name).Settings)]
    values = [None, True, "x", "", [], {}, [[]], {1: 2}, -1, 1.5, float("nan"), float("inf"), 10**30, b"x", {"a"}]
    mistakes = [message_of(partial(build_method, name, {option: value})) for option in options for value in values]
    assert sum(map(bool, mistakes)) > 5 * len(options)
