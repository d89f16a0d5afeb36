"""Models in 4 bit on a CPU, where bitsandbytes is installed: those of their unpacked weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedguild.core.errors import ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.export.merged import require_mergeable
from fedguild.measuring.costs.memory import weight_bytes
from fedguild.model import four_bit
from fedguild.model.backbone import Backbone, load_backbone
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from tests.backbones import PAD, lora_plan, random_adapter, random_rows
from tests.families import tiny_model
from tests.runs.runs import save_model, small_config

bitsandbytes = pytest.importorskip("bitsandbytes", minversion=four_bit.OLDEST)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
FAMILIES = {
    "olmoe": {},
    "gpt_oss": {"head_dim": 32},  # experts with biases, transposed and interleaved
    "qwen2_moe": {},  # a shared expert
    "nemotron_h": {"mamba_num_heads": 4, "head_dim": 32},  # experts without a gate, layers of Mamba
}
"""Families with the values of their configs that make every weight whole blocks of 64."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**SIZES, **FAMILIES[request.param]}
    return save_model(tmp_path_factory.mktemp("model") / request.param, request.param, make=tiny_model, **sizes)


def load(folder: Path, *, packed: bool, dtype: str = "float32") -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype=dtype, load_in_4bit=packed)


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Any, Tensor]]:
    """Yields the name of every packed weight, what it was packed to, and the weight unpacked again."""
    for path, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            yield f"{path}.weight", state, bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
        elif parametrize.is_parametrized(module):
            for name, (form,) in module.parametrizations.items():
                yield f"{path}.{name}", form.quant_state, getattr(module, name)


def unpacked(folder: Path, packed: Backbone) -> Backbone:
    """Returns the backbone whose weights are those that a packed one unpacks."""
    plain = load(folder, packed=False)
    for name, _, weight in packed_weights(packed.model):
        found = plain.model.get_parameter(name)
        assert 0 < (found - weight).abs().max() < 0.3 * found.abs().max()
        found.data.copy_(weight)
    return plain


def test_losses_and_gradients_are_those_of_the_unpacked_weights_before_and_after_scoring(folder: Path) -> None:
    packed = load(folder, packed=True)
    plain = unpacked(folder, packed)
    targets = ("attention", "router", "experts")
    plans = [lora_plan(3, 0.5, targets, 2), lora_plan(1, 2.0, targets)]
    adapters = [random_adapter(plain.info, plan, 20 + slot) for slot, plan in enumerate(plans)]
    ids = torch.tensor(random_rows([9, 9], seed=1))
    lengths = ([8, 5], [6])
    batch = collate([[Encoded(tuple(row), 2) for row in random_rows(each, 3)] for each in lengths], PAD)
    found: dict[int, list[Tensor]] = {}
    for index, backbone in enumerate((plain, packed)):
        with SlotModel(backbone, plans) as model:
            for slot, adapter in enumerate(adapters):
                model.load(slot, adapter)
            for _ in range(2):
                losses = model.token_losses(batch)
                losses.sum().backward()
                found.setdefault(index, []).append(losses.detach())
                with torch.inference_mode():
                    found[index].append(model.token_losses(batch).clone())
            found[index] += [tensor.stored.grad.clone() for tensor in model.trainables.values()]
        with torch.inference_mode():
            found[index].append(backbone.model(ids, use_cache=False).logits.clone())
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_all_but_routers_embeddings_and_the_head_are_in_4_bit_and_the_estimate_is_their_bytes(folder: Path) -> None:
    backbone = load(folder, packed=True, dtype="bfloat16")
    model, info = backbone.model, backbone.info
    packed = {name: state for name, state, _ in packed_weights(model)}
    assert {linear.name for linear in info.linears} <= {name.removesuffix(".weight") for name in packed}
    for moe in info.moe:
        assert {f"{moe.experts}.down_proj", f"{moe.experts}.up_proj", f"{moe.experts}.gate_up_proj"} & {*packed}
        assert model.get_parameter(f"{moe.router}.weight").dtype is torch.bfloat16
    held = sum(weight.nbytes for weight in model.parameters()) + sum(state.absmax.nbytes for state in packed.values())
    of_layer = sum(state.shape.numel() for name, state in packed.items() if name.startswith(f"{info.moe[0].experts}."))
    assert weight_bytes(info, torch.bfloat16, four_bit=True) == pytest.approx(held + 2 * of_layer, rel=0.01)


def test_changes_are_not_merged_into_it(folder: Path) -> None:
    with pytest.raises(ModelError, match="loaded in 4 bit, and changes cannot be merged"):
        require_mergeable(load(folder, packed=True))


def test_a_run_trains_and_scores(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "olmoe", make=tiny_model, **SIZES)
    result = experiment.run(small_config(model, "model.load_in_4bit=true"), tmp_path / "run")
    assert result is not None


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "olmoe", make=tiny_model, **{**SIZES, "intermediate_size": 96})
    with pytest.raises(ModelError, match=r"cannot unpack .*experts\.down_proj.* rows of 96 values"):
        load(model, packed=True)
