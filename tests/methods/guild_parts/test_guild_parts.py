"""Guild's parts against their box: Guild and FLAME where they are off, averages, steps at a smaller k, messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild import experiment
from fedguild.client.cohort import Cohort
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.engines.local import LocalEngine
from fedguild.engines.secure import trained_from
from fedguild.errors import ConfigError
from fedguild.methods import build_method
from fedguild.methods.guild_parts import GuildParts, GuildPartsSettings
from fedguild.methods.guild_parts.smaller_steps import at_active_experts, below, drawn_experts
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.payload import ADAPTER, Payload
from fedguild.server.engine import Delivery, Task
from fedguild.server.method import Method, Upload
from fedguild.server.optimizer import server_step, takes_steps
from tests.backbones import random_rows, tiny_backbone
from tests.experiment.runs import ended, save_model, small_config
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.oracles import guild as guild_oracle
from tests.oracles import guild_parts as oracle

OFF: dict[str, Any] = {
    "rank": 2,
    "balance_step": 0,
    "smaller_probability": 0,
    "choose_mix": False,
    "mix": 0,
    "basis": "received",
}
CLIENTS = (client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3), client(3, SMALL, 6))
LAYER = "model.layers.0.mlp"
STEPS = TrainingSettings(optimizer="adam", learning_rate=0.05, batch_size=2, steps=3, clip_norm=1.0)


WHOLE: dict[str, Any] = {"rescaler": "per_layer", "balance_step": 0.05, "smaller_probability": 0.25, "choose_mix": True}
"""All parts that are off by default."""


def guild(**options: Any) -> GuildParts:
    """With all parts."""
    return GuildParts(GuildPartsSettings(**{"rank": 2, **WHOLE, **options}))


def deliveries(federation: Federation, state: Payload, round: int = 1, **engine: Any) -> list[Delivery]:
    """What all clients deliver of a round of `STEPS`."""
    local = LocalEngine(federation.backbone, federation.examples, STEPS, federation.memory, seed=1, **engine)
    tasks = [Task(round, who, federation.method.download(state, federation.model, who)) for who in federation.clients]
    return list(local.train(federation.method, federation.model, tasks))


def of_upload(delivery: Delivery) -> dict[str, torch.Tensor]:
    """The trained LoRA."""
    assert delivery.upload is not None
    return delivery.upload.part(ADAPTER)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


# FLAME


@pytest.mark.parametrize("rescaler", ["none", "static", "per_layer", "shared"])
def test_with_everything_off_it_is_flame_at_temperature_0_bit_for_bit(
    rescaler: str, olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """Uploads, states, global models and the clients' own; half of the clients a round."""
    flame = build_method("flame", {"rank": 2, "temperature": 0, "rescaler": rescaler})
    methods: tuple[Method, Method] = (guild(**OFF, rescaler=rescaler), flame)
    ours, theirs = (Federation(olmoe_backbone, method, CLIENTS, tmp_path / method.name) for method in methods)
    states = [ours.start(), theirs.start()]
    for round in (1, 2, 3):
        some = ((0, 1), (1, 2), (0, 3))[round - 1]
        uploads = [
            federation.train(state, round, some) for federation, state in zip((ours, theirs), states, strict=True)
        ]
        for one, other in zip(*uploads, strict=True):
            for part in (ADAPTER, "rescaler"):
                assert_equal(one.payload.part(part), other.payload.part(part))
            assert one.payload.tensors.keys() == {
                name for name in other.payload.tensors if not name.startswith("routing/")
            }
        states = [
            federation.method.aggregate(state, iter(sent))
            for federation, state, sent in zip((ours, theirs), states, uploads, strict=True)
        ]
        assert_equal(dict(states[0].tensors), dict(states[1].tensors))
        for who in CLIENTS:
            models = []
            for federation, state in zip((ours, theirs), states, strict=True):
                excerpt = federation.method.excerpt(state, federation.model, who)
                memory = federation.memory.load(who.name, round + 1)
                models.append(federation.method.deploy(state, federation.model, who.budget))
                models.append(federation.method.personalize(excerpt, federation.model, who, memory))
                models.append(federation.method.as_received(excerpt, federation.model, who, memory))
            for one, other in zip(models[:3], models[3:], strict=True):
                assert one is not None
                assert other is not None
                assert one.plan == other.plan
                assert_equal(dict(one.tensors), dict(other.tensors))
    assert any(bool(value.any()) for name, value in states[0].part(ADAPTER).items() if name.endswith("lora_B"))


def test_with_every_part_off_it_is_guild_bit_for_bit(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Uploads, states and the clients' own models, in Guild's basis and with its mixture."""
    off = {"rank": 2, "mix": 0.3}
    federations = [
        Federation(olmoe_backbone, build_method(name, off), CLIENTS, tmp_path / name)
        for name in ("guild", "guild-parts")
    ]
    states = [federation.start() for federation in federations]
    for round in (1, 2):
        sent = [federation.train(state, round) for federation, state in zip(federations, states, strict=True)]
        for one, other in zip(*sent, strict=True):
            assert_equal(dict(one.payload.tensors), dict(other.payload.tensors))
        states = [
            federation.method.aggregate(state, iter(uploads))
            for federation, state, uploads in zip(federations, states, sent, strict=True)
        ]
        assert_equal(dict(states[0].tensors), dict(states[1].tensors))
        for who in CLIENTS:
            one, other = (
                federation.method.personalize(
                    federation.method.excerpt(state, federation.model, who),
                    federation.model,
                    who,
                    federation.memory.load(who.name, round + 1),
                )
                for federation, state in zip(federations, states, strict=True)
            )
            assert one.plan == other.plan
            assert_equal(dict(one.tensors), dict(other.tensors))


# Line 6, and parts a and c


def test_two_clients_by_hand() -> None:
    """n = 10 and 30, M = 4, zeta = 0.1, the limit 0.15; the budgets differ, so that each has an s of its own.

    theta = (10 * 2 + 30 * 6) / 40 = 5. u_1 = (.5, .5, 0, 0), u_2 = (.1, .3, .4, .2): u = (.2, .35, .3, .15), and phi
    goes up for the first and last, down for the others: from (.1, 0, -.1, .02) to (.15, -.1, -.15, .12).
    """
    query, scale, phi = (
        "model.layers.0.self_attn.q_proj.lora_A",
        "model.layers.0.mlp.output_scale",
        f"{LAYER}.selection_bias",
    )

    def sent(index: int, budget: Any, examples: int, value: float, s: float, shares: list[float]) -> Upload:
        return upload(
            client(index, budget, examples),
            adapter={query: torch.tensor([[value]])},
            rescaler={scale: torch.tensor(s)},
            usage={LAYER: torch.tensor(shares)},
        )

    uploads = [sent(0, LARGE, 10, 2.0, 0.8, [0.5, 0.5, 0, 0]), sent(1, SMALL, 30, 6.0, 1.4, [0.1, 0.3, 0.4, 0.2])]
    state = Payload.of(
        {
            ADAPTER: {query: torch.zeros(1, 1)},
            "rescaler": {f"{name}/{scale}": torch.tensor(1.0) for name in ("large", "middle", "small")},
            "selection_bias": {phi: torch.tensor([0.1, 0.0, -0.1, 0.02])},
            "usage": {LAYER: torch.full((4,), 0.25)},
        }
    )
    found = guild(balance_step=0.1, balance_limit=0.15).aggregate(state, iter(uploads))
    torch.testing.assert_close(found.part(ADAPTER)[query], torch.tensor([[5.0]]))
    torch.testing.assert_close(found.part("usage")[LAYER], torch.tensor([0.2, 0.35, 0.3, 0.15]))
    torch.testing.assert_close(found.part("selection_bias")[phi], torch.tensor([0.15, -0.1, -0.15, 0.12]))
    scales = {name.partition("/")[0]: float(value) for name, value in found.part("rescaler").items()}
    assert scales == pytest.approx({"large": 0.8, "middle": 1.0, "small": 1.4})


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_a_round_of_the_server_is_the_box(clients: int, olmoe_backbone: Backbone) -> None:
    """With the server's step of 1.5, which moves theta and neither u, s nor phi."""
    method, model = guild(balance_step=0.03, balance_limit=0.05), olmoe_backbone.info
    state = method.start(model, [LARGE], torch.Generator().manual_seed(0))
    drawn = torch.Generator().manual_seed(5)
    state = Payload({**state.tensors, **{
        name: torch.rand(8, generator=drawn) / 10 - 0.05 for name in state.tensors if name.startswith("selection_bias/")
    }})  # fmt: skip
    counts = torch.randint(0, 50, (clients, len(model.moe), 8), generator=drawn)
    uploads = []
    for index in range(clients):
        trained = random_tensors(
            model, method.plan(model, LARGE).without(type(method.plan(model, LARGE).parts[-1])), index
        )
        scales = {name: value for name, value in trained.items() if name.endswith("output_scale")}
        lora = {name: value for name, value in trained.items() if name not in scales}
        usage = {
            layer.name: torch.tensor(oracle.shares(counts[index, place].tolist()))
            for place, layer in enumerate(model.moe)
        }
        uploads.append(upload(client(index, LARGE, 3 + 5 * index), adapter=lora, rescaler=scales, usage=usage))
    assert takes_steps(method)
    after = server_step(state, method.aggregate(state, iter(uploads)), step=1.5, momentum=0.0)
    sizes = [sent.client.examples for sent in uploads]
    for name, before in state.part(ADAPTER).items():
        values = torch.stack([sent.payload.part(ADAPTER)[name].flatten() for sent in uploads])
        for place in (0, -1, before.numel() // 2):
            expected = guild_oracle.theta(float(before.flatten()[place]), values[:, place].tolist(), sizes, 1.5)
            assert float(after.part(ADAPTER)[name].flatten()[place]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for layer in model.moe:
        own = [sent.payload.part("usage")[layer.name].tolist() for sent in uploads]
        used = [oracle.mean([shares[expert] for shares in own], sizes) for expert in range(8)]
        torch.testing.assert_close(after.part("usage")[layer.name], torch.tensor(used))
        name = f"{layer.name}.selection_bias"
        expected_phi = oracle.phi(state.part("selection_bias")[name].tolist(), used, 0.03, 0.05)
        torch.testing.assert_close(after.part("selection_bias")[name], torch.tensor(expected_phi))
        s = f"{layer.name}.output_scale"
        mean = sum(float(sent.payload.part("rescaler")[s]) for sent in uploads) / clients
        assert float(after.part("rescaler")[f"large/{s}"]) == pytest.approx(mean, rel=1e-5)


def test_no_upload_leaves_the_state(olmoe_backbone: Backbone) -> None:
    method = guild()
    state = method.start(olmoe_backbone.info, [LARGE, SMALL], torch.Generator().manual_seed(0))
    assert_equal(dict(method.aggregate(state, iter(())).tensors), dict(state.tensors))


def test_one_liar_moves_the_use_of_an_expert_by_its_own_share_at_most(olmoe_backbone: Backbone) -> None:
    method, model = guild(rescaler="none"), olmoe_backbone.info
    state = method.start(model, [LARGE], torch.Generator().manual_seed(0))
    honest = {layer.name: torch.full((8,), 1 / 8) for layer in model.moe}
    lie = {name: torch.full((8,), 1e5) for name in honest}
    lora = state.part(ADAPTER)
    sent = [
        upload(client(0, LARGE, 30), adapter=lora, usage=honest),
        upload(client(1, LARGE, 10), adapter=lora, usage=lie),
    ]
    for value in method.aggregate(state, iter(sent)).part("usage").values():
        torch.testing.assert_close(value, torch.full((8,), 1 / 8 + 1 / 4))


# Line 4, parts a and b, and messages


class Drawing:
    """The part of a cohort that draws see."""

    def __init__(self, seed: int, round: int, clients: Sequence[Any]) -> None:
        self.seed, self.round, self.clients = seed, round, clients


def test_as_many_steps_as_rho_says_run_a_smaller_k_each_alike() -> None:
    """4,000 steps of three clients: within five standard errors of the expectation, and the same alone."""
    who, smaller, rho, steps = [client(0, LARGE), client(1, MIDDLE), client(2, SMALL)], [[1, 2], [1], []], 0.3, 4000
    cohort: Any = Drawing(7, 2, who)
    drawn = torch.tensor([drawn_experts(cohort, step, smaller, rho) for step in range(steps)], dtype=torch.float64)
    for slot, one in enumerate(who):
        error = 5 * float(drawn[:, slot].std()) / steps**0.5
        expected = oracle.mean_active(one.budget.active_experts, smaller[slot], rho)
        assert float(drawn[:, slot].mean()) == pytest.approx(expected, abs=error + 1e-12)
    of_large = drawn[:, 0]
    assert abs(int((of_large == 1).sum()) - int((of_large == 2).sum())) < 5 * (rho * steps) ** 0.5
    assert bool((drawn[:, 2] == 1).all())
    alone: Any = Drawing(7, 2, who[1:2])
    assert [drawn_experts(alone, step, smaller[1:2], rho)[0] for step in range(50)] == drawn[:50, 1].tolist()
    other: Any = Drawing(7, 3, who)
    assert [drawn_experts(other, step, smaller, rho) for step in range(50)] != drawn[:50].tolist()
    assert [drawn_experts(cohort, 5, smaller, 0.0), drawn_experts(cohort, 5, smaller, 1.0)[1:]] == [[4, 2, 1], [1, 1]]


def test_the_drawn_experts_run(olmoe_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one length, so that every step has as many tokens: the activations add up to the drawn k."""
    seen: list[list[int]] = []

    def watched(*arguments: Any) -> list[int]:
        seen.append(drawn_experts(*arguments))
        return seen[-1]

    monkeypatch.setattr("fedguild.methods.guild_parts.drawn_experts", watched)
    federation = Federation(olmoe_backbone, guild(smaller_probability=0.5, choose_mix=False, mix=0), CLIENTS, tmp_path)
    federation.examples = {
        who.index: [Encoded(tuple(row), 2) for row in random_rows([6] * 6, who.index)] for who in CLIENTS
    }
    for delivery in deliveries(federation, federation.start(), cohort_size=4):
        expected = sum(step[delivery.task.client.index] for step in seen) / len(seen)
        assert delivery.frequency is not None
        torch.testing.assert_close(
            delivery.frequency.sum(-1).double(), torch.full((2,), expected, dtype=torch.float64), rtol=1e-5, atol=1e-5
        )
        assert delivery.upload is not None
        for shares in delivery.upload.part("usage").values():
            assert float(shares.sum()) == pytest.approx(1.0)
    assert len({step[0] for step in seen}) > 1
    assert {step[1] for step in seen} == {1}


@pytest.mark.parametrize("rescaler", ["static", "none"])
def test_a_step_at_a_smaller_k_trains_as_a_client_of_that_budget_does(
    rescaler: Any, olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """rho = 1, and one smaller k: the update is FLAME's of the same client at that k, bit for bit."""
    options = {**OFF, "rescaler": rescaler}
    large, other = client(0, LARGE, 4), client(1, SMALL, 4)
    ours = Federation(olmoe_backbone, guild(**{**options, "smaller_probability": 1.0}), [large, other], tmp_path / "a")
    flame = build_method("flame", {"rank": 2, "rescaler": rescaler})
    theirs = Federation(olmoe_backbone, flame, [client(0, SMALL, 4), other], tmp_path / "b")
    found, expected = (of_upload(deliveries(federation, federation.start())[0]) for federation in (ours, theirs))
    assert_equal(found, expected)
    at_its_own = Federation(olmoe_backbone, guild(**options), [large, other], tmp_path / "c")
    own = of_upload(deliveries(at_its_own, at_its_own.start())[0])
    assert any(not torch.equal(found[name], value) for name, value in own.items())


def test_the_static_ratio_is_that_of_the_experts_that_run(olmoe_backbone: Backbone) -> None:
    method = guild(rescaler="static")
    plans = [method.plan(olmoe_backbone.info, budget) for budget in (LARGE, MIDDLE)]
    with SlotModel(olmoe_backbone, plans) as model:
        cohort: Any = type("Slots", (), {"model": model})
        layer = olmoe_backbone.moe[0]
        assert layer.output_scale is not None
        assert layer.output_scale.tolist() == [1.0, 2.0]
        with at_active_experts(cohort, [2, 1], static=True):
            assert layer.output_scale.tolist() == [2.0, 4.0]
        assert layer.output_scale.tolist() == [1.0, 2.0]
        with pytest.raises(ConfigError, match="Choose active_experts from 1 to 4"), model.activating([5, 1]):
            pass


def test_downloads_name_the_smaller_k_of_the_federation(olmoe_backbone: Backbone) -> None:
    method, model = guild(), olmoe_backbone.info
    state = method.start(model, [LARGE, SMALL, MIDDLE, SMALL], torch.Generator().manual_seed(0))
    found = {
        budget.name: method.download(state, model, client(0, budget)).part("active_experts")["k"].tolist()
        for budget in (LARGE, MIDDLE, SMALL)
    }
    assert found == {"large": [1.0, 2.0], "middle": [1.0], "small": []}
    assert below(torch.tensor([0.0, 1.0, 2.0, 4.0, 64.0]), client(0, MIDDLE)) == [1.0]  # whatever a server sends


def test_a_client_goes_on_with_its_own_s_whatever_it_receives(
    olmoe_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server cannot leave one budget alone in the sums over the experts, by an s of 0 for the others."""
    federation = Federation(olmoe_backbone, guild(smaller_probability=0), CLIENTS, tmp_path)
    scale = "model.layers.0.mlp.output_scale"
    state = federation.start()
    state = federation.method.aggregate(state, iter(federation.train(state, 1, (0, 1))))
    kept = float(federation.memory.load(CLIENTS[1].name, 2).part("rescaler")[scale])
    assert float(state.part("rescaler")[f"small/{scale}"]) == kept != 1.0  # of the only one of its budget
    state = Payload({**state.tensors, f"rescaler/small/{scale}": torch.tensor(0.0)})
    begun: dict[int, float] = {}
    steps = Cohort.steps

    def watched(cohort: Cohort) -> Any:
        begun.update({who.index: float(cohort.read(slot)[scale]) for slot, who in enumerate(cohort.clients)})
        return steps(cohort)

    monkeypatch.setattr(Cohort, "steps", watched)
    federation.train(state, 2)
    assert begun.pop(0) != 1.0
    assert begun == {1: kept, 2: 1.0, 3: 1.0}


def test_clients_of_a_secure_round_find_that_they_have_one_phi(olmoe_backbone: Backbone) -> None:
    """With another phi, a server could send one client's tokens to experts that no other client trains."""
    method, model, budgets = guild(), olmoe_backbone.info, [LARGE, SMALL]
    state, form = method.start(model, budgets, torch.Generator()), method.linear_form(model, budgets)
    name = f"selection_bias/{LAYER}.selection_bias"
    other = Payload({**state.tensors, name: torch.tensor([9.0] + [0.0] * 7)})

    def digest(state: Payload, index: int, budget: Any) -> bytes:
        return trained_from(method.download(state, model, client(index, budget)), form, b"config", method.told_alike)

    assert digest(state, 0, LARGE) == digest(state, 1, SMALL) != digest(other, 1, SMALL)


@pytest.mark.parametrize(
    ("mix", "choose", "mix_by", "expected"),
    [
        (0, False, "client", {"rescaler"}),
        (0.3, False, "client", {"rescaler", "adapter"}),
        (0, True, "client", {"rescaler", "adapter", "mix"}),
        (0.5, True, "expert", {"rescaler", "adapter", "mix", "usage"}),
    ],
)
def test_a_client_keeps_one_adapter_at_most(
    mix: float, choose: bool, mix_by: Any, expected: set[str], olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    federation = Federation(olmoe_backbone, guild(mix=mix, choose_mix=choose, mix_by=mix_by), CLIENTS, tmp_path)
    sent = federation.train(federation.start())[0]
    kept = federation.memory.load(sent.client.name, 2)
    assert {name.partition("/")[0] for name in kept.tensors} == expected
    beside = sum(value.numel() for name, value in kept.tensors.items() if not name.startswith("adapter/"))
    assert beside <= 2 * (8 + 1) + 1  # two layers of eight experts
    if "adapter" in expected:
        assert_equal(kept.part(ADAPTER), sent.payload.part(ADAPTER))


def test_an_upload_is_as_large_as_flames(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    sizes = []
    for method in (guild(), build_method("flame", {"rank": 2})):
        federation = Federation(olmoe_backbone, method, CLIENTS, tmp_path / method.name)
        sizes.append(sum(value.numel() for value in federation.train(federation.start())[0].payload.tensors.values()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "switch"])
def test_other_families_train(family: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(family)
    budgets = [LARGE, SMALL] if backbone.info.top_k >= 4 else [SMALL, SMALL]
    who = [client(index, budget, 4) for index, budget in enumerate(budgets)]
    federation = Federation(backbone, guild(smaller_probability=0.5, held_out=0.4), who, tmp_path)
    state = federation.start()
    for round in (1, 2):
        state = federation.method.aggregate(state, iter(federation.train(state, round)))
    assert all(bool(value.any()) for value in state.part("selection_bias").values())
    assert all(float(value.sum()) == pytest.approx(1.0, rel=1e-4) for value in state.part("usage").values())


def test_a_run_with_every_part_off_is_guilds(tmp_path: Path) -> None:
    """It begins with the same draws, so that a part and Guild are compared from one start."""
    model, states = save_model(tmp_path / "model"), []
    for name in ("guild", "guild-parts"):
        config = small_config(
            model, "federation.rounds=1", f"method={{name: {name}, rank: 3}}", base="guild/tiny-tasks"
        )
        assert config.method.name == name
        experiment.run(config, tmp_path / name)
        states.append(ended(tmp_path / name).state)
    assert_equal(dict(states[1].tensors), dict(states[0].tensors))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mix_by": "expert", "mix": 0}, "mix_by has no effect without a mix above 0 or choose_mix: true, and LoRA on"),
        ({"mix_by": "expert", "targets": ["attention"]}, "mix_by has no effect without a mix above 0 or choose_mix"),
        ({"held_out": 0.2}, "held_out has no effect without choose_mix: true"),
        ({"held_out_examples": 8}, "held_out_examples has no effect without choose_mix: true"),
        ({"balance_limit": 2.0}, "balance_limit has no effect without balance_step above 0"),
        ({"turned": False, "basis": "received"}, "turned has no effect without a singular basis"),
        ({"start_norm": 5}, "start_norm has no effect without basis: received"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method("guild-parts", options)


def test_an_option_with_what_it_needs_is_taken() -> None:
    build_method("guild-parts", {"mix_by": "expert", "choose_mix": True, "mix": 0, "held_out": 0.2})
    build_method("guild-parts", {"balance_limit": 2.0, "balance_step": 0.1})
