"""The models that the benchmarks run: random OLMoE of three sizes, and peft's and our adapters on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import OlmoeConfig, OlmoeForCausalLM

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel


@dataclass(frozen=True)
class Size:
    """A model's size and the length of its sequences."""

    hidden: int
    width: int
    layers: int
    experts: int
    vocabulary: int
    tokens: int


SMALL = Size(hidden=64, width=64, layers=4, experts=16, vocabulary=512, tokens=32)
TINY = Size(hidden=256, width=128, layers=4, experts=16, vocabulary=512, tokens=128)
LAYER = Size(hidden=2048, width=1024, layers=1, experts=64, vocabulary=512, tokens=128)


CPU = torch.device("cpu")


def random_model(size: Size, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Any:
    """Returns a random OLMoE with eight active experts."""
    config = OlmoeConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.hidden // 64),
        num_key_value_heads=max(1, size.hidden // 64),
        num_experts=size.experts,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
        eos_token_id=1,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    return OlmoeForCausalLM(config).to(device, dtype)


def rows(size: Size, batch: int, seed: int, tokens: int | None = None) -> list[Encoded]:
    """Returns random rows of equal length, the loss on all but the first token."""
    rng = torch.Generator().manual_seed(seed)
    length = tokens or size.tokens
    ids = torch.randint(2, size.vocabulary, (batch, length), generator=rng).tolist()
    return [Encoded(tuple(row), 1) for row in ids]


def our_backbone(size: Size, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Backbone:
    """Returns the random model as a backbone."""
    return make_backbone(random_model(size, dtype, device), None, name="random")


def our_step(
    backbone: Backbone,
    batches: Sequence[Sequence[Encoded]],
    rank: int,
    targets: tuple[str, ...],
    active: int | None = 8,
) -> tuple[Callable[[], None], SlotModel]:
    """Returns one training step (forward, backward, AdamW) of all clients at once, and its model."""
    plan = AdapterPlan((Lora(rank, 2.0, targets),), active)
    model = SlotModel(backbone, [plan] * len(batches))
    for name, trainable in model.trainables.items():
        trainable.stored.detach().normal_(0, 0.02) if name.endswith("lora_A") else None
    optimizer = SlotOptimizer(model.trainables, TrainingSettings(optimizer="adamw"))
    counts = [sum(len(row.input_ids) - 1 for row in rows) for rows in batches]

    def step() -> None:
        optimizer.zero_grad()
        losses = model.token_losses(collate(batches, 0))
        torch.stack([part.mean() for part in losses.split(counts)]).sum().backward()
        optimizer.step([1e-4] * len(batches))

    return step, model


def peft_step(
    size: Size,
    batch: Sequence[Encoded],
    rank: int,
    targets: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> Callable[[], None]:
    """Returns one client's training step with peft's `target_parameters` (gate and up share one rank)."""
    modules = [name for name in ("q_proj", "v_proj") if "q_proj" in targets]
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=modules or [],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        lora_dropout=0.0,
    )
    return peft_step_of(random_model(size, dtype, device), config, batch)


def peft_step_of(plain: Any, config: LoraConfig, batch: Sequence[Encoded]) -> Callable[[], None]:
    """Returns one client's training step with peft on a model of transformers."""
    model = get_peft_model(plain, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)
    ids = torch.tensor([row.input_ids for row in batch], device=plain.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()

    return step
