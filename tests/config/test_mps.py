"""Apple's GPUs, checked on the config alone: what they run, and why they do not run the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchgen

from fedguild.config import load_config
from fedguild.core.errors import ConfigError
from fedguild.methods import METHODS
from fedguild.model.backbone import describe_config, pick_device, pick_dtype
from fedguild.runs.setup import check_fit, fitted, method_of

KNOWN = {"ub-smoe", "flex", "hfedmoe"}
"""Methods of which it is known that their clients compute in fp64; others may."""


def check(name: str, *overrides: str) -> None:
    config, model = load_config(f"{name}/tiny-tasks", ["model.device=mps", *overrides]), describe_config("embedded")
    check_fit(fitted(method_of(config), config, model), config, model)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_runs_on_mps_unless_it_needs_fp64_there(name):
    reason = METHODS.load(name).facts.needs_float64
    assert reason or name not in KNOWN
    if not reason:
        return check(name)
    with pytest.raises(
        ConfigError, match=rf"model.device=mps does not go with method.name={name}: it {reason} in fp64"
    ):
        check(name)
    return None


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.load_in_4bit=true", "bitsandbytes needs CUDA or a CPU"),
        ("federation.engine.name=ray", "Ray assigns CUDA's GPUs"),
    ],
)
def test_what_mps_does_not_go_with(override, reason):
    with pytest.raises(ConfigError, match=reason):
        check("fedit", override)


def test_mps_computes_in_fp32_and_is_refused_where_there_is_none(monkeypatch):
    assert pick_dtype("auto", torch.device("mps")) is torch.float32
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="mps is requested, but torch finds no Apple GPU"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps") == torch.device("mps")


@pytest.mark.parametrize(
    "operation", ["_grouped_mm", "_embedding_bag", "nonzero_static", "index_copy.out", "topk.values"]
)
def test_torch_has_what_the_experts_compute_with_on_mps(operation):
    """torch's own list of kernels, which every wheel carries; a composite one runs on any device."""
    functions = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    entry = functions.split(f"- func: {operation}(")[1].split("- func:")[0]
    assert "MPS" in entry or "CompositeExplicitAutograd:" in entry
