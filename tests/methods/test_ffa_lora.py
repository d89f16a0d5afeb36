"""FFA-LoRA: one A for all that never travels, and an average that is exact."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.errors import ConfigError
from fedguild.core.packing import pack, unpack
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.methods import build_method
from fedguild.methods.ffa_lora import FFALoRA, shared_factors
from fedguild.model.adapters.lora import kaiming_uniform
from fedguild.model.slots import SlotModel
from fedguild.server.method import Upload
from tests.backbones import PAD, random_rows, tiny_model
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, upload
from tests.oracles.ffa_lora import dense_mean

TARGETS = ["attention", "router", "experts"]


def ffa(**options) -> FFALoRA:
    method = build_method("ffa-lora", {"rank": 2, "targets": TARGETS, **options})
    assert isinstance(method, FFALoRA)
    return method


def started(method: FFALoRA, model) -> Payload:
    return method.start(model, [LARGE], torch_rng(0, "start"))


def random_ups(state: Payload, seed: int) -> dict[str, torch.Tensor]:
    rng = torch_rng(seed, "B")
    return {name: torch.randn(value.shape, generator=rng) for name, value in state.part("adapter").items()}


# Line 1


def test_the_model_starts_as_it_was_published(olmoe_backbone):
    """BA = 0, with A as LoRA draws it."""
    method, model = ffa(), olmoe_backbone.info
    deployment = method.deploy(started(method, model), model, LARGE)
    for name, value in deployment.tensors.items():
        assert bool(value.any()) == name.endswith("lora_A")
    row = random_rows([9], 1)[0]
    with SlotModel(olmoe_backbone, [deployment.plan]) as slots, torch.no_grad():
        slots.load(0, deployment.tensors)
        found = slots.token_losses(collate([[Encoded(tuple(row), 1)]], PAD))
        logits = tiny_model("olmoe")(torch.tensor([row])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_client_draws_the_servers_a_bit_by_bit(olmoe_backbone):
    """From the number in the download, after the wire; each module's own, whatever else is adapted."""
    method, model = ffa(), olmoe_backbone.info
    state = started(method, model)
    sent = method.download(state, model, client(0, LARGE))
    travelled = Payload(*unpack(pack(sent.tensors, sent.scalars)))
    assert not any("lora_A" in name for name in travelled.tensors)
    plan = method.plan(model, LARGE)
    mine = shared_factors(model, plan, int(travelled.scalars["seed"]))
    theirs = method.deploy(state, model, LARGE).tensors
    fewer = shared_factors(model, ffa(targets=["v_proj"]).plan(model, LARGE), int(travelled.scalars["seed"]))
    assert set(fewer) < set(mine)
    for name, value in {**mine, **fewer}.items():
        assert torch.equal(theirs[name], value)
    values = list(mine.values())
    assert not torch.equal(values[0], values[1])
    name = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(mine[name], kaiming_uniform((2, 16), torch_rng(int(sent.scalars["seed"]), "shared A", name)))


def test_runs_of_other_seeds_have_another_a(olmoe_backbone):
    method, model = ffa(), olmoe_backbone.info
    seeds = [method.start(model, [LARGE], torch_rng(seed, "start")).scalars["seed"] for seed in (0, 1)]
    assert seeds[0] != seeds[1]


# Lines 3 and 4


def test_a_round_moves_b_alone(olmoe_backbone, tmp_path):
    federation = Federation(olmoe_backbone, ffa(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    state = federation.start()
    uploads = federation.train(state)
    for sent in uploads:
        tensors = sent.payload.part("adapter")
        assert tensors.keys() == state.part("adapter").keys()
        assert all(name.endswith("lora_B") for name in tensors)
        assert sum(bool(value.any()) for value in tensors.values()) > len(tensors) / 2
    after = federation.method.aggregate(state, iter(uploads))
    assert after.scalars == state.scalars
    before, later = (federation.method.deploy(each, federation.model, LARGE).tensors for each in (state, after))
    for name, value in later.items():
        if name.endswith("lora_A"):
            assert torch.equal(value, before[name])


def test_clients_run_their_budgets_experts(olmoe_backbone, llama_backbone):
    plans = [ffa().plan(olmoe_backbone.info, budget) for budget in (LARGE, MIDDLE, SMALL)]
    assert [plan.active_experts for plan in plans] == [4, 2, 1]
    assert {plan.rank for plan in plans} == {2}
    assert ffa(targets=["attention"]).plan(llama_backbone.info, LARGE).active_experts is None


# Line 5


def test_two_clients_by_hand(llama_backbone):
    """Weights 1 and 3: B = (1 · 8 + 3 · 0) / 4 = 2; each as much with uniform weights: 4."""
    model = llama_backbone.info
    for weights, expected in (("size", 2.0), ("uniform", 4.0)):
        method = ffa(targets=["q_proj"], weights=weights)
        state = started(method, model)
        sent = [
            upload(client(index, LARGE, examples), adapter={name: torch.full_like(b, value) for name, b in tensors})
            for index, (examples, value, tensors) in enumerate(
                [(1, 8.0, state.part("adapter").items()), (3, 0.0, state.part("adapter").items())]
            )
        ]
        after = method.aggregate(state, iter(sent))
        assert all(bool((value == expected).all()) for value in after.part("adapter").values())


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_the_aggregate_is_the_mean_of_the_dense_updates(weights, olmoe_backbone):
    """Of linear layers, routers and every expert: mean_c(B_c A) = (mean_c B_c) A."""
    method, model = ffa(weights=weights), olmoe_backbone.info
    state, examples = started(method, model), (2, 7, 4)
    trained = [random_ups(state, index) for index in range(3)]
    sent = [upload(client(i, LARGE, n), adapter=own) for i, (n, own) in enumerate(zip(examples, trained, strict=True))]
    found = method.deploy(method.aggregate(state, iter(sent)), model, LARGE).tensors
    shares = [float(n) if weights == "size" else 1.0 for n in examples]
    for name in state.part("adapter"):
        up, down = found[name], found[name.replace("lora_B", "lora_A")]
        for expert in range(up.shape[0]) if up.dim() == 3 else (...,):
            expected = dense_mean([own[name][expert] for own in trained], down[expert], shares)
            product = up[expert].double() @ down[expert].double()
            torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-6)


def test_one_client_gets_its_own_back(olmoe_backbone):
    method, model = ffa(), olmoe_backbone.info
    state = started(method, model)
    own = random_ups(state, 4)
    after = method.aggregate(state, iter([upload(client(0, SMALL, 3), adapter=own)]))
    assert all(torch.equal(after.part("adapter")[name], value) for name, value in own.items())


def test_nobody_changes_nothing(olmoe_backbone):
    method, model = ffa(), olmoe_backbone.info
    state = Payload.of({"adapter": random_ups(started(method, model), 1)}, {"seed": 5})
    after = method.aggregate(state, iter(()))
    assert after.scalars == state.scalars
    assert all(torch.equal(after.part("adapter")[name], value) for name, value in state.part("adapter").items())


def test_a_client_without_weight_counts_for_nothing(olmoe_backbone):
    method, model = ffa(), olmoe_backbone.info
    state = started(method, model)
    first, second = random_ups(state, 1), random_ups(state, 2)
    sent = [
        Upload(1, client(i, LARGE, n), upload(client(i, LARGE, n), adapter=own).payload)
        for i, (n, own) in enumerate([(0, first), (4, second)])
    ]
    after = method.aggregate(state, iter(sent))
    assert all(torch.equal(after.part("adapter")[name], value) for name, value in second.items())


def test_an_expert_nobody_activated_keeps_its_zero_update(olmoe_backbone, tmp_path):
    """Its B has no gradient, so it stays at zero on every client."""
    federation = Federation(olmoe_backbone, ffa(targets=["experts"]), [client(0, SMALL, 1)], tmp_path)
    state = federation.start()
    (sent,) = federation.train(state)
    moved = [value.flatten(1).any(dim=1) for value in sent.payload.part("adapter").values()]
    assert any(not bool(own.all()) for own in moved)
    assert any(bool(own.any()) for own in moved)


def test_a_budget_beyond_the_model_is_refused(olmoe_backbone):
    with pytest.raises(ConfigError, match="has active_experts 9"):
        ffa().plan(olmoe_backbone.info, type(LARGE)("big", 9, 2))
