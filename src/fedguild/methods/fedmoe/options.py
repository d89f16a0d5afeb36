"""Checks of FedMoE's options against the model, the budgets and the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedguild.client.budget import Budget
from fedguild.core.errors import ConfigError
from fedguild.methods.fedmoe.fitting import Limits
from fedguild.model.info import ModelInfo


def require_targets(targets: Sequence[str]) -> None:
    """Checks the layers that LoRA adapts beside the experts.

    Raises:
        ConfigError: routers or experts are among them.
    """
    if taken := {"router", "experts"} & set(targets):
        raise ConfigError(
            f"method.targets: {' and '.join(sorted(taken))} cannot be among the targets of fedmoe.",
            "Routers and held experts always train; `targets` names other layers, for example [attention].",
        )


def limits_of(model: ModelInfo, budget: Budget, memory: Mapping[str, float], memory_share: float) -> Limits:
    """Returns the limits of the sets of a budget's clients, alpha memory_k.

    Args:
        model: The model's description.
        budget: The clients' budget.
        memory: Budget's name -> share of all expert parameters that its clients can hold; 1 if left out.
        memory_share: alpha.

    Raises:
        ConfigError: not even the active experts fit.
    """
    sizes = [layer.expert_parameters for layer in model.moe]
    share = memory.get(budget.name, 1.0)
    whole = sum(layer.num_experts * size for layer, size in zip(model.moe, sizes, strict=True))
    limits = Limits(sizes, [layer.top_k for layer in model.moe], int(memory_share * share * whole))
    if limits.smallest > limits.most:
        raise ConfigError(
            f"method.memory: budget '{budget.name}' can hold {share:.3g} of all expert parameters, of which "
            f"{memory_share:.3g} are for its experts, but the {model.top_k} active experts of "
            f"every layer are {limits.smallest / whole:.3g} of all.",
            "Raise method.memory of this budget, or method.memory_share.",
        )
    return limits


def task_numbers(tasks: Sequence[str], clients: int) -> list[int]:
    """Returns every client's task by number; without tasks all have the same.

    Raises:
        ConfigError: there are more or fewer tasks than clients.
    """
    tasks = tasks or ("",) * clients
    if len(tasks) != clients:
        raise ConfigError(
            f"method.tasks names {len(tasks)} tasks, but there are {clients} clients.",
            "Name a task for every client, in client order, or leave it empty.",
        )
    return [sorted(set(tasks)).index(task) for task in tasks]
