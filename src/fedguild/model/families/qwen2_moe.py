"""Qwen2-MoE (Qwen Team, 2024), with shared experts beside the routed ones."""

from __future__ import annotations

from fedguild.model.moe.family import Family

FAMILY = Family()
