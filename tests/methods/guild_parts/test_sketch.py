"""Part e against slow references with whole matrices: exact up to a rank, the server's round, who may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild import experiment
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.config import load_config
from fedguild.config.privacy import PrivacySettings
from fedguild.engines.local import LocalEngine
from fedguild.engines.private import PrivateEngine
from fedguild.errors import ConfigError
from fedguild.methods import build_method
from fedguild.methods.guild_parts import GuildParts, GuildPartsSettings
from fedguild.methods.guild_parts.sketch import SEED, Probes, changes, refactored, sizes, sketched
from fedguild.model.backbone import Backbone
from fedguild.payload import ADAPTER, Payload
from fedguild.privacy.noise import Noise
from fedguild.seeding import torch_rng
from fedguild.server.engine import Task
from fedguild.server.guard import not_finite
from fedguild.server.low_rank import Factors, by_module, named, stack
from fedguild.server.method import Upload
from fedguild.server.optimizer import takes_steps
from fedguild.server.private_mean import PrivateMean
from fedguild.setup import check_config
from tests.backbones import tiny_backbone
from tests.experiment.runs import ended, save_model, small_config
from tests.methods.federation import LARGE, MIDDLE, SETTINGS, SMALL, Federation, client
from tests.oracles import guild_parts as oracle
from tests.oracles.low_rank import dense_product

CLIENTS = (client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3), client(3, SMALL, 6))
EVERYTHING = ("attention", "router", "experts")
SHAPES = [((), 32, 32), ((), 24, 40), ((), 40, 24), ((3,), 12, 30), ((), 4, 30), ((), 30, 4), ((2,), 3, 3), ((), 64, 1)]
"""Experts, outputs and inputs; of the last ones an adapter of rank 6 has more ranks than the layer."""


def guild(**options: Any) -> GuildParts:
    return GuildParts(GuildPartsSettings(**{"rank": 2, "targets": EVERYTHING, "mix": 0, "mean": "sketch", **options}))


def drawn(experts: tuple[int, ...], outputs: int, inputs: int, rank: int, seed: int) -> Factors:
    """Normal factors in fp64."""
    rng = torch_rng(seed, "factors", outputs, inputs)
    down = torch.randn(*experts, rank, inputs, generator=rng, dtype=torch.float64)
    return Factors(down, torch.randn(*experts, outputs, rank, generator=rng, dtype=torch.float64))


def product(factors: Factors) -> Tensor:
    return factors.up @ factors.down


def products(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Module -> B A in full."""
    return {module: dense_product(pair.down, pair.up) for module, pair in by_module(adapter).items()}


def loras(seed: int, rank: int = 6) -> dict[str, Tensor]:
    """LoRA on one module of each of `SHAPES`."""
    return named({str(place): drawn(*shape, rank, seed) for place, shape in enumerate(SHAPES)})


def told(adapter: Mapping[str, Tensor], seed: int = 7) -> Payload:
    """A state, or a download, with an adapter in fp32."""
    return Payload.of({ADAPTER: {name: value.float() for name, value in adapter.items()}}, {SEED: seed})


# Sketches


@pytest.mark.parametrize("rank", [1, 2, 3, 20])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 64), (64, 256), (256, 256), (8, 256), (256, 3), (5, 5), (1, 9)])
def test_sketches_have_at_most_as_many_numbers_as_lora(rank: int, outputs: int, inputs: int) -> None:
    first, second = sizes(outputs, inputs, rank)
    assert first * max(outputs, inputs) + second * min(outputs, inputs) <= rank * (outputs + inputs)
    assert 1 <= first <= second
    assert first <= min(outputs, inputs)
    assert second <= max(outputs, inputs)


def test_the_english_models_sizes_are_those_of_the_page() -> None:
    assert [sizes(*shape, 20) for shape in ((64, 256), (256, 64), (256, 256))] == [(18, 28), (18, 28), (16, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_up_to_rank_s1_nothing_is_lost(shape: tuple[tuple[int, ...], int, int]) -> None:
    """In fp64: the mean of three clients' sketches gives back the mean of their products, of rank s1 together."""
    experts, outputs, inputs = shape
    first, second = sizes(outputs, inputs, 6)
    probes = Probes.drawn(outputs, inputs, first, second, torch_rng(0, "probes"))
    ranks = [first // 3, first // 3, first - 2 * (first // 3)]
    each = [drawn(experts, outputs, inputs, rank, seed) for seed, rank in enumerate(ranks) if rank]
    numbers = torch.stack([probes.sketch(factors) for factors in each]).mean(0)
    assert numbers.shape[-1] == first * max(outputs, inputs) + second * min(outputs, inputs)
    found = probes.recovered(numbers, transposed=outputs < inputs)
    expected = product(stack([(factors, 1 / len(each)) for factors in each]))
    torch.testing.assert_close(product(found), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES)
def test_beyond_it_they_give_what_the_paper_says(shape: tuple[tuple[int, ...], int, int]) -> None:
    experts, outputs, inputs = shape
    probes = Probes.drawn(outputs, inputs, *sizes(outputs, inputs, 6), torch_rng(1, "probes"))
    change = drawn(experts, outputs, inputs, 9, 0)
    found = product(probes.recovered(probes.sketch(change), transposed=outputs < inputs)).reshape(-1, outputs, inputs)
    for matrix, whole in zip(found, product(change).reshape(-1, outputs, inputs), strict=True):
        expected = oracle.from_sketches(whole, probes.omega, probes.psi)
        torch.testing.assert_close(matrix, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_every_round_and_module_has_other_probes_and_all_clients_the_same() -> None:
    lora = drawn((), 16, 16, 2, 0)
    one, same, *others = (
        Probes.of_round(Payload({}, {SEED: seed}), round, module, lora).omega
        for seed, round, module in ((1, 1, "a"), (1, 1, "a"), (1, 2, "a"), (1, 1, "b"), (2, 1, "a"))
    )
    assert torch.equal(one, same)
    assert not any(torch.equal(one, other) for other in others)
    torch.testing.assert_close(one.mT @ one, torch.eye(one.shape[-1], dtype=torch.float64))


# A round of clients and server


def sent_of(state: Payload, trained: Mapping[str, Tensor], round: int = 1) -> dict[str, Tensor]:
    return sketched(state, state.part(ADAPTER), {name: value.float() for name, value in trained.items()}, round)


def test_a_round_of_the_server_is_the_slow_one_with_whole_matrices() -> None:
    """Three clients, of which one has no examples; linear layers and experts, narrow ones and wide ones."""
    state, weights = told(loras(0)), (3, 0, 5)
    steps = [{name: value + 0.3 * loras(9 + index)[name] for name, value in loras(0).items()} for index in range(3)]
    uploads = [
        Upload(1, client(index, LARGE, size), Payload.of({ADAPTER: sent_of(state, trained)}))
        for index, (size, trained) in enumerate(zip(weights, steps, strict=True))
    ]
    after = guild(rank=6).aggregate(state, iter(uploads))
    assert after.scalars == state.scalars
    before, trained = products(state.part(ADAPTER)), [products(each) for each in steps]
    for module, pair in by_module(after.part(ADAPTER)).items():
        old = by_module(state.part(ADAPTER))[module]
        assert (pair.down.shape, pair.up.shape) == (old.down.shape, old.up.shape)
        assert pair.down.dtype == pair.up.dtype == torch.float32
        probes = Probes.of_round(state, 1, module, old)
        outputs, inputs = before[module].shape[-2:]
        parts = (before[module], *(each[module] for each in trained), dense_product(pair.down, pair.up))
        for whole, *each, found in zip(*(part.reshape(-1, outputs, inputs) for part in parts), strict=True):
            expected = oracle.next_product(whole, each, weights, probes.omega, probes.psi, 6)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        rows = pair.down.double() @ pair.down.double().mT
        norm = old.down.double().square().sum((-2, -1)) / min(6, inputs)
        kept = torch.eye(6, dtype=torch.float64) * (torch.arange(6) < min(6, inputs))
        torch.testing.assert_close(rows, kept * norm[..., None, None], rtol=1e-4, atol=1e-4)
        columns = pair.up.double().mT @ pair.up.double()
        apart = columns - torch.diag_embed(columns.diagonal(dim1=-2, dim2=-1))
        assert float(apart.abs().max()) <= 1e-4 * float(columns.abs().max())


def test_what_nobody_changed_stays_bit_for_bit() -> None:
    """A module, and single experts; a client without a change sends what it received."""
    state = told(loras(0))
    trained = dict(state.part(ADAPTER))
    for name in ("3.lora_A", "3.lora_B", "0.lora_B"):
        trained[name] = trained[name].clone()
    trained["3.lora_A"][1] += 0.1
    trained["3.lora_B"][1] += 0.1
    trained["0.lora_B"] += 0.1
    nothing, sent = sent_of(state, state.part(ADAPTER)), sent_of(state, trained)
    assert all(torch.equal(nothing[name], value) for name, value in state.part(ADAPTER).items())
    uploads = [
        Upload(1, client(index, LARGE, 3), Payload.of({ADAPTER: upload}))
        for index, upload in enumerate((nothing, sent))
    ]
    after = guild(rank=6).aggregate(state, iter(uploads)).part(ADAPTER)
    assert not not_finite(Payload(after))
    for name, before in state.part(ADAPTER).items():
        moved = after[name].ne(before)
        if name.startswith("3."):
            assert moved.flatten(1).any(1).tolist() == [False, True, False]
        else:
            assert bool(moved.any()) == name.startswith("0.")


@pytest.mark.parametrize("uploads", ["none", "without examples"])
def test_a_round_of_nothing_leaves_the_state(uploads: str) -> None:
    state = told(loras(0))
    far = {name: value + 1 for name, value in state.part(ADAPTER).items()}
    sent = [Upload(1, client(0, LARGE, 0), Payload.of({ADAPTER: far}))] if uploads != "none" else []
    after = guild(rank=6).aggregate(state, iter(sent))
    assert all(torch.equal(after.tensors[name], value) for name, value in state.tensors.items())


def test_a_factor_of_zeros_gives_no_nan() -> None:
    adapter = {name: torch.zeros_like(value) for name, value in loras(0).items()}
    trained = {name: value + loras(1)[name] for name, value in adapter.items()}
    state = told(adapter)
    mean = changes(sent_of(state, trained), state.part(ADAPTER))
    assert not not_finite(Payload(refactored(state, mean, 1)))


def test_an_upload_has_the_form_of_guilds_and_its_client_keeps_nothing(
    olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    shapes = []
    for method in (guild(), build_method("guild", {"rank": 2, "targets": EVERYTHING})):
        federation = Federation(olmoe_backbone, method, CLIENTS, tmp_path / method.name)
        sent = federation.train(federation.start())[0]
        shapes.append({name: value.shape for name, value in sent.payload.tensors.items()})
    assert shapes[0] == shapes[1]
    assert (
        not Federation(olmoe_backbone, guild(), CLIENTS, tmp_path / "guild-parts").memory.load("client-000", 2).tensors
    )


def test_it_begins_as_guild_and_trains_what_guild_trains(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The sketches in an upload are those of the B_i A_i that Guild sends, less the B A that both received."""
    methods = guild(), build_method("guild", {"rank": 2, "targets": EVERYTHING})
    ours, theirs = (Federation(olmoe_backbone, method, CLIENTS, tmp_path / method.name) for method in methods)
    state, other = ours.start(), theirs.start()
    assert all(torch.equal(state.tensors[name], value) for name, value in other.tensors.items())
    received = state.part(ADAPTER)
    for found, expected in zip(ours.train(state), theirs.train(other), strict=True):
        pairs = by_module(expected.payload.part(ADAPTER))
        for module, sent in by_module(changes(found.payload.part(ADAPTER), received)).items():
            lora = by_module(received)[module]
            moved = stack([(pairs[module], 1.0), (lora, -1.0)])
            numbers = Probes.of_round(state, 1, module, lora).sketch(Factors(moved.down.double(), moved.up.double()))
            flat = torch.cat([sent.down.flatten(-2), sent.up.flatten(-2)], -1)[..., : numbers.shape[-1]]
            torch.testing.assert_close(flat, numbers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "switch"])
def test_other_families_train(family: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(family)
    budgets = [LARGE, SMALL] if backbone.info.top_k >= 4 else [SMALL, SMALL]
    who = [client(index, budget, 4) for index, budget in enumerate(budgets)]
    federation = Federation(backbone, guild(rank=20), who, tmp_path)
    state = federation.start()
    for round in (1, 2):
        state = federation.method.aggregate(state, iter(federation.train(state, round)))
        assert not not_finite(state)
    assert any(bool(value.any()) for name, value in state.part(ADAPTER).items() if name.endswith("lora_B"))


def test_it_goes_with_the_parts_that_mix_nothing(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    method = guild(rescaler="per_layer", balance_step=0.05, smaller_probability=0.5, basis="received")
    assert not method.is_mean
    assert method.privacy_refusal("example")
    federation = Federation(olmoe_backbone, method, CLIENTS, tmp_path)
    state = federation.start()
    for round in (1, 2):
        state = method.aggregate(state, iter(federation.train(state, round)))
    assert not not_finite(state)
    assert any(bool(value.any()) for value in state.part("selection_bias").values())


# Privacy


@pytest.mark.parametrize("unit", ["client", "example"])
def test_the_clients_noise_is_on_its_sketches(unit: Any, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """As on Guild's adapters: nothing else leaves a client, and the next state is finite."""
    method = guild()
    assert method.privacy_refusal(unit) == ""
    training = SETTINGS.model_copy(update={"optimizer": "sgd", "learning_rate": 0.1})
    public = ("sizes",) if unit == "example" else ()
    settings = PrivacySettings(unit=unit, noise_multiplier=0.5, clip=0.1, public=public)
    rules = PrivacyRules(settings, training, 2, 4, 4)
    federation = Federation(olmoe_backbone, method, CLIENTS, tmp_path)
    examples = {who.index: who.examples for who in CLIENTS}

    def private(who: Any, number: int) -> Any:
        return rules.dp_sgd(examples[who.index], Noise(b"key").child(who.index, number))

    local = LocalEngine(
        olmoe_backbone,
        federation.examples,
        training,
        federation.memory,
        seed=1,
        private=private if unit == "example" else None,
    )
    engine = PrivateEngine(local, rules, lambda task: Noise(b"key").child(task.client.index), examples.__getitem__)
    state = federation.start()
    tasks = [Task(1, who, method.download(state, federation.model, who)) for who in CLIENTS]
    uploads = []
    for delivery in engine.train(method, federation.model, tasks):
        assert delivery.upload is not None, delivery.failure
        assert {name.partition("/")[0] for name in delivery.upload.tensors} == {ADAPTER}
        moved = changes(delivery.upload.part(ADAPTER), state.part(ADAPTER))
        assert all(bool(value.any()) for value in moved.values())
        uploads.append(Upload(1, delivery.task.client, delivery.upload))
    after = method.aggregate(state, iter(uploads))
    assert not not_finite(after)


def test_the_server_can_noise_the_mean_of_the_sketches(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Without noise and with a clip that none reaches it is the mean of clients that weigh alike."""
    method, rejected = guild(), []
    federation = Federation(olmoe_backbone, method, [replace(who, examples=4) for who in CLIENTS], tmp_path)
    state = federation.start()
    uploads = federation.train(state)
    pairs = [(sent, method.download(state, federation.model, sent.client)) for sent in uploads]

    def by_server(sigma: float) -> Payload:
        mean = PrivateMean(1e6, sigma, Noise(b"key"))
        return mean.aggregate(method, state, pairs, lambda *why: rejected.append(why), round_index=1, wanted=4)

    expected = products(method.aggregate(state, iter(uploads)).part(ADAPTER))
    for module, found in products(by_server(0.0).part(ADAPTER)).items():
        torch.testing.assert_close(found, expected[module], rtol=1e-3, atol=1e-4)
    assert not not_finite(by_server(1e-7))
    assert not rejected


def test_a_secure_run_with_noise_ends_as_the_plain_one(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    settings = ["method={name: guild-parts, rank: 2, mix: 0, mean: sketch, targets: [q_proj]}", "federation.rounds=1"]
    settings += ["federation.clients=3", "privacy.unit=client", "privacy.clip=1", "privacy.noise_multiplier=0.01"]
    states = []
    for secure in ("false", "true"):
        config = small_config(model, *settings, f"federation.secure={secure}", base="guild/tiny-tasks")
        experiment.run(config, tmp_path / secure)
        states.append(products(ended(tmp_path / secure).state.part(ADAPTER)))
    for module, expected in states[0].items():
        torch.testing.assert_close(states[1][module], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


# Refusals


@pytest.mark.parametrize("options", [{"mix": 0.5}, {"choose_mix": True}, {"mix": 0.25, "mix_by": "expert"}])
def test_factors_of_two_rounds_are_not_mixed(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mean: sketch gives other factors .* set mix: 0 and choose_mix: false"):
        build_method("guild-parts", {"mix": 0, "mean": "sketch", **options})
    with pytest.raises(ConfigError, match="set mix: 0"):
        build_method("guild-parts", {"mean": "sketch"})


SKETCHES = "method={name: guild-parts, rank: 4, mix: 0, mean: sketch}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("federation.server_step=1.5", "guild-parts sends sketches .* and the server finds other factors after each"),
        ("federation.server_momentum=0.5", "guild-parts sends sketches"),
        (
            "federation.late=next_round",
            "late=next_round uses an upload in another round, but guild-parts sends sketches",
        ),
        ("evaluation.diagnosis=true", "diagnosis=true compares the clients' adapters, but guild-parts sends sketches"),
        ("federation.codec=bf16", r"federation\.codec rounds the adapter on which a client's sketches are sent"),
    ],
)
def test_what_needs_adapters_is_refused(override: str, told: str) -> None:
    check_config(load_config("guild/tiny-tasks", [SKETCHES]))
    with pytest.raises(ConfigError, match=told):
        check_config(load_config("guild/tiny-tasks", [SKETCHES, override]))
    check_config(load_config("guild-parts/tiny-tasks", [override]))


@pytest.mark.parametrize("override", ["federation.robust=median", "privacy.unit=client", "federation.secure=true"])
def test_what_guild_can_it_can(override: str) -> None:
    overrides = [override, *(["privacy.noise_multiplier=1", "privacy.noise=central"] if "privacy" in override else [])]
    check_config(load_config("guild/tiny-tasks", [SKETCHES, *overrides]))
    if "secure" not in override:
        with pytest.raises(ConfigError, match="guild-parts"):
            check_config(load_config("guild-parts/tiny-tasks", overrides))


def test_nothing_of_a_config_without_it_is_another() -> None:
    method = build_method("guild-parts", {})
    state = method.start(tiny_backbone("olmoe").info, [LARGE], torch_rng(0, "start"))
    assert not state.scalars
    assert (method.is_mean, method.not_adapters, takes_steps(method)) == (False, "", True)
    sketching = guild()
    assert (sketching.is_mean, takes_steps(sketching)) == (True, False)
    assert "mean" not in load_config("guild-parts/english-ag_news").method.options
