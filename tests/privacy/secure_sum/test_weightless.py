"""Clients without examples in the linear sums of every method: the next state is that of the plain aggregate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.model.backbone import Backbone
from fedguild.privacy.secure_sum.fixed_point import Means
from fedguild.server.method import Method, secure_form
from fedguild.server.terms import Contributor, OpenedMeans, Upload, contribution
from tests.backbones import tiny_backbone
from tests.methods.federation import Federation
from tests.methods.test_means import NOT_BY_SIZE
from tests.privacy.secure_sum.federation import Federation as Session
from tests.privacy.secure_sum.federation import session_of
from tests.privacy.secure_sum.test_methods import AMPLIFIED, BUDGETS, CLIENTS, LINEAR, fp32_bound


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    backbone = tiny_backbone("olmoe")
    backbone.tokenizer.encode = lambda text, **_: [1 + ord(letter) % 31 for letter in text]
    return backbone


def trained(label: str, backbone: Backbone, folder: Path) -> tuple[Method, Payload, list[Upload]]:
    """A method, the state before its first round, and what six clients upload."""
    name = label.partition(" ")[0]
    federation = Federation(
        backbone, build_method(name, {**LINEAR[label], **NOT_BY_SIZE.get(name, {})}), CLIENTS, folder
    )
    state = federation.start()
    return federation.method, state, federation.train(state)


def without_examples(uploads: Sequence[Upload], *clients: int) -> list[Upload]:
    return [
        replace(upload, client=replace(upload.client, examples=0)) if upload.client.index in clients else upload
        for upload in uploads
    ]


def in_sums(method: Method, backbone: Backbone, state: Payload, uploads: Sequence[Upload]) -> tuple[Payload, Means]:
    """The next state from a session of the clients, and the means that it opened."""
    form, changes = secure_form(method, backbone.info, BUDGETS, 1)
    session = Session(
        {upload.client.index: contribution(method.terms(upload)) for upload in uploads}, form, session=session_of(form)
    )
    means = session.run()
    contributors = []
    for upload in uploads:
        held = session.server.holdings(upload.client.index)
        clear = {
            name: sent for name, sent in upload.payload.tensors.items() if name.partition("/")[0] in form.disclosed
        }
        own = {key: torch.from_numpy(bits.copy()) for key, bits in held.items()}
        contributors.append(Contributor(upload.client, upload.round, own, Payload(clear)))
    return method.update(state, OpenedMeans(means, form, changes, contributors)), means


@pytest.mark.parametrize("label", LINEAR)
def test_a_client_without_examples_changes_no_mean(label: str, backbone: Backbone, tmp_path: Path) -> None:
    """Its upload is a trained one, so that it would be seen if it counted; without any example nothing moves."""
    method, state, uploads = trained(label, backbone, tmp_path)
    weightless = without_examples(uploads, 2)
    found, means = in_sums(method, backbone, state, weightless)
    expected, counted = (method.aggregate(state, iter(each)) for each in (weightless, uploads))
    assert found.scalars == expected.scalars
    rounding, seen = fp32_bound(expected), False
    for name, bound in means.bounds.items():
        known = torch.from_numpy(np.array(means.known[name]))
        if name not in found.tensors:  # of a budget with too few clients that have examples
            assert not (name in expected.tensors and known.any())
            continue
        value = expected.tensors[name].double()
        limit = AMPLIFIED.get(label, 1) * bound + rounding[name]
        assert float(((found.tensors[name].double() - value).abs() * known).max()) <= limit, name
        seen |= float(((counted.tensors[name].double() - value).abs() * known).max()) > limit
    assert seen, "it would not have been seen"
    found, means = in_sums(method, backbone, state, without_examples(uploads, *range(6)))
    assert not any(known.any() for name, known in means.known.items() if name.startswith("adapter/"))
    assert found.part("adapter").keys() == state.part("adapter").keys()
    for name, value in state.part("adapter").items():
        assert torch.equal(found.part("adapter")[name], value), name
