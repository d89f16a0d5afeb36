"""presets, methods, doctor and partition."""

import json
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import Result

from fedguild.cli import doctor
from fedguild.config import Config, axes, load_config, presets, tables
from fedguild.data import ClientData, Corpus, Example, PartitionTable
from fedguild.methods import METHODS
from fedguild.model import kernels
from fedguild.model.families import FAMILIES
from fedguild.runs.setup import PreparedData
from tests.cli.conftest import Invoke
from tests.plugins import install


def test_the_axes_of_the_presets_are_listed(invoke: Invoke) -> None:
    known, shown = axes(), invoke("presets")
    words = re.split(r"[\s,]+", shown.stdout)
    assert {*known.methods, *known.models, *known.data} <= set(words)
    assert all(part.description in shown.stdout for part in (*known.models.values(), *known.data.values()))
    assert all(name in shown.stderr for name in known.cells)
    listed = json.loads(invoke("presets", "--json").stdout)
    for axis in ("methods", "models", "data"):
        assert sorted(part["name"] for part in listed[axis]) == sorted(getattr(known, axis))
    assert listed["presets"] == [preset.name for preset in presets()]
    assert listed["own_files"] == list(known.cells)
    assert [table["name"] for table in listed["tables"]] == [table.name for table in tables()]
    assert "reference: fedamole" in invoke("presets", "fedamole/table-1").stdout


def rows_of_80_columns(result: Result) -> int:
    """Returns how many rows a listing takes; in what goes to stdout no line is longer than 80."""
    assert max(map(len, result.stdout.splitlines())) <= 80
    return sum(max(1, -(-len(line) // 80)) for line in [*result.stdout.splitlines(), *result.stderr.splitlines()])


@pytest.mark.parametrize("listing", ["presets", "methods"])
def test_a_listing_fits_a_screen_of_80_columns(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert rows_of_80_columns(invoke(listing)) < 60


@pytest.mark.parametrize("method", ["flame", "guild", "ub-smoe"])
def test_a_method_shows_what_it_runs_on_its_variants_and_its_tables(invoke: Invoke, method: str) -> None:
    shown, known = invoke("presets", method), axes()
    rows = {line.split(maxsplit=1)[0] for line in shown.stdout.splitlines() if line.strip()}
    needs = set(known.methods[method].needs)
    assert "moe" in needs
    fitting = {name for name, part in known.models.items() if needs <= set(part.words)}
    assert rows & known.models.keys() == fitting
    assert known.data.keys() <= rows
    assert {table.name for table in tables() if table.name.startswith(f"{method}/")} <= rows
    assert known.methods[method].description in shown.stdout
    assert all(variant in shown.stderr for variant in known.methods[method].variants)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["flame"], r"flame/.*"),
        (["flame", "--model", "OLMoE"], r"flame/olmoe-.*"),
        (["--model", "tiny", "--data", "dolly"], r".*/(granite-4\.0-h-)?tiny-dolly"),
        (["--data", "telequad"], r".*/.*-telequad"),
        (["--model", "qwen-2.5", "--data", "flowertune"], r".*/qwen-2.5-0.5b-flowertune-.*"),
    ],
)
def test_presets_are_chosen_by_method_model_and_data(invoke: Invoke, arguments: list[str], pattern: str) -> None:
    names = json.loads(invoke("presets", *arguments, "--json").stdout)["presets"]
    assert names == [preset.name for preset in presets() if re.fullmatch(pattern, preset.name)]
    if len(arguments) > 1:
        shown = invoke("presets", *arguments).stdout
        assert all(name in shown for name in names)


def test_a_choice_that_leaves_nothing_is_told(invoke: Invoke) -> None:
    result = invoke("presets", "fedit", "--model", "gpt-9")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "There is no preset for fedit, model gpt-9." in result.stderr
    assert "Did you mean 'flame/tiny-tasks'" in invoke("presets", "flame/tiny-task").stderr


def test_methods_are_chosen_by_the_presets_that_they_have(invoke: Invoke) -> None:
    chosen = json.loads(invoke("methods", "--model", "olmoe", "--data", "dolly", "--json").stdout)
    assert {entry["name"] for entry in chosen} == set(METHODS)
    dense = json.loads(invoke("methods", "--model", "llama-3.2-1b", "--data", "dolly", "--json").stdout)
    assert {entry["name"] for entry in dense} == {
        name for name, part in axes().methods.items() if "moe" not in part.needs
    }


def test_methods_are_listed_with_their_options(invoke: Invoke) -> None:
    listed = {entry["name"]: entry for entry in json.loads(invoke("methods", "--json").stdout)}
    assert set(listed) == set(METHODS)
    assert {entry["from"] for entry in listed.values()} == {"fedguild"}
    one = json.loads(invoke("methods", "flame", "--json").stdout)
    assert one["title"] == listed["flame"]["title"] == METHODS.load("flame").title
    assert one["needs_experts"] is True
    temperature = next(option for option in one["options"] if option["key"] == "temperature")
    assert temperature["accepts"] == "number ≥ 0"
    assert "method.temperature" in invoke("methods", "flame").stdout
    assert "fedit" in invoke("methods").stdout


def test_doctor_reports_versions_extras_and_the_machine(invoke: Invoke) -> None:
    found = {entry["subject"]: entry for entry in json.loads(invoke("doctor", "--json").stdout)}
    assert {"python", "torch", "extra ray", "memory", "processor", "current folder"} <= set(found)
    assert found["torch"]["verdict"] == "ok"
    assert found["current folder"]["found"] == "writable"
    assert "transformers" in invoke("doctor").stdout


def test_doctor_knows_every_extra() -> None:
    """All but the empty `cpu` and those for work on FedGuild itself; of MLflow the extra installs the client alone."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert doctor.EXTRAS.keys() == project["optional-dependencies"].keys() - {"cpu", "dev", "docs", "notebook"}
    for extra, (packages, _) in doctor.EXTRAS.items():
        names = {doctor.DISTRIBUTIONS.get(package, package) for package in packages}
        listed = {re.split(r"[\[<>=;]", line)[0].strip() for line in project["optional-dependencies"][extra]}
        assert names <= {*listed, *(name.removesuffix("-skinny") for name in listed)}, extra


def test_doctor_names_the_plugins_of_other_packages_and_those_that_are_broken(invoke, tmp_path, monkeypatch):
    entries = """
        [fedguild.metrics]
        rhyme = verses:rhyme
        reason = verses:reason
        [fedguild.model_families]
        mixtral = verses:MIXTRAL
        [fedguild.corpora]
        poems = absent.poems
    """
    source = "def rhyme(prediction, reference):\n    return 1.0\n"
    install(monkeypatch, tmp_path / "verses", "verses", entry_points=entries, modules={"verses.py": source})
    found = {entry["subject"]: entry for entry in json.loads(invoke("doctor", "--json").stdout)}
    assert found["metrics"]["found"] == "exact_match, rouge_l, token_f1, rhyme (verses 1.2)"
    assert found["model families"]["found"] == ", ".join(FAMILIES)
    assert found["methods"]["found"] == ", ".join(METHODS)
    broken = {subject: entry["consequence"] for subject, entry in found.items() if entry["found"] == "verses 1.2"}
    assert broken == {
        "metric reason": "it cannot be used: AttributeError: module 'verses' has no attribute 'reason'",
        "model family mixtral": "it cannot be used: fedguild and verses 1.2 provide one of that name",
        "corpus poems": "it cannot be used: ModuleNotFoundError: No module named 'absent'",
    }


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    missing = doctor._extra("secure", *doctor.EXTRAS["secure"])
    assert missing.found == "without cryptography, pycryptodome"
    assert missing.consequence == "federation.secure cannot be enabled: pip install 'fedguild[secure]'"
    missing = doctor._extra("eval", ("peft", "accelerate"), "no check")
    assert (missing.verdict, missing.found) == ("missing", "without peft, accelerate")
    assert missing.consequence == "no check: pip install 'fedguild[eval]'"
    assert doctor._package("no-such-package").verdict == "problem"


def test_doctor_says_whether_the_converter_to_gguf_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    line = doctor._converter()
    assert (line.verdict, line.found) == ("missing", "no convert_hf_to_gguf.py")
    assert "set LLAMA_CPP to its folder" in line.consequence
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert doctor._converter() == doctor.Finding("gguf converter", str(tmp_path / "convert_hf_to_gguf.py"))
    assert "gguf converter" in [finding.subject for finding in doctor.diagnose()]


def test_doctor_warns_of_little_memory_threads_and_a_folder_that_takes_no_files(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**29, total=2**33))
    assert doctor._memory().verdict == "problem"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    assert "export OMP_NUM_THREADS=1" in doctor._cores().consequence

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert doctor._write_access().found == "not writable (Permission denied)"


def test_doctor_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: False)
    facts = SimpleNamespace(name="A card", total_memory=16 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: facts)
    (card,) = doctor._device()
    assert (card.subject, card.found) == ("device cuda:0", "A card, 16 GiB")
    assert "no bfloat16" in card.consequence


@pytest.mark.parametrize(
    ("setting", "installed", "verdict", "found"),
    [
        ("auto", True, "ok", "low-rank, grouped, cross-entropy, dropout, optimizer, norm, rotary, swiglu"),
        ("auto", False, "missing", "none"),
        ("grouped,norm", True, "missing", "grouped, norm"),
        ("grouped,norm", False, "problem", "grouped,norm"),
    ],
)
def test_doctor_lists_the_kernels_of_a_gpu(setting, installed, verdict, found, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    monkeypatch.setattr("fedguild.model.kernels.fused.faults", lambda *given: {})
    monkeypatch.setenv(kernels.VARIABLE, setting)
    kernels.chosen.cache_clear()
    line = doctor._kernels()
    kernels.chosen.cache_clear()
    assert (line.verdict, line.found) == (verdict, found)
    assert ("pip install 'fedguild[gpu]'" in line.consequence) is (verdict != "ok")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    one = (Example("p", "r", "x", "t"),)
    made = PreparedData(
        Corpus("tasks", one),
        partition_table=PartitionTable(
            tuple(f"label {index}" for index in range(12)), ((40, 20, *[1] * 10), (0, 5, *[2] * 10))
        ),
        clients=[ClientData(one * 60, one * 6, one * 4), ClientData(one * 20, one * 3, one * 2)],
    )
    monkeypatch.setattr("fedguild.runs.setup.prepare_data", lambda config, *_: made)


def test_partition_shows_clients_and_labels(invoke: Invoke, prepared: None) -> None:
    result = invoke("partition", "flame/tiny-tasks", "federation.clients=2")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[-2][:6] == ["0", "b1", "40", "█", "20", "▄"]
    assert rows[-1][:5] == ["1", "b2", "·", "5", "▁"]
    assert rows[-2][-4:] == ["70", "60", "6", "4"]
    assert "2 more" in " ".join(result.stdout.split())


def test_partition_as_json_and_plot(invoke: Invoke, prepared: None) -> None:
    result = invoke("partition", "flame/tiny-tasks", "federation.clients=2", "--json", "--plot", "p.svg")
    shown = json.loads(result.stdout)
    assert shown["clients"][1] == {
        "client": 1,
        "budget": "b2",
        "counts": [0, 5, *[2] * 10],
        "train": 20,
        "validation": 3,
        "test": 2,
    }
    assert Path("p.svg").read_text().startswith("<svg")
    assert "does not end in .svg" in invoke("partition", "flame/tiny-tasks", "--plot", "p.pdf").stderr


def test_an_unknown_method_lists_the_known(invoke: Invoke) -> None:
    result = invoke("methods", "flam")
    assert result.exit_code == 2
    assert "Did you mean 'flame'?" in result.stderr


def test_doctor_names_kernels_that_fail_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    monkeypatch.setattr(kernels, "chosen", lambda setting, kind: frozenset(kernels.KERNELS))
    monkeypatch.setattr("fedguild.model.kernels.fused.faults", lambda *given: {})
    assert doctor._kernels().verdict == "ok"
    monkeypatch.setattr("fedguild.model.kernels.fused.faults", lambda *given: {"OlmoeMLP": "no sm_90"})
    found = doctor._kernels()
    assert (found.verdict, found.consequence) == ("problem", "plain torch computes in their place: OlmoeMLP: no sm_90")


@pytest.mark.parametrize(("kept", "verdict"), [(True, "ok"), (False, "missing")])
def test_doctor_says_whether_freed_pages_are_kept(kept: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "keep_freed_pages", lambda: kept)
    _, pages = doctor._device()
    assert (pages.subject, pages.verdict) == ("freed pages", verdict)
    assert bool(pages.consequence) is not kept


@pytest.mark.parametrize(
    ("setting", "verdict", "found"),
    [
        ("auto", "ok", "low-rank, grouped, optimizer, norm, rotary, swiglu"),
        ("optimizer,dropout", "missing", "optimizer"),
        ("optimiser", "problem", "optimiser"),
    ],
)
def test_doctor_lists_the_kernels_of_a_cpu(
    setting: str, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(kernels.VARIABLE, setting)
    kernels.chosen.cache_clear()
    line = doctor._kernels()
    kernels.chosen.cache_clear()
    assert (line.verdict, line.found) == (verdict, found)
    assert ("FEDGUILD_KERNELS" in line.consequence) is (verdict != "ok")


def test_a_preset_written_out_is_the_same_config(invoke: Invoke) -> None:
    shown = invoke("presets", "flame/tiny-tasks", "seed=5")
    assert Config.model_validate(yaml.safe_load(shown.stdout)) == load_config("flame/tiny-tasks", ["seed=5"])
    as_json = json.loads(invoke("presets", "flame/tiny-tasks", "seed=5", "--json").stdout)
    assert as_json["seed"] == 5


def test_settings_are_listed_with_their_ranges(invoke: Invoke) -> None:
    listed = {entry["key"]: entry for entry in json.loads(invoke("presets", "--settings", "--json").stdout)}
    assert listed["training.learning_rate"]["accepts"] == "number > 0"
    assert "training.learning_rate" in invoke("presets", "--settings").stdout
