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
from fedguild.runs.environment import describe_environment

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


def test_neither_host_nor_user_nor_path_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "a-user-of-this-machine")
    told = json.dumps(describe_environment(CPU, torch.float32))
    assert socket.gethostname() not in told
    assert getpass.getuser() not in told
    assert "/" not in told
