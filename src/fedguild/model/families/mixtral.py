"""Mixtral (Jiang et al., 2024), whose active experts' weights sum to one."""

from __future__ import annotations

from typing import Any

from fedguild.model.moe.family import Family
from fedguild.model.moe.routing import RoutingRule


class Mixtral(Family):
    """Mixtral; see the module's docstring."""

    def rule(self, router: Any) -> RoutingRule:
        return RoutingRule(renormalise=True)


FAMILY = Mixtral()
