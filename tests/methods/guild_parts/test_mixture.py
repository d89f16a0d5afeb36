"""A client's own model against part d: the mixture by expert, and the lambda that held-out examples choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.data.batches import Encoded, collate
from fedguild.methods.guild_parts import GuildParts, GuildPartsSettings
from fedguild.methods.guild_parts.mixture import MIXES, mixture
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.payload import ADAPTER, Payload
from fedguild.seeding import numpy_rng
from fedguild.server.method import Deployment
from tests.methods.federation import LARGE, SMALL, Federation, client
from tests.oracles import guild_parts as oracle

EXPERTS, QUERY = "model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj.lora_A"
CLIENTS = (client(0, LARGE, 6), client(1, SMALL, 5), client(2, SMALL, 7))


FIRST_MIX = 0.3


def guild(**options: Any) -> GuildParts:
    given = {"rank": 2, "choose_mix": True, "mix": FIRST_MIX, **options}
    return GuildParts(GuildPartsSettings(**{**({"held_out": 0.4} if given["choose_mix"] else {}), **given}))


def some(seed: int) -> dict[str, Tensor]:
    """A LoRA of four experts and of a query projection."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {f"{EXPERTS}.up_proj.lora_A": (4, 2, 3), f"{EXPERTS}.up_proj.lora_B": (4, 5, 2), QUERY: (2, 3)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_every_number_lies_where_line_7_says(mix: float, by_expert: bool) -> None:
    """With shares of an expert that is not used, used half as much as evenly, evenly, and more."""
    received, trained, shares = some(1), some(2), [0.0, 0.125, 0.25, 0.625]
    found = mixture(received, trained, mix, {EXPERTS: torch.tensor(shares)} if by_expert else None)
    for name, value in found.items():
        for place in range(value.numel()):
            expert = place // (value.numel() // 4) if by_expert and name.startswith(EXPERTS) else None
            share = None if expert is None else shares[expert]
            expected = oracle.mixed(
                float(received[name].flatten()[place]), float(trained[name].flatten()[place]), mix, share, 4
            )
            assert float(value.flatten()[place]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_ends_are_the_two_models_bit_for_bit() -> None:
    received, trained = some(1), some(2)
    for mix, expected in ((0.0, received), (1.0, trained)):
        found = mixture(received, trained, mix)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def held_out(federation: Federation, index: int, share: float) -> list[Encoded]:
    """The examples that a client holds out, drawn as `Cohort.hold_out` does."""
    examples = federation.examples[index]
    order = numpy_rng(1, "held out", index).permutation(len(examples)).tolist()
    return [examples[place] for place in order[: round(share * len(examples))]]


def loss(federation: Federation, deployment: Deployment, examples: list[Encoded]) -> float:
    """The mean over all response tokens, example by example."""
    losses: list[float] = []
    with SlotModel(federation.backbone, [deployment.plan]) as model, torch.no_grad():
        model.load(0, deployment.tensors)
        for example in examples:
            losses += model.token_losses(collate([[example]], 0)).tolist()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("mix_by", ["client", "expert"])
def test_a_client_chooses_the_mixture_of_the_least_loss(mix_by: Any, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Each round's choice is of the model that the client had after the round before."""
    federation = Federation(olmoe_backbone, guild(mix_by=mix_by), CLIENTS, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    chosen = set()
    for round in (1, 2, 3, 4):
        before = {who.index: federation.memory.load(who.name, round) for who in CLIENTS}
        uploads = federation.train(state, round, learning_rate=0.02 * 2**round)
        for who in CLIENTS:
            found = float(federation.memory.load(who.name, round + 1).tensors["mix"])
            if round == 1:
                assert found == pytest.approx(FIRST_MIX)
                continue
            kept = before[who.index]

            excerpt = method.excerpt(state, model, who)

            def at(mix: float, who: Any = who, kept: Payload = kept, excerpt: Payload = excerpt) -> float:
                memory = Payload({**kept.tensors, "mix": torch.tensor(mix)})
                own = method.personalize(excerpt, model, who, memory)
                return loss(federation, own, held_out(federation, who.index, 0.4))

            losses = sorted(at(mix) for mix in MIXES)
            assert losses[1] - losses[0] > 1e-6, "two mixtures are as good as each other: the case tells nothing"
            assert found == oracle.best_mix(at)
            chosen.add(found)
        state = method.aggregate(state, iter(uploads))
    assert len(chosen) > 1


def test_what_is_held_out_is_not_trained_on(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Other words in the held-out examples change what is chosen at most; with a fixed lambda nothing is held out."""
    for options, same in (({}, True), ({"choose_mix": False}, False)):
        uploads = []
        for name in ("as they are", "others"):
            federation = Federation(olmoe_backbone, guild(**options), CLIENTS, tmp_path / f"{name}{same}")
            if name == "others":
                for who in CLIENTS:
                    mine = held_out(federation, who.index, 0.4)
                    federation.examples[who.index] = [
                        Encoded(tuple(3 + token % 7 for token in row.input_ids), 2) if row in mine else row
                        for row in federation.examples[who.index]
                    ]
            uploads.append(federation.train(federation.start()))
        for one, other in zip(*uploads, strict=True):
            equal = [torch.equal(value, other.payload.tensors[name]) for name, value in one.payload.tensors.items()]
            assert all(equal) == same


def test_a_client_that_never_took_part_has_the_global_model(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, guild(), CLIENTS, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    state = method.aggregate(state, iter(federation.train(state, 1, (0, 1))))
    own = method.personalize(method.excerpt(state, model, CLIENTS[2]), model, CLIENTS[2], Payload())
    expected = method.deploy(state, model, SMALL)
    assert expected is not None
    assert own.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(own.tensors[name], value) for name, value in expected.tensors.items())


def test_a_mixture_has_the_clients_own_scale_and_the_servers_phi(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, guild(mix=0.25, choose_mix=False), CLIENTS, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    state = method.aggregate(state, iter(federation.train(state)))
    for who in CLIENTS:
        memory = federation.memory.load(who.name, 2)
        own = method.personalize(method.excerpt(state, model, who), model, who, memory)
        for name, value in own.tensors.items():
            if name.endswith("output_scale"):
                assert torch.equal(value, memory.part("rescaler")[name])
            elif name.endswith("selection_bias"):
                assert torch.equal(value, state.part("selection_bias")[name])
            else:
                theta, trained = state.part(ADAPTER)[name], memory.part(ADAPTER)[name]
                torch.testing.assert_close(value, theta + 0.25 * (trained - theta))
