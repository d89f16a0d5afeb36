"""fedguild profile."""

import json
from pathlib import Path

import pytest

from fedguild.client.budget import Budget
from fedguild.measuring.costs import published_claims
from fedguild.measuring.costs.flops import cost
from fedguild.methods import build_method
from fedguild.model.backbone import describe_config
from fedguild.runs.api.profiling import EXAMPLES
from tests.cli.conftest import Invoke
from tests.data.writing import write_jsonl


def test_a_tier_a_row_and_a_section_for_each_kind_of_cost(invoke: Invoke) -> None:
    result = invoke("profile", "flame/tiny-tasks")
    assert result.exit_code == 0, result.output
    shown = result.stdout
    for title in ("Each client, in one round", "Bytes by payload part", "Peak memory", "Server, C = 8 clients"):
        assert title in shown
    tiers = [line.split() for line in shown.split("Bytes by payload part")[0].splitlines() if line.startswith("b")]
    assert [row[0] for row in tiers] == ["b1", "b2", "b3", "b4"]
    assert [row[2] for row in tiers] == ["8", "4", "2", "1"]
    assert result.stderr == ""


def test_json_is_a_list_with_an_object_for_each_tier(invoke: Invoke) -> None:
    result = invoke("profile", "flame/tiny-tasks", "method.rank=4", "--json")
    records = json.loads(result.stdout)
    assert [record["tier"] for record in records] == ["b1", "b2", "b3", "b4"]
    model = describe_config("embedded")
    method = build_method("flame", {"rank": 4})
    counted = cost(model, method.plan(model, Budget("b4", 1, 6)))
    assert records[-1]["parameters_active"] == counted.active_parameters
    assert records[-1]["trainable_total"] == counted.trainable
    assert records[-1]["upload_bytes"] < records[-1]["peak_memory_bytes"]
    assert records[0]["steps_per_round"] == 25


def test_a_real_preset_needs_no_download(invoke: Invoke) -> None:
    """Table 15's 370 and 730 MiB, from the command line."""
    arguments = ("profile", "ub-smoe/olmoe-commonsense", "method.send_pseudo_gradient=always")
    (record, *_) = json.loads(invoke(*arguments, "--wire-dtype", "bf16", "--clients", 4, "--json").stdout)
    assert record["upload_bytes"] / 2**20 == pytest.approx(370, abs=0.5)
    assert record["download_bytes"] / 2**20 == pytest.approx(730, abs=0.5)
    assert record["model"] == "allenai/OLMoE-1B-7B-0924"
    assert record["wire_dtype"] == "bfloat16"


def test_another_model_and_other_lengths(invoke: Invoke) -> None:
    result = invoke(
        "profile", "fedprompt/tiny-tasks", "--model", "llama-3.2-1b", "--context", 128, "--tokens", 256, "--json"
    )
    (record, *_) = json.loads(result.stdout)
    assert record["parameters_total"] == 1_235_814_400
    assert (record["tokens_per_pass"], record["context_tokens"]) == (256, 128)
    assert record["active_experts"] == 0


def test_examples_come_from_the_data_at_hand_or_the_config_or_a_stated_default(invoke: Invoke, tmp_path: Path) -> None:
    epochs = ("profile", "fedprompt/tiny-tasks", "training.steps=null", "training.epochs=1", "training.batch_size=10")

    def steps(*arguments: object) -> tuple[int, str]:
        result = invoke(*epochs, *arguments, "--json")
        return json.loads(result.stdout)[0]["steps_per_round"], invoke(*epochs, *arguments).stderr

    assert steps("data.split.max_train_samples=50") == (5, "")
    assert steps("data.max_samples=160", "federation.clients=8") == (2, "")
    assert steps("--examples", 70) == (7, "")
    rows = [{"instruction": f"Say {number}.", "response": "x"} for number in range(300)]
    own = ("data.dataset=instructions", f"data.train={write_jsonl(tmp_path / 'own.jsonl', rows)}", "data.options={}")
    assert steps(*own, "federation.clients=3", "data.partition.scheme=iid") == (8, "")  # 80 of each client's 100
    on_the_hub = ("data.dataset=dolly", "data.options={}")
    assert steps(*on_the_hub, "data.split.max_train_samples=50") == (5, "")
    assert steps(*on_the_hub, "data.max_samples=160", "federation.clients=8") == (2, "")
    default, told = steps(*on_the_hub)
    assert default == EXAMPLES / 10
    assert "--examples" in told


def test_memory_is_shown_in_the_dtypes_that_the_config_may_run_in(invoke: Invoke) -> None:
    shown = invoke("profile", "flame/tiny-tasks").stdout
    assert all(f" {bits} bit " in shown for bits in (32, 16, 4))
    one = invoke("profile", "flame/tiny-tasks", "model.dtype=bfloat16").stdout
    assert " 16 bit " in one
    assert " 32 bit " not in one


def test_checkpointing_is_the_configs_unless_it_is_asked_for(invoke: Invoke) -> None:
    def peak(*arguments: object) -> int:
        return int(
            json.loads(invoke("profile", "flame/tiny-tasks", *arguments, "--json").stdout)[0]["peak_memory_bytes"]
        )

    plain, checkpointed = peak(), peak("--checkpointing")
    assert checkpointed < plain == peak("--no-checkpointing")
    assert peak("model.gradient_checkpointing=true") == checkpointed
    assert peak("model.gradient_checkpointing=true", "--no-checkpointing") == plain


def test_what_is_wrong_is_said(invoke: Invoke) -> None:
    for arguments, told in (
        ((), "No config is named, and there is no fedguild.yaml in this folder."),
        (("flame/tiny-tasks", "--wire-dtype", "int8"), "Known: fp32, bf16"),
        (("flame/tiny-tasks", "--model", "llama-3.2-1b"), "needs a mixture-of-experts model"),
        (("flame/olmoe-dolly", "--model", "qwen1.5-moe-a2.7b"), "runs 4 of 60 experts per token"),
    ):
        result = invoke("profile", *arguments)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.split())


def test_the_papers_figures(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole list is in tests/measuring/costs/test_published.py."""
    monkeypatch.setattr(published_claims, "CLAIMS", published_claims.CLAIMS[:4])
    shown = invoke("profile", "--published").stdout
    assert "8.19 M" in shown
    assert "differs" in shown
    assert "linear in the rank" in shown
    rows = json.loads(invoke("profile", "--published", "--json").stdout)
    assert [row["verdict"] for row in rows] == ["equal", "equal", "equal", "differs"]
    assert rows[3]["why"]
    assert invoke("profile", "--published", "--markdown").stdout.startswith("## UB-SMoE")


def test_a_method_that_lacks_its_extra_is_left_out(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    claims = [claim for claim in published_claims.CLAIMS if claim.what == "FDLoRA"]
    monkeypatch.setattr(published_claims, "CLAIMS", (*claims, published_claims.CLAIMS[0]))
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    from fedguild.measuring.costs import published

    published._traffic.cache_clear()
    result = invoke("profile", "--published")
    assert result.exit_code == 0
    assert "FDLoRA is left out" in result.stderr


def test_clients_are_those_of_the_config(invoke: Invoke) -> None:
    records = json.loads(invoke("profile", "flame/tiny-tasks", "--clients", 6, "--json").stdout)
    assert [record["clients"] for record in records] == [2, 2, 1, 1]
    assert records[0]["server"]["participants"] == 6


def test_the_guide_shows_what_the_command_prints(invoke: Invoke) -> None:
    """But for the time, which is this machine's."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "costs.md").read_text()
    block = guide.split("```text\n$ fedguild ")[1].split("\n```")[0]
    arguments, _, printed = block.partition("\n")

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines() if "on this machine" not in line]

    assert lines(invoke(*arguments.split()).stdout) == lines(printed)
