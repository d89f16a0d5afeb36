"""SwitchTransformers: stacked experts, capacity, and slots on an encoder-decoder model against merged weights."""

from __future__ import annotations

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

from fedguild.core.errors import ModelError
from fedguild.data.batches import Encoded, Seq2Seq, collate
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import describe_config, load_backbone, make_backbone
from fedguild.model.moe import view
from fedguild.model.moe.routing import within_capacity
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD, VOCABULARY, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.oracles.switch import MergedSwitch
from tools.tiny.tokenizer import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
"""Transformers' router moves its weights to its own dtype in every pass, merged ones of the oracle too."""

PLAN = AdapterPlan((Lora(4, 0.5, ("attention", "mlp", "router", "experts")), OutputScale("per_layer")))
PLANS = [PLAN.with_lora(rank=rank, scale=scale) for rank, scale in ((3, 0.5), (1, 2.0), (4, 1.0))]
ROWS = [
    [Encoded(tuple(ids), prompt) for ids, prompt in zip(random_rows(lengths, seed), prompts, strict=True)]
    for seed, (lengths, prompts) in enumerate([([7, 12], [3, 9]), ([], []), ([9], [4])])
]
"""Two slots with rows, one without; their prompts have 3, 9 and 4 tokens, their responses 4, 3 and 5."""
SEQ2SEQ = Seq2Seq(PAD, END)
BLOCKS = {"encoder.block.1.layer.1.mlp", "decoder.block.1.layer.2.mlp"}


@pytest.fixture(scope="module")
def backbone():
    return tiny_backbone("switch")


def random_adapters(backbone, plans, dtype=torch.float64):
    adapters = [random_adapter(backbone.info, plan, 20 + slot) for slot, plan in enumerate(plans)]
    return [{name: value.to(dtype) for name, value in adapter.items()} for adapter in adapters]


def loaded(model, adapters):
    for slot, adapter in enumerate(adapters):
        model.load(slot, adapter)
    return model


def sides(row: Encoded) -> tuple[list[int], list[int]]:
    """The encoder's tokens and the response of a row."""
    return [*row.input_ids[: row.prompt_length], END], list(row.input_ids[row.prompt_length :])


def test_the_description_names_what_is_stacked(backbone):
    info = backbone.info
    assert (info.family, info.layers, info.vocabulary, info.top_k) == ("switch_transformers", 4, VOCABULARY, 1)
    assert info.seq2seq == SEQ2SEQ
    assert info.parameters == sum(p.numel() for p in tiny_model("switch").parameters())
    assert {layer.name for layer in info.moe} == BLOCKS
    for layer in info.moe:
        assert (layer.num_experts, layer.hidden, layer.width, layer.projections) == (8, 16, 8, ("up_proj", "down_proj"))
        assert backbone.model.get_submodule(layer.router).weight.shape == (8, 16)
        assert backbone.model.get_submodule(layer.experts).down_proj.shape == (8, 16, 8)
    groups = {linear.name.rsplit(".", 1)[-1]: linear.group for linear in info.linears}
    assert groups == {**dict.fromkeys("qkvo", "attention"), "wi": "mlp", "wo": "mlp"}


@pytest.mark.parametrize("capacity", [64, 2])
def test_without_a_slot_model_the_backbone_is_the_plain_model(capacity):
    ids, decoder_ids = torch.tensor(random_rows([9, 9], 1)), torch.tensor(random_rows([5, 5], 2))
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    inputs, options = (
        {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids},
        {"dtype": torch.float64},
    )
    with torch.no_grad():
        expected = tiny_model("switch", expert_capacity=capacity, **options)(**inputs).logits
        found = tiny_backbone("switch", expert_capacity=capacity, **options).model(**inputs).logits
        unlimited = tiny_model("switch", **options)(**inputs).logits
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(expected, unlimited) == (capacity == 64)


def losses_and_gradients(backbone, plans, adapters, rows):
    with SlotModel(backbone, plans) as model:
        losses = loaded(model, adapters).token_losses(collate(rows, PAD, model.seq2seq))
        losses.sum().backward()
        grads = [
            {name: t.own(slot, of=t.stored.grad).clone() for name, t in model.trainables.items()}
            for slot in range(len(plans))
        ]
    return losses.detach(), grads


@pytest.mark.parametrize("asks", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("capacity", [64, 2], ids=["within capacity", "beyond capacity"])
def test_slots_equal_their_merged_models_in_losses_and_gradients(capacity, asks, monkeypatch):
    """Three slots of mixed rank and scale, one without rows, on rows of unequal lengths; fp64.

    On a GPU the host does not ask how many pairs are active, and all are computed.
    """
    monkeypatch.setattr(view, "waits_for_values", lambda _: not asks)
    backbone = tiny_backbone("switch", dtype=torch.float64, expert_capacity=capacity)
    adapters = random_adapters(backbone, PLANS)
    losses, found = losses_and_gradients(backbone, PLANS, adapters, ROWS)
    parts = losses.split([sum(row.response_tokens for row in slot_rows) for slot_rows in ROWS])
    plain = tiny_model("switch", dtype=torch.float64, expert_capacity=capacity)
    for slot, (plan, adapter) in enumerate(zip(PLANS, adapters, strict=True)):
        if not ROWS[slot]:
            assert all(not grad.any() for grad in found[slot].values())
            continue
        leaves = {name: value.clone().requires_grad_() for name, value in adapter.items()}
        alone = MergedSwitch(plain, plan, leaves)
        expected = torch.cat([alone.losses(*sides(row), PAD) for row in ROWS[slot]])
        assert torch.allclose(parts[slot], expected, rtol=1e-6, atol=1e-6)
        grads = torch.autograd.grad(expected.sum(), list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            assert torch.allclose(found[slot][name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max() + 1)), name
        assert sum(bool(grad.any()) for grad in grads) > 0.9 * len(grads)


def test_activations_are_counted_on_each_side_without_padding(backbone):
    with SlotModel(backbone, PLANS) as model, model.collect_routing() as statistics, torch.no_grad():
        model.token_losses(collate(ROWS, PAD, model.seq2seq))
    assert statistics.layer_tokens.tolist() == [[4 + 10, 0, 5], [4 + 3, 0, 5]]
    assert statistics.counts.sum(dim=2).tolist() == [[14, 0, 5], [7, 0, 5]]
    assert statistics.frequency().sum(dim=2).tolist() == [pytest.approx([1.0, 0.0, 1.0])] * 2


def test_slots_generate_what_each_prompt_gives_alone(backbone):
    prompts = [random_rows(lengths, seed) for seed, lengths in enumerate([[5, 2], [], [1, 7]])]
    adapters = random_adapters(backbone, PLANS, torch.float32)
    with SlotModel(backbone, PLANS) as model:
        found = loaded(model, adapters).generate(prompts, 8)
    plain = tiny_model("switch")
    for plan, adapter, own, texts in zip(PLANS, adapters, prompts, found, strict=True):
        alone = MergedSwitch(plain, plan, adapter)
        assert texts == [alone.greedy([*prompt, END], 8, PAD, END) for prompt in own]
    assert len({tuple(text) for texts in found for text in texts}) > 2


def test_a_dense_encoder_decoder_model_runs_alike():
    backbone = tiny_backbone("t5", dtype=torch.float64)
    plans = [AdapterPlan((Lora(rank, 0.5, ("attention", "mlp")),)) for rank in (4, 1, 2)]
    adapters = random_adapters(backbone, plans)
    losses, _ = losses_and_gradients(backbone, plans, adapters, ROWS)
    plain = tiny_model("t5", dtype=torch.float64)
    expected = [
        MergedSwitch(plain, plan, adapter).losses(*sides(row), PAD)
        for plan, adapter, own in zip(plans, adapters, ROWS, strict=True)
        for row in own
    ]
    assert torch.allclose(losses, torch.cat(expected), rtol=1e-6, atol=1e-6)
    assert (backbone.info.layers, backbone.info.moe, backbone.info.top_k) == (3, (), 0)


def test_other_encoder_decoder_models_are_refused():
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(ModelError, match=r"family 'bart' are not supported[\s\S]*switch_transformers"):
        make_backbone(BartForConditionalGeneration(BartConfig(**sizes)), None, name="bart")


def test_batches_of_the_other_kind_are_refused(backbone, olmoe_backbone):
    with (
        SlotModel(backbone, PLANS) as model,
        pytest.raises(ModelError, match="an encoder-decoder model, but the batch"),
    ):
        model.token_losses(collate(ROWS, PAD))
    plan = AdapterPlan((Lora(2, 1.0, ("attention",)),))
    with SlotModel(olmoe_backbone, [plan] * 3) as model, pytest.raises(ModelError, match="a causal model, but"):
        model.token_losses(collate(ROWS, PAD, SEQ2SEQ))


def test_a_folder_loads_as_an_encoder_decoder_model_and_its_config_alone_describes_it(tmp_path):
    tokenizer = train_tokenizer(["A fox."])
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    tiny_model("switch", pad_token_id=5, decoder_start_token_id=None, **tokens).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    backbone = load_backbone(str(tmp_path), dtype="bfloat16", device="cpu")
    assert backbone.info == describe_config(str(tmp_path))
    assert backbone.info.seq2seq == Seq2Seq(5, tokenizer.eos_token_id)
    assert backbone.dtype is torch.bfloat16
    assert {layer.router.classifier.weight.dtype for layer in backbone.moe} == {torch.float32}


def test_bf16_runs_near_fp32_and_leaves_the_weights_alone():
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        backbone = tiny_backbone("switch", dtype=dtype, initializer_factor=0.5)
        before = backbone.fingerprint()
        adapters = [{name: 0.2 * value for name, value in a.items()} for a in random_adapters(backbone, PLANS)]
        losses[dtype], grads = losses_and_gradients(backbone, PLANS, adapters, ROWS)
        assert all(bool(grad.isfinite().all()) for grad in grads[0].values())
        assert backbone.fingerprint() == before
    assert losses[torch.bfloat16].dtype is torch.float32
    assert torch.allclose(losses[torch.float32], losses[torch.bfloat16], rtol=0.05, atol=0.1)


def test_capacity_drops_the_later_tokens_of_a_row():
    """Two rows of four tokens, capacity 2: the third token of expert 5 in row 0 and the third in row 1 fall out."""
    indices = torch.tensor([[5], [5], [3], [5], [5], [8], [5], [5]])
    weights = torch.arange(1.0, 9.0)[:, None]
    kept, experts = within_capacity(weights, indices, 2, 8, rows=2)
    assert experts.flatten().tolist() == [5, 5, 3, 8, 5, 8, 5, 8]
    assert kept.flatten().tolist() == [1.0, 2.0, 3.0, 0.0, 5.0, 6.0, 7.0, 0.0]
    assert within_capacity(weights, indices, 4, 8, rows=2)[1] is indices


def test_quantised_experts_are_refused():
    model = tiny_model("switch")
    expert = model.encoder.block[1].layer[1].mlp.experts["expert_3"]
    expert.wi.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ModelError, match=r"4 bit[\s\S]*load_in_4bit=false"):
        make_backbone(model, None, name="quantised")
