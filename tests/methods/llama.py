"""Llama-3.2-1B from its published sizes, on meta tensors: for counts that papers state."""

from __future__ import annotations

from fedguild.model.backbone import describe_config
from fedguild.model.info import ModelInfo


def llama_1b() -> ModelInfo:
    """Returns what Llama-3.2-1B looks like."""
    return describe_config("llama-3.2-1b")
