"""Messages and their serialisation."""

from __future__ import annotations

import json

import pytest

from fedguild.core.errors import UploadError
from fedguild.federation.flower.message import Message

REQUEST = Message(
    "train", "ab" * 16, 3, 1, "int8", metadata={"deep": {"list": [1, 2.5, None]}}, body=bytes(range(256)) * 9
)


def test_a_message_survives_serialisation() -> None:
    assert Message.from_bytes(REQUEST.to_bytes()) == REQUEST


@pytest.mark.parametrize(
    "header",
    [
        "no json",
        "[]",
        json.dumps({"kind": "steal", "run": "x"}),
        json.dumps({"kind": "train"}),
        json.dumps({"kind": "train", "run": 7}),
        json.dumps({"kind": "train", "run": "x", "round": "1"}),
        json.dumps({"kind": "train", "run": "x", "round": True}),
        json.dumps({"kind": "train", "run": "x", "metadata": []}),
        json.dumps({"kind": "train", "run": "x", "surplus": 1}),
    ],
)
def test_a_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(UploadError):
        Message.from_header(header, b"")


def test_truncated_bytes_are_refused() -> None:
    with pytest.raises(UploadError, match="cut off"):
        Message.from_bytes(REQUEST.to_bytes()[:40])
