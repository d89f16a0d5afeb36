"""A cohort's training on a device that has no fp64, as Apple's GPUs.

The device is `meta`, which keeps no values: what the host reads from it is zeros here.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedguild.config import load_config
from fedguild.methods import METHODS
from fedguild.model.backbone import make_backbone
from fedguild.runs.setup import method_of
from tests.backbones import tiny_model
from tests.methods.federation import LARGE, SMALL, Federation, client

aten = torch.ops.aten
OVERRIDES = {
    "pfl-moe": ["method.gate_epochs=1"],  # else the host counts the targets of each row
    "fed-sb": ["method.rank=8"],
    "fedamole": ["method.experts=4"],
}
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=2, encode=lambda text, **_: list(range(3, 9)))
DAILY = {"fedalign-moe", "fedamole", "flame", "flex", "pfl-moe"}
TRAINABLE = sorted(name for name in METHODS if not METHODS.load(name).facts.needs_float64)


class WithoutFp64(TorchDispatchMode):
    """Lets the host read zeros from `meta`, and refuses fp64 there; what depends on values has its largest size."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        if (
            function is aten._to_copy.default
            and args[0].is_meta
            and torch.device(kwargs.get("device", "meta")).type == "cpu"
        ):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if function is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        if function is aten.nonzero.default and args[0].is_meta:
            return torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")
        out = function(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.is_meta and leaf.dtype is torch.float64:
                raise AssertionError(f"{function} computes in fp64 on the device")
        return out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else pytest.mark.long) for name in TRAINABLE]
)
def test_a_cohort_trains_without_fp64_on_its_device(name: str, tmp_path: Path) -> None:
    backbone = make_backbone(tiny_model("olmoe", dtype=torch.bfloat16).to("meta"), TOKENIZER, name="without values")
    method = method_of(load_config(f"{name}/tiny-tasks", OVERRIDES.get(name, [])))
    federation = Federation(backbone, method, [client(0, LARGE), client(1, SMALL)], tmp_path)
    with WithoutFp64():
        federation.train(federation.start())
