"""The clients' half of secure aggregation, and an engine whose simulated clients keep their uploads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.client.cohort import LocalReport
from fedguild.core.errors import UploadError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.info import ModelInfo
from fedguild.privacy.secure_sum.client import ClientSession, Once
from fedguild.privacy.secure_sum.form import Contribution, Form
from fedguild.privacy.secure_sum.graph import FEWEST_CLIENTS
from fedguild.privacy.secure_sum.keys import PrivateKey, PublicKey, new_identity
from fedguild.privacy.secure_sum.session import Session, Step
from fedguild.server.engine import AnswerFilter, Delivery, Engine, FilteredEngine, Task
from fedguild.server.guard import LARGEST_VALUE
from fedguild.server.method import Method, secure_form
from fedguild.server.secure_round import to_arrays, to_payload, whole_form, whole_terms
from fedguild.server.secure_scores import FORM, scores_terms
from fedguild.server.terms import Upload, contribution
from fedguild.server.validation import check_upload

UNFIT = "its upload is not finite, beyond the limits of the run's config, or not of the method's form"
"""All that the server is told of an upload that its client does not send; the figures are the client's own."""


@dataclass(frozen=True)
class _Kept:
    """What a client has trained in a round and not yet submitted to a session."""

    round: int
    trained: bytes
    once: Once | None
    form: Form
    terms: Contribution
    disclosed: Mapping[str, Tensor]


@dataclass
class SecureClients:
    """The clients of one process: that of a site, or all of a simulation.

    Each training enters one session only, whether or not that completes: anyone who could open the sums of two sessions
    would know their difference.

    Attributes:
        budgets: The run's budgets, in the config's order.
        identities: Client index -> its registered private key.
        registered: Client index -> registered public key, of all clients.
        norm_limit: Upper limit of an upload's L2 norm, which each client checks itself; None for no limit.
        least: Fewest clients among whom each of them hides.
        reported: See `SecureAggregation`.
        once: Of a round and a download, what is called before a sum of that training is opened (`Once`). None to record
            nothing.
    """

    budgets: Sequence[Budget]
    identities: Mapping[int, PrivateKey]
    registered: Mapping[int, PublicKey]
    norm_limit: float | None = None
    least: int = FEWEST_CLIENTS
    reported: bool = True
    once: Callable[[int, Payload], Once] | None = None
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _sessions: dict[int, ClientSession] = field(default_factory=dict)
    _disclosed: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def __call__(self, method: Method, model: ModelInfo, delivery: Delivery) -> Delivery:
        """Keeps what a client has trained; returns its delivery without it."""
        left = without_figures(replace(delivery, upload=None))
        if delivery.upload is None or not delivery.needed:
            return left
        try:
            self.keep(method, model, delivery.task, delivery.upload, delivery.report, delivery.frequency)
        except UploadError as error:
            return replace(left, failure=error.message)
        return replace(left, upload=Payload(), kept=True)

    def forget(self, client: int) -> None:
        """Forgets a client's training and its session: it trains again."""
        for kept in (self._kept, self._sessions, self._disclosed):
            kept.pop(client, None)

    def keep(
        self,
        method: Method,
        model: ModelInfo,
        task: Task,
        upload: Payload,
        report: LocalReport,
        frequency: Tensor | None,
        config: bytes = b"",
    ) -> None:
        """Keeps what a client has trained until it is aggregated, in place of what it kept before.

        Args:
            method: The method.
            model: The backbone's description.
            task: What the client was told to train.
            upload: What it has trained.
            report: The training's report.
            frequency: [L, M] the experts' activation; None for a dense model.
            config: The run's config as the server sent it.

        Raises:
            UploadError: its values are not finite, too large, or of another form than the server could have summed. The
                message is the same for all, since it goes to the server; its cause has the figures.
        """
        client = task.client
        self.forget(client.index)
        try:
            check_upload(
                upload,
                method.schema(model, client, task.download, task.round),
                norm_limit=self.norm_limit,
                largest_value=LARGEST_VALUE,
            )
        except UploadError as error:
            raise UploadError(UNFIT) from error
        form, _ = secure_form(method, model, self.budgets, task.round)
        terms = contribution(method.terms(Upload(task.round, client, upload, task.download)))
        if self.reported:
            form, terms = whole_form(form, model), whole_terms(terms, report, frequency)
        clear = {name: tensor for name, tensor in upload.tensors.items() if name.partition("/")[0] in form.disclosed}
        trained = trained_from(task.download, form, config, method.facts.told_alike)
        once = self.once(task.round, task.download) if self.once else None
        self._kept[client.index] = _Kept(task.round, trained, once, form, terms, clear)

    def keep_score(
        self,
        client: int,
        round: int,
        score: float,
        examples: int,
        measures: Sequence[int],
        told: bytes,
        once: Once | None = None,
    ) -> None:
        """Keeps the score of a client's own model until it is summed, in place of what the client kept before.

        Args:
            round: The round whose model was scored.
            examples: Number of examples that the score is a mean over.
            measures: The places of the metrics that it is of, among those that the run can have.
            told: What the client was asked to score, as all others were.
            once: As `once` of the training.
        """
        self.forget(client)
        terms = scores_terms(score, examples, measures)
        self._kept[client] = _Kept(round, hashlib.sha256(told).digest(), once, FORM, terms, {})

    def answer(self, client: int, session: Session, step: Step, request: Payload) -> Payload:
        """Returns a client's answer to a step.

        Raises:
            UploadError: it has nothing to aggregate, or refuses the request.
        """
        if step == "join":
            kept = self._kept.pop(client, None)
            self.forget(client)
            if kept is None or kept.round != session.round:
                raise UploadError("it has nothing of this round that it has not been asked for already")
            self._disclosed[client] = kept.disclosed
            self._sessions[client] = ClientSession(
                client,
                session,
                kept.form,
                kept.terms,
                self.identities[client],
                self.registered,
                self.least,
                kept.trained,
                kept.once,
            )
        part = self._sessions.get(client)
        if part is None or part.session != session:
            raise UploadError("it has not joined this aggregation")
        answered = part.answer(step, to_arrays(request))
        disclosed = self._disclosed[client] if step == "send" else None
        if step == "open":
            self.forget(client)
        return to_payload(answered, disclosed)


class SecureEngine(FilteredEngine):
    """Wraps an engine of simulated clients, each of which keeps its upload and takes part in the session.

    The clients' keys are drawn for this engine alone. The result does not depend on any of its random numbers.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: Sequence[Budget],
        clients: int,
        norm_limit: float | None = None,
        *,
        filters: Sequence[AnswerFilter] = (),
        reported: bool = True,
    ) -> None:
        identities = {client: new_identity() for client in range(clients)}
        self.registered = {client: key.public_key() for client, key in identities.items()}
        self.clients = SecureClients(budgets, identities, self.registered, norm_limit, reported=reported)
        super().__init__(engine, [*filters, self.clients])

    def exchange(self, session: Session, step: Step, requests: Mapping[int, Payload]) -> dict[int, Payload | str]:
        """Returns client -> its answer to a step's request, or why there is none."""
        answers: dict[int, Payload | str] = {}
        for client, request in requests.items():
            try:
                answers[client] = self.clients.answer(client, session, step, request)
            except UploadError as error:
                answers[client] = error.message
        return answers


def trained_from(download: Payload, form: Form, config: bytes, parts: Sequence[str] = (ADAPTER,)) -> bytes:
    """Returns a digest of what all clients of a round are told to train alike.

    That is the run's config and, where all clients hold all of every tensor, the scalars of the download and the
    parts of it that are to be the same for all. Of downloads that differ by rank or by set nothing is in it.

    Args:
        download: What a client received.
        form: All that is summed.
        config: The run's config as the server sent it.
        parts: The method's `told_alike`.
    """
    digest = hashlib.sha256(hashlib.sha256(config).digest())
    if not form.groups:
        digest.update(json.dumps(dict(download.scalars), sort_keys=True).encode())
        told = {f"{part}/{name}": tensor for part in parts for name, tensor in download.part(part).items()}
        for name, tensor in sorted(told.items(), key=itemgetter(0)):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def without_figures(delivery: Delivery) -> Delivery:
    """Returns a delivery without the report of its client's training."""
    return replace(delivery, report=LocalReport(), frequency=None, peak_memory_bytes=None)
