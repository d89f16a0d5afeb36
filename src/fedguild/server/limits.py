"""Checks of budgets: active experts up to the model's top-k, ranks up to the global adapter's, names in options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedguild.client.budget import Budget
from fedguild.core.errors import ConfigError
from fedguild.model.info import ModelInfo


def require_within_top_k(model: ModelInfo, budget: Budget) -> int:
    """Returns the budget's active experts.

    Raises:
        ModelError: the model is dense.
        ConfigError: the budget's active experts are not from 1 to the model's top-k.
    """
    return model.require_active_experts(budget.active_experts, f"federation.budgets: '{budget.name}'")


def active_experts_of(model: ModelInfo, budget: Budget) -> int | None:
    """Returns the budget's active experts; None for a dense model.

    Raises:
        ConfigError: the budget's active experts are not from 1 to the model's top-k.
    """
    return require_within_top_k(model, budget) if model.moe else None


def require_within_rank(budget: Budget, rank: int) -> int:
    """Returns the budget's rank.

    Raises:
        ConfigError: the global adapter's rank is lower.
    """
    if not 1 <= budget.rank <= rank:
        raise ConfigError(
            f"Budget '{budget.name}' has rank {budget.rank}, but the global adapter has rank {rank}.",
            f"Set federation.budgets[].rank from 1 to {rank}, or raise method.rank.",
        )
    return budget.rank


def require_budgets(key: str, named: Iterable[str], budgets: Sequence[Budget]) -> None:
    """Checks the budgets' names in an option.

    Args:
        key: The option's key in the config, for example `method.memory`.
        named: The names.
        budgets: The run's budgets.

    Raises:
        ConfigError: no budget has such a name.
    """
    known = {budget.name for budget in budgets}
    if unknown := sorted(set(named) - known):
        raise ConfigError(f"{key}: no budget is called {', '.join(unknown)}.", f"Known: {', '.join(sorted(known))}.")
