"""A mean on the server against its equation, and that who has no weight changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods import METHODS, build_method
from fedguild.runs.promises import require_equal
from fedguild.server.method import Upload
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.methods.test_matrix import CASES, backbone_of, train
from tests.oracles.aggregation import weighted_mean

CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3), client(3, MIDDLE, 6)]
QUERY: dict[str, Any] = {"rank": 2, "targets": ["q_proj"]}
UNIFORM: dict[str, Any] = {**QUERY, "weights": "uniform"}
MEANS: dict[str, tuple[dict[str, Any], bool]] = {
    "fedalign-moe": (QUERY, True),
    "fedavg": ({"rank": 1, "experts": "none", "gate": "full"}, True),
    "fedit": ({"rank": 2, "targets": ["q_proj", "router", "experts"]}, True),
    "fedit of equal weights": (UNIFORM, False),
    "fedprompt": ({"tokens": 3}, False),
    "fedprox": ({**QUERY, "experts": "none", "gate": "lora"}, True),
    "fedptuning": ({"tokens": 3, "width": 5}, False),
    "fedsa-lora": (QUERY, True),
    "fedsa-lora of equal weights": (UNIFORM, False),
    "ffa-lora": (QUERY, True),
    "ffa-lora of equal weights": (UNIFORM, False),
    "flex": ({**QUERY, "graft_rank": 2}, True),
    "guild": (QUERY, True),
    "pfl-moe": (QUERY, False),
    "rolora": (QUERY, True),
    "rolora of equal weights": (UNIFORM, False),
    "smoe-llb": (QUERY, True),
    "trivial": ({"targets": ["q_proj"]}, True),
}
"""A method whose aggregate is one mean of its part `adapter` -> options, and whether it weighs by size."""
NOT_BY_SIZE: dict[str, dict[str, Any]] = {
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


def after_a_round(label: str, options: dict[str, Any], folder: Path) -> tuple[Federation, Payload, list[Upload]]:
    """A federation, its state after one round, and the uploads of the next."""
    federation = Federation(backbone_of(label), build_method(label.partition(" ")[0], options), CLIENTS, folder)
    state = federation.start()
    state = federation.method.aggregate(state, iter(train(federation, state)))
    return federation, state, train(federation, state, 2)


def averages(state: Payload) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in state.tensors.items()
        if name.removeprefix("server/").partition("/")[0] in AVERAGED
    }


def without_examples(sent: Upload) -> Upload:
    return replace(sent, client=replace(sent.client, examples=0))


@pytest.mark.parametrize("label", MEANS)
def test_the_adapter_is_the_mean_of_the_adapters(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size or with equal weights, and without a client that has no examples; what nobody sends stays."""
    options, by_size = MEANS[label]
    monkeypatch.setitem(CASES, label, CASES[label.partition(" ")[0]])
    federation, state, uploads = after_a_round(label, options, tmp_path)
    uploads[2] = without_examples(uploads[2])
    weights = [torch.tensor(float(one.client.examples if by_size else one.client.examples > 0)) for one in uploads]
    found = federation.method.aggregate(state, iter(uploads)).part(ADAPTER)
    sent = [one.payload.part(ADAPTER) for one in uploads]
    assert sent[0]
    for name, before in state.part(ADAPTER).items():
        expected = weighted_mean([own[name] for own in sent], weights, before) if name in sent[0] else before
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", NOT_BY_SIZE)
def test_a_client_without_examples_changes_no_average(label: str, tmp_path: Path) -> None:
    """Its upload is a trained one, so that it would be seen if it counted."""
    options = {**CASES[label].options, **NOT_BY_SIZE[label]}
    federation, state, uploads = after_a_round(label, options, tmp_path)
    aggregate = federation.method.aggregate
    found = averages(aggregate(state, iter([*uploads[:2], without_examples(uploads[2]), uploads[3]])))
    require_equal(found, averages(aggregate(state, iter([*uploads[:2], uploads[3]]))))
    counted = averages(aggregate(state, iter(uploads)))
    assert any(not value.equal(found[name]) for name, value in counted.items()), "it would not have been seen"


@pytest.mark.parametrize("name", METHODS)
def test_a_round_without_weight_changes_no_average(name: str, tmp_path: Path) -> None:
    """Nobody's uploads, and those of clients without examples; FedAlign-MoE weighs by similarity alone."""
    federation, state, uploads = after_a_round(name, dict(CASES[name].options), tmp_path)
    for sent in ([], [without_examples(one) for one in uploads if name != "fedalign-moe"]):
        require_equal(averages(federation.method.aggregate(state, iter(sent))), averages(state))
