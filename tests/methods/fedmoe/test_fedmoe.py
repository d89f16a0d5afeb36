"""FedMoE: who gets which experts, what travels, how it is aggregated, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.cohort import Cohort, LocalWork
from fedguild.core.codec import decode, encode
from fedguild.core.errors import ConfigError, UploadError
from fedguild.core.payload import Payload
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.methods.fedavg import FedAvg, FedAvgSettings
from fedguild.methods.fedmoe import POOL, FedMoe, FedMoeSettings
from fedguild.methods.fedmoe.held_experts import HeldExperts
from fedguild.methods.fedmoe.sub_moes import SubMoes
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster, Upload, client_model, excerpt_of
from fedguild.server.validation import check_upload
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.methods.federation import LARGE, MIDDLE, SETTINGS, SMALL, Federation, client
from tests.oracles import fedmoe as oracle
from tests.oracles.lora import MergedModel

LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
GATES = [f"model.layers.{layer}.mlp.gate.delta" for layer in (0, 1)]
TIGHT = {"small": 0.75}
"""Of 16 experts, 12.8 · 0.75 = 9.6 fit a small client and 12.8 the others; 8 are active."""


def method(**options: object) -> FedMoe:
    return FedMoe(FedMoeSettings(**{"rank": 2, "held_out": 0.4, **options}))


def federation_of(backbone: Backbone, folder: Path, **options: object) -> Federation:
    clients = [client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 6)]
    return Federation(backbone, method(**options), clients, folder)


def held(state: Payload, client: int) -> list[list[int]]:
    return [ids.tolist() for ids in SubMoes.of(state).ids(client).values()]


def hold(state: Payload, *clients: list[int]) -> Payload:
    """The state with other sets, the same in all layers."""
    members = SubMoes.of(state)
    for own in members.held.values():
        for index, experts in enumerate(clients):
            own[index] = torch.zeros(own.shape[1], dtype=torch.bool).index_fill(0, torch.tensor(experts), True)
    return Payload({**state.tensors, **members.tensors()}, state.scalars)


# The aggregation


def values(uploads: list[Upload], part: str, name: str, row: int | None) -> list[float]:
    tensors = [sent.payload.part(part)[name] for sent in uploads]
    return [float((tensor if row is None else tensor[row]).flatten()[0]) for tensor in tensors]


def test_two_clients_by_hand(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Sizes 4 and 5. Expert 0 is held by the first alone, 1 to 4 by both, 5 by the second alone, 6 and 7 by nobody."""
    federation = federation_of(olmoe_backbone, tmp_path)
    server = federation.method
    state = hold(federation.start(), [0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    uploads = federation.train(state, 1, who=(0, 1))
    after = server.aggregate(state, iter(uploads))
    assert [sent.client.examples for sent in uploads] == [4, 5]
    for name, value in after.part("adapter").items():
        expected = oracle.expert_mean(0.0, values(uploads, "adapter", name, None), [4, 5])
        assert float(value.flatten()[0]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    rows = [dict(zip(ids, range(5), strict=True)) for ids in ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])]
    names = [f"{layer}.{what}" for layer in LAYERS for what in ("router.delta", "up_proj.lora_A", "down_proj.lora_B")]
    for name in names:
        for expert in range(8):
            versions = [
                float(sent.payload.part("experts")[name][own[expert]].flatten()[0]) if expert in own else None
                for sent, own in zip(uploads, rows, strict=True)
            ]
            old = float(state.part(POOL)[name][expert].flatten()[0])
            expected = oracle.expert_mean(old, versions, [4, 5])
            found = float(after.part(POOL)[name][expert].flatten()[0])
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
            if expert > 5:
                assert torch.equal(after.part(POOL)[name][expert], state.part(POOL)[name][expert])
        copied = uploads[0].payload.part("experts")[name][0]
        assert torch.equal(after.part(POOL)[name][0], copied)
        assert not torch.equal(copied, state.part(POOL)[name][0])


def test_with_all_experts_and_the_plain_loss_it_is_fedavg(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """In stage 1, on the examples that are not held out: the state is that of FedAvg, to rounding."""
    ours = federation_of(olmoe_backbone, tmp_path / "ours", label_smoothing=0.0, balance=0.0)
    theirs = FedAvg(FedAvgSettings(rank=2, targets=("attention",)))
    fedavg = Federation(olmoe_backbone, theirs, ours.clients, tmp_path / "theirs")
    for who in fedavg.clients:
        order = numpy_rng(1, "held out", who.index).permutation(who.examples).tolist()
        left = sorted(order[round(0.4 * who.examples) :])
        fedavg.examples[who.index] = [ours.examples[who.index][at] for at in left]
    state, expected = ours.start(), fedavg.start()
    for round_index in (1, 2):
        state = ours.method.aggregate(state, iter(ours.train(state, round_index)))
        expected = fedavg.method.aggregate(expected, iter(fedavg.train(expected, round_index)))
    found = ours.method.deploy(state, ours.model, LARGE).tensors
    assert found.keys() == expected.part("adapter").keys()
    for name, value in expected.part("adapter").items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_late_upload_is_of_the_experts_that_were_held_then(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Client 0 is late; meanwhile the end of stage 1 gave it other experts, on which it has not validated yet."""
    federation = federation_of(olmoe_backbone, tmp_path, stage_one_rounds=1)
    server, first = federation.method, federation.start()
    late, *others = federation.train(first, 1)
    state = server.aggregate(first, iter(others))
    assert held(state, 0) != held(first, 0)
    after = server.aggregate(state, iter([late]))
    for name, sent in late.payload.part("experts").items():
        assert torch.equal(after.part(POOL)[name], sent)
    members = SubMoes.of(after)
    assert bool(members.known[0])
    assert not bool(members.scored[0])
    uploads = federation.train(after, 3, who=(1,))
    assert SubMoes.of(server.aggregate(after, iter(uploads))).scored.tolist() == [False, True, False]


# What a client gets and sends


def test_a_client_receives_and_sends_the_experts_that_it_holds(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Over three rounds, two of them in stage 2: rows, bytes, and what is refused."""
    federation = federation_of(olmoe_backbone, tmp_path, stage_one_rounds=1, memory=TIGHT, patience=1)
    server, model, state = federation.method, federation.model, federation.start()
    size = model.moe[0].expert_parameters
    for round_index in (1, 2, 3):
        uploads = federation.train(state, round_index)
        for sent in uploads:
            download = server.download(state, model, sent.client)
            own = held(state, sent.client.index)
            room = SubMoes.of(state).limits(sent.client.index).most
            full = round_index == 1 and sent.client.budget.name != "small"
            assert own == [list(range(8))] * 2 if full else sum(map(len, own)) * size <= room
            for part in (download.part("experts"), sent.payload.part("experts")):
                assert {len(rows) for name, rows in part.items() if name.startswith(LAYERS[0])} == {len(own[0])}
                assert {len(rows) for name, rows in part.items() if name.startswith(LAYERS[1])} == {len(own[1])}
            expected = server.schema(model, sent.client, decode(encode(download)))
            check_upload(decode(encode(sent.payload)), expected)
            name = f"{LAYERS[0]}.router.delta"
            longer = {**sent.payload.tensors, f"experts/{name}": torch.zeros(len(own[0]) + 1, model.hidden)}
            with pytest.raises(UploadError, match=r"router\.delta"):
                check_upload(Payload(longer), expected)
        state = server.aggregate(state, iter(uploads))


def test_p_and_the_accuracy_are_those_of_the_trained_sub_moe(tmp_path: Path) -> None:
    """On the examples that are held out, with the plain model of the global theta if nothing moves."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    federation = federation_of(backbone, tmp_path)
    state, server, model = federation.start(), federation.method, federation.model
    (sent,) = federation.train(state, 1, who=(0,), learning_rate=0.0)
    order = numpy_rng(1, "held out", 0).permutation(4).tolist()
    rows = [federation.examples[0][at] for at in order[:2]]
    adapter = {name: value.double() for name, value in server.deploy(state, model, LARGE).tensors.items()}
    plain = MergedModel(tiny_model("olmoe", dtype=torch.float64), model, server.plan(model, LARGE), adapter)
    with torch.no_grad():
        losses = torch.cat([plain.losses(row.input_ids, 2) for row in rows])
    assert float(sent.payload.tensors["validation/loss"]) == pytest.approx(float(losses.mean()), rel=1e-6)
    for p in sent.payload.part("activation").values():
        assert float(p.sum()) == pytest.approx(1.0)
    ratio = float(sent.payload.tensors["validation/accuracy"]) * len(losses)
    assert ratio == pytest.approx(round(ratio), abs=1e-5)


def test_a_client_does_not_train_what_it_does_not_hold(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Nor does any token reach it."""
    federation = federation_of(olmoe_backbone, tmp_path)
    server, model = federation.method, federation.model
    state = hold(federation.start(), [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7])
    with SlotModel(olmoe_backbone, [server.plan(model, who.budget) for who in federation.clients]) as slots:
        work = [
            LocalWork(who, federation.examples[who.index], server.download(state, model, who), Payload())
            for who in federation.clients
        ]
        cohort = Cohort(slots, work, SETTINGS, round_index=1, seed=1, pad_id=PAD)
        server.local_update(cohort)
        assert cohort.routing is not None
        for slot, own in enumerate(([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], list(range(8)))):
            others = [expert for expert in range(8) if expert not in own]
            assert not cohort.routing.counts[:, slot, others].any()
            for name, value in cohort.read(slot).items():
                if name in GATES or ".experts." in name:
                    assert not value[others].any()
                    assert value[own].any()


def test_labels_are_smoothed() -> None:
    """The loss of every target against the loop over the vocabulary; without smoothing it is the likelihood."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    plan = AdapterPlan((Lora(2, 0.5, ("attention",)),))
    batch = collate([[Encoded(tuple(random_rows([7], 1)[0]), 2)]], PAD)
    with SlotModel(backbone, [plan]) as model:
        model.load(0, random_adapter(backbone.info, plan, 1))
        logits = model.logits(batch).detach()
        for smoothing in (0.0, 0.1, 0.5):
            found = model.token_losses(batch, smoothing).detach()
            expected = [
                oracle.smoothed_loss(row, int(target), smoothing)
                for row, target in zip(logits, batch.targets, strict=True)
            ]
            torch.testing.assert_close(found.tolist(), expected)


def test_both_additions_to_the_loss_act(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    sent = []
    for options in ({}, {"balance": 0.0}, {"balance": 5.0}, {"label_smoothing": 0.0}):
        federation = federation_of(olmoe_backbone, tmp_path / str(options), **options)
        sent.append(federation.train(federation.start(), 1, who=(0,))[0].payload.part("experts"))
    for other in sent[1:]:
        assert any(not torch.equal(value, sent[0][name]) for name, value in other.items())


# The sets


def test_sets_follow_at_the_end_of_stage_one(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Clients 0 and 2 by their own p, the small client by theirs, 4 : 6; before it all hold what they held."""
    federation = federation_of(olmoe_backbone, tmp_path, stage_one_rounds=2, memory=TIGHT)
    server, state = federation.method, federation.start()
    start = [held(state, index) for index in range(3)]
    state = server.aggregate(state, iter(federation.train(state, 1)))
    assert [held(state, index) for index in range(3)] == start
    uploads = federation.train(state, 2)
    state = server.aggregate(state, iter(uploads))
    p = [[sent.payload.part("activation")[layer].double().tolist() for layer in LAYERS] for sent in uploads]
    p[1] = [[0.4 * a + 0.6 * b for a, b in zip(*pair, strict=True)] for pair in zip(p[0], p[2], strict=True)]
    size = federation.model.moe[0].expert_parameters
    for index, fits in ((0, 12), (1, 9), (2, 12)):
        sets, _ = oracle.fitted(p[index], [size] * 2, [4, 4], fits * size)
        assert held(state, index) == [sorted(own) for own in sets]
    assert state.scalars == {"server/round": 2}


def test_tasks_say_whose_p_counts(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The small client is of client 2's task: it gets the sets that fit by client 2's p alone."""
    federation = federation_of(olmoe_backbone, tmp_path, stage_one_rounds=1, memory=TIGHT, tasks=("a", "b", "b"))
    state = federation.start()
    uploads = federation.train(state, 1)
    state = federation.method.aggregate(state, iter(uploads))
    size = federation.model.moe[0].expert_parameters
    p = [uploads[2].payload.part("activation")[layer].double().tolist() for layer in LAYERS]
    sets, _ = oracle.fitted(p, [size] * 2, [4, 4], 9 * size)
    assert held(state, 1) == [sorted(own) for own in sets]


# The models


def test_the_report_shows_what_clients_hold(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = federation_of(olmoe_backbone, tmp_path)
    state = hold(federation.start(), [0, 1, 2, 3, 4], [1, 2, 3, 4], list(range(8)))
    seen = {figure.name: figure for figure in federation.method.observe(state, federation.model)}
    assert seen["held experts"].values.tolist() == [[5, 5], [4, 4], [8, 8]]
    size = federation.model.moe[0].expert_parameters / 1e6
    torch.testing.assert_close(seen["held expert parameters"].values, torch.tensor([10.0, 8.0, 16.0]) * size)
    assert seen["held expert parameters"].unit == "million"
    assert seen["clients whose experts are settled"].values.tolist() == [0.0]


def test_a_clients_model_is_its_sub_moe_and_the_global_one_has_all(tmp_path: Path) -> None:
    """Its losses are those of the global model under the restricted routing, whatever it kept."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    federation = federation_of(backbone, tmp_path)
    server, model = federation.method, federation.model
    state = hold(federation.start(), [0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    state = server.aggregate(state, iter(federation.train(state, 1)))
    batch = collate([[Encoded(tuple(random_rows([9], 1)[0]), 2)]], PAD)
    whole = server.deploy(state, model, LARGE)
    assert not any(isinstance(part, HeldExperts) for part in whole.plan.parts)
    excerpt = excerpt_of(server, state, model, federation.clients[0])
    own = client_model(server, excerpt, model, federation.clients[0], Payload({"x": torch.zeros(1)}))
    found: list[Tensor] = []
    for deployment in (own, replace(own, tensors=whole.tensors), whole):
        with SlotModel(backbone, [deployment.plan]) as slots, torch.no_grad():
            slots.load(0, deployment.tensors)
            found.append(slots.token_losses(batch))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_an_encoder_decoder_model_with_one_active_expert(tmp_path: Path) -> None:
    """Two rounds of SwitchTransformers, the second with sub-MoEs of as few as one expert a layer."""
    backbone = tiny_backbone("switch")
    federation = federation_of(backbone, tmp_path, stage_one_rounds=1, memory={"small": 0.2}, targets=())
    server, state = federation.method, federation.start()
    for round_index in (1, 2):
        uploads = federation.train(state, round_index)
        for sent in uploads:
            expected = server.schema(
                federation.model, sent.client, server.download(state, federation.model, sent.client)
            )
            check_upload(sent.payload, expected)
        state = server.aggregate(state, iter(uploads))
        assert all(bool(value.isfinite().all()) for value in state.tensors.values() if value.is_floating_point())
    assert [len(own) for own in held(state, 1)] == [1, 1]
    excerpt = excerpt_of(server, state, federation.model, federation.clients[1])
    own = client_model(server, excerpt, federation.model, federation.clients[1], Payload())
    with SlotModel(backbone, [own.plan]) as slots:
        slots.load(0, own.tensors)
        assert len(slots.generate([random_rows([5], 1)], 3)[0]) == 1


# What is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory": {"smal": 0.5}}, r"no budget is called smal\.\nKnown: large, small"),
        ({"memory": {"small": 0.5}}, r"'small' can hold 0\.5 .* 0\.8 .*4 active experts of every layer are 0\.5 "),
        ({"memory_share": 0.4}, "'large' can hold 1 of all"),
        ({"targets": ("router", "q_proj")}, r"router cannot be among the targets of fedmoe"),
    ],
)
def test_options_that_do_not_fit_the_federation(options: dict, told: str, olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=told):
        method(**options).start(olmoe_backbone.info, Roster([LARGE, SMALL]), torch_rng(0, "start"))


def test_as_many_tasks_as_clients(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names 2 tasks, but there are 3 clients"):
        federation_of(olmoe_backbone, tmp_path, tasks=("a", "b")).start()
