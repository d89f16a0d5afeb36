"""Checks of a method against its config and model, before data is read or a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import Config
from fedguild.config.federation import FederationSettings
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.payload import Payload
from fedguild.core.torchrun import torchrun_ranks
from fedguild.model.backbone import describe_config, is_at_hand
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.model.shapes_only import ShapesOnly
from fedguild.privacy.secure_sum.fixed_point import MOST_CLIENTS
from fedguild.privacy.secure_sum.form import require_disclosure
from fedguild.privacy.secure_sum.graph import FEWEST_CLIENTS
from fedguild.runs.byte_budget import first_refusal
from fedguild.runs.guarantee import check_central, check_privacy
from fedguild.runs.setup.checks import require_room, require_split
from fedguild.runs.setup.fitting import budgets_of, fitted, method_of, require_preferences
from fedguild.server.method import (
    ClientsUnknownError,
    Method,
    Roster,
    require_linear,
    secure_form,
    start_on_shapes,
    starting_rng,
    takes_means,
)
from fedguild.server.optimizer import takes_steps

_MANY = 1000
"""Examples that stand for many."""


def check_config(config: Config) -> None:
    """Checks a config for every fault that can be found without the network, before anything else is done with it.

    What depends on the model is checked if its config is on this machine: the embedded one, a local folder, or a known
    model.

    Raises:
        ModelError, ConfigError: as `method_of`, `fitted` and `check_fit`.
    """
    method, model = method_of(config), config.model
    if is_at_hand(model.path, model.revision):
        described = describe_config(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
        check_fit(fitted(method, config, described), config, described)
    else:
        _check_settings(method, config)


def check_fit(method: Method, config: Config, model: ModelInfo) -> None:
    """Checks that a method can run with the rest of its config on a model.

    Args:
        method: The method as it runs on the model (`fitted`).

    Raises:
        ConfigError: a budget asks for more active experts than the model has, a plan does not fit the model, for
            example because a target names no layer of it, the config wants what the method does not offer, or the
            method cannot begin with these budgets and clients.
    """
    federation, tiers = config.federation, budgets_of(config, model)
    budgets = list(tiers.values())
    plans = [method.plan(model, budget) for budget in budgets]
    _require_trainables(method, [adapter_shapes(model, plan) for plan in plans])
    _check_settings(method, config)
    _require_mergeable(method, config, plans)
    if federation.secure:
        require_disclosure(secure_form(method, model, budgets)[0], federation.secure_disclose, method.name)
    if config.privacy.is_central:
        check_central(method, config, model, budgets)
    _require_beginning(method, config, model, tiers)


def _check_settings(method: Method, config: Config) -> None:
    """Raises ConfigError if a method cannot run with the rest of its config, whatever the model."""
    federation = config.federation
    require_split(config, config.evaluation.split)
    if config.training.objective == "dpo":
        require_preferences(method)
    _require_steps(method, federation)
    _require_means(method, federation.aggregator)
    if federation.secure:
        _require_secure(method, federation)
    _require_single_uploads(config)
    check_privacy(method, config)
    require_room(config, generates=config.evaluation.answer_mode == "generation")
    _require_device(method, config)


def _require_trainables(method: Method, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Raises ConfigError if no budget has an adapter; `shapes` are those of each budget's."""
    if not any(shapes):
        raise ConfigError(
            f"{method.name} would train nothing with these options: none of its clients has an adapter.",
            "Give it targets, for example method.targets=[attention].",
        )


def _require_mergeable(method: Method, config: Config, plans: Sequence[AdapterPlan]) -> None:
    if config.model.load_in_4bit and any(plan.merges for plan in plans):
        raise ConfigError(
            f"{method.name} adds its rounds to the backbone's weights, which model.load_in_4bit keeps in 4 bit.",
            "Set model.load_in_4bit=false, or choose a method that merges nothing.",
        )


def _require_steps(method: Method, federation: FederationSettings) -> None:
    """Raises ConfigError if the config wants a server's step or momentum with a method that has none."""
    if takes_steps(method) or (federation.server_step, federation.server_momentum) == (1.0, 0.0):
        return
    reason = f"{method.name} {method.facts.not_stepped}"
    if not takes_means(method):
        reason = f"the aggregate of {method.name} is not a mean towards which the server could take a step"
    raise ConfigError(
        f"federation.server_step is {federation.server_step:g} and federation.server_momentum is "
        f"{federation.server_momentum:g}, but {reason}.",
        f"Leave federation.server_step at 1 and federation.server_momentum at 0; `fedguild methods {method.name}` "
        "lists the method's own options.",
    )


def _require_means(method: Method, robust: str) -> None:
    """Raises ConfigError if the config wants robust means but the method's server takes none."""
    if robust not in ("auto", "none") and not takes_means(method):
        raise ConfigError(
            f"federation.aggregator is {robust}, but the aggregate of {method.name} is not a mean.",
            "Set federation.aggregator=none; federation.norm_factor bounds what one upload can change with every "
            "method.",
        )


def _require_secure(method: Method, federation: FederationSettings) -> None:
    _require_secure_packages()
    require_linear(method)
    wanted = federation.wanted_uploads
    beside = {
        "wire_dtype": federation.wire_dtype != "fp32"
        and "masked uploads are words of 32 bits, which cannot be rounded",
        "aggregator": federation.aggregator not in ("auto", "none") and "it needs single uploads",
        "norm_factor": federation.norm_factor not in ("auto", None)
        and "it compares single uploads; each client checks max_update_norm itself",
        "straggler_policy": federation.straggler_policy != "drop" and "a late upload would be in no sum",
        "clients": not FEWEST_CLIENTS <= wanted <= MOST_CLIENTS
        and f"a round has {wanted} of them, but {FEWEST_CLIENTS} to {MOST_CLIENTS} can be aggregated securely",
        "byte_limit": federation.byte_limit is not None and "the messages of its protocol are not planned",
        "secure_clients": federation.secure_clients > wanted and f"a round has {wanted} clients only",
    }
    for setting, reason in beside.items():
        if reason:
            raise ConfigError(f"federation.secure does not go with federation.{setting} as it is: {reason}.")


def _require_secure_packages() -> None:
    try:
        import Crypto
        import cryptography
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"federation.secure: the package '{error.name}' is not installed.",
            "Install the extra: pip install 'fedguild[secure]'.",
        ) from error
    del Crypto, cryptography


def _require_single_uploads(config: Config) -> None:
    """Raises ConfigError if uploads are to be compared that the server does not see individually."""
    if config.evaluation.diagnostics and (config.federation.secure or config.privacy.unit != "none"):
        raise ConfigError(
            "evaluation.diagnostics compares single uploads, which this run keeps from the server or puts noise on.",
            "Set evaluation.diagnostics=false, or diagnose a run without federation.secure and privacy.unit.",
        )


def _require_device(method: Method, config: Config) -> None:
    """Raises ConfigError if the config uses something on Apple's GPUs (`mps`) that torch does not support there."""
    if config.model.device != "mps":
        return
    lacking = {
        f"method.name={method.name}": method.facts.needs_float64 and f"it {method.facts.needs_float64} in fp64",
        "privacy.unit=example": config.privacy.unit == "example" and "it clips gradients in fp64",
        "model.load_in_4bit": config.model.load_in_4bit and "bitsandbytes needs CUDA or a CPU",
        "federation.engine.name=ray": config.federation.engine.name == "ray" and "Ray assigns CUDA's GPUs",
        "torchrun": torchrun_ranks() > 1 and "its processes communicate by NCCL or on CPUs",
    }
    for setting, reason in lacking.items():
        if reason:
            raise ConfigError(f"model.device=mps does not go with {setting}: {reason}.", "Set model.device=cpu.")


def _require_beginning(method: Method, config: Config, model: ModelInfo, budgets: Mapping[str, Budget]) -> None:
    """Raises ConfigError if the method cannot begin with these budgets or clients, before any round.

    It begins on shapes alone, with one example for each client; if that fails, with many. Faults that depend on values
    or examples are found when the run begins. So is a limit on bytes below the first round's, if these depend on
    values.
    """
    tiers = config.federation.budget_per_client()
    clients = [ClientInfo(index, budgets[tier.name], 1) for index, tier in enumerate(tiers)]
    try:
        state = _first_state(method, model, Roster(list(budgets.values())), config.seed)
    except ClientsUnknownError:
        state = _first_state(method, model, Roster(list(budgets.values()), clients), config.seed)
    if state is None:
        return
    shapes = ShapesOnly()
    try:
        with shapes:
            error = first_refusal(method, config, state, model, clients)
    except FedGuildError:
        raise
    except (ArithmeticError, RuntimeError, ValueError):
        return  # the numbers of examples are made up
    if error and not shapes.made_up:
        raise error


def _first_state(method: Method, model: ModelInfo, roster: Roster, seed: int) -> Payload | None:
    """Returns the method's state before the first round, as shapes alone; None if it needs values or examples.

    Raises:
        FedGuildError: the method refuses the budgets or the clients.
        ClientsUnknownError: it depends on the clients, and the roster has none.
        ConfigError: it fails, and no value is missing; the method's own error is the cause.
    """
    try:
        return start_on_shapes(method, model, roster, starting_rng(method, seed))
    except (FedGuildError, ClientsUnknownError):
        raise
    except Exception as error:
        if isinstance(error, ArithmeticError | RuntimeError | ValueError) and _begins_with_more(
            method, model, roster, seed
        ):
            return None
        raise ConfigError(
            f"{method.name} cannot begin: its `start` raises {type(error).__name__}: {error}",
            "`fedguild --debug` shows the traceback.",
        ) from error


def _begins_with_more(method: Method, model: ModelInfo, roster: Roster, seed: int) -> bool:
    """Whether a method begins if the known clients have many examples instead, each another number of them."""
    if roster.known is None:
        return False
    clients = [replace(client, examples=_MANY + client.index) for client in roster.known]
    try:
        start_on_shapes(method, model, replace(roster, known=clients), starting_rng(method, seed))
    except Exception:
        return False
    return True
