"""Parity of a device with a CPU: one layer of OLMoE's layout, losses and gradients of four unequal clients.

One of the clients has no data. In fp32 device and CPU must agree; in the asked dtype the values must be finite, and the
differences are printed, for a rounded router may choose other experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.known import find_known
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel

TARGETS = ("attention", "router", "experts")
BUDGETS = (8, 4, 2, 1)
"""Active experts of the clients, in turn."""
RANK = 20
LARGEST = 1e-3
"""Largest difference of a gradient in fp32, relative to its norm, that counts as equal."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_hidden_layers": 2,
}
"""What a rehearsal changes in the model's config."""


@dataclass(frozen=True)
class Setting:
    """What to measure on.

    Attributes:
        device: The device.
        dtype: The dtype of its model.
        small: Whether to rehearse with small sizes.
    """

    device: torch.device
    dtype: torch.dtype
    small: bool


def say(*parts: object) -> None:
    """Prints at once."""
    print(*parts, flush=True)


def config(small: bool, **changes: Any) -> dict[str, Any]:
    """Returns the keys of OLMoE-1B-7B's config."""
    known = find_known("olmoe-1b-7b")
    assert known is not None
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 8192}
    return {**known.config, **(SMALL if small else {}), **ends, **changes}


def random_model(keys: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Returns a model with random weights, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(before)


def frozen(model: Any, **options: Any) -> Backbone:
    """Returns a model as a backbone, whose texts never end."""
    return make_backbone(model, SimpleNamespace(pad_token_id=0, eos_token_id=None), name="random", **options)


def rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[Encoded]:
    """Returns random texts, the loss on all but their first token."""
    rng = torch.Generator().manual_seed(seed)
    return [Encoded(tuple(torch.randint(2, vocabulary, (n,), generator=rng).tolist()), 1) for n in lengths]


def plans(active: Sequence[int], dropout: float = 0.0) -> list[AdapterPlan]:
    """Returns clients' plans, by their active experts."""
    return [AdapterPlan((Lora(RANK, 0.8, TARGETS, dropout),), number) for number in active]


def gradients(backbone: Backbone, batches: Sequence[Sequence[Encoded]]) -> dict[str, Tensor]:
    """Returns the losses, and the gradients by name and client, on the host in fp32."""
    with SlotModel(backbone, plans(BUDGETS)) as model:
        rng = torch.Generator().manual_seed(3)
        for name, trainable in model.trainables.items():
            for slot, shape in enumerate(trainable.shapes):
                assert shape is not None
                model.load(slot, {name: 0.02 * torch.randn(shape, generator=rng)})
        losses = model.token_losses(collate(batches, 0))
        losses.sum().backward()
        found = {"losses": losses.detach().float().cpu()}
        for name, trainable in model.trainables.items():
            assert trainable.stored.grad is not None
            for slot in range(len(BUDGETS)):
                found[f"{slot}/{name}"] = trainable.own(slot, of=trainable.stored.grad).float().cpu()
        return found


def differences(here: Setting, dtype: torch.dtype) -> tuple[dict[str, float], list[str]]:
    """Returns each result's difference from the CPU's, relative to its norm, and the names of those that are wrong.

    Wrong is what is not finite, and a gradient of the client without data that is not zero.
    """
    keys = config(here.small, num_hidden_layers=1, vocab_size=512)
    model = random_model(keys, here.device, dtype)
    copy = random_model(keys, torch.device("cpu"), dtype)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    lengths: tuple[list[int], ...] = ([40, 17], [33], [], [5, 9, 60])
    batches = [rows(own, 512, seed) for seed, own in enumerate(lengths)]
    found, expected = (gradients(frozen(each), batches) for each in (model, copy))
    wrong = [name for name, value in found.items() if not value.isfinite().all()]
    wrong += [name for name, value in found.items() if name.startswith("2/") and value.any()]
    apart = {
        name: float((value - expected[name]).norm() / expected[name].norm().clamp(min=1e-6))
        for name, value in found.items()
    }
    return apart, wrong


def parity(here: Setting) -> None:
    """Compares the device with the CPU.

    Raises:
        SystemExit: they differ in fp32, or a value is wrong; the message names it.
    """
    for dtype in dict.fromkeys((torch.float32, here.dtype)):
        apart, wrong = differences(here, dtype)
        worst = sorted(apart, key=lambda name: apart[name], reverse=True)[:3]
        told = ", ".join(f"{name} {apart[name]:.1e}" for name in worst)
        say(f"parity in {dtype}: median {statistics.median(apart.values()):.1e}, largest: {told}")
        if dtype is torch.float32:
            wrong += [name for name, value in apart.items() if not value <= LARGEST]
        if wrong:
            raise SystemExit(f"{here.device} computes something else than the CPU in {dtype}: {', '.join(wrong[:5])}")
