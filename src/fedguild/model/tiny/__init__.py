"""The embedded checkpoint: an OLMoE of 3.6 M parameters that ships with the package.

It loads as any other model does, `AutoModelForCausalLM.from_pretrained(CHECKPOINT)`, so that
examples, tests and the demo need no download. `python -m fedguild.model.tiny.build` rebuilds it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKPOINT"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the checkpoint, in the layout of the Hugging Face hub; its README.md is the model card."""
