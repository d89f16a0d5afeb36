"""The bytes of a session, from its form alone and as they were sent."""

from __future__ import annotations

import pytest

from fedguild.costs.secure import session_bytes
from fedguild.methods import build_method
from fedguild.model.backbone import describe_config
from fedguild.secure.form import Form, LinearMean
from fedguild.secure.session import STEPS
from fedguild.server.secure_round import to_payload, whole_form
from fedguild.wire.accounting import size_bytes
from tests.methods.federation import LARGE
from tests.secure.federation import EQUAL, FORM, Federation, contributions


@pytest.mark.parametrize(
    ("form", "clients"), [(EQUAL, 5), (FORM, 4), (Form({"x": LinearMean((40,), "w")}, {"w": 1}), 9)]
)
def test_a_sessions_bytes_follow_from_its_form(form, clients, monkeypatch):
    for module in ("secure.session", "costs.secure"):
        monkeypatch.setattr(f"fedguild.{module}.degree_of", lambda count: min(count - 1, 4))
    federation = Federation(contributions(clients, form), form)
    down = 0
    for step in STEPS:
        requests = federation.server.requests(step)
        down += size_bytes(to_payload(requests[1]))
        answers = {client: federation.answer(client, step, request) for client, request in requests.items()}
        federation.server.receive(step, answers, {})
    up = sum(size_bytes(to_payload(federation.sent[(1, step)])) for step in STEPS)
    assert session_bytes(form, clients) == (down, up)


@pytest.mark.parametrize("clients", [8, 64])
@pytest.mark.parametrize("name", ["flame", "fedit", "ffa-lora", "ub-smoe"])
def test_equal_shapes_cost_at_most_a_seventh_more_on_a_published_model(name, clients):
    """OLMoE-1B-7B: bytes of a client's round, the plain download and the session over the plain round's."""
    model = describe_config("allenai/OLMoE-1B-7B-0924")
    method = build_method(name, {})
    form = whole_form(method.linear_form(model, [LARGE]), model)
    values = 4 * form.value_count
    down, up = session_bytes(form, clients)
    assert (values + down + up) / (2 * values) <= 1.15
