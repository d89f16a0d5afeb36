"""DeepSeek-V2 (DeepSeek-AI, 2024), whose large models limit a token to some groups of experts."""

from __future__ import annotations

from typing import Any

from fedguild.model.moe.family import Family
from fedguild.model.moe.routing import RoutingRule


class DeepseekV2(Family):
    """DeepSeek-V2; see the module's docstring."""

    def rule(self, router: Any) -> RoutingRule:
        """Returns scaled softmax scores, by groups where the router is `group_limited_greedy`."""
        limited = getattr(router, "topk_method", "greedy") == "group_limited_greedy"
        return RoutingRule(
            scaling=number(router, "routed_scaling_factor"),
            groups=int(number(router, "num_group")) if limited else 1,
            groups_kept=int(number(router, "topk_group")) if limited else 1,
        )


def number(router: Any, name: str) -> Any:
    """Returns an attribute of a router; 1 if it is missing or None."""
    value = getattr(router, name, None)
    return 1 if value is None else value


FAMILY = DeepseekV2()
