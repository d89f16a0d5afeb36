"""Fixtures that any test may use."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.report.watch.browser import NO_BROWSER, Browser, require_chromium

if TYPE_CHECKING:
    from fedguild.model.backbone import Backbone

pytest.register_assert_rewrite("tests.runs.runs", "tests.engines.equality")

TOGETHER = {
    "tests/runs/api/test_ray_cells.py": "ray",
    "tests/federation/flower/test_guide.py": "flower",
    "tests/federation/flower/test_processes.py": "flower",
    "tests/federation/flower/test_processes_long.py": "flower",
    "tests/federation/flower/test_kills_long.py": "flower",
    "tests/engines/test_ray.py": "ray",
    "tests/measuring/costs/test_published.py": "published",
    "tests/tools/test_docs.py": "published",
    "tests/runs/test_disk.py": "disk",
    "tests/runs/test_resume.py": "resume",
    "tests/runs/test_exporting.py": "exports",
    "tests/model/test_sharding.py": "ranks",
    "tests/report/test_browser.py": "pages",
    "tests/report/test_html.py": "pages",
    "tests/report/watch/test_page.py": "pages",
}
"""File of tests -> what they share: processes of which a machine bears one at a time, or a fixture that takes long."""

SPREAD = frozenset(
    f"tests/{file}.py"
    for file in (
        "cli/test_end_to_end",
        "cli/test_profile",
        "client/test_optimizer",
        "client/test_synchronisations",
        "federation/flower/test_faults",
        "measuring/costs/test_traffic",
        "methods/test_matrix",
        "methods/test_synchronisations",
        "privacy/secure_sum/test_methods",
        "privacy/secure_sum/test_runs",
        "runs/test_bad_input",
        "runs/test_presets",
        "trust/test_attacks",
        "trust/test_fuzzing",
        "trust/test_poison",
        "trust/test_poisoned_parts",
    )
)
"""Files of tests that take ten seconds and more, and whose fixtures do not: several workers run them."""

UNTRACED = frozenset(
    f"tests/{file}.py"
    for file in (
        "client/test_synchronisations",
        "client/test_without_fp64",
        "config/test_published_settings",
        "config/test_table",
        "data/test_real_extracts",
        "export/test_every_family",
        "federation/flower/test_equality",
        "measuring/costs/test_measured_memory",
        "measuring/costs/test_memory_table",
        "measuring/costs/test_published",
        "measuring/costs/test_traffic",
        "methods/fed_sb/test_gradient",
        "methods/fedamole/test_runs",
        "methods/test_equalities",
        "methods/test_fedsa_lora",
        "methods/test_flame",
        "methods/test_matrix",
        "methods/test_private_methods",
        "methods/test_rolora",
        "methods/test_score_protocols",
        "methods/test_smoe_llb",
        "methods/test_synchronisations",
        "methods/test_trivial",
        "methods/test_vocabulary",
        "model/test_experts",
        "model/test_families",
        "model/test_full_experts",
        "model/test_full_router",
        "model/test_known",
        "model/test_segmented",
        "privacy/secure_sum/test_weightless",
        "runs/test_depth",
        "runs/test_disk",
        "runs/test_faults",
        "runs/test_fitted",
        "runs/test_imports",
        "runs/test_presets",
        "runs/test_protocols",
        "runs/test_resume",
        "runs/test_switch",
        "runs/tracking/test_in_runs",
        "server/test_singular_basis",
        "test_architecture",
        "test_commands",
        "test_contributing",
        "test_gpu_benchmark",
        "test_gpu_session",
        "tools/test_english_tasks",
        "tools/test_smollm2",
        "tools/test_tiny",
        "trust/test_fuzzing",
        "trust/test_poisoned_parts",
    )
)
"""Files of tests that go through whole runs or many cases of one kind, outside of the measured coverage.

Tracing lines takes a quarter of their time, and the tests of the parts reach all those lines but a dozen.
"""


def pytest_configure() -> None:
    """One thread, unless the user says otherwise: what one process computes is compared with another's bit by bit.

    Garbage is looked for more seldom than usual: that took a twentieth of the tests' time, in objects of torch and
    transformers that stay.
    """
    gc.set_threshold(50_000, 20, 50)
    if "OMP_NUM_THREADS" not in os.environ:
        import torch  # not above: the process that hands out the tests does without

        os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if file_of(item.nodeid) in UNTRACED:
            item.add_marker(pytest.mark.no_cover)
    items.sort(key=lambda item: turn_of(file_of(item.nodeid)))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def turn_of(file: str) -> int:
    """What waits most of the time comes first, then what takes long, so that no worker has much of it at the end."""
    return 0 if file in TOGETHER else 1 if file in SPREAD else 2


def pytest_collection_finish() -> None:
    """What was imported stays, and the collector need not go through it again.

    The corpora are imported here, where lines are counted: who needs one first may be a test outside of the coverage.
    """
    from fedguild.data import corpora

    for module in pkgutil.iter_modules(corpora.__path__, f"{corpora.__name__}."):
        importlib.import_module(module.name)
    gc.freeze()
    atexit.register(gc.unfreeze)  # not before pytest's own ten collections; Triton finds what it counts as leaked else


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says that the browser tests were skipped, if they were: a run of the tests without them looks the same."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"browser tests skipped: {NO_BROWSER} ({len(skipped)})", yellow=True)


class Scheduling(LoadScopeScheduling):
    """Gives a file, or files that belong together, to one worker; tests of the files in SPREAD to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return nodeid if file in SPREAD else TOGETHER.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Leaves out fsync, which takes 10 ms and more, and protects from power cuts only, not from a kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium for all tests; without one they are skipped, or fail if FEDGUILD_BROWSER is `required`."""
    require_chromium()
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def browser(one_browser: Browser) -> Browser:
    """The same, with a record of problems that is empty."""
    one_browser.problems.clear()
    return one_browser


@pytest.fixture(scope="session", autouse=True)
def _empty_reports() -> Iterator[None]:
    """Lets runs in this process write an empty report without answers, which take longer than small runs."""

    def write(folder: Path) -> Path:
        (folder / "report.html").touch(0o600)
        return folder / "report.html"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedguild.runs.experiment.write_report", write)
        patch.setattr("fedguild.runs.experiment.sampled", lambda *_: [])
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures of pages undrawn, which take most of a page's time; tests/report draws them."""
    monkeypatch.setattr("fedguild.report.html.wide_and_narrow", lambda draw: "")


@pytest.fixture(scope="session")
def olmoe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random OLMoE of two layers with 8 experts, of which 4 are active."""
    from tests.runs.runs import save_model  # it imports transformers, which most tests do without

    return save_model(tmp_path_factory.mktemp("models") / "olmoe")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random dense Llama of two layers."""
    from tests.runs.runs import save_model

    return save_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def english_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random OLMoE with the English model's 64 experts, 8 of them active."""
    from tests.runs.runs import save_model

    sizes = {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 1, "norm_topk_prob": False}
    widths = {"hidden_size": 32, "intermediate_size": 24}  # at least rank 20
    return save_model(tmp_path_factory.mktemp("english"), **sizes, **widths)


@pytest.fixture
def small_english(monkeypatch: pytest.MonkeyPatch, english_stand_in: Path) -> None:
    """Lets `model.path: english` mean the stand-in, whether or not the weights are packaged."""
    from fedguild.model.packaged import PACKAGED

    monkeypatch.setitem(PACKAGED, "english", english_stand_in)


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the casts to fp32 of transformers' softmax, so that an fp64 model computes all of itself in fp64.

    Rounding in fp32 depends on the length of a row and on a processor's vectors: two ways to the same number, such as a
    row with and without its padding, agree to the last bit on one machine and to 1e-7 on another.
    """
    import torch

    softmax, to_float = torch.nn.functional.softmax, torch.Tensor.float

    def of_its_own_dtype(
        values: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return softmax(values, dim, _stacklevel, None if values.dtype is torch.float64 else dtype)

    def unless_fp64(values: torch.Tensor, **options: Any) -> torch.Tensor:
        return values if values.dtype is torch.float64 else to_float(values, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", of_its_own_dtype)
    monkeypatch.setattr(torch.Tensor, "float", unless_fp64)


@pytest.fixture(scope="session")
def olmoe_backbone() -> Backbone:
    """A frozen random OLMoE of two layers with 8 experts, of which 4 are active."""
    from tests.backbones import tiny_backbone

    return tiny_backbone("olmoe")


@pytest.fixture(scope="session")
def llama_backbone() -> Backbone:
    """A frozen random dense Llama of two layers."""
    from tests.backbones import tiny_backbone

    return tiny_backbone("llama")
