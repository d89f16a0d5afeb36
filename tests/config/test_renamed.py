"""Names that changed with 0.4: an old one is answered with the new one, and runs of 0.3 are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import fedguild
from fedguild.cli import app
from fedguild.config import Config, load_config, load_saved
from fedguild.config.explaining import known_keys
from fedguild.config.renamed import (
    ARGUMENTS,
    OPTIONS,
    SERVER,
    SETTINGS,
    SITE,
    answers_old_arguments,
    with_new_names,
    with_old_names,
)
from fedguild.core.errors import ConfigError
from fedguild.federation.site import ServerSettings, SiteSettings, load_server, load_site
from tests.config.test_composing import RECORDED, recorded

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "names.md"


def test_the_page_has_the_table() -> None:
    listed = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert dict(listed) == {**SETTINGS, **SITE, **SERVER, **ARGUMENTS, **OPTIONS}


@pytest.mark.parametrize(
    ("names", "schema"), [(SETTINGS, Config), (SITE, SiteSettings), (SERVER, ServerSettings)], ids=lambda x: str(x)[:9]
)
def test_a_new_name_is_a_setting_and_an_old_one_is_none(names: dict[str, str], schema: Any) -> None:
    assert set(names.values()) <= set(known_keys(schema))
    assert not set(names) & set(known_keys(schema))


@pytest.mark.parametrize(("old", "new"), SETTINGS.items())
def test_an_old_name_is_answered_with_the_new_one(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"override '{old}=1': '{old}' is now called '{new}'")):
        load_config("flame/tiny-tasks", [f"{old}=1"])
    nested: Any = 1
    for part in reversed(old.split(".")):
        nested = {part: nested}
    for given in ({"method": "flame", **nested}, written(tmp_path, {"method": "flame", **nested})):
        with pytest.raises(ConfigError, match=re.escape(f"'{old}' is now called '{new}'")):
            load_config(given)


def written(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_all_old_names_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"method": "flame", "training": {"clip_norm": 1, "accumulation": 2}})
    assert str(caught.value).splitlines() == [
        "the config: 'training.accumulation' is now called 'training.gradient_accumulation_steps'",
        "the config: 'training.clip_norm' is now called 'training.max_grad_norm'",
        "docs/reference/names.md lists the names that changed with 0.4.",
    ]


def test_a_site_and_a_server_answer_with_the_new_name(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("client: 0\nserver: a:1\ncertificate: ca.pem\ndata: {corpus: dolly}\n")
    with pytest.raises(ConfigError) as caught:
        load_site(tmp_path)
    assert "'data.corpus' is now called 'data.dataset'" in str(caught.value)
    assert "'certificate' is now called 'ca_certificate'" in str(caught.value)
    (tmp_path / "server.yaml").write_text("authority: ca.pem\nreads_data: true\n")
    with pytest.raises(ConfigError, match="'reads_data' is now called 'server_evaluation'"):
        load_server(tmp_path)


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_command_line_answers_with_the_new_option(command: str) -> None:
    result = CliRunner().invoke(app, [command, "flame/tiny-tasks", "--engine", "ray"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--engine is now called --launcher." in result.stderr


def test_python_answers_with_the_new_argument(tmp_path: Path) -> None:
    for function, old in (("export_model", "form"), ("push", "form"), ("compare", "engine"), ("sweep", "engine")):
        with pytest.raises(ConfigError, match=f"{function}: the argument '{old}' is now called '{ARGUMENTS[old]}'"):
            getattr(fedguild, function)(tmp_path, tmp_path, **{old: "x"})
    assert answers_old_arguments(lambda format: format)(format="merged") == "merged"


def test_a_run_of_0_3_is_read_and_has_its_fingerprint(tmp_path: Path) -> None:
    """`conditions.yaml` of the papers' records and every checkpoint hold fingerprints of 0.3."""
    for name in ("fedamole/llama-3.2-1b-snli", "flame/olmoe-flowertune-code", "ub-smoe/tiny-commonsense"):
        assert name in RECORDED["presets"]
        config = load_saved(written(tmp_path, recorded(name)))
        assert config == load_config(name, ["federation.aggregator=none"])
        assert config.fingerprint() == load_config(name).fingerprint()
    assert (
        load_config("fedamole/llama-3.2-1b-snli").fingerprint()
        == "b1ac767091daac3b870ec846e619c9eba5f4b45b5f8df482e84979965e41c44d"
    )


def test_settings_go_back_and_forth() -> None:
    old = recorded("fedamole/llama-3.2-1b-snli")
    assert with_old_names(with_new_names(old)) == old
    assert with_new_names(with_new_names(old)) == with_new_names(old) != old
