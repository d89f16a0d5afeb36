"""The protocol of a method: both halves of a paper's algorithm, four hooks to write and defaults for the rest.

State goes in and comes out; the round loop never names a method. Every hook but `local_update` runs on
the server; `local_update` runs where the client's data is. No method inherits from another.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.payload import ADAPTER, Payload, Scalar
from fedguild.server.settings import fitting_defaults


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
        plan: The adapter's parts and the active experts.
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


@dataclass(frozen=True)
class ServerCosts:
    """The order of a method's server work, which `fedguild profile` prints beside what it counts.

    n is the size of an upload, C the number of clients that take part in a round.

    Attributes:
        memory: Order of the server's memory while it aggregates.
        time: Order of its time in a round.
        holds: Whether it holds one upload at a time, or all of a round's.
        varies: `no`: payloads are as counted; `at most`: they depend on the data, and the most there may
            be is counted; `mean`: they differ between clients as the data decides, their mean does not.
        note: What else there is to know about the figures.
        bound: Options under which the most there may be is reached.
        leave_out: Whether the profile aggregates uploads without what may be left out.
        rounds: The round in which payloads have the form that they have from then on.
        period: After how many rounds that form repeats, where payloads take turns; the profile gives their mean.
        trains: Whether a client trains its own budget's adapter, or one for every budget.
    """

    memory: str = "not stated"
    time: str = "not stated"
    holds: Literal["one", "all"] = "one"
    varies: Literal["no", "at most", "mean"] = "no"
    note: str = ""
    bound: Mapping[str, Any] = field(default_factory=dict)
    leave_out: bool = False
    rounds: int = 2
    period: int = 1
    trains: Literal["own", "every budget"] = "own"


RUNNING_MEAN = ServerCosts("O(n), whatever C is: a running mean", "O(C n)")


class Method(ABC):
    """A federated method: `plan`, `start`, `local_update` and `aggregate`, and the rest where a paper differs.

    Where the clients train elsewhere, a method is built again from its `name` and its `settings`.

    Attributes:
        name: The name in configs; by default that of the module, `-` for `_`.
        title: One line about it; by default the first of the module's docstring.
        Settings: The options, each declared once with help and range.
        needs_experts: Whether it runs on mixture-of-experts models only.
        costs: The order of its server's work.
        settings: The options of this instance.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    Settings: ClassVar[type[BaseModel]]
    needs_experts: ClassVar[bool] = False
    costs: ClassVar[ServerCosts] = ServerCosts()
    settings: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        module = sys.modules[cls.__module__]
        if "name" not in vars(cls):
            cls.name = module.__name__.rpartition(".")[2].replace("_", "-")
        if "title" not in vars(cls):
            cls.title = (module.__doc__ or cls.name).strip().partition("\n")[0].removesuffix(".")

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    # The algorithm

    @abstractmethod
    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns what a client of this budget trains and how it runs.

        Raises:
            ConfigError: the budget or an option asks for what the model does not have.
        """

    @abstractmethod
    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Returns the state before the first round; what is sent and aggregated lies in the part `adapter`."""

    @abstractmethod
    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Trains the cohort's clients on their own data; returns their uploads, in slot order."""

    @abstractmethod
    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Consumes the round's valid uploads and returns the next state.

        They come in client order, then those of clients that were asked again, then late ones of the round
        before (`upload.round` tells), whose clients had the download of that round.
        """

    # What crosses a client's boundary

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns what the server sends to this client at the start of a round; by default the state's adapter."""
        return Payload.of({ADAPTER: state.part(ADAPTER)})

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns name -> shape of the tensors that an upload must have from a client that got this download.

        By default what the client's plan trains, in the part `adapter`.
        """
        return in_part(ADAPTER, trainable_shapes(model, self.plan(model, client.budget)))

    def expected_scalars(self, download: Payload) -> Mapping[str, Scalar]:
        """Returns the scalars of an upload that answers this download, as the profile counts them; by default none."""
        return {}

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns what this client may see of the state: enough for `personalize`; by default all of it.

        A method whose state holds what is about single clients, or meant for some of them, leaves that out.
        """
        return state

    # The models that come out

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment | None:
        """Returns the global model as a client of this budget runs it; None where every client has its own.

        By default the state's adapter under the budget's plan.
        """
        return Deployment(self.plan(model, budget), state.part(ADAPTER))

    def personalize(self, excerpt: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the model that this client itself uses after the round; by default the global one.

        Args:
            excerpt: The client's excerpt of the state after the round.
            model: The backbone's description.
            client: Whose model it is.
            memory: What the client kept from its last participation; empty if it never took part, and
                where the model is wanted that the client would receive next.
        """
        deployment = self.deploy(excerpt, model, client.budget)
        assert deployment is not None, f"{self.name} has no global model, so it has to say what a client's own is"
        return deployment

    # The federation

    def fitted(self, model: ModelInfo, clients: int, *, exact: bool) -> Method:
        """Returns the method as it runs on this model in a federation; asked before data or weights are read.

        An option that the config sets (`settings.model_fields_set`) is kept, or refused; one that is left to its
        default may become what fits. By default so do targets that the model does not have.

        Args:
            model: The backbone's description.
            clients: How many there are.
            exact: Whether what is received is what was sent, bit for bit (`federation.codec` fp32).

        Raises:
            ConfigError: the method's options do not fit.
        """
        return self.with_options(**fitting_defaults(self.settings, model))

    def with_options(self, **changes: Any) -> Self:
        """Returns the method with other values of some options; without changes itself."""
        return type(self)(self.settings.model_copy(update=changes)) if changes else self

    def with_secret(self, secret: int) -> Method:
        """Returns the method for one training on a client's own machine; by default itself.

        Args:
            secret: What noise that protects the client's data is to be drawn from, another number for every training.
                The server does not know it, while it knows the run's seed and could draw that noise again.
        """
        return self

    def enroll(self, state: Payload, model: ModelInfo, clients: Sequence[ClientInfo]) -> Payload:
        """Returns the state before the first round, given what `start` returned and who the clients are.

        Raises:
            ConfigError: the method's options do not fit these clients.
        """
        return state

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns figures of the round that led to this state; by default none."""
        return ()


def in_part(part: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns `shapes` under `part/…`, as an upload names them."""
    return {f"{part}/{name}": shape for name, shape in shapes.items()}
