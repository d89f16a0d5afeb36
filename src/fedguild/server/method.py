"""The protocol that every method implements: both halves of a paper's algorithm, no base class.

State goes in and comes out; the round loop never names a method. `plan`, `start`, `download`,
`aggregate` and `deploy` run on the server; `local_update` runs where the client's data is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from pydantic import BaseModel
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.model.plan import AdapterPlan, ModelInfo
from fedguild.payload import Payload, Scalar


@dataclass(frozen=True)
class State:
    """A method's server state between two rounds: named tensors and scalars, nothing else.

    Methods read and write it through typed accessors of their own; the checkpoint stores it as
    it is, so that a resumed run continues from the same bits.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """A client's payload as it reached the server in a round."""

    round: int
    client: ClientInfo
    payload: Payload


@dataclass(frozen=True)
class Deployment:
    """A model ready to run: what adapter to build and the tensors to load into it.

    Attributes:
        plan: Rank, targets, active experts and output scale.
        tensors: Name -> tensor for every name of `adapter_shapes(model, plan)`.
        merged: What is added to the backbone's weights beneath the adapter, as `Backbone.merged` takes it.
            The models of one state hold the same tensors here, not copies, and so are scored together.
    """

    plan: AdapterPlan
    tensors: Mapping[str, Tensor]
    merged: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """A figure that a method reports of a round, drawn in the report.

    Attributes:
        name: What it is, the same in every round, for example `utilisation entropy`.
        values: [rows] or [rows, columns].
        rows: A label for each row, for example `layer 0`.
        columns: A label for each column; empty where `values` has one dimension.
        unit: The unit of the values; empty for a pure number.
    """

    name: str
    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str] = ()
    unit: str = ""


@runtime_checkable
class Observing(Protocol):
    """A method that reports figures of its own after each round."""

    def observe(self, state: State, model: ModelInfo) -> Sequence[Observation]:
        """Returns the figures of the round that led to this state."""
        ...


@runtime_checkable
class Enrolling(Protocol):
    """A method whose start depends on who the clients are, not on their budgets alone."""

    def enroll(self, state: State, model: ModelInfo, clients: Sequence[ClientInfo]) -> State:
        """Returns the state before the first round, from what `start` returned.

        Raises:
            ConfigError: the method's options do not fit these clients.
        """
        ...


@runtime_checkable
class Fitting(Protocol):
    """A method that not every federation suits, or that runs otherwise in some."""

    def fitted(self, clients: int, *, exact: bool) -> Method:
        """Returns the method as it runs in a federation; asked before anything is read or loaded.

        Args:
            clients: How many there are.
            exact: Whether what is received is what was sent, bit for bit (`federation.codec` fp32).

        Raises:
            ConfigError: the method's options do not fit.
        """
        ...


@runtime_checkable
class Excerpting(Protocol):
    """A method whose state holds what is about single clients, or meant for some of them only."""

    def excerpt(self, state: State, model: ModelInfo, client: ClientInfo) -> State:
        """Returns what `personalize` needs of the state for this client, and nothing of the others.

        `personalize` takes it in place of the state, and returns the same. A real client that scores its own
        model or takes it home is sent this.
        """
        ...


class Method(Protocol):
    """One federated method. `Settings` declares its options once, with help and range.

    Where the clients train elsewhere, a method is built again from its `name` and its `settings`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs_experts: ClassVar[bool]
    Settings: ClassVar[type[BaseModel]]
    settings: Any

    def __init__(self, settings: Any) -> None: ...

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns what a client of this budget trains and how it runs.

        Raises:
            ConfigError: the budget asks for more than the model has.
        """
        ...

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> State:
        """Returns the state before the first round."""
        ...

    def download(self, state: State, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns what the server sends to this client at the start of a round."""
        ...

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Trains the cohort's clients on their own data; returns their uploads, in slot order."""
        ...

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns name -> shape of the tensors that an upload must have from a client that got this download."""
        ...

    def aggregate(self, state: State, uploads: Iterable[Upload]) -> State:
        """Consumes the round's valid uploads and returns the next state.

        They come in client order, then those of clients that were asked again, then late ones of the round
        before (`upload.round` tells), whose clients had the download of that round.
        """
        ...

    def deploy(self, state: State, model: ModelInfo, budget: Budget) -> Deployment | None:
        """Returns the global model as a client of this budget runs it; None where every client has its own."""
        ...

    def personalize(self, state: State, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the model that this client itself uses after the round.

        Args:
            state: The method's state after the round; of an `Excerpting` method also its `excerpt` for this client.
            model: The backbone's description.
            client: Whose model it is.
            memory: What the client kept from its last participation; empty if it never took part, and
                where the model is wanted that the client would receive next.
        """
        ...
