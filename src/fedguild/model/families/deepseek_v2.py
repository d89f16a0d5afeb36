"""DeepSeek-V2 (DeepSeek-AI, 2024).

Its large models limit a token to some groups of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fedguild.model.moe.family import Family
from fedguild.model.moe.routing import RoutingRule


class DeepseekV2(Family):
    """DeepSeek-V2; see the module's docstring."""

    routing: Mapping[str, Any] = MappingProxyType({"scaling": "routed_scaling_factor"})

    def rule(self, router: Any) -> RoutingRule:
        """Returns scaled softmax scores, by groups where the router is `group_limited_greedy`."""
        limited = getattr(router, "topk_method", "greedy") == "group_limited_greedy"
        groups = {"groups": "num_group", "groups_kept": "topk_group"} if limited else {}
        return RoutingRule.of(router, **self.routing, **groups)


FAMILY = DeepseekV2()
