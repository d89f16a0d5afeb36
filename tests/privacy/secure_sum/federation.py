"""Clients and a server of one aggregation in this process, and clients that stop answering."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedguild.core.errors import UploadError
from fedguild.core.payload import Payload
from fedguild.federation.sum_log import SumLog
from fedguild.privacy.secure_sum.client import ClientSession
from fedguild.privacy.secure_sum.form import Contribution, Form, LinearMean
from fedguild.privacy.secure_sum.keys import new_identity
from fedguild.privacy.secure_sum.server import ServerSession
from fedguild.privacy.secure_sum.session import STEPS, Session

FORM = Form(
    {
        "dense": LinearMean((7, 3), "examples"),
        "experts": LinearMean((4, 5), "experts", weight_axis=0),
        "rows": LinearMean((6, 4), "examples", held="rows", held_axis=1),
    },
    {"examples": 1, "experts": 4, "count": 2},
)
EQUAL = Form({name: mean for name, mean in FORM.means.items() if not mean.held}, FORM.weights)


def session_of(form: Form, *, share: float = 2 / 3, fewest: int = 3, unheld: str = "omit", nonce: str = "0") -> Session:
    return Session("run", 1, nonce, form.digest(), share, fewest, unheld)


def contributions(count: int, form: Form = EQUAL, seed: int = 0) -> dict[int, Contribution]:
    rng = np.random.default_rng(seed)
    return {
        client: Contribution(
            {name: rng.normal(size=mean.shape) for name, mean in form.means.items()},
            {key: rng.uniform(0.1, 100, size) for key, size in form.weights.items()},
        )
        for client in range(count)
    }


class Federation:
    """A server and its clients.

    Args:
        numbers: Client -> its numbers.
        form: What is summed.
        silent: Client -> the first step that it does not answer.
        session: The session.
        least: Fewest clients among whom each of them hides.
        trained: Client -> the digest of what it was told to train, of those that were told something else.
        logs: Client -> where it records which sums its one training went into.
        knows_keys: Whether the server has the registered keys and checks signatures; one that lies would not.

    Attributes:
        told: What a client is told in place of what the server asks; of client, step and request.
        said: What a client says in place of its answer; likewise.
    """

    told = said = staticmethod(lambda client, step, content: content)

    def __init__(
        self,
        numbers: Mapping[int, Contribution],
        form: Form = EQUAL,
        silent: Mapping[int, str] | None = None,
        session: Session | None = None,
        least: int = 3,
        trained: Mapping[int, bytes] | None = None,
        logs: Mapping[int, SumLog] | None = None,
        *,
        knows_keys: bool = False,
    ) -> None:
        self.form, self.silent = form, dict(silent or {})
        self.session = session or session_of(form)
        self.identities = {client: new_identity() for client in numbers}
        registered = {client: key.public_key() for client, key in self.identities.items()}
        self.server = ServerSession(self.session, form, list(numbers), registered if knows_keys else None)
        self.clients = {
            client: ClientSession(
                client,
                self.session,
                form,
                own,
                self.identities[client],
                registered,
                least,
                (trained or {}).get(client, bytes(32)),
                logs[client].training("run", 1, Payload()) if logs else None,
            )
            for client, own in numbers.items()
        }
        self.sent: dict[tuple[int, str], dict[str, np.ndarray]] = {}

    def answer(self, client, step, request):
        if self.silent.get(client) == step:
            return "it has gone"
        try:
            answered = self.clients[client].answer(step, self.told(client, step, request))
        except UploadError as error:
            return error.message
        answered = self.said(client, step, answered)
        self.sent[(client, step)] = answered
        return answered

    def run(self):
        """Runs all steps and returns the means; raises QuorumError as `ServerSession.receive`."""
        for step in STEPS:
            requests = self.server.requests(step)
            answered = {client: self.answer(client, step, request) for client, request in requests.items()}
            failures = {client: answer for client, answer in answered.items() if isinstance(answer, str)}
            answers = {client: answer for client, answer in answered.items() if client not in failures}
            self.server.receive(step, answers, failures)
        return self.server.means()
