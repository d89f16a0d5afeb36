"""Downloads and uploads of a method's clients, counted by running its server half on shapes instead of weights.

The method itself starts, creates downloads and aggregates; the clients' uploads have the expected shapes and arbitrary
values. The bytes are therefore those of a real run, counted by the same code (`fedguild.core.accounting`), except where
the names or ranks in a payload depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.accounting import bytes_by_part, size_bytes
from fedguild.core.codec import Codec, shrunk_shapes
from fedguild.core.packing import tensor_bytes
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.model.info import ModelInfo
from fedguild.model.shapes_only import LIMIT, ShapesOnly
from fedguild.server.method import Method, Roster
from fedguild.server.schema import without_values
from fedguild.server.terms import Upload


@dataclass(frozen=True)
class Exchange:
    """Bytes that one client receives and sends in one round, by payload part.

    Attributes:
        upload: From the client to the server, with every tensor that it may omit.
        least_upload: The same without them.
        held_bytes: The upload as the server holds it, in fp32.
    """

    client: ClientInfo
    download: Mapping[str, int]
    upload: Mapping[str, int]
    least_upload: Mapping[str, int]
    held_bytes: int


@dataclass(frozen=True)
class Exchanges:
    """The payloads of a federation's first rounds.

    Attributes:
        rounds: For each round, the exchange of every client that takes part, in client order.
        others: The rounds in which clients of the budgets take part that `rounds` has no client of: for each, their
            exchanges, one for each such budget.
        absent: The exchanges, in the last of these rounds, of clients that missed the one before; empty if no other
            clients could have taken part in that.
        state_bytes: What the server keeps between two rounds, before the last of these.
        period: Number of rounds after which the form of the payloads repeats.
    """

    rounds: Sequence[Sequence[Exchange]]
    absent: Sequence[Exchange]
    state_bytes: int
    period: int = 1
    others: Sequence[Sequence[Exchange]] = ()

    @property
    def first(self) -> Sequence[Exchange]:
        """The first round, and that of the budgets not asked in it."""
        return [*self.rounds[0], *chain(*self.others[:1])]

    @property
    def later(self) -> Sequence[Sequence[Exchange]]:
        """The last rounds, one for each form that the payloads take from then on."""
        return self.rounds[-self.period :]

    @property
    def later_of_others(self) -> Sequence[Sequence[Exchange]]:
        return self.others[-self.period :]


def exchanges(
    method: Method,
    model: ModelInfo,
    clients: Sequence[ClientInfo],
    *,
    budgets: Sequence[Budget] = (),
    participants: int | None = None,
    rounds: int | None = None,
    absences: bool = True,
    codec: Codec = "fp32",
    wire_dtype: torch.dtype | None = None,
    limit: int = LIMIT,
) -> Exchanges:
    """Returns the payloads exchanged in the first rounds, in bytes.

    Args:
        budgets: Its tiers, including those without a client; empty for those of the clients.
        participants: Number of clients, counted from the first, that take part in each round; None for all.
        rounds: Number of rounds; None for as many as it takes to show every form of the method's payloads.
        absences: Whether to count also the exchanges after an absence.
        codec: The encoding of large tensors on the wire.
        wire_dtype: The dtype as which every floating-point tensor is counted instead; None for what the wire carries.
        limit: Tensors of up to this many values are real (`fedguild.model.shapes_only`).

    Raises:
        ConfigError: the method's settings do not fit the model or the clients.
    """
    wire = _Wire(codec, wire_dtype)
    asked, period = clients[:participants], method.facts.costs.period
    rounds = rounds or method.facts.costs.rounds + period - 1
    with ShapesOnly(limit):
        roster = Roster(list(budgets) or list(_last_of_budgets(clients)), clients)
        start = method.start(model, roster, torch_rng(0, "start"))
        states = _states(method, start, model, asked, rounds)
        per_round = [
            [_exchange(method, state, model, client, number, wire) for client in asked]
            for number, state in enumerate(states, 1)
        ]
        others: list[list[Exchange]] = [[] for _ in states]
        for others_asked, shown in _other_rounds(clients, asked):
            for number, state in enumerate(_states(method, start, model, others_asked, rounds), 1):
                others[number - 1] += [_exchange(method, state, model, client, number, wire) for client in shown]
        missed = []
        if absences and rounds > 1:
            for absent, state in _after_absences(method, states, model, clients, asked):
                missed += [_exchange(method, state, model, client, rounds, wire) for client in absent]
    missed.sort(key=lambda exchange: exchange.client.index)
    state_bytes = sum(tensor_bytes(tensor) for tensor in states[-1].tensors.values())
    return Exchanges(per_round, missed, state_bytes, period, others)


def _states(
    method: Method, start: Payload, model: ModelInfo, asked: Sequence[ClientInfo], rounds: int
) -> list[Payload]:
    """Returns the states before each of the rounds, in which the same clients take part."""
    states = [start]
    for number in range(1, rounds):
        states.append(_after(method, states[-1], model, asked, number))
    return states


def _other_rounds(
    clients: Sequence[ClientInfo], asked: Sequence[ClientInfo]
) -> Iterator[tuple[Sequence[ClientInfo], Sequence[ClientInfo]]]:
    """Yields as many other clients as are asked in a round, with those of them whose budgets are not among the asked.

    Each such budget has one client; clients that are asked anyway complete the number.
    """
    known = {client.budget for client in asked}
    left = [client for budget, client in _last_of_budgets(clients).items() if budget not in known]
    for start in range(0, len(left), len(asked)):
        shown = left[start : start + len(asked)]
        yield sorted([*shown, *asked[len(shown) :]], key=lambda client: client.index), shown


def _after_absences(
    method: Method,
    states: Sequence[Payload],
    model: ModelInfo,
    clients: Sequence[ClientInfo],
    asked: Sequence[ClientInfo],
) -> Iterator[tuple[Sequence[ClientInfo], Payload]]:
    """Yields clients that missed the round before the last, with the state that they find in the last.

    If all take part, the last client of each budget is left out, half of the budgets at a time, so that other clients
    take part.
    """
    if len(asked) < len(clients):
        yield clients[len(asked) :], states[-1]
        return
    last = list(_last_of_budgets(clients).values())
    for absent in (last[::2], last[1::2]):
        present = [client for client in clients if client not in absent]
        if absent and present:
            yield absent, _after(method, states[-2], model, present, len(states) - 1)


def _last_of_budgets(clients: Sequence[ClientInfo]) -> dict[Budget, ClientInfo]:
    return {client.budget: client for client in clients}


def _after(method: Method, state: Payload, model: ModelInfo, clients: Sequence[ClientInfo], number: int) -> Payload:
    rng = torch_rng(number, "uploads")

    def uploads() -> Iterator[Upload]:
        for client in clients:
            download = method.download(state, model, client)
            schema = method.schema(model, client, download, number)
            example = (schema.needed if method.facts.costs.leave_out else schema).example()
            sent = {name: torch.rand(tensor.shape, generator=rng) for name, tensor in example.tensors.items()}
            yield Upload(number, client, Payload(sent, example.scalars), download)

    return method.aggregate(state, uploads())


def _exchange(
    method: Method, state: Payload, model: ModelInfo, client: ClientInfo, number: int, wire: _Wire
) -> Exchange:
    download = method.download(state, model, client)
    schema = method.schema(model, client, download, number)
    upload = schema.example()
    return Exchange(
        client, wire.bytes(download), wire.bytes(upload), wire.bytes(schema.needed.example()), size_bytes(upload)
    )


@dataclass(frozen=True)
class _Wire:
    """How payloads are counted; see `exchanges`."""

    codec: Codec
    dtype: torch.dtype | None

    def bytes(self, payload: Payload) -> dict[str, int]:
        sent = Payload({name: self._sent(tensor) for name, tensor in payload.tensors.items()}, payload.scalars)
        return bytes_by_part(sent if self.dtype else shrunk_shapes(sent, self.codec))

    def _sent(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the same shape without values; floating-point ones have the dtype, if one is given."""
        dtype = self.dtype if self.dtype and tensor.dtype is torch.float32 else tensor.dtype
        return without_values(tuple(tensor.shape), dtype)
