"""The bytes of a session, from its form alone and as they were sent."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

import fedguild
from fedguild.cli.profile_tables import tables
from fedguild.core.accounting import size_bytes
from fedguild.measuring.costs.rows import as_rows
from fedguild.measuring.costs.secure import session_bytes
from fedguild.methods import build_method
from fedguild.model.backbone import describe_config
from fedguild.model.plan import trainable_shapes
from fedguild.privacy.secure_sum.form import Form, LinearMean
from fedguild.privacy.secure_sum.session import STEPS
from fedguild.server.method import secure_form
from fedguild.server.secure_round import to_payload, whole_form
from tests.methods.federation import LARGE
from tests.privacy.secure_sum.federation import EQUAL, FORM, Federation, contributions


@pytest.mark.parametrize(
    ("form", "clients"), [(EQUAL, 5), (FORM, 4), (Form({"x": LinearMean((40,), "w")}, {"w": 1}), 9)]
)
def test_a_sessions_bytes_follow_from_its_form(form, clients, monkeypatch):
    for module in ("privacy.secure_sum.session", "measuring.costs.secure"):
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
    form = whole_form(secure_form(method, model, [LARGE])[0], model)
    values = 4 * form.value_count
    down, up = session_bytes(form, clients)
    assert (values + down + up) / (2 * values) <= 1.15


def test_a_secure_configs_profile_counts_its_session():
    """FLAME on the embedded model, 8 clients: up, about the plain upload, and a summary of it is shown."""
    plain, secure = (
        fedguild.profile("flame/tiny-tasks", f"federation.secure={on}").profile for on in ("false", "true")
    )
    assert plain.session is None
    down, up = secure.session
    assert up == pytest.approx(plain.tiers[0].upload.bytes, rel=0.1)
    assert 0 < down < up
    rows = as_rows(secure)
    assert rows[0]["session"] == {"down_bytes": down, "up_bytes": up}
    console = Console(record=True, width=200)
    console.print(*tables(secure))
    assert "up in place of it, secure aggregation" in console.export_text()


def test_a_session_sums_the_factor_that_trains():
    """RoLoRA: every other round has A, so that a session is as large as the mean of the two uploads."""
    plain, secure = (
        fedguild.profile("rolora/tiny-tasks", f"federation.secure={on}").profile for on in ("false", "true")
    )
    method, model = build_method("rolora", {"rank": 2}), describe_config("allenai/OLMoE-1B-7B-0924")
    odd, even = (secure_form(method, model, [LARGE], number)[0] for number in (1, 2))
    both = trainable_shapes(model, method.plan(model, LARGE))
    assert {name.rpartition(".")[2] for name in odd.means} == {"lora_B"}
    assert {name.rpartition(".")[2] for name in even.means} == {"lora_A"}
    assert odd.means.keys() | even.means.keys() == {f"adapter/{name}" for name in both}
    assert odd.value_count + even.value_count == sum(map(math.prod, both.values()))
    assert secure.session[1] == pytest.approx(plain.tiers[0].upload.bytes, rel=0.2)
