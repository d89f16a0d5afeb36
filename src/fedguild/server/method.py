"""The protocol of a method: both halves of a paper's algorithm, of which only the plan has no default.

State goes in and comes out; the round loop never names a method. `local_update` and, if secure, `terms` run where the
client's data is, everything else on the server. No method inherits from another. Averaged LoRA with equal weights:

    >>> from fedguild.server.settings import LoraSettings
    >>> class Averaging(Method):
    ...     Settings = LoraSettings
    ...     facts = Facts(not_private="")
    ...
    ...     def plan(self, model, budget):
    ...         return AdapterPlan((self.settings.lora,))
    ...
    ...     def terms(self, sent):
    ...         return mean(ADAPTER, sent, "uniform")

Its state before a round, two uploads of clients with 10 and 90 examples, and its state after the round:

    >>> method, budget = Averaging(LoraSettings(targets=("attention",))), Budget("one", 0, 4)
    >>> state = Payload({"adapter/x": torch.zeros(2)})
    >>> sent = [Payload({"adapter/x": torch.tensor([1.0, 2.0])}), Payload({"adapter/x": torch.tensor([3.0, 4.0])})]
    >>> clients = [ClientInfo(0, budget, 10), ClientInfo(1, budget, 90)]
    >>> uploads = [Upload(1, client, payload, state) for client, payload in zip(clients, sent)]
    >>> method.aggregate(state, uploads).tensors["adapter/x"]
    tensor([2., 3.])
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.merge_ledger import MERGE, merge_version, up_to
from fedguild.client.training import load_received, train
from fedguild.config.privacy import Unit
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.payload import ADAPTER, SERVER, Payload
from fedguild.core.seeding import torch_rng
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes, initial_adapter, trainable_shapes
from fedguild.model.shapes_only import ShapesOnly
from fedguild.privacy.secure_sum.form import Form
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import MethodSettings
from fedguild.server.terms import Means, RunningMeans, Terms, Upload, form_of, mean


@dataclass(frozen=True)
class Deployment:
    """A model ready to run: the plan of its adapter and the tensors to load into it.

    Attributes:
        plan: The adapter's parts and the active experts.
        tensors: Name -> tensor for every name of `adapter_shapes(model, plan)`.
        merged: The changes added to the backbone's weights, in the form that `Backbone.merged` takes. The models of one
            state share these tensors rather than copies, so that they are scored together.
    """

    plan: AdapterPlan
    tensors: Mapping[str, Tensor]
    merged: Mapping[str, Tensor] = field(default_factory=dict)


class ClientsUnknownError(LookupError):
    """A start asks for the clients where only the budgets are known."""

    def __init__(self) -> None:
        super().__init__("this start needs the clients, of which only the budgets are known")


@dataclass(frozen=True)
class Roster:
    """Who takes part in a run.

    Attributes:
        budgets: All budgets in the config's order, those without a client too.
        known: The clients by index; None where they are not known.
    """

    budgets: Sequence[Budget]
    known: Sequence[ClientInfo] | None = None

    @property
    def clients(self) -> Sequence[ClientInfo]:
        """The clients by index.

        Raises:
            ClientsUnknownError: they are not known.
        """
        if self.known is None:
            raise ClientsUnknownError
        return self.known


@dataclass(frozen=True)
class Own:
    """What a client has of its own when its model is deployed.

    Attributes:
        kept: What it kept when it last took part; empty if it never did.
        trained: What its training left (`Cohort.leave`), where those are not the tensors of the plan; else empty.
        begins: Whether the model is the one with which the client begins a round: what it gets, and what it kept for
            its training.
    """

    kept: Payload = field(default_factory=Payload)
    trained: Payload = field(default_factory=Payload)
    begins: bool = False

    @property
    def model(self) -> Payload:
        """What the client kept as its own model; empty for the model with which it begins a round."""
        return Payload() if self.begins else self.kept


GLOBAL = Own()
"""Of no client: the global model."""


@dataclass(frozen=True)
class Observation:
    """A figure that a method reports after a round, drawn in the report.

    Attributes:
        name: The figure's name, the same in every round, for example `utilisation entropy`.
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
    """The order of a method's server work, which `fedguild profile` prints beside the figures that it counts.

    n is the size of an upload, C the number of clients that take part in a round.

    Attributes:
        memory: Order of the server's memory during aggregation.
        time: Order of the server's time per round.
        holds: Whether the server holds one upload at a time, or all uploads of a round.
        varies: `no`: payloads are as counted; `at most`: they depend on the data, and the upper bound is counted;
            `mean`: they differ between clients depending on the data, but their mean does not.
        note: A further remark on the figures.
        bound: Options under which the upper bound is reached.
        leave_out: Whether the profile aggregates uploads without the tensors that may be omitted.
        rounds: The first round in which payloads have their final form.
        period: Number of rounds after which payloads that alternate repeat; the profile gives their mean.
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


@dataclass(frozen=True)
class NotPrivate:
    """Why a method cannot run with differential privacy of one unit or another; empty where it can.

    Attributes:
        client: Of a client's whole data.
        example: Of one training example.
    """

    client: str = ""
    example: str = ""


@dataclass(frozen=True)
class Facts:
    """What holds of a method whatever its options.

    Attributes:
        needs_experts: Whether it runs on mixture-of-experts models only.
        costs: The order of the server's work.
        not_private: Why it cannot run with differential privacy, a clause without a subject; empty where it can. See
            `privacy_refusal`.
        needs_float64: What it computes in fp64 on the clients' device, a clause without a subject's name; empty for
            nothing. Apple's GPUs have no fp64.
        has_global_model: Whether there is a global model; False where every client has its own and none is shared.
        told_alike: Parts of the download that are the same for all clients where all hold all of every tensor; in a
            secure round these find out whether it is so.
        not_linear: Why the server does not take sums alone, a clause without a subject's name; for an `aggregate` of
            its own, or for terms that are not secure.
        not_stepped: Why the server cannot step from the old adapter towards the mean, with momentum
            (`federation.server_step`), a clause without a subject; empty where it can, if it takes means.
        not_preferences: Why it cannot train on preference pairs by DPO, a clause without a subject; empty where its
            clients train by `fedguild.client.training.train` and use the examples in no other way.
        start_hint: What to set where the model that the method makes is far worse than the backbone before any
            training, a sentence; empty for general advice.
    """

    needs_experts: bool = False
    costs: ServerCosts = ServerCosts()
    not_private: str | NotPrivate = "does not say what its uploads tell about a client's data"
    needs_float64: str = ""
    has_global_model: bool = True
    told_alike: tuple[str, ...] = (ADAPTER,)
    not_linear: str = ""
    not_stepped: str = ""
    not_preferences: str = ""
    start_hint: str = ""


RUNNING_MEAN = ServerCosts("O(n), whatever C is: a running mean", "O(C n)")


class Method(ABC):
    """A federated method: `plan`, and overrides of the defaults where a paper differs.

    If clients train on other machines, the method is rebuilt there from its `name` and its `settings`.

    Attributes:
        name: The name in configs; by default that of the module, `-` for `_`.
        title: A one-line description; by default the first line of the module's docstring.
        Settings: The options, each declared once with help and range; by default none.
        facts: What holds of all its instances.
        settings: The options of this instance.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    facts: ClassVar[Facts] = Facts()
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
        """Returns the plan of a client of this budget: the parts that it trains and its active experts.

        Raises:
            ConfigError: the budget or an option asks for something that the model does not have.
        """

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Returns the state before the first round; the part `adapter` holds the tensors sent and aggregated.

        By default the adapter of the first budget's plan.

        Raises:
            ConfigError: the method's options do not fit these budgets or clients.
        """
        plans = [self.plan(model, budget) for budget in roster.budgets]
        return Payload.of({ADAPTER: initial_adapter(model, plans[0], rng)})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Trains the cohort's clients on their own data; returns their uploads, in slot order.

        By default each loads what it received and trains it by the plain loop.

        Raises:
            FedGuildError: a client received no adapter.
        """
        for work in cohort.work:
            if not work.download.part(ADAPTER):
                raise FedGuildError(
                    f"The download of {work.client.name} has nothing in the part `{ADAPTER}`, which it is to train.",
                    f"The `start` of {self.name} returns it in the state's part `{ADAPTER}`, and its `update` or "
                    "`aggregate` keeps it there.",
                )
        load_received(cohort)
        return train(cohort)

    # The server's half of a mean

    def terms(self, sent: Upload) -> Terms:
        """Returns what one client adds to which means, with which weights; see `fedguild.server.terms`.

        In a secure round this runs where the client's data is, and only sums of the terms are opened. By default the
        part `adapter` is averaged, each client weighed by its number of examples.
        """
        return mean(ADAPTER, sent)

    def update(self, state: Payload, means: Means) -> Payload:
        """Returns the next state from the means of the clients' terms; by default each part moves to its mean."""
        moved = {part: means.moved(part, state.part(part)) for part in means.parts}
        return Payload({**state.tensors, **Payload.of(moved).tensors}, state.scalars)

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Consumes the round's valid uploads, which can be iterated once, and returns the next state.

        By default `update` from the means of `terms`; a method whose server takes other than means overrides this in
        their place. Uploads come in client order, followed by those of clients that were asked again, and by late
        uploads of the round before (see `upload.round`), whose clients had the download of that round.
        """
        means = RunningMeans()
        for upload in uploads:
            means.add(upload, self.terms(upload))
        return returned(self, "update", self.update(state, means))

    # Messages between server and clients

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns the server's message to this client at the start of a round; by default the state's adapter."""
        return Payload.of({ADAPTER: state.part(ADAPTER)})

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns what an upload in a round has, from a client that got this download.

        By default these are the trainables of the client's plan, in the part `adapter`.
        """
        return Schema(entries(ADAPTER, trainable_shapes(model, self.plan(model, client.budget))))

    # The resulting models

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment | None:
        """Returns the global model as a client of this budget runs it, or a client's own model.

        By default the state's adapter under the budget's plan, or else the adapter that the client kept.

        Args:
            state: The state after a round; for a client's own model, its excerpt (`excerpt_of`).
            model: The backbone's description.
            budget: The budget; of a client's own model, the client's.
            own: What the client has of its own; `GLOBAL` for the global model, which is None if `has_global_model` is
                False.
        """
        return Deployment(self.plan(model, budget), own.model.tensors or state.part(ADAPTER))

    # The federation

    def privacy_refusal(self, unit: Unit) -> str:
        """Returns why the method cannot run with differential privacy of a unit; empty if it can.

        A method can run with the unit `example` if it trains by `fedguild.client.training.train` alone and once a
        round, and with `client` if its uploads are the adapters that its clients received, after a training. In no case
        may an upload hold anything else that was computed from data. By default `facts.not_private` says it, and a
        method that declares nothing is refused.

        Args:
            unit: What is protected: a client's whole data, or one training example.
        """
        reason = self.facts.not_private
        return reason if isinstance(reason, str) else str(getattr(reason, unit))

    def observe(self, state: Payload, model: ModelInfo) -> Sequence[Observation]:
        """Returns figures of the round that led to this state; by default none."""
        return ()


def excerpt_of(method: Method, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
    """Returns the part of the state that a client may see, from which its own model is deployed.

    What is reserved is left out: parts `server/NAME`, in whose place the client sees the tensors that its next download
    has as `NAME`, and the parts `budget/NAME/…` and `client/INDEX/…` of others.
    """
    theirs = {"budget": client.budget.name, "client": str(client.index)}

    def is_hidden(name: str) -> bool:
        part, _, rest = name.partition("/")
        return part == SERVER or (part in theirs and rest.partition("/")[0] != theirs[part])

    seen = state.without(*filter(is_hidden, (*state.tensors, *state.scalars)))
    kept = {name.split("/")[1] for name in (*state.tensors, *state.scalars) if name.startswith(f"{SERVER}/")}
    if not kept:
        return seen
    sent = method.download(state, model, client)
    parts = {name: value for name, value in sent.tensors.items() if name.partition("/")[0] in kept}
    return Payload({**seen.tensors, **parts}, seen.scalars)


def client_model(
    method: Method,
    excerpt: Payload,
    model: ModelInfo,
    client: ClientInfo,
    kept: Payload,
    protocol: Literal["client", "trained", "received"] = "client",
    left: Payload | None = None,
) -> Deployment:
    """Returns a client's own model after a round.

    Args:
        method: The method.
        excerpt: The client's excerpt of the state after the round.
        model: The backbone's description.
        client: The client.
        kept: What it kept when it last took part; empty if it never did.
        protocol: `client` for the model that it uses; `trained` for the one that its own training left, before any
            average; `received` for the one with which it would begin its next round.
        left: What its training left, with the version of the backbone that it trained on; empty or None for nothing.
    """
    own, plan = Own(kept, begins=protocol == "received"), method.plan(model, client.budget)
    if protocol == "trained" and left is not None and left.tensors:
        if left.tensors.keys() == adapter_shapes(model, plan).keys():
            return Deployment(plan, left.tensors, up_to(excerpt.part(MERGE), merge_version(left)))
        own = Own(kept, left)
    deployment = method.deploy(excerpt, model, client.budget, own)
    assert deployment is not None, f"{method.name}: `deploy` has no model of a client"
    return deployment


def returned(method: Method, hook: str, value: object) -> Payload:
    """Returns what a method's hook returned.

    Raises:
        FedGuildError: it is not a payload.
    """
    if isinstance(value, Payload):
        return value
    raise FedGuildError(
        f"The `{hook}` of {method.name} returned {'nothing' if value is None else f'a {type(value).__name__}'}, where "
        "a Payload is expected.",
        "`Payload.of({part: {name: tensor}})` makes one.",
    )


def starting_rng(method: Method, seed: int) -> torch.Generator:
    """Returns where the draws of a run's first state come from."""
    return torch_rng(seed, "start", method.name)


def takes_means(method: Method) -> bool:
    """Returns whether the server takes means of the clients' terms, and nothing else."""
    return type(method).aggregate is Method.aggregate


def start_on_shapes(method: Method, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload | None:
    """Returns the state before the first round as shapes alone; None if the method needs values for it.

    Raises:
        ClientsUnknownError: it depends on the clients, and the roster has none.
        Exception: the method's own, where no value is missing.
    """
    shapes = ShapesOnly()
    try:
        with shapes:
            return method.start(model, roster, rng)
    except (FedGuildError, ClientsUnknownError):
        raise
    except Exception as error:
        if shapes.made_up or re.search(r"\bmeta\b", str(error), re.IGNORECASE):  # as torch calls it
            return None
        raise


def starts_from_clients(method: Method, model: ModelInfo, budgets: Sequence[Budget]) -> bool:
    """Returns whether the state before the first round may depend on the clients, and not on the budgets alone."""
    try:
        return start_on_shapes(method, model, Roster(budgets), torch_rng(0, "form")) is None
    except ClientsUnknownError:
        return True


def always_sent(method: Method, model: ModelInfo, budgets: Sequence[Budget], client: ClientInfo) -> frozenset[str]:
    """Returns the names of the adapter's tensors that every download and excerpt of this client has.

    They are those of its first, on shapes alone; none where what a client is sent may depend on all clients.
    """
    try:
        state = start_on_shapes(method, model, Roster(budgets), torch_rng(0, "form"))
    except ClientsUnknownError:
        state = None
    if state is None:
        return frozenset()
    with ShapesOnly():
        sent = method.download(state, model, client)
    return frozenset(name for name in sent.tensors if name.startswith(f"{ADAPTER}/"))


def secure_form(
    method: Method, model: ModelInfo, budgets: Sequence[Budget], round_index: int = 0
) -> tuple[Form, frozenset[str]]:
    """Returns the form of a method's sums in a round, and the names of the means of changes.

    It is that of the terms of one client of each budget, on shapes alone, from the method's own start: nothing that a
    server sends has a part in it.

    Args:
        method: The method.
        model: The backbone's description.
        budgets: All budgets of the run, in the config's order.
        round_index: The round, from 1; 0 for the one that follows the start.

    Raises:
        ConfigError: the method's server does not take sums alone.
    """
    require_linear(method)
    terms = _terms_of_zeros(method, model, budgets, round_index)
    _require_sums(method, next((each.why for each in terms if not each.secure), ""))
    return form_of(terms)


def require_linear(method: Method) -> None:
    """Raises ConfigError if, on any model, a method's server does not take sums alone."""
    why = method.facts.not_linear
    if not why and not takes_means(method):
        why = "its `aggregate` does not say which sums it takes of them"
    _require_sums(method, why)


def _require_sums(method: Method, why: str) -> None:
    """Raises ConfigError with the reason why a method's server does not take sums alone, unless that is empty."""
    if why:
        raise ConfigError(
            f"federation.secure: the server of {method.name} does not aggregate securely: {why}.",
            "Set federation.secure=false, or use a method that aggregates securely (docs/guides/security.md).",
        )


def is_client_mean(method: Method, model: ModelInfo, budgets: Sequence[Budget]) -> bool:
    """Returns whether the next state depends on the uploads by a mean of the adapters with one weight a client."""
    if not takes_means(method):
        return False
    means = form_of(_terms_of_zeros(method, model, budgets))[0].means
    return all(
        name.startswith(f"{ADAPTER}/") and mean.weight_axis is None and not mean.held for name, mean in means.items()
    )


def _terms_of_zeros(method: Method, model: ModelInfo, budgets: Sequence[Budget], round_index: int = 0) -> list[Terms]:
    """Returns the terms of one client of each budget, on shapes alone."""
    clients = [ClientInfo(index, budget, 1) for index, budget in enumerate(budgets)]
    terms = []
    with ShapesOnly():
        state = method.start(model, Roster(budgets, clients), torch_rng(0, "form"))
        for client in clients:
            download = method.download(state, model, client)
            example = method.schema(model, client, download, round_index).example()
            zeros = {name: torch.zeros(tensor.shape) for name, tensor in example.tensors.items()}
            terms.append(method.terms(Upload(round_index, client, Payload(zeros, example.scalars), download)))
    return terms
