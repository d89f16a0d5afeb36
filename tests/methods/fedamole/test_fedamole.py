"""FedAMoLE against its equations: who holds what, what comes back, Eq. 10-14, and the next assignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.cohort import Cohort, LocalWork
from fedguild.config import tables
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.data.batches import collate
from fedguild.engines.local import LocalEngine
from fedguild.methods.fedamole import FedAMoLE, FedAMoLESettings
from fedguild.methods.fedamole.pool import COMMON, EXPERT, EXPERTS, TOKEN, Pool, held_experts
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.engine import Task
from fedguild.server.method import Upload, client_model, excerpt_of
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, SETTINGS, Federation, client
from tests.oracles import fedamole as oracle

VARIANTS = {
    "FedAMoLE": {},
    "-H": {"router": "vanilla"},
    "-S": {"shared_expert": False},
    "-R": {"assignment": "fixed"},
    "Random": {"assignment": "random"},
    "once": {"assignment": "once"},
}
QUERY, VALUE = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def fedamole(**options: object) -> FedAMoLE:
    """Five experts of rank 2 in a module; a client gets two to four."""
    return FedAMoLE(FedAMoLESettings(**{"rank": 2, "experts": 5, "experts_per_client": 4, "balance": 0.1, **options}))


def federation(backbone: Backbone, folder: Path, clients: int = 4, **options: object) -> Federation:
    return Federation(backbone, fedamole(**options), [client(i, LARGE, 4 + 3 * i) for i in range(clients)], folder)


def downloads(known: Federation, state: Payload) -> list[Payload]:
    return [known.method.download(state, known.model, who) for who in known.clients]


def held(payload: Payload) -> dict[str, tuple[int, ...]]:
    return held_experts(payload.part(EXPERTS))


def by_expert(payload: Payload, module: str, leaf: str) -> dict[int, Tensor]:
    """Expert -> its lora_A, lora_B or embedding in an upload."""
    ids = held(payload)[module]
    if leaf == "embedding":
        return dict(zip(ids, payload.part(EXPERT)[module], strict=True))
    return {number: payload.part(EXPERTS)[f"{module}.experts.{number}.{leaf}"] for number in ids}


@pytest.fixture(scope="module")
def exact() -> Backbone:
    return tiny_backbone("llama", dtype=torch.float64)


# lines 7 to 10, by hand


def by_hand(**changes: object) -> Payload:
    """One module m with 3 experts of rank 1 on a 1 x 1 layer, two clients."""
    experts = {
        "m.experts.lora_A": torch.tensor([1.0, 1.0, -9.0]).view(3, 1, 1),
        "m.experts.lora_B": torch.tensor([0.0, 0.0, 7.0]).view(3, 1, 1),
        "m.experts.embedding": torch.tensor([[0.0], [0.0], [0.5]]),
    }
    assigned = {"m": torch.tensor([[True, True, False], [False, True, True]])}
    pool = Pool(
        common={"m.router": torch.tensor([[5.0]])},
        experts=experts,
        token={"m": torch.zeros(2, 1)},
        assigned=assigned,
        before=assigned,
        known=torch.tensor([False, False]),
        seed=0,
        round=0,
    )
    return replace(pool, **changes).state()  # type: ignore[arg-type]


def sent_by_hand(index: int, router: float, token: float, experts: dict[int, tuple[float, float, float]]) -> Upload:
    """An upload: W^t, h^t, and for each expert A, B and h^e."""
    tensors = {"common/m.router": torch.tensor([[router]]), "token_embedding/m": torch.tensor([token])}
    for number, (down, up, _) in experts.items():
        tensors[f"experts/m.experts.{number}.lora_A"] = torch.tensor([[down]])
        tensors[f"experts/m.experts.{number}.lora_B"] = torch.tensor([[up]])
    tensors["expert_embedding/m"] = torch.tensor([[experts[number][2]] for number in sorted(experts)])
    return Upload(1, client(index, LARGE, 1 + 9 * index), Payload(tensors))


HAND = {"rank": 1, "experts": 3, "active_experts": 1, "experts_per_client": 2, "clients_per_expert": 1}


def test_who_sits_out_keeps_its_embedding_and_a_stranger_has_the_mean() -> None:
    """Client 0 comes in round 1, nobody in round 2 but client 1: client 0's h^t = 2 stays.

    Before its first round client 1 has the mean h^t of those known, which is 2: s is the same for both.
    """
    method = fedamole(**HAND)
    alone = method.aggregate(by_hand(), [sent_by_hand(0, 1.0, 2.0, {0: (4.0, 1.0, 1.0)})])
    assert method.relevance(Pool.of(alone)).tolist() == [[[2.0, 0.0, 1.0]] * 2]
    pool = Pool.of(method.aggregate(alone, [sent_by_hand(1, 1.0, -1.0, {1: (6.0, 4.0, -1.0)})]))
    assert pool.token["m"].tolist() == [[2.0], [-1.0]]
    assert pool.known.tolist() == [True, True]
    assert pool.experts["m.experts.lora_A"].flatten().tolist() == [4.0, 6.0, -9.0]
    assert pool.experts["m.experts.embedding"].flatten().tolist() == [1.0, -1.0, 0.5]


@pytest.mark.parametrize(("option", "divisor"), [("rank", 2.0), ("hidden", 16.0)])
def test_both_scales_of_the_relevance(option: str, divisor: float, llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path, score_scale=option)
    state = known.method.aggregate(known.start(), known.train(known.start()))
    pool = Pool.of(state)
    found = known.method.relevance(pool)
    for index, module in enumerate(pool.modules):
        expected = oracle.relevance(
            pool.token[module].tolist(), pool.experts[f"{module}.experts.embedding"].tolist(), int(divisor)
        )
        torch.testing.assert_close(found[index], torch.tensor(expected, dtype=torch.float64))


# lines 7 to 10, against the oracle


@pytest.mark.parametrize("variant", ["FedAMoLE", "-H", "-S"])
@pytest.mark.parametrize("who", [None, (1,), (0, 3)])
def test_aggregation(variant: str, who: Sequence[int] | None, llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path, **VARIANTS[variant])
    state = known.start()
    uploads = known.train(state, who=who)
    before, after = Pool.of(state), Pool.of(known.method.aggregate(state, iter(uploads)))
    assert after.experts.keys() == before.experts.keys()
    for name, rows in before.experts.items():
        stack, leaf = name.rsplit(".", 1)
        trained = {sent.client.index: by_expert(sent.payload, stack.removesuffix(".experts"), leaf) for sent in uploads}
        expected = oracle.mean_over_holders(rows, trained)
        torch.testing.assert_close(after.experts[name].double(), expected, rtol=1e-5, atol=1e-7)
    for name, value in after.common.items():
        mean = torch.stack([sent.payload.part(COMMON)[name].double() for sent in uploads]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", ["FedAMoLE", "-H", "-S", "once"])
def test_the_next_assignment_is_the_best_of_all(variant: str, llama_backbone: Backbone, tmp_path: Path) -> None:
    """Eq. 14, the softmax over clients and Definition 4.1, from the uploads on; every assignment tried."""
    known = federation(llama_backbone, tmp_path, clients=3, clients_per_expert=2, **VARIANTS[variant])
    state = known.start()
    pool = Pool.of(known.method.aggregate(state, known.train(state)))
    for module in pool.modules:
        token = pool.token[module].tolist()
        if variant != "-H":
            token = oracle.relevance(token, pool.experts[f"{module}.experts.embedding"].tolist(), width=2)
        weights = oracle.selection(token)
        best = max(oracle.value(weights, one) for one in oracle.feasible(3, 5, fewest=2, most=4, per_expert=2))
        found = tuple(tuple(column.nonzero().flatten().tolist()) for column in pool.assigned[module].T)
        assert oracle.value(weights, found) == pytest.approx(best, abs=1e-12)


# line 3: what goes down


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_client_gets_its_own_experts_and_no_other(variant: str, llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path, **VARIANTS[variant])
    state = known.start()
    pool = Pool.of(state)
    received = downloads(known, state)
    assert len({str(sorted(payload.tensors)) for payload in received}) == 4
    for who, payload in zip(known.clients, received, strict=True):
        assert {name.split("/")[0] for name in payload.tensors} == {COMMON, EXPERTS}
        for module, ids in held(payload).items():
            assert list(ids) == pool.assigned[module][who.index].nonzero().flatten().tolist()
            assert 2 <= len(ids) <= 4
            for number in ids:
                for factor in ("lora_A", "lora_B"):
                    value = payload.part(EXPERTS)[f"{module}.experts.{number}.{factor}"]
                    assert torch.equal(value, pool.experts[f"{module}.experts.{factor}"][number])
        assert all(torch.equal(value, pool.common[name]) for name, value in payload.part(COMMON).items())
        assert any(".shared." in name for name in payload.tensors) is (variant != "-S")
    counts = torch.stack([assigned.sum(0) for assigned in pool.assigned.values()])
    assert counts.unique().tolist() == [2]


def test_the_vanilla_router_has_a_row_for_each_expert(llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path, router="vanilla")
    state = known.start()
    assert Pool.of(state).common[f"{QUERY}.router"].shape == (5, 16)
    assert not any(name.endswith("embedding") for name in Pool.of(state).experts)
    pool = Pool.of(known.method.aggregate(state, known.train(state)))
    assert pool.token[QUERY].shape == (4, 5)
    assert torch.equal(known.method.relevance(pool)[pool.modules.index(QUERY)], pool.token[QUERY].double())


# lines 4 to 6: the client


@pytest.mark.parametrize("cohort_size", [1, 4])
def test_weight_decay_leaves_the_rows_of_others_experts_alone(
    cohort_size: int, llama_backbone: Backbone, tmp_path: Path
) -> None:
    known = federation(llama_backbone, tmp_path, **VARIANTS["-H"])
    state = known.start()
    decaying = SETTINGS.model_copy(update={"optimizer": "adamw", "weight_decay": 0.1, "steps": 3})
    uploads = known.train(state, settings=decaying, cohort=cohort_size)
    for sent, received in zip(uploads, downloads(known, state), strict=True):
        for module, ids in held(received).items():
            name = f"{COMMON}/{module}.router"
            same_row = (sent.payload.tensors[name] == received.tensors[name]).all(dim=1)
            assert same_row.nonzero().flatten().tolist() == [row for row in range(5) if row not in ids]


def test_the_embedding_set_is_disjoint_from_the_training(llama_backbone: Backbone, tmp_path: Path) -> None:
    """A third of 12 examples is put aside; an epoch sees the other 8."""
    method = fedamole(embedding_share=1 / 3, experts=4, clients_per_expert=1)
    known = Federation(llama_backbone, method, [client(0, LARGE, 12)], tmp_path)
    (delivery,) = known.deliver(known.start(), settings=SETTINGS.model_copy(update={"steps": None, "epochs": 1}))
    assert delivery.report.examples == 8


def test_the_balance_loss_counts(llama_backbone: Backbone, tmp_path: Path) -> None:
    """At B = 0 the NLL does not reach the router: it moves by beta alone, in proportion.

    Client 2 holds three experts there; with two, both active, the loss is constant. All its examples are
    the same, so that two accumulated passes move the router as far as one.
    """
    moved = {}
    for balance, accumulation in ((0.0, 1), (0.1, 1), (0.2, 1), (0.1, 2)):
        settings = TrainingSettings(
            optimizer="sgd",
            learning_rate=1.0,
            batch_size=2,
            gradient_accumulation_steps=accumulation,
            steps=1,
            max_grad_norm=None,
        )
        known = federation(llama_backbone, tmp_path / f"{balance} {accumulation}", balance=balance, dropout=0.0)
        known.examples[2] = known.examples[2][:1] * 10
        state = known.start()
        assert len(held(downloads(known, state)[2])[QUERY]) == 3
        sent = known.train(state, settings=settings)[2].payload.part(COMMON)
        moved[balance, accumulation] = sent[f"{QUERY}.router"] - Pool.of(state).common[f"{QUERY}.router"]
    assert moved[0.0, 1].abs().max() == 0
    assert moved[0.1, 1].norm() > 1e-5
    torch.testing.assert_close(moved[0.2, 1], 2 * moved[0.1, 1], rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(moved[0.1, 2], moved[0.1, 1], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("variant", ["FedAMoLE", "-H"])
def test_the_embeddings_are_those_of_the_trained_model(variant: str, exact: Backbone, tmp_path: Path) -> None:
    """Eq. 11 and 13: the mean over real tokens of W^t h and A_j h, h from the client's own model in evaluation."""
    known = federation(
        exact, tmp_path, clients=2, embedding_share=0.5, dropout=0.3, clients_per_expert=1, **VARIANTS[variant]
    )
    state = known.start()
    for sent in known.train(state):
        mean = mean_inputs(known, state, sent, QUERY), mean_inputs(known, state, sent, VALUE)
        for module, hidden in zip((QUERY, VALUE), mean, strict=True):
            token = sent.payload.part(COMMON)[f"{module}.router"].double() @ hidden
            torch.testing.assert_close(sent.payload.part(TOKEN)[module].double(), token)
            experts = sent.payload.part(EXPERTS)
            assert bool(sent.payload.part(EXPERT)) is (variant == "FedAMoLE")
            for row, number in enumerate(held(sent.payload)[module] if variant == "FedAMoLE" else ()):
                expected = experts[f"{module}.experts.{number}.lora_A"].double() @ hidden
                torch.testing.assert_close(sent.payload.part(EXPERT)[module][row].double(), expected)


def mean_inputs(known: Federation, state: Payload, sent: Upload, module: str) -> Tensor:
    """The mean input of a module over the client's embedding set, one row at a time on its own model."""
    own = client_model(known.method, state, known.model, sent.client, known.memory.load(sent.client.name, 2))
    rows: list[Tensor] = []
    with SlotModel(known.backbone, [own.plan]) as model:
        model.load(0, own.tensors)
        work = LocalWork(sent.client, known.examples[sent.client.index], Payload(), Payload())
        cohort = Cohort(model, [work], SETTINGS, round_index=1, seed=1)
        taken = cohort.hold_out(0, 0.5, 200)
        assert 1 < len(taken) < sent.client.examples
        layer = known.backbone.model.get_submodule(module)
        handle = layer.register_forward_pre_hook(lambda _, args: rows.append(args[0].flatten(0, -2).detach().clone()))
        for row in taken:
            with torch.no_grad():
                model.token_losses(collate([[row]], 0))
        handle.remove()
    return torch.cat(rows).mean(0)


# privacy


def test_noise_on_the_embeddings_and_on_nothing_else(llama_backbone: Backbone, tmp_path: Path) -> None:
    uploads = []
    for eta in (None, 10.0):
        known = federation(llama_backbone, tmp_path / str(eta), privacy_eta=eta)
        uploads.append(known.train(known.start()))
    for plain, noisy in zip(*uploads, strict=True):
        for name, value in plain.payload.tensors.items():
            found = noisy.payload.tensors[name]
            is_embedding = name.split("/")[0] in (TOKEN, EXPERT)
            assert torch.equal(found, value) is not is_embedding, name
            if is_embedding:
                assert (found.norm(dim=-1) <= value.norm(dim=-1) * (1 + 1e-5)).all()


def test_the_noise_differs_by_client_and_round(llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path, privacy_eta=1e-3, privacy_bound=1.0)
    state = known.start()
    directions = [
        sent.payload.part(TOKEN)[QUERY] for round in (1, 2) for sent in known.train(state, round, learning_rate=0.0)
    ]
    assert len({tuple(one.tolist()) for one in directions}) == 8
    again = [sent.payload.part(TOKEN)[QUERY] for sent in known.train(state, 1, learning_rate=0.0)]
    assert all(torch.equal(one, other) for one, other in zip(again, directions[:4], strict=True))


def test_the_noise_is_drawn_from_a_secret_where_there_is_one(llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path, privacy_eta=1e-3)
    state = known.start()
    who = known.clients[0]
    task = Task(1, who, known.method.download(state, known.model, who))
    found = []
    for secret in (None, 1, 2, 2**255 + 1):
        engine = LocalEngine(known.backbone, known.examples, SETTINGS, known.memory, seed=1)
        engine.trainer = replace(engine.trainer, noise_seed=secret)
        (delivery,) = engine.train(known.method, known.model, [task])
        assert delivery.upload is not None
        found.append(delivery.upload.tensors)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), "by default it is the run's seed"
        is_embedding = name.split("/")[0] in (TOKEN, EXPERT)
        assert all(torch.equal(value, other[name]) is not is_embedding for other in found[2:]), name


# rounds and variants


def assignments(known: Federation, rounds: int, learning_rate: float = 0.05) -> list[dict[str, Tensor]]:
    """The assignment before each round, and after the last."""
    state = known.start()
    found = [Pool.of(state).assigned]
    for number in range(1, rounds + 1):
        state = known.method.aggregate(state, known.train(state, number, learning_rate=learning_rate))
        found.append(Pool.of(state).assigned)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[module]) for module, value in one.items())


def test_the_variants_differ_in_how_they_assign(llama_backbone: Backbone, tmp_path: Path) -> None:
    """All begin alike; -R stays, Random changes whatever the clients learn, FedAMoLE follows, or did once."""
    found = {
        name: assignments(federation(llama_backbone, tmp_path / name, **VARIANTS[name]), 2)
        for name in ("FedAMoLE", "-R", "Random", "once")
    }
    untrained = assignments(federation(llama_backbone, tmp_path / "0", assignment="random"), 2, learning_rate=0.0)
    assert all(same(rounds[0], found["-R"][0]) for rounds in found.values())
    assert same(found["-R"][2], found["-R"][0])
    assert not same(found["FedAMoLE"][1], found["-R"][0])
    assert not same(found["Random"][1], found["Random"][2])
    assert same(found["Random"][1], untrained[1])
    assert not same(found["FedAMoLE"][1], found["Random"][1])
    assert same(found["once"][1], found["FedAMoLE"][1])
    assert same(found["once"][2], found["once"][1])
    assert not same(found["FedAMoLE"][2], found["FedAMoLE"][1])


def test_a_clients_own_model_is_the_one_it_trained(llama_backbone: Backbone, tmp_path: Path) -> None:
    """With its memory what it uploaded, with the experts it had; without, what it would receive next."""
    known = federation(llama_backbone, tmp_path)
    state = known.start()
    uploads = known.train(state)
    after = known.method.aggregate(state, uploads)
    assert known.method.deploy(after, known.model, LARGE) is None
    for sent, received in zip(uploads, downloads(known, after), strict=True):
        memory = known.memory.load(sent.client.name, 2)
        for payload, source in ((memory, sent.payload), (Payload(), received)):
            excerpt = excerpt_of(known.method, after, known.model, sent.client)
            mine = client_model(known.method, excerpt, known.model, sent.client, payload)
            ids = dict(mine.plan.parts[0].held)
            assert ids == held(source)
            for name, value in source.part(COMMON).items():
                assert torch.equal(mine.tensors[name], value)
            for module, own in ids.items():
                stack = mine.tensors[f"{module}.experts.lora_B"]
                rows = [source.part(EXPERTS)[f"{module}.experts.{number}.lora_B"] for number in own]
                assert torch.equal(stack[: len(own)], torch.stack(rows))
                assert stack.shape[0] == 4
                assert not stack[len(own) :].any()


def test_observations(llama_backbone: Backbone, tmp_path: Path) -> None:
    known = federation(llama_backbone, tmp_path)
    state = known.method.aggregate(known.start(), known.train(known.start()))
    after = known.method.aggregate(state, known.train(state, 2))
    pool, before = Pool.of(after), Pool.of(state)
    probability, held_next, kept, traced, drift = known.method.observe(after, known.model)
    assert probability.name == f"selection probability, {VALUE}"
    assert list(probability.values.shape) == [len(probability.rows), len(probability.columns)] == [5, 4]
    torch.testing.assert_close(probability.values.sum(1), torch.ones(5, dtype=torch.float64))
    assert held_next.values[list(held_next.rows).index(QUERY)].tolist() == pool.assigned[QUERY].sum(1).tolist()
    for module, share in zip(kept.rows, kept.values.tolist(), strict=True):
        choices = [(i, j) for i, j in before.assigned[module].nonzero().tolist() if pool.assigned[module][i, j]]
        assert share == pytest.approx(len(choices) / 10)
    assert 0 < float(kept.values.mean()) < 1
    assert traced.name == f"experts of client 0, {VALUE}"
    assert list(traced.rows) == ["client 0"]
    assert traced.columns == probability.rows
    assert traced.values.tolist() == [before.assigned[VALUE][0].float().tolist()]
    assert drift.name == "router drift"
    for module, moved in zip(drift.rows, drift.values.tolist(), strict=True):
        old, new = (one.common[f"{module}.router"].double() for one in (before, pool))
        assert moved == pytest.approx(float(((new - old) ** 2).sum().sqrt() / (old**2).sum().sqrt()), rel=1e-5)
        assert moved > 0
    assert len(known.method.observe(known.start(), known.model)) == 4
    for table in (table for table in tables() if table.name.startswith("fedamole/")):
        assert set(table.load().shows) <= {kept.name, drift.name}, table.name


# bad input


def test_a_federation_without_an_assignment(llama_backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 x 2 is less than 6 x 2(.|\n)*clients_per_expert to at least 3"):
        federation(llama_backbone, tmp_path, clients=6).start()
    known = federation(llama_backbone, tmp_path, clients=6, scale_clients_per_expert=True)
    assert {int(n) for d in Pool.of(known.start()).assigned.values() for n in d.sum(0)} == {3}


def test_more_active_experts_than_a_client_may_hold(llama_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="5 active experts"):
        fedamole(active_experts=5).plan(llama_backbone.info, LARGE)
