"""The linear layers that an adapter may target, and their groups: `attention`, `mixer` and `mlp`.

`attention` mixes tokens by a softmax over them. `mixer` holds the other token mixers of hybrid and recurrent models:
linear attention (Gated DeltaNet, lightning attention), state spaces (Mamba) and short convolutions. `mlp` is the rest,
which sees one token at a time: dense MLPs, shared experts, projections between layers. The group follows from the
classes and names of modules in transformers, and from what they hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fedguild.model.info import Group, LinearInfo

_MIXER = re.compile(r"(Mixer|DeltaNet|DeltaAttention|LightningAttention|ShortConv|RecurrentBlock|LSTMLayer)$")
_ATTENTION = re.compile(r"Attention$")
_ATTENTION_NAMES = {"self_attn", "attn", "SelfAttention", "EncDecAttention"}


def adaptable_linears(model: Any, without: Collection[str]) -> tuple[LinearInfo, ...]:
    """Returns every linear layer but the head that an adapter may target, in module order; works on meta tensors.

    Layers to which a low-rank product cannot be added are left out: those whose weight is no matrix on all inputs
    (DeepSeek-V4's grouped ones) or is read in place of a call (Mamba's `dt_proj`), and those of an indexer, which
    chooses tokens without a gradient (DeepSeek-V3.2).

    Args:
        without: Paths to leave out: routers and experts.
    """
    head, found = model.get_output_embeddings(), []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and path not in without:
            group, names = _group(model, path), path.split(".")
            read = group == "mixer" and names[-1] == "dt_proj"
            if not read and "indexer" not in names and "Grouped" not in type(module).__name__:
                found.append(LinearInfo(path, group, module.in_features, module.out_features))
    return tuple(found)


def _group(model: nn.Module, path: str) -> Group:
    for name, module in _around(model, path):
        kind = type(module).__name__
        if _MIXER.search(kind) or _decays(module):
            return "mixer"
        if _ATTENTION.search(kind) or name in _ATTENTION_NAMES:
            return "attention"
        if _convolves(module):
            return "mixer"
    return "mlp"


def _around(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module of everything that a module is in, from the outermost below the model on."""
    module = model
    for name in path.split(".")[:-1]:
        module = module.get_submodule(name)
        yield name, module


def _decays(module: nn.Module) -> bool:
    """Whether a module has the decay of a recurrent state."""
    return any(name in module._parameters for name in ("A_log", "time_decay"))


def _convolves(module: nn.Module) -> bool:
    """Whether a module convolves along the tokens. In an encoder of sounds, convolutions come before the layers."""
    children = list(module.children())
    return any(isinstance(each, nn.Conv1d) for each in children) and not any(
        isinstance(each, nn.ModuleList) for each in children
    )
