"""OLMoE (Muennighoff et al., 2025)."""

from __future__ import annotations

from fedguild.model.moe.family import Family

FAMILY = Family()
