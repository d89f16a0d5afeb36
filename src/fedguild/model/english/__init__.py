"""The English checkpoint: an OLMoE of 16 M parameters, 8 of 64 experts active, pre-trained on textbooks and novels.

It loads as any other model does, `AutoModelForCausalLM.from_pretrained(CHECKPOINT)`, and goes by the name
`english` in `model.path`. `python -m fedguild.model.english.build` trains it from a folder of text.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKPOINT"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the checkpoint, in the layout of the Hugging Face hub; its README.md is the model card."""
