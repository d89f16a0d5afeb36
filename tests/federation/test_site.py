"""The files of a federation with real clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError
from fedguild.federation.site import load_server, load_site
from tests.runs.runs import says


def test_a_site_needs_its_number_and_its_server_only(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("client: 2\nserver: guild.example.org:9443\n")
    site = load_site(tmp_path)
    assert (site.client, site.accept.min_clients, site.data.shares) == (2, 2, 1)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("server: a:1", ("client: is required",)),
        ("client: 0\nserver: https://a:1", ("server: ", "host:port")),
        ("client: 0\nserver: a:1\naccept: {method: [fedit]}", ("unknown key 'accept.method'",)),
        ("client: 0\nserver: a:1\naccept: {min_clients: 0}", ("accept.min_clients: must be at least 1",)),
        ("client: 0\nserver: a:1\ndata: {shares: 2, share: 2}", ("data.share is 2, but data.shares is 2",)),
        ("client: [", ("site.yaml, line",)),
        ("just text", ("expected a mapping",)),
    ],
)
def test_a_mistake_is_named_with_the_file(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_site(tmp_path)
    says(str(caught.value), "site.yaml", *parts)


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_bytes(b"server: a:1\nname: \xe9")
    with pytest.raises(ConfigError) as caught:
        load_site(tmp_path)
    says(str(caught.value), "site.yaml: line 2: the byte 0xe9 is not UTF-8.")


def test_a_folder_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_server(tmp_path)
    says(str(caught.value), "server.yaml", "fedguild federation init")


def test_a_server_has_a_default_for_everything(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("{}")
    assert not load_server(tmp_path).server_evaluation
