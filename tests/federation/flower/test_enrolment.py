"""The program that registers and revokes keys: one connection, a line for each key, one's fault none of the others'."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedguild.federation.flower import enrolment
from fedguild.federation.keys import write_key
from fedguild.federation.revocation import SPENT


class Control:
    """Flower's server, as far as keys are concerned."""

    def __init__(self) -> None:
        self.nodes: list[SimpleNamespace] = []
        self.closed = False

    def RegisterNode(self, request):  # noqa: N802
        if request.name == "client-666":
            raise RuntimeError("not this\none")
        if any(node.public_key == request.public_key for node in self.nodes):
            raise RuntimeError("Public key already in use")
        one = SimpleNamespace(
            node_id=len(self.nodes) + 1, name=request.name, public_key=request.public_key, unregistered_at=""
        )
        self.nodes.append(one)

    def ListNodes(self, request):  # noqa: N802
        return SimpleNamespace(nodes_info=self.nodes)

    def UnregisterNode(self, request):  # noqa: N802
        (node,) = [node for node in self.nodes if node.node_id == request.node_id]
        node.unregistered_at = "now"

    def close(self):
        self.closed = True


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    server = Control()
    monkeypatch.setattr(enrolment, "read_superlink_connection", lambda name: name)
    monkeypatch.setattr(enrolment, "init_http_client_from_connection", lambda connection: server)
    return server


def told(**work: object) -> dict[str, str]:
    lines: list[str] = []
    enrolment.main("here", work, lines.append)
    return {line["name"]: line["fault"] for line in map(json.loads, lines)}


def test_keys_are_registered_and_revoked_each_by_itself(control: Control, tmp_path: Path) -> None:
    key = write_key(tmp_path / "node.key")
    broken, other = tmp_path / "broken.pub", tmp_path / "other.pub"
    broken.write_text("no key")
    other.write_bytes(Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    files = {"client-001": broken, "client-002": tmp_path / "gone", "client-003": other, "client-000": key}
    threads = set(threading.enumerate())
    faults = told(register={name: str(path) for name, path in files.items()})
    assert set(threading.enumerate()) == threads, "Flower's way to read a key ends the process some seconds later"
    assert faults["client-000"] == ""
    assert "Unsupported key type" in faults["client-001"]
    assert "No such file" in faults["client-002"]
    assert "no key on a NIST curve" in faults["client-003"]
    assert [node.name for node in control.nodes] == ["client-000"]
    assert told(register={"client-666": str(key)})["client-666"] == "not this one"
    assert told(revoke=["client-000", "client-009"]) == {"client-000": "", "client-009": enrolment.UNKNOWN}
    assert told(revoke=["client-000"]) == {"client-000": enrolment.UNKNOWN}, "a revoked key is not revoked twice"
    assert control.closed


def test_a_key_that_flower_has_had_is_registered_or_spent(control: Control, tmp_path: Path) -> None:
    """An answer that was lost is made good; a key that was revoked, or that is another's, is none to register."""
    keys = {"client-000": str(write_key(tmp_path / "node.key"))}
    assert told(register=keys) == told(register=keys) == {"client-000": ""}
    assert len(control.nodes) == 1
    assert told(register={"client-001": keys["client-000"]}) == {"client-001": SPENT}
    told(revoke=["client-000"])
    assert told(register=keys) == {"client-000": SPENT}
    again = {"client-000": str(write_key(tmp_path / "again.key"))}
    other = {"client-000": str(write_key(tmp_path / "other.key"))}
    assert told(register=again) == told(register=other) == {"client-000": ""}
    live = [node for node in control.nodes if not node.unregistered_at]
    assert len(live) == 1, "another key of the same client takes its place"
