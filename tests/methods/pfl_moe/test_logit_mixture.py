"""Two LoRAs in one slot whose logits a gate mixes: likelihood, packed candidates, generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ConfigError
from fedguild.data.batches import Encoded, collate
from fedguild.measuring.scores.likelihood import Candidates, collate_candidates, collate_singles
from fedguild.methods.pfl_moe.logit_mixture import BIAS, SECOND, WEIGHT, LogitMixture
from fedguild.methods.pfl_moe.prompt_features import prompt_features
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.oracles import pfl_moe as oracle
from tests.oracles.lora import MergedModel

TARGETS = {
    "olmoe": ("attention", "router", "experts"),
    "llama": ("attention", "mlp"),
    "switch": ("attention", "mlp", "experts"),
}
LENGTHS = ([9, 5], [7])


def plain_plan(family: str) -> AdapterPlan:
    return AdapterPlan((Lora(3, 0.5, TARGETS[family]),))


def mixture_plan(family: str, features: str = "hidden") -> AdapterPlan:
    lora = plain_plan(family).lora
    return AdapterPlan((LogitMixture(lora.rank, lora.targets, features), lora))  # type: ignore[arg-type]


def pair(backbone: Backbone, family: str, slot: int, bias: float = 0.3) -> tuple[dict[str, Tensor], ...]:
    """A slot's first LoRA, second LoRA and gate."""
    size = 2.0 if family == "switch" else 0.3  # small changes leave the random decoder in the same loop
    first, second = (random_adapter(backbone.info, plain_plan(family), 10 * slot + i, size) for i in (1, 2))
    rng = torch.Generator().manual_seed(slot)
    weight = torch.randn(backbone.info.hidden, generator=rng, dtype=torch.float64) * 0.2
    return first, second, {WEIGHT: weight, BIAS: torch.tensor(bias, dtype=torch.float64)}


def loaded(first: dict[str, Tensor], second: dict[str, Tensor], gate: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**first, **{f"{SECOND}{name}": value for name, value in second.items()}, **gate}


def mixed_slots(backbone: Backbone, plan: AdapterPlan, tensors: list[dict[str, Tensor]]) -> SlotModel:
    model = SlotModel(backbone, [plan] * len(tensors))
    for slot, own in enumerate(tensors):
        model.load(slot, own)
    return model


@pytest.mark.parametrize("features", ["hidden", "embedding"])
@pytest.mark.parametrize("family", ["olmoe", "llama"])
def test_losses_are_those_of_the_mixture(family: str, features: str) -> None:
    """Two slots, rows of other lengths, against plain merged models in fp64."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    plan, pairs = mixture_plan(family, features), [pair(backbone, family, slot) for slot in (0, 1)]
    rows = [[Encoded(tuple(ids), 3) for ids in random_rows(own, slot)] for slot, own in enumerate(LENGTHS)]
    with mixed_slots(backbone, plan, [loaded(*own) for own in pairs]) as model, torch.no_grad():
        found = model.token_losses(collate(rows, PAD)).split([6, 2, 4])
    plain = tiny_model(family, dtype=torch.float64)
    gates = []
    for losses, (slot, row) in zip(found, [(0, rows[0][0]), (0, rows[0][1]), (1, rows[1][0])], strict=True):
        alone = mixture_of(plain, backbone, family, pairs[slot], features)
        torch.testing.assert_close(losses, alone.losses(row.input_ids, 3), rtol=1e-9, atol=1e-9)
        phi = oracle.features(plain, row.input_ids[:3], features)
        gates.append(float(oracle.gate(phi, alone.weight, alone.bias)))
    assert len({round(gate, 4) for gate in gates}) == 3
    assert all(0.001 < gate < 0.999 for gate in gates)


def mixture_of(
    plain: object, backbone: Backbone, family: str, tensors: tuple[dict[str, Tensor], ...], features: str
) -> oracle.Mixture:
    first, second, gate = tensors
    sides = [MergedModel(plain, backbone.info, plain_plan(family), adapter) for adapter in (first, second)]
    return oracle.Mixture(plain, *sides, gate[WEIGHT], gate[BIAS], features)


@pytest.mark.parametrize("family", ["olmoe", "llama"])
def test_candidates_of_one_row_share_its_gate(family: str) -> None:
    """A packed row of two candidates has the likelihoods of two rows; its gate sees the prompt alone."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    prompt, first, second, longer = random_rows([4, 3, 2, 7], seed=8)
    rows = [[Candidates(tuple(prompt), (tuple(first), tuple(second)))], [Candidates(tuple(longer), (tuple(first),))]]
    pairs = [pair(backbone, family, slot) for slot in (0, 1)]
    with mixed_slots(backbone, mixture_plan(family), [loaded(*own) for own in pairs]) as model, torch.no_grad():
        found = model.token_losses(collate_candidates(rows, PAD)).split([3, 2, 3])
    plain = tiny_model(family, dtype=torch.float64)
    for losses, (slot, start, response) in zip(
        found, [(0, prompt, first), (0, prompt, second), (1, longer, first)], strict=True
    ):
        alone = mixture_of(plain, backbone, family, pairs[slot], "hidden")
        torch.testing.assert_close(losses, alone.losses([*start, *response], len(start)), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", ["olmoe", "llama"])
def test_generation_follows_the_mixed_logits(family: str) -> None:
    """Prompts of other lengths in one batch, two slots; neither model alone would say the same."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    pairs = [pair(backbone, family, slot) for slot in (0, 1)]
    prompts = [random_rows([6, 3], 1), random_rows([5, 2, 4], 2)]
    with mixed_slots(backbone, mixture_plan(family), [loaded(*own) for own in pairs]) as model:
        found = model.generate(prompts, 6)
    plain = tiny_model(family, dtype=torch.float64)
    differs = [False, False]
    for slot, rows in enumerate(prompts):
        alone = mixture_of(plain, backbone, family, pairs[slot], "hidden")
        for row, text in zip(rows, found[slot], strict=True):
            assert text == alone.greedy(row, 6, END)
            for index, side in enumerate((alone.first, alone.second)):
                differs[index] |= side.greedy(row, 6, END) != text
    assert all(differs)


def test_an_encoder_decoder_model_gates_by_what_its_encoder_reads() -> None:
    """Likelihood from two plain passes mixed by hand; generation at either end of the gate; fp64."""
    backbone = tiny_backbone("switch", dtype=torch.float64)
    family, seq2seq = "switch", None
    pairs = [pair(backbone, family, slot) for slot in (0, 1)]
    with SlotModel(backbone, [plain_plan(family)] * 2) as model:
        seq2seq = model.seq2seq
        assert seq2seq is not None
        rows = [[Candidates(tuple(random_rows([5 + slot], slot)[0]), ((4, 5, 6), (7, 8)))] for slot in (0, 1)]
        batch = collate_singles(rows, PAD, seq2seq)
        sides, texts = [], []
        prompts = [random_rows([6, 3], 1), random_rows([5], 2)]
        for index in (0, 1):
            for slot in (0, 1):
                model.load(slot, pairs[slot][index])
            with torch.no_grad():
                sides.append(model.logits(batch))
            texts.append(model.generate(prompts, 5))
    plain = tiny_model(family, dtype=torch.float64)
    targets = torch.repeat_interleave(torch.tensor([3, 2, 3, 2]))
    gates = []
    for slot, own in enumerate(rows):
        ids = torch.tensor([seq2seq.closed(own[0].prompt)])
        with torch.no_grad():
            phi = plain.get_encoder()(input_ids=ids).last_hidden_state[0].mean(dim=0)
        gates += [oracle.gate(phi, pairs[slot][2][WEIGHT], pairs[slot][2][BIAS])] * 2
    expected = [
        oracle.loss(oracle.mixture(gates[row], sides[0][at], sides[1][at]), int(batch.targets[at]))
        for at, row in enumerate(targets.tolist())
    ]
    with mixed_slots(backbone, mixture_plan(family), [loaded(*own) for own in pairs]) as model:
        with torch.no_grad():
            torch.testing.assert_close(model.token_losses(batch), torch.stack(expected), rtol=1e-8, atol=1e-8)
        for index, bias in ((0, 1e4), (1, -1e4)):
            for slot in (0, 1):
                model.load(slot, {BIAS: torch.tensor(bias)})
            assert model.generate(prompts, 5) == texts[index]
    assert texts[0] != texts[1]


def test_names_are_read_as_they_were_loaded_and_nothing_but_the_gate_trains(olmoe_backbone: Backbone) -> None:
    plan = mixture_plan("olmoe")
    tensors = [loaded(*pair(olmoe_backbone, "olmoe", slot)) for slot in (0, 1)]
    with mixed_slots(olmoe_backbone, plan, tensors) as model:
        for slot, own in enumerate(tensors):
            assert own.keys() == trainable_shapes(olmoe_backbone.info, plan).keys() == model.loaded.keys()
            assert all(torch.equal(model.loaded[name].own(slot), value.float()) for name, value in own.items())
        assert model.trainables.keys() == {WEIGHT, BIAS}


def test_features_see_no_adapter_and_no_padding(olmoe_backbone: Backbone) -> None:
    """Before, beside and after an adapter; with other rows, and padded on the left as a generation's prompts are."""
    rows = random_rows([7, 4], 3)
    alone = [collate([[Encoded(tuple(row), 3)]], PAD) for row in rows]
    expected = torch.cat([prompt_features(olmoe_backbone, batch, "hidden") for batch in alone])
    together = collate([[Encoded(tuple(row), 3) for row in rows]], PAD)
    plan = plain_plan("olmoe")
    with SlotModel(olmoe_backbone, [plan]) as model, torch.no_grad():
        model.load(0, random_adapter(olmoe_backbone.info, plan, 1))
        model.token_losses(together)
        torch.testing.assert_close(prompt_features(olmoe_backbone, together, "hidden"), expected)
        assert olmoe_backbone.runtime.current is not None
    prompts = [row[:3] for row in rows]
    nothing = torch.zeros(0, dtype=torch.int64)
    ids = torch.tensor([[PAD, PAD, *prompt] for prompt in prompts])
    left = replace(together, input_ids=ids, mask=ids != PAD, predict_at=nothing, targets=nothing, group=nothing)
    torch.testing.assert_close(prompt_features(olmoe_backbone, left, "hidden"), expected)
    embeddings = prompt_features(olmoe_backbone, left, "embedding")
    table = olmoe_backbone.model.get_input_embeddings().weight
    torch.testing.assert_close(embeddings, torch.stack([table[prompt].mean(dim=0) for prompt in prompts]))


def test_slots_share_their_features(olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="features of their gates"):
        SlotModel(olmoe_backbone, [mixture_plan("olmoe"), mixture_plan("olmoe", "embedding")])
    SlotModel(olmoe_backbone, [plain_plan("olmoe")]).close()
