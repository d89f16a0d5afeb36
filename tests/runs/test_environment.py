"""Record of a run's machine: versions and hardware, and nothing that names anybody."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
import socket

import pytest
import torch

import fedguild
from fedguild.runs.environment import describe_environment, device_name, installed

CPU = torch.device("cpu")


def test_versions_and_hardware_as_json() -> None:
    found = describe_environment(CPU, torch.bfloat16)
    assert json.loads(json.dumps(found)) == found
    assert found["fedguild"] == fedguild.__version__
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["packages"]["transformers"] == importlib.metadata.version("transformers")
    assert (found["device"], found["dtype"]) == ("CPU", "bfloat16")
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 10**8
    assert found["threads"] == torch.get_num_threads()


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.runs.environment.PACKAGES", ("torch", "no-such-package"))
    assert installed("no-such-package") is None
    assert set(describe_environment(CPU, torch.float32)["packages"]) == {"torch"}


def test_neither_host_nor_user_nor_path_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "a-user-of-this-machine")
    told = json.dumps(describe_environment(CPU, torch.float32))
    assert socket.gethostname() not in told
    assert getpass.getuser() not in told
    assert "/" not in told


def test_a_gpu_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"A card, number {device.index}")
    assert device_name(torch.device("cuda", 1)) == "A card, number 1"
