"""DeepSeek-V3 (DeepSeek-AI, 2024), which scores experts by sigmoid and chooses among groups with a bias."""

from __future__ import annotations

from typing import Any

from fedguild.model.families.deepseek_v2 import number
from fedguild.model.moe.family import Family
from fedguild.model.moe.routing import RoutingRule


class DeepseekV3(Family):
    """DeepSeek-V3; see the module's docstring."""

    def rule(self, router: Any) -> RoutingRule:
        """Returns scaled sigmoid scores, groups chosen by the sum of their two best experts."""
        return RoutingRule(
            score="sigmoid",
            renormalise=bool(router.norm_topk_prob),
            scaling=number(router, "routed_scaling_factor"),
            groups=int(number(router, "num_group")),
            groups_kept=int(number(router, "topk_group")),
            group_score="top2",
        )


FAMILY = DeepseekV3()
