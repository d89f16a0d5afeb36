"""The check of the app that a run carries."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from fedguild.federation import templates
from fedguild.federation.commands import write_app
from fedguild.federation.flower import bundle


def packed(*files: tuple[str, str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files:
            archive.writestr(name, text)
    return content.getvalue()


def test_the_app_that_the_server_starts_is_the_one_that_clients_trust(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    write_app(tmp_path)
    sent = build_fab_from_disk(tmp_path / "app")
    assert sent == bundle.build(templates.APP)
    assert bundle.refusal(sent, templates.APP) == ""


def test_the_way_in_which_the_bundle_was_packed_does_not_matter() -> None:
    project = "# written in another way\n" + templates.APP.replace('"guild"', "'guild'")
    assert bundle.refusal(packed((".info/CONTENT", "x"), ("pyproject.toml", project)), templates.APP) == ""


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([("pyproject.toml", templates.APP), ("fedguild/__init__.py", "")], "it brings code or data of its own"),
        ([("pyproject.toml", templates.APP), ("../pyproject.toml", "")], "it brings code or data of its own"),
        ([("pyproject.toml", templates.APP.replace("client_app:app", "server_app:app"))], "its description is not"),
        ([("pyproject.toml", templates.APP + "\n[tool.flwr.app.more]\nkey = 1\n")], "its description is not"),
        ([("pyproject.toml", "[")], "it cannot be read"),
        ([(".info/CONTENT", "")], "it is no bundle"),
        ([("pyproject.toml", "x" * 2**21)], "it is larger than"),
    ],
)
def test_any_other_app_is_refused(files: list[tuple[str, str]], reason: str) -> None:
    assert bundle.refusal(packed(*files), templates.APP).startswith(reason)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_descriptions_of_which_a_reader_may_take_either_are_refused() -> None:
    twice = packed(("pyproject.toml", "[project]"), ("pyproject.toml", templates.APP))
    assert bundle.refusal(twice, templates.APP) == "it is no bundle of one app"


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 100, packed(("pyproject.toml", templates.APP))[:-30]])
def test_bytes_that_are_no_bundle(content: bytes) -> None:
    assert bundle.refusal(content, templates.APP).startswith("it cannot be read")
