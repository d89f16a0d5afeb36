"""Methods that aggregate securely end within the stated bound of their plain runs; the others say why they do not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedguild.client.cohort import LocalReport
from fedguild.client.memory import ClientMemory
from fedguild.config.federation import FederationSettings
from fedguild.core.errors import ConfigError, QuorumError
from fedguild.core.payload import Payload
from fedguild.engines.local import LocalEngine
from fedguild.engines.secure import SecureEngine, trained_from
from fedguild.methods import METHODS, build_method
from fedguild.privacy.secure_sum.fixed_point import weight_words
from fedguild.privacy.secure_sum.server import ServerSession
from fedguild.privacy.secure_sum.session import STEPS
from fedguild.server.method import Method, secure_form
from fedguild.server.round import RoundSetup
from fedguild.server.rounds import run_round
from fedguild.server.secure_round import SecureAggregation
from fedguild.server.terms import Terms
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, SETTINGS, SMALL, Federation, client
from tests.methods.test_matrix import CASES

BUDGETS = (LARGE, SMALL)
CLIENTS = tuple(client(index, BUDGETS[index % 2], 2 + index) for index in range(6))
"""Three clients of each budget, which is the fewest behind any mean."""
RULES = FederationSettings(clients=6)
ROUNDS = 2


def secure_options(name: str) -> Mapping[str, Any]:
    case = CASES[name]
    return case.options if case.secure is None else case.secure


WITH_FORM = [
    name for name in METHODS if METHODS.load(name).aggregate is Method.aggregate and name not in ("fedamole", "hfedmoe")
]
LINEAR = {name: secure_options(name) for name in WITH_FORM} | {
    "fedit by rank": {"rank": 3, "rank_by_budget": True},
    "fedavg on full experts": CASES["fedavg on full experts"].options,
    "rolora of equal weights": {"rank": 2, "weights": "uniform"},
}
"""Every method that says which sums its server takes, under the options `secure` of its case in the matrix."""

DECLARED = {
    "one mean, by size or with equal weights": (
        *("fdlora", "fedavg", "fedit", "fedprompt", "fedprox", "fedptuning", "fedsa-lora", "ffa-lora", "flex", "guild"),
        *("pfl-moe", "rolora", "smoe-llb", "trivial"),
    ),
    "means with weights by expert": ("a3smoe", "flame"),
    "means over the holders of a rank or an expert": ("fedmoe", "hetlora"),
    "further means beside the adapter's": ("ub-smoe",),
}
"""What the methods declare; the test of them says which have no form."""
AMPLIFIED = {"fdlora": 1.5}
"""What multiplies the error of a mean: the server's Nesterov step, by 1 + m at a learning rate of 1."""
CLOSED = ("fedmoe",)
"""Methods of whose experts some have fewer than three clients that hold them, here after stage 1."""


@pytest.fixture(scope="module")
def backbone():
    backbone = tiny_backbone("olmoe")
    backbone.tokenizer.encode = lambda text, **_: [1 + ord(letter) % 31 for letter in text]  # where FedPrompt starts
    return backbone


class Run:
    """Rounds of one method on six clients, plain or secure."""

    def __init__(self, backbone, label, folder, *, secure, clients=CLIENTS, options=None, **wishes):
        method = build_method(label.partition(" ")[0], {**LINEAR.get(label, {}), **(options or {})})
        self.federation = federation = Federation(backbone, method, clients, folder)
        # SGD: Adam makes a whole step out of the last bits of a gradient that is 0 but for rounding
        settings = SETTINGS.model_copy(update={"optimizer": "sgd", "learning_rate": 0.1})
        self.memory = folder / "memory"
        engine = LocalEngine(backbone, federation.examples, settings, ClientMemory(self.memory), seed=1)
        self.engine = SecureEngine(engine, BUDGETS, len(clients)) if secure else engine
        session = {"share": 2 / 3, "fewest": 3, "unheld": "omit", **wishes}
        self.filters = [SecureAggregation("run", BUDGETS, **session)] if secure else []
        self.state = federation.start()

    def begin_as(self, other):
        """Takes over the state of another run and what its clients remember."""
        self.state = other.state
        shutil.rmtree(self.memory, ignore_errors=True)
        if other.memory.exists():
            shutil.copytree(other.memory, self.memory)

    def round(self, number, rules=RULES):
        federation = self.federation
        setup = RoundSetup(federation.method, federation.model, self.engine, rules, 3, self.filters)
        outcome = run_round(number, self.state, federation.clients, setup)
        self.state = outcome.state
        return outcome


def fp32_bound(state, clients=6):
    return {
        name: clients * 2.0**-23 * float(tensor.abs().max())
        for name, tensor in state.tensors.items()
        if tensor.is_floating_point()
    }


@pytest.mark.parametrize("label", LINEAR)
def test_every_round_ends_within_the_stated_bound_of_the_plain_one(label, backbone, tmp_path, monkeypatch):
    """Each from one state and one memory of the clients, since training amplifies what two states differ by."""
    means, closed = [], ServerSession.means
    monkeypatch.setattr(ServerSession, "means", lambda self: means.append(closed(self)) or means[-1])
    plain = Run(backbone, label, tmp_path / "plain", secure=False)
    secure = Run(backbone, label, tmp_path / "secure", secure=True)
    opened = [True]
    for number in range(1, ROUNDS + 1):
        before = plain.state
        secure.begin_as(plain)
        outcomes = plain.round(number), secure.round(number)
        assert outcomes[1].accepted == outcomes[0].accepted == list(range(6))
        assert plain.state.tensors.keys() == secure.state.tensors.keys()
        rounding, bounds, compared, frozen = fp32_bound(plain.state), outcomes[1].bounds, 0, 0
        form, _ = secure_form(secure.federation.method, backbone.info, BUDGETS, number)
        for name, expected in plain.state.tensors.items():
            mean = name.removeprefix("server/")
            found, known = secure.state.tensors[name], torch.from_numpy(means[-1].known.get(mean, np.ones(1, bool)))
            if mean not in bounds:
                if name.startswith("adapter/"):
                    assert name not in form.means
                    assert torch.equal(found, before.tensors[name])
                    assert torch.equal(expected, before.tensors[name])
                    frozen += 1
                continue
            error = ((found.double() - expected.double()).abs() * known).max()
            assert float(error) <= AMPLIFIED.get(label, 1) * bounds[mean] + rounding[name], (number, name)
            if not bool(known.all()):
                assert torch.equal(found[~known], before.tensors[name][~known])
            compared += 1
            opened.append(bool(known.all()))
        assert compared + frozen >= len(plain.state.part("adapter"))
        assert bool(frozen) == label.startswith("rolora"), "one of its factors takes part in a round"
    assert all(opened) == (label not in CLOSED), "too few clients hold, or have a weight for, some of the experts"


def test_the_server_sees_means_of_reports_only(backbone, tmp_path):
    plain = Run(backbone, "flame", tmp_path / "plain", secure=False).round(1)
    outcome = Run(backbone, "flame", tmp_path / "secure", secure=True).round(1)
    single = [delivery.report for delivery in plain.deliveries]
    tokens = sum(report.tokens for report in single)
    for delivery in outcome.deliveries:
        assert delivery.report.tokens == round(tokens / 6)
        assert delivery.report.loss == pytest.approx(sum(r.loss * r.tokens for r in single) / tokens, rel=1e-6)
        assert delivery.upload is None
        assert delivery.peak_memory_bytes is None
    frequency = sum(d.frequency.double() * d.report.tokens for d in plain.deliveries) / tokens
    torch.testing.assert_close(outcome.deliveries[3].frequency.double(), frequency, rtol=1e-5, atol=1e-6)


class Deserting(SecureEngine):
    """Clients that stop answering at a step."""

    silent: dict[int, str]

    def exchange(self, session, step, requests):
        answers = super().exchange(session, step, requests)
        return {c: "its machine stopped" if self.silent.get(c) == step else a for c, a in answers.items()}


def test_a_client_that_drops_out_is_left_out_and_recorded(backbone, tmp_path):
    run, rest = (Run(backbone, "flame", tmp_path / name, secure=True) for name in ("run", "rest"))
    before, kept = run.state.part("adapter"), trained(rest)
    run.engine.__class__, run.engine.silent = Deserting, {4: "send"}
    outcome = run.round(1)
    assert outcome.rejected == {4: "dropped out of the secure aggregation: its machine stopped"}
    assert outcome.accepted == [0, 1, 2, 3, 5]
    plain = Run(backbone, "flame", tmp_path / "plain", secure=False)
    method, train = plain.federation.method, plain.engine.train

    def without_four(*arguments):
        for delivery in train(*arguments):
            gone = delivery.task.client.index == 4
            yield replace(delivery, upload=None, failure="it stopped") if gone else delivery

    plain.engine.train = without_four
    expected, closed = plain.round(1).state.part("adapter"), 0
    assert isinstance(method, Method)
    for name, value in run.state.part("adapter").items():
        opened, experts = ..., name.rsplit(".", 2)[0]
        if experts in kept[0].terms.weights:
            # Experts that exactly three clients activated might have lost one of them: they wait for the next round.
            counts = sum((torch.from_numpy(own.terms.weights[experts]) > 0).long() for own in kept.values())
            opened = counts >= 4
            assert opened.any()
            closed += int((~opened).sum())
            assert torch.equal(value[~opened], before[name][~opened])
        difference = (value - expected[name])[opened]
        assert float(difference.abs().max()) <= outcome.bounds[f"adapter/{name}"] + 1e-6
    assert closed, "the case has no such expert"


def test_too_few_clients_fail_the_round_and_leave_the_state(backbone, tmp_path):
    run = Run(backbone, "flame", tmp_path, secure=True)
    run.engine.__class__, run.engine.silent = Deserting, dict.fromkeys((1, 3, 4), "send")
    before = run.state
    with pytest.raises(QuorumError, match=r"after 'send', but 5 are needed\. Only sums of weights were opened"):
        run.round(1)
    assert run.state is before


@pytest.mark.parametrize("last", STEPS)
def test_an_upload_is_brought_into_one_session_only(last, backbone, tmp_path):
    """However far a session has come: the weights are open after `open_weights`, the values after `open`."""
    run = Run(backbone, "fedit", tmp_path, secure=True)
    exchange, again = run.engine.exchange, {}

    def repeating(session, step, requests):
        answers = exchange(session, step, requests)
        if step == last:
            again.update(exchange(replace(session, nonce="another"), "join", dict.fromkeys(range(6), Payload())))
        return answers

    run.engine.exchange = repeating
    with nullcontext() if last == "open" else pytest.raises(QuorumError):
        run.round(1)
    assert set(again) == set(range(6))
    assert set(again.values()) == {"it has nothing of this round that it has not been asked for already"}


def test_what_was_trained_in_one_round_is_not_aggregated_in_another(backbone, tmp_path):
    run = Run(backbone, "fedit", tmp_path, secure=True)
    exchange = run.engine.exchange
    run.engine.exchange = lambda session, *rest: exchange(replace(session, round=2), *rest)
    with pytest.raises(QuorumError, match="it has nothing of this round"):
        run.round(1)


def test_clients_that_received_different_states_do_not_aggregate(backbone, tmp_path, monkeypatch):
    """The server sent them, so that it does not leave out those that say so."""
    monkeypatch.setattr(ServerSession, "_leave_out_the_odd_ones", lambda self: None)
    run = Run(backbone, "fedit", tmp_path, secure=True)
    keep = run.engine.clients.keep

    def inconsistent(method, model, task, *rest):
        if task.client.index != 2:
            nothing = {name: torch.zeros_like(tensor) for name, tensor in task.download.tensors.items()}
            task = replace(task, download=replace(task.download, tensors=nothing))
        keep(method, model, task, *rest)

    run.engine.clients.keep = inconsistent
    with pytest.raises(QuorumError, match="was told to train something else"):
        run.round(1)


@pytest.mark.parametrize("label", LINEAR)
def test_a_server_that_tells_one_client_something_else_is_found_out(label, backbone, tmp_path):
    """Whatever it changes of what all hold alike; the budgets' own parts and what is held in part are not."""
    run = Run(backbone, label, tmp_path, secure=True)
    method, model = run.federation.method, backbone.info
    if label == "fedprompt":
        run.round(1)  # before the first round its server has no prompt to tell
    form, _ = secure_form(method, model, BUDGETS)
    downloads = [method.download(run.state, model, one) for one in CLIENTS]
    if form.groups:
        pytest.skip("its clients hold different parts, which are not compared")
    alike = {
        name
        for name, tensor in downloads[0].tensors.items()
        if all(name in other.tensors and torch.equal(other.tensors[name], tensor) for other in downloads)
    }
    assert alike, "nothing would be changed"
    found = {trained_from(download, form, b"config", method.facts.told_alike) for download in downloads}
    assert len(found) == 1, "clients of one round are told different things"
    for name in sorted(alike):
        other = replace(downloads[0], tensors={**downloads[0].tensors, name: downloads[0].tensors[name] + 1})
        told = trained_from(other, form, b"config", method.facts.told_alike)
        assert told not in found, name


def trained(run):
    kept = {}
    run.engine.exchange = lambda session, step, requests: kept.update(run.engine.clients._kept) or {}
    with pytest.raises(QuorumError):
        run.round(1)
    return kept


@pytest.mark.parametrize("label", ["a3smoe", "flame", "ub-smoe"])
def test_no_range_is_of_a_budgets_only_client(label, backbone, tmp_path):
    clients = tuple(client(index, LARGE if index == 0 else SMALL, 2 + index) for index in range(4))
    kept = trained(Run(backbone, label, tmp_path, secure=True, clients=clients))
    form = kept[0].form
    ranges = np.array([weight_words(form, kept[index].terms)[3 * form.weight_count :] for index in range(4)])
    assert ranges[0].any()
    alone = (ranges[0] > 0) & (ranges[1:] == 0).all(axis=0)
    assert not alone.any(), [name for name, bare in zip(form.ranges, alone, strict=True) if bare]


def test_an_upload_that_is_not_needed_stays_with_its_client(backbone, tmp_path):
    run = Run(backbone, "fedit", tmp_path, secure=True)
    train, seen = run.engine.engine.train, []

    def more(*arguments):
        for delivery in train(*arguments):
            yield replace(delivery, needed=delivery.task.client.index != 5)

    run.engine.engine.train = more
    secure_train = run.engine.train

    def watched(*arguments):
        for delivery in secure_train(*arguments):
            seen.append(delivery)
            yield delivery

    run.engine.train = watched
    assert run.round(1).unneeded == [5]
    assert [delivery.upload for delivery in seen if not delivery.needed] == [None]
    assert all(delivery.report == LocalReport() and delivery.frequency is None for delivery in seen)


def lacking_a_loss(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "disclosed/validation/loss"}


def filling(part, value):
    return lambda tensors: {
        name: torch.full_like(tensor, value) if name.startswith(f"disclosed/{part}") else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("label", "change", "reason"),
    [
        ("fedmoe", lacking_a_loss, "lacks 'validation/loss'"),
        ("fedmoe", filling("validation/loss", 1e7), "has a value of 1e+07, beyond 1e+06"),
        ("fedmoe", filling("validation/accuracy", 2.0), "sum to 2, beyond 1"),
        ("fedmoe", filling("activation", 1.0), "beyond 1"),
        ("fedmoe", filling("activation", -0.1), "negative"),
        ("fedit", lambda tensors: {**tensors, "disclosed/adapter": torch.ones(3)}, "sent in the clear what fedit"),
    ],
)
def test_who_discloses_something_else_is_left_out_before_values_are_opened(label, change, reason, backbone, tmp_path):
    """FedMoE's figures missing or out of their bounds; a part in the clear that FedIT does not ask for."""
    run = Run(backbone, label, tmp_path, secure=True)
    answer = run.engine.clients.answer

    def otherwise(client, session, step, request):
        answered = answer(client, session, step, request)
        if (client, step) != (2, "send"):
            return answered
        return Payload(change(answered.tensors))

    run.engine.clients.answer = otherwise
    outcome = run.round(1)
    assert outcome.accepted == [0, 1, 3, 4, 5]
    assert outcome.rejected[2].startswith("dropped out of the secure aggregation: ")
    assert reason in outcome.rejected[2]


def test_a_weight_beside_equal_ones_that_adds_up_to_the_sizes_fails_the_round(backbone, tmp_path):
    """The server of a mean of equal weights knows how many clients there are, and takes no other sum."""
    run = Run(backbone, "rolora of equal weights", tmp_path, secure=True)
    method, sizes = run.federation.method, sum(one.examples for one in CLIENTS)
    terms = type(method).terms

    def heavier(self, sent):
        own = terms(self, sent)
        if sent.client.index != 2:
            return own
        weight = float(sizes - len(CLIENTS) + 1)
        return Terms({name: replace(term, weight=weight) for name, term in own.means.items()}, {"clients": weight})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "terms", heavier)
        with pytest.raises(QuorumError, match=f"add up to {sizes}, but those that the server knows to {len(CLIENTS)}"):
            run.round(1)


def test_a_weight_that_is_not_the_clients_size_fails_the_round(backbone, tmp_path):
    run = Run(backbone, "fedit", tmp_path, secure=True)
    keep = run.engine.clients.keep

    def inflated(method, model, task, *rest):
        task = replace(task, client=replace(task.client, examples=1000)) if task.client.index == 2 else task
        keep(method, model, task, *rest)

    run.engine.clients.keep = inflated
    with pytest.raises(
        QuorumError, match="the clients' weights add up to 1023, but those that the server knows to 27"
    ) as caught:
        run.round(1)
    assert "Only sums of weights were opened" in str(caught.value)


def test_a_holder_group_below_the_fewest_keeps_its_global_value(backbone, tmp_path):
    clients = tuple(client(index, LARGE if index < 2 else SMALL, 3) for index in range(6))
    run = Run(backbone, "fedit by rank", tmp_path, secure=True, clients=clients)
    before = run.state.part("adapter")
    run.round(1)
    for name, value in run.state.part("adapter").items():
        own, high = (
            (value[..., :1, :], value[..., 1:, :]) if name.endswith("lora_A") else (value[..., :1], value[..., 1:])
        )
        kept = before[name][..., 1:, :] if name.endswith("lora_A") else before[name][..., 1:]
        assert torch.equal(high, kept)
        assert own.abs().sum() > 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("flora", "stacks every client's own A and B"),
            ("fedalign-moe", "compares the clients' experts by their cosines"),
            ("fedamole", "assigns experts by every client's embedding"),
            ("flexlora", "decomposes the mean of the clients' products B A"),
            ("florist", "stacks every client's own A and B"),
            ("fedex-lora", "merges the products of every client's own A and B"),
            ("fed-sb", "records of every client whether it still holds A and B"),
            ("hfedmoe", "would tell who they are"),
        ],
    )
    def test_a_method_whose_server_needs_single_uploads_says_so(self, name, reason, backbone):
        with pytest.raises(ConfigError, match=reason):
            secure_form(build_method(name, {}), backbone.info, BUDGETS)

    def test_a_method_that_says_nothing_of_its_sums_is_refused(self, backbone):
        class Silent(METHODS.load("fedavg")):
            name, not_linear = "silent", ""

            def aggregate(self, state, uploads):
                return super().aggregate(state, uploads)

        with pytest.raises(ConfigError, match="silent does not aggregate securely: its `aggregate` does not say"):
            secure_form(Silent(Silent.Settings()), backbone.info, BUDGETS)

    def test_the_methods_that_aggregate_securely_are_these(self):
        refusing = {name: METHODS.load(name).facts.not_linear for name in METHODS if name not in WITH_FORM}
        assert set(WITH_FORM) == {name for names in DECLARED.values() for name in names}
        of_products = {"fedex-lora", "flexlora", "flora", "florist"}
        assert set(refusing) == of_products | {"fed-sb", "fedalign-moe", "fedamole", "hfedmoe"}
        own = [name for name in refusing if METHODS.load(name).aggregate is not Method.aggregate]
        assert all(refusing[name] for name in own), "Say in `not_linear` why the server does not take sums alone."

    @pytest.mark.parametrize(
        ("name", "options"), [("hetlora", {"norm_scope": "module"}), ("ub-smoe", {"measure_cosine": True})]
    )
    def test_options_that_are_not_linear_are_refused(self, name, options, backbone):
        with pytest.raises(ConfigError, match=r"federation\.secure"):
            secure_form(build_method(name, {**LINEAR[name], **options}), backbone.info, BUDGETS)


@pytest.mark.parametrize("name", ["a3smoe", "flame"])
def test_the_experts_weights_stay_closed_where_no_expert_trains(name, backbone, tmp_path):
    """A sum that no mean needs would tell how the clients' tokens are routed, for nothing."""
    experts = {layer.experts for layer in backbone.info.moe}
    options = {"rank": 2, "targets": ["attention"]}
    run = Run(backbone, f"{name} on the attention", tmp_path, secure=True, options=options)
    assert secure_form(run.federation.method, backbone.info, BUDGETS)[0].weights.keys().isdisjoint(experts)
    assert run.round(1).accepted == list(range(6))
    assert secure_form(build_method(name, {"rank": 2}), backbone.info, BUDGETS)[0].weights.keys() > experts
