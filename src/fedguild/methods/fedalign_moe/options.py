"""Checks of FedAlign-MoE's options against each other."""

from __future__ import annotations

from collections.abc import Sequence

from fedguild.core.errors import ConfigError


def require_targets(targets: Sequence[str]) -> None:
    """Checks the layers that LoRA adapts beside gates and experts.

    Raises:
        ConfigError: gates or experts are among them.
    """
    if taken := {"router", "experts"} & set(targets):
        raise ConfigError(
            f"method.targets: {' and '.join(sorted(taken))} cannot be among the targets of fedalign-moe.",
            "The gate and the experts always train; `targets` names other layers, for example [attention].",
        )


def require_direction(direction: str, experts: str) -> None:
    """Checks `method.direction` against `method.experts`.

    Raises:
        ConfigError: products of LoRA are to be compared, but the experts train in full.
    """
    if direction == "product" and experts == "full":
        raise ConfigError(
            "method.direction: 'product' compares the changes of LoRA's B A, but method.experts is 'full'.",
            "Set method.direction to flat or none, or method.experts to lora.",
        )
