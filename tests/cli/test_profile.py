"""fedguild profile."""

import json
import re
from pathlib import Path

import pytest
import torch

from fedguild.measuring.costs import published_claims
from fedguild.runs.api.profiling import EXAMPLES
from tests.cli.conftest import Invoke
from tests.data.writing import write_jsonl


def test_a_real_preset_needs_no_download(invoke: Invoke) -> None:
    """Table 15's 370 and 730 MiB, from the command line."""
    arguments = ("profile", "ub-smoe/olmoe-commonsense", "method.send_pseudo_gradient=always")
    (record, *_) = json.loads(invoke(*arguments, "--wire-dtype", "bf16", "--clients", 4, "--json").stdout)
    assert record["upload_bytes"] / 2**20 == pytest.approx(370, abs=0.5)
    assert record["download_bytes"] / 2**20 == pytest.approx(730, abs=0.5)
    assert record["model"] == "allenai/OLMoE-1B-7B-0924"
    assert record["wire_dtype"] == "bfloat16"
    assert record["bytes_are"] == "as papers count"


def test_bytes_are_those_that_the_wire_carries(invoke: Invoke) -> None:
    command = ("profile", "fedit/tiny-tasks", "federation.clients=2")

    def uploaded(*arguments: str) -> int:
        (record, *_) = json.loads(invoke(*command, *arguments, "--json").stdout)
        return int(record["upload_bytes"])

    bf16 = "federation.wire_dtype=bf16"
    assert uploaded("--wire-dtype", "bf16") < uploaded(bf16) < uploaded() == uploaded(bf16, "--wire-dtype", "fp32")
    assert uploaded("federation.wire_dtype=int8") < uploaded(bf16)
    shown = " ".join(invoke(*command, bf16).stdout.split())
    assert "large tensors in bf16 (exact)" in shown
    assert "(exact)" not in invoke(*command, "--wire-dtype", "bf16").stdout


def test_examples_come_from_the_data_at_hand_or_the_config_or_a_stated_default(invoke: Invoke, tmp_path: Path) -> None:
    epochs = ("profile", "fedprompt/tiny-tasks", "training.steps=null", "training.epochs=1", "training.batch_size=10")
    epochs += ("--context", 512)

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


def test_a_context_that_is_not_given_is_said_to_be_a_bound(invoke: Invoke) -> None:
    told = "Every sequence counts as data.max_length, 512 tokens"
    assert told in invoke("profile", "fedit/tiny-tasks").stderr
    assert told not in invoke("profile", "fedit/tiny-tasks", "--context", 24).stderr


def test_checkpointing_is_the_configs_unless_it_is_asked_for(invoke: Invoke) -> None:
    def peak(*arguments: object) -> int:
        return int(
            json.loads(invoke("profile", "flame/tiny-tasks", *arguments, "--json").stdout)[0]["peak_memory_bytes"]
        )

    plain, checkpointed = peak(), peak("--checkpointing")
    assert checkpointed < plain == peak("--no-checkpointing")
    assert peak("model.gradient_checkpointing=true") == checkpointed
    assert peak("model.gradient_checkpointing=true", "--no-checkpointing") == plain


def test_the_memory_of_dp_sgd_holds_a_gradient_for_each_example_of_a_batch(invoke: Invoke) -> None:
    def gradients(*arguments: object) -> int:
        (record, *_) = json.loads(
            invoke("profile", "fedit/tiny-tasks", "training.batch_size=4", *arguments, "--json").stdout
        )
        return int(record["memory"][0]["gradients_bytes"])

    private = ("privacy.unit=example", "privacy.target_epsilon=8", "privacy.sample_rate=0.1", "training.epochs=null")
    assert gradients(*private, "training.steps=7") == 5 * gradients()


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


def test_the_guide_shows_what_the_command_prints(invoke: Invoke) -> None:
    """But for the time, which is this machine's."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "costs.md").read_text()
    block = guide.split("```text\n$ fedguild ")[1].split("\n```")[0]
    arguments, _, printed = block.partition("\n")

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines() if "on this machine" not in line]

    assert lines(invoke(*arguments.split()).stdout) == lines(printed)


def test_what_each_target_names_is_listed(invoke: Invoke) -> None:
    """A hybrid model's Mamba layers are no MLP."""
    shown = invoke("profile", "fedit/granite-4.0-h-tiny-dolly", "--examples", "10").stdout
    rows = [line.split() for line in shown.partition("What method.targets can name")[2].splitlines()[2:]]
    assert ["mixer", "72", "526", "M", "in_proj,", "out_proj"] in rows
    assert ["mlp", "80", "189", "M", "input_linear,", "output_linear"] in rows
    assert ["experts", "120", "6.04", "G", "gate_proj,", "up_proj,", "down_proj"] in rows


def test_the_clients_at_once_are_those_that_half_of_the_free_memory_holds(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where no number of tokens bounds them; four clients take part in a round."""

    def at_once(free: float) -> str:
        monkeypatch.setattr("fedguild.engines.cohorts.free_bytes", lambda device: int(free))
        shown = invoke(
            "profile", "fedit/llama-dolly", "federation.clients=4", "federation.client_fraction=1", "--examples", "10"
        ).stdout
        (line,) = (line for line in shown.splitlines() if line.startswith("federation.cohort_size=auto: "))
        return line.removeprefix("federation.cohort_size=auto: ")

    monkeypatch.setattr("fedguild.model.backbone.pick_device", lambda device: torch.device("cuda"))
    assert at_once(1e9) == "none on this machine, whose 1.00 GB free do not hold the 13.5 GB of weights"
    plenty = at_once(1e12)
    assert plenty.startswith("4 at once on this machine")
    (each,) = re.findall(r"estimate: ([\d.]+) GB each", plenty)
    assert at_once(13.5e9 + 2 * 3.2e9 * float(each)).startswith("3 at once on this machine")
