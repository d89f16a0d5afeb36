"""Clients without examples under uniform and norm weights: they trained on nothing, so they count for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.payload import Payload
from fedguild.methods import build_method
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.methods.test_matrix import CASES, assert_same_tensors, backbone_of, train

UNIFORM: dict[str, dict[str, Any]] = {
    "fedit": {"weights": "uniform"},
    "fedsa-lora": {"weights": "uniform"},
    "ffa-lora": {"weights": "uniform"},
    "rolora": {"weights": "uniform"},
    "fed-sb": {"weights": "uniform", "start": "random"},
    "hetlora": {},
    "hetlora that prunes hard": {},
    "fdlora": {},
    "fedex-lora": {},
    "flex": {"weights": "uniform"},
    "fedamole": {},
    "fedprompt": {},
    "fedptuning": {},
    "pfl-moe": {},
    "flame": {},
}
"""Methods and cases in which some part is a mean that does not weigh by size, with the options that make it so."""
AVERAGED = ("adapter", "experts", "shared", "rescaler")
"""The parts of a state that are means over clients."""


def averages(state: Payload) -> dict[str, Any]:
    return {name: value for name, value in state.tensors.items() if name.partition("/")[0] in AVERAGED}


@pytest.mark.parametrize("label", UNIFORM)
def test_a_client_without_examples_changes_no_average(label: str, tmp_path: Path) -> None:
    """Its upload is a trained one, so that it would be seen if it counted."""
    case = CASES[label]
    method = build_method(label.partition(" ")[0], {**case.options, **UNIFORM[label]})
    clients = [client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3), client(3, MIDDLE, 6)]
    federation = Federation(backbone_of(label), method, clients, tmp_path)
    state = federation.start()
    state = method.aggregate(state, iter(train(federation, state)))
    uploads = train(federation, state, 2)
    nobody = replace(uploads[2], client=replace(uploads[2].client, examples=0))
    found = averages(method.aggregate(state, iter([*uploads[:2], nobody, uploads[3]])))
    assert_same_tensors(found, averages(method.aggregate(state, iter([*uploads[:2], uploads[3]]))))
    counted = averages(method.aggregate(state, iter(uploads)))
    assert any(not value.equal(found[name]) for name, value in counted.items()), "it would not have been seen"
