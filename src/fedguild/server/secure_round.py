"""Secure aggregation of a round: the steps of a session with the clients of any engine, and what comes of it.

A round trains first; the clients keep what they trained. Then those that have trained go through the session's steps,
and the method gets means in place of uploads. Losses, tokens and the experts' activations are summed in the same way.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.core.accounting import Traffic, size_bytes
from fedguild.core.errors import FedGuildError, QuorumError, UploadError
from fedguild.core.payload import Payload
from fedguild.core.progress import unnoted
from fedguild.core.text import printable
from fedguild.model.info import ModelInfo
from fedguild.privacy.secure_sum.fixed_point import LARGEST_VALUE, Means
from fedguild.privacy.secure_sum.form import Contribution, Form, LinearMean
from fedguild.privacy.secure_sum.session import STEPS, Arrays, Session, Step, Unheld
from fedguild.server.guard import LARGEST_VALUE as LARGEST_SENT
from fedguild.server.method import Method, secure_form
from fedguild.server.round import Onward, Passage
from fedguild.server.sampling import require_quorum
from fedguild.server.schema import Schema
from fedguild.server.terms import CLIENTS, EXAMPLES, Contributor, OpenedMeans, Upload
from fedguild.server.validation import check_upload, unusable

if TYPE_CHECKING:
    from fedguild.privacy.secure_sum.keys import PublicKey
    from fedguild.privacy.secure_sum.server import ServerSession

PART, DISCLOSED = "secure", "disclosed"
"""The parts of the messages: the protocol's arrays, and what goes in the clear."""
REPORT = "report"
_UNSIGNED = {torch.int32: np.uint32, torch.int64: np.uint64}
_SIGNED_NAMES = ("clients", "agreed", "complaints")
"""Arrays of signed numbers; all other integers of 32 and 64 bits are words modulo 2^32 and 2^64."""


class Peers(Protocol):
    """The clients of a round, wherever they are; an engine of a secure run is one."""

    @property
    def registered(self) -> Mapping[int, PublicKey]:
        """Client index -> its registered public key, of those that the server knows."""
        ...

    def exchange(self, session: Session, step: Step, requests: Mapping[int, Payload]) -> Mapping[int, Payload | str]:
        """Returns client -> its answer to a step's request, or why there is none."""
        ...


@dataclass(frozen=True)
class Aggregated:
    """A round's result.

    Attributes:
        state: The method's state after it.
        dropped: Client index -> why its numbers are not in it.
        report: The mean over the clients of what each would report of its training.
        frequency: [L, M] mean over the clients' tokens of the experts' activation; None for a dense model.
        traffic: Client index -> bytes of the session.
        bounds: Name of a mean -> the largest error of fixed point in it.
        faults: Client index -> what it did wrong that the others could make good.
    """

    state: Payload
    dropped: Mapping[int, str]
    report: LocalReport
    frequency: Tensor | None
    traffic: Mapping[int, Traffic]
    bounds: Mapping[str, float]
    faults: Mapping[int, str]


@dataclass(frozen=True)
class SecureAggregation:
    """The secure aggregation of a run, the one filter of its server, which sees no upload.

    Attributes:
        run: Identity of the run.
        budgets: Its budgets, in the config's order.
        share: Share of a round's clients that have to be left.
        fewest: Fewest clients behind a mean.
        unheld: What a client sends of what it does not hold.
        reported: Whether what clients report of their training is summed too; differential privacy withholds it.
        note: Called with the facts of every session once it has ended, well or not (`ServerSession.facts`).
    """

    run: str
    budgets: Sequence[Budget]
    share: float
    fewest: int
    unheld: Unheld
    reported: bool = True
    note: Callable[[Mapping[str, Any]], None] = unnoted

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        """Takes the clients that have trained through a session; the engine is one of `Peers`."""
        given, setup, outcome = list(uploads), passage.setup, passage.outcome
        names = {client.index: client.name for client in outcome.asked}
        reasons = {names[index]: reason for index, reason in outcome.rejected.items()}
        require_quorum(len(given), passage.wanted, setup.quorum(passage.wanted), reasons)
        peers = cast(Peers, setup.engine)
        result = self.aggregate(outcome.round, setup.method, passage.state, setup.model, peers, given)
        for upload in given:
            index = upload.client.index
            outcome.traffic[index] = outcome.traffic[index] + result.traffic[index]
            if index in result.dropped:
                passage.withdraw(upload, result.dropped[index])
        outcome.mean_report = (result.report, result.frequency)
        outcome.faults = {index: printable(fault) for index, fault in result.faults.items()}
        outcome.bounds = dict(result.bounds)
        return result.state

    def aggregate(
        self, round: int, method: Method, state: Payload, model: ModelInfo, peers: Peers, uploads: Sequence[Upload]
    ) -> Aggregated:
        """Returns the result of the clients that have trained.

        Args:
            round: The round.
            method: The method.
            state: The state before the round.
            model: The backbone's description.
            peers: The clients.
            uploads: One of each client that has trained; their payloads stay with the clients.

        Raises:
            QuorumError: too few clients are left, or the sums are not what honest clients' are; nothing was opened but
                sums.
        """
        from fedguild.privacy.secure_sum.server import ServerSession

        own, changes = secure_form(method, model, self.budgets, round)
        form = whole_form(own, model) if self.reported else own
        clients = {upload.client.index: upload.client for upload in uploads}
        session = Session(self.run, round, secrets.token_hex(16), form.digest(), self.share, self.fewest, self.unheld)
        server = ServerSession(session, form, list(clients), peers.registered)
        try:
            result = self._through(server, form, changes, method, state, model, peers, clients)
        except FedGuildError as error:
            self.note({**server.facts(), "failed": error.message})
            raise
        self.note(server.facts())
        return result

    def _through(
        self,
        server: ServerSession,
        form: Form,
        changes: frozenset[str],
        method: Method,
        state: Payload,
        model: ModelInfo,
        peers: Peers,
        clients: Mapping[int, ClientInfo],
    ) -> Aggregated:
        """Takes the clients through the steps of a session; the arguments are those of `aggregate`."""
        round = server.session.round
        down, up, disclosed = through_steps(
            server,
            peers,
            lambda sent: _unfit(method, state, model, form, round, clients, sent),
            lambda: _require_known_sizes(server.weights, [clients[client] for client in server.weighers]),
        )
        means = server.means()
        _require_plausible(means, form)
        contributors = [
            Contributor(
                clients[client],
                round,
                {key: torch.from_numpy(held.copy()) for key, held in server.holdings(client).items()},
                disclosed.get(client, Payload()),
            )
            for client in server.contributors
        ]
        dropped = {
            client: f"dropped out of the secure aggregation: {server.dropped.get(client, 'it did not answer')}"
            for client in clients
            if client not in server.contributors
        }
        report, frequency = LocalReport(withheld=True), None
        if self.reported:
            report, frequency = _report(means, len(server.weighers), model)
        traffic = {
            client: Traffic(round, client, {PART: down[client]}, {PART: up[client]} if up[client] else {})
            for client in clients
        }
        next_state = method.update(state, OpenedMeans(means, without_report(form), changes, contributors))
        return Aggregated(next_state, dropped, report, frequency, traffic, means.bounds, server.faults)


def through_steps(
    server: ServerSession,
    peers: Peers,
    unfit: Callable[[Mapping[int, Payload]], Mapping[int, str]],
    weights_opened: Callable[[], None] = lambda: None,
) -> tuple[Counter[int], Counter[int], dict[int, Payload]]:
    """Takes clients through the steps of a session.

    Args:
        server: The server's half of it.
        peers: The clients.
        unfit: Returns client -> why it is left out, for what it disclosed.
        weights_opened: Called once the sums of the weights are known; may raise to end the session.

    Returns:
        Client -> bytes of its requests; of its answers; and what it disclosed.

    Raises:
        QuorumError: too few clients are left.
    """
    down: Counter[int] = Counter()
    up: Counter[int] = Counter()
    disclosed: dict[int, Payload] = {}
    for step in STEPS:
        requests = {client: to_payload(arrays) for client, arrays in server.requests(step).items()}
        answers = peers.exchange(server.session, step, requests)
        read = {client: answer for client, answer in answers.items() if isinstance(answer, Payload)}
        down.update({client: size_bytes(request) for client, request in requests.items()})
        up.update({client: size_bytes(answer) for client, answer in read.items()})
        if step == "send":
            disclosed = {client: Payload(answer.part(DISCLOSED)) for client, answer in read.items()}
        failed = {client: why for client, why in answers.items() if isinstance(why, str)}
        failed |= unfit(disclosed)
        arrays: dict[int, dict[str, NDArray[np.generic]]] = {}
        for client, answer in read.items():
            try:
                arrays |= {} if client in failed else {client: to_arrays(answer)}
            except Exception as error:
                failed[client] = unusable(error)
        server.receive(step, arrays, failed)
        if step == "open_weights":
            weights_opened()
    return down, up, disclosed


def whole_form(form: Form, model: ModelInfo) -> Form:
    """Returns a method's form with the sums of what clients report of their training."""
    means = {f"{REPORT}/loss": LinearMean((), f"{REPORT}/tokens")}
    if model.moe:
        shape = (len(model.moe), model.moe[0].num_experts)
        means[f"{REPORT}/frequency"] = LinearMean(shape, f"{REPORT}/tokens")
    weights = dict.fromkeys((f"{REPORT}/{name}" for name in ("tokens", "steps", "examples", "seconds")), 1)
    return replace(form, means={**form.means, **means}, weights={**form.weights, **weights})


def without_report(form: Form) -> Form:
    """Returns a method's form without the sums of what clients report."""
    means = {name: mean for name, mean in form.means.items() if not name.startswith(f"{REPORT}/")}
    return replace(form, means=means)


def whole_terms(terms: Contribution, report: LocalReport, frequency: Tensor | None) -> Contribution:
    """Returns a client's terms with those of its report."""
    values: dict[str, NDArray[np.floating]] = {f"{REPORT}/loss": np.array(report.loss)}
    if frequency is not None:
        values[f"{REPORT}/frequency"] = frequency.detach().cpu().double().numpy()
    numbers = {"tokens": report.tokens, "steps": report.steps, "examples": report.examples, "seconds": report.seconds}
    weights = {f"{REPORT}/{name}": np.array([float(number)]) for name, number in numbers.items()}
    return replace(terms, values={**terms.values, **values}, weights={**terms.weights, **weights})


def to_payload(arrays: Arrays, disclosed: Mapping[str, Tensor] | None = None) -> Payload:
    """Returns a message's arrays as a payload; words are written as signed numbers of the same bits."""
    tensors = {}
    for name, array in arrays.items():
        signed = array.view({"uint32": np.int32, "uint64": np.int64}.get(array.dtype.name, array.dtype))
        tensors[f"{PART}/{name}"] = torch.from_numpy(signed.copy())
    clear = {f"{DISCLOSED}/{name}": tensor for name, tensor in (disclosed or {}).items()}
    return Payload({**tensors, **clear})


def to_arrays(payload: Payload) -> dict[str, NDArray[np.generic]]:
    """Returns the arrays of a message, whose form and values the session checks."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, tensor in payload.part(PART).items():
        if tensor.dtype not in (torch.uint8, torch.int32, torch.int64):
            continue
        array = tensor.contiguous().numpy()
        words = name not in _SIGNED_NAMES and tensor.dtype in _UNSIGNED
        arrays[name] = array.view(_UNSIGNED[tensor.dtype]) if words else array
    return arrays


def _unfit(
    method: Method,
    state: Payload,
    model: ModelInfo,
    form: Form,
    round: int,
    clients: Mapping[int, ClientInfo],
    disclosed: Mapping[int, Payload],
) -> dict[int, str]:
    """Returns client -> why what it disclosed cannot be used; such a client is left out before anything is opened."""
    faults = {}
    for client, sent in disclosed.items():
        info = clients[client]
        schema = Schema({})
        if form.disclosed:
            schema = method.schema(model, info, method.download(state, model, info), round).of_parts(form.disclosed)
        if sent.tensors and not form.disclosed:
            faults[client] = f"it sent in the clear what {method.name} does not ask for"
            continue
        try:
            check_upload(sent, schema, largest_value=LARGEST_SENT)
        except UploadError as error:
            faults[client] = error.message
    return faults


def _require_known_sizes(weights: Mapping[str, NDArray[np.float64]], clients: Sequence[ClientInfo]) -> None:
    """Raises unless the clients' weights by size, or equal ones, add up to what the server knows.

    Raises:
        QuorumError: it is not.
    """
    known = {
        EXAMPLES: sum(client.examples for client in clients),
        CLIENTS: sum(client.examples > 0 for client in clients),
    }
    for name, expected in known.items():
        if name in weights and not np.isclose(weights[name][0], expected, rtol=1e-9):
            raise QuorumError(
                f"Secure aggregation: the clients' weights add up to {weights[name][0]:g}, but those that the server "
                f"knows to {expected}. One of them weighs itself otherwise than it says; which one cannot be told. "
                "Only sums of weights were opened.",
                "docs/guides/security.md, What stays open: how the run goes on without a client.",
            )


def _require_plausible(means: Means, form: Form) -> None:
    """Raises QuorumError where a mean is larger than honest clients' could be."""
    broken = [name for name in form.names if float(np.abs(means.values[name]).max(initial=0)) > LARGEST_VALUE]
    if broken:
        raise QuorumError(f"Secure aggregation: the mean of '{broken[0]}' is beyond {LARGEST_VALUE:g}.")


def _report(means: Means, clients: int, model: ModelInfo) -> tuple[LocalReport, Tensor | None]:
    """Returns the mean over the clients of their reports, and of the experts' activations over their tokens."""

    def mean(name: str) -> float:
        return float(means.weights[f"{REPORT}/{name}"][0]) / clients

    report = LocalReport(
        round(mean("steps")),
        round(mean("tokens")),
        round(mean("examples")),
        float(means.values[f"{REPORT}/loss"]),
        mean("seconds"),
    )
    if not model.moe:
        return report, None
    return report, torch.from_numpy(means.values[f"{REPORT}/frequency"]).float().clamp(0, 1)
