"""Experts in 4 bit, with a stand-in for bitsandbytes that rounds; `test_bitsandbytes.py` has the package itself."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.quantizers.quantizers_utils import should_convert_module

from fedguild.core.errors import ConfigError
from fedguild.data.batches import Encoded, collate
from fedguild.model import four_bit
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.four_bit import four_bit_options, quantise_experts
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_model
from tests.families import tiny_model as tiny_family
from tests.oracles.lora import MergedModel

PLAN = AdapterPlan((Lora(3, 0.5, ("attention", "router", "experts")),), 2)
STEP = 0.05


class Rounded(nn.Module):
    """Packs a weight as int8 multiples of `STEP`, and counts the weights that it unpacked and that are still there."""

    unpacked = 0
    alive = 0

    def forward(self, packed: Tensor) -> Tensor:
        weight = packed.to(torch.float64) * STEP
        Rounded.unpacked += 1
        Rounded.alive += 1
        weakref.finalize(weight, self._gone)
        return weight

    @staticmethod
    def _gone() -> None:
        Rounded.alive -= 1


def replace_parameter(module: nn.Module, name: str, quant_type: str) -> None:
    assert quant_type == "nf4"
    packed = (getattr(module, name).data / STEP).round().to(torch.int8)
    setattr(module, name, nn.Parameter(packed, requires_grad=False))
    parametrize.register_parametrization(module, name, Rounded(), unsafe=True)


@pytest.fixture
def stand_in(monkeypatch):
    """Puts the stand-in where bitsandbytes would be."""
    whole, layers, replacing = (ModuleType(f"bitsandbytes{part}") for part in ("", ".nn", ".nn.parametrize"))
    whole.nn, layers.Params4bit, replacing.replace_parameter_4bit = layers, type("Packed", (), {}), replace_parameter
    for module in (whole, layers, replacing):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Rounded, "unpacked", 0)


def quantised(family: str = "olmoe", *, checkpointing: bool = False) -> Backbone:
    backbone = make_backbone(
        tiny_model(family, dtype=torch.float64), None, name="tiny", gradient_checkpointing=checkpointing
    )
    quantise_experts(layer.experts for layer in backbone.moe)
    return backbone


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2 grouped"])
def test_training_is_that_of_the_rounded_weights_one_layer_at_a_time(family, checkpointing):
    backbone = quantised(family, checkpointing=checkpointing)
    adapter = random_adapter(backbone.info, PLAN, seed=1)
    ids = random_rows([9], seed=2)[0]
    with SlotModel(backbone, [PLAN]) as model:
        model.load(0, adapter)
        losses = model.token_losses(collate([[Encoded(tuple(ids), 2)]], PAD))
        layers = len(backbone.moe)
        assert (Rounded.unpacked, Rounded.alive) == (2 * layers, 0)
        losses.sum().backward()
        assert (Rounded.unpacked, Rounded.alive) == (2 * layers * (3 if checkpointing else 2), 0)
        found = {name: tensor.own(0, of=tensor.stored.grad) for name, tensor in model.trainables.items()}
    plain = tiny_model(family, dtype=torch.float64)
    for layer in backbone.moe:
        experts = plain.get_submodule(layer.info.experts)
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)
            weight.data = (weight.data / STEP).round() * STEP
    leaves = {name: value.clone().requires_grad_() for name, value in adapter.items()}
    expected = MergedModel(plain, backbone.info, PLAN, leaves).losses(ids, 2)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for name, grad in zip(leaves, torch.autograd.grad(expected.sum(), list(leaves.values())), strict=True):
        assert (found[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.usefixtures("stand_in")
def test_every_stacked_weight_of_the_experts_is_packed_and_nothing_else():
    model = tiny_model("qwen2_moe", dtype=torch.float64)
    model.is_loaded_in_4bit = True
    count = model.num_parameters()
    backbone = make_backbone(model, None, name="tiny")
    packed = {name for name, weight in model.named_parameters() if weight.dtype is torch.int8}
    assert packed == {
        f"{layer.info.experts}.parametrizations.{name}.original"
        for layer in backbone.moe
        for name in ("gate_up_proj", "down_proj")
    }
    assert backbone.info.parameters == count
    assert not any(weight.requires_grad for weight in model.parameters())


def test_what_is_missing_is_named_before_anything_is_loaded(monkeypatch):
    with pytest.raises(ConfigError, match="needs a CUDA GPU or a CPU"):
        four_bit_options(torch.float32, torch.device("mps"))
    monkeypatch.setattr(four_bit, "is_bitsandbytes_available", lambda oldest: False)
    with pytest.raises(ConfigError, match=r"bitsandbytes 0\.50\.0 or newer(.|\n)*pip install"):
        four_bit_options(torch.bfloat16, torch.device("cuda:0"))


def test_linear_layers_go_to_the_gpu_in_4_bit(monkeypatch):
    monkeypatch.setattr(four_bit, "is_bitsandbytes_available", lambda oldest: True)
    monkeypatch.setattr(four_bit, "is_accelerate_available", lambda: True)
    options = four_bit_options(torch.bfloat16, torch.device("cuda:1"))
    config = options["quantization_config"]
    assert options["device_map"] == {"": 1}
    assert (config.load_in_4bit, config.bnb_4bit_quant_type) == (True, "nf4")
    assert config.bnb_4bit_compute_dtype is torch.bfloat16
    assert config.llm_int8_skip_modules is None


def test_routers_that_are_linear_layers_stay_in_16_bit(monkeypatch):
    monkeypatch.setattr(four_bit, "is_bitsandbytes_available", lambda oldest: True)
    monkeypatch.setattr(four_bit, "is_accelerate_available", lambda: True)
    config = four_bit_options(torch.bfloat16, torch.device("cuda:0"), "router")["quantization_config"]
    model = tiny_family("phimoe")
    quantised = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and should_convert_module(name, config.llm_int8_skip_modules)
    ]
    assert len(quantised) == 2 * 4  # attention
    assert all(".self_attn." in name for name in quantised)
