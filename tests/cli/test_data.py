"""`fedguild data`, of a file and of a config."""

import json
import re
from html import unescape
from pathlib import Path

from tests.cli.conftest import Invoke
from tests.data.writing import write_jsonl


def rows(count: int) -> list[dict[str, object]]:
    turns = (("user", "<b>Name</b> bird {}."), ("assistant", "Robin {}."))
    return [{"messages": [{"role": role, "content": said.format(n)} for role, said in turns]} for n in range(count)]


def test_a_file_is_shown_in_terminal_json_and_html(invoke: Invoke, tmp_path: Path):
    file = write_jsonl(tmp_path / "birds.jsonl", [*rows(12), rows(1)[0], {"messages": []}])
    page = tmp_path / "birds.html"
    result = invoke("data", file, "--examples", 2, "--html", page)
    assert result.exit_code == 0, result.output
    assert "chat messages (messages)" in result.stdout
    assert "⟦Robin 0.<|endoftext|>⟧" in result.stdout
    assert "⟦Robin 2." not in result.stdout
    assert "Left out: 1 training conversations without an assistant turn that answers." in result.stderr
    assert "1 training examples repeat an earlier one." in result.stderr
    assert "are those of the small model that ships" in result.stderr
    text = page.read_text("utf-8")
    learned = "".join(re.findall(r'<span class="learned">([^<]*)</span>', text))
    assert unescape(learned) == "Robin 0.<|endoftext|>Robin 1.<|endoftext|>"
    assert "<b>Name</b>" not in text
    assert "Lengths" in text
    found = json.loads(invoke("data", file, "--json").stdout)
    assert (found["train"], found["duplicates"]["train"], len(found["shown"])) == (13, 1, 3)
    assert sum(bar["count"] for bar in found["histogram"]) == 13


def test_a_config_is_partitioned_and_a_leak_is_told(invoke: Invoke, tmp_path: Path):
    file = write_jsonl(tmp_path / "birds.jsonl", rows(12) * 3)
    settings = ["data.dataset=instructions", f"data.train={file}", "data.chat_template=plain"]
    iid = ["data.partition={scheme: iid, minimum: 3}", "federation.clients=2"]
    result = invoke("data", "fedit/tiny-tasks", *settings, *iid)
    assert result.exit_code == 0, result.output
    assert "training examples are on several clients." in result.stderr
    assert "held-out examples have the prompt of a training example." in result.stderr


def test_a_site_of_a_federation_is_shown_as_its_client_reads_it(invoke: Invoke, tmp_path: Path):
    site = tmp_path / "client-000"
    site.mkdir()
    write_jsonl(site / "data.jsonl", [*rows(20), {"messages": []}])
    (site / "site.yaml").write_text(
        "{client: 0, server: 'a:1', data: {dataset: instructions, train: data.jsonl, chat_template: plain, "
        "partition: {scheme: iid}, split: {test: 0.1, test_source: client}}}"
    )
    for given in (site, site / "site.yaml"):
        result = invoke("data", given, "-n", 1)
        assert result.exit_code == 0, result.output
        assert "### User:\n<b>Name</b> bird" in result.stdout
        assert "Left out: 1 training conversations without an assistant turn that answers." in result.stderr
        assert "model that ships" not in result.stderr


def test_what_is_wrong_names_the_row_or_the_option(invoke: Invoke, tmp_path: Path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "response": ["x"]}])
    result = invoke("data", file)
    assert result.exit_code == 2
    assert "Row 1 of" in result.stderr
    assert "nosuch.jsonl does not exist" in invoke("data", tmp_path / "nosuch.jsonl").stderr
    assert "does not end in .html" in invoke("data", file, "--html", "x.svg").stderr
    assert "no tokens are shown" in invoke("data", "fedit/tiny-tasks", "--model", "nobody/nothing", "-n", 1).stderr
