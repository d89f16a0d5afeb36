"""FDLoRA: the outer step, when the personal adapter follows, and the fusion."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ConfigError, UploadError
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded
from fedguild.methods.fdlora import WEIGHTS, FDLoRA, FDLoRASettings
from fedguild.model.backbone import Backbone
from fedguild.server.method import Roster, client_model
from fedguild.server.validation import check_upload
from tests.backbones import tiny_model
from tests.methods.federation import LARGE, SMALL, Federation, client, random_tensors, upload
from tests.oracles import fdlora as oracle
from tests.oracles.lora import MergedModel


def method(**options: object) -> FDLoRA:
    return FDLoRA(FDLoRASettings(**{"rank": 2, "dropout": 0.0, "held_out": 0.4, **options}))


def personal(memory: Payload) -> dict[str, Tensor]:
    return memory.part("personal")


def weights(memory: Payload) -> list[float]:
    return memory.tensors[WEIGHTS].tolist()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], value) for name, value in expected.items())


# The server


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.5), (0.7, 0.9), (1.0, 0.0)])
def test_the_outer_step(rate: float, momentum: float, clients: int, olmoe_backbone: Backbone) -> None:
    """Against the slow loop and against torch's SGD, whose Nesterov is the only one with a name."""
    server, model = method(outer_learning_rate=rate, outer_momentum=momentum), olmoe_backbone.info
    plan = server.plan(model, LARGE)
    state = server.start(model, Roster([LARGE]), torch.Generator().manual_seed(0))
    first = [upload(client(i, LARGE), adapter=random_tensors(model, plan, i)) for i in range(clients)]
    state = server.aggregate(state, first)
    shared = {name: value.flatten().tolist() for name, value in state.part("adapter").items()}
    velocity = {name: [0.0] * len(value) for name, value in shared.items()}
    parameters = {name: torch.tensor(value, dtype=torch.float64) for name, value in shared.items()}
    sgd = torch.optim.SGD(parameters.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    for round in range(3):
        sent = [
            upload(client(i, LARGE), adapter=random_tensors(model, plan, 10 * round + i + 10)) for i in range(clients)
        ]
        state = server.aggregate(state, iter(sent))
        for name, before in shared.items():
            trained = [part.payload.tensors[f"adapter/{name}"].flatten() for part in sent]
            parameters[name].grad = parameters[name] - torch.stack(trained).double().mean(0)
            shared[name], velocity[name] = oracle.outer_step(
                before, [value.tolist() for value in trained], velocity[name], rate, momentum
            )
        sgd.step()
        for name, expected in shared.items():
            found = state.tensors[f"adapter/{name}"].flatten()
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.double(), parameters[name], rtol=1e-5, atol=1e-5)


# The personal adapter


def test_the_personal_adapter_follows_every_h_rounds(llama_backbone: Backbone, tmp_path: Path) -> None:
    """H = 2, client 1 sampled from round 2 on: theta_p is of rounds 1, 1, 3, 3, 5, and 2, 3, 3, 5."""
    server = method(synchronise_every=2)
    federation = Federation(llama_backbone, server, [client(0, LARGE, 5), client(1, SMALL, 4)], tmp_path)
    state, sent = federation.start(), {}
    taken_from = {1: (1, None), 2: (1, 2), 3: (3, 3), 4: (3, 3), 5: (5, 5)}
    for round, sources in taken_from.items():
        for part in federation.train(state, round, who=(0,) if round == 1 else (0, 1)):
            sent[round, part.client.index] = part.payload.part("adapter")
            expected = server.schema(federation.model, part.client, Payload())
            check_upload(part.payload, expected)
        for index, source in enumerate(sources):
            memory = federation.memory.load(federation.clients[index].name, round + 1)
            if source is None:
                assert not memory.tensors
            else:
                assert same(personal(memory), sent[source, index])
    assert not same(sent[1, 0], sent[2, 0])


def test_after_stage_one_a_client_has_its_personal_adapter(llama_backbone: Backbone, tmp_path: Path) -> None:
    server = method()
    federation = Federation(llama_backbone, server, [client(0, LARGE), client(1, LARGE)], tmp_path)
    sent = federation.train(federation.start())
    state = server.aggregate(federation.start(), sent)
    for part in sent:
        memory = federation.memory.load(part.client.name, 2)
        assert weights(memory) == [0.0, 1.0]
        own = client_model(server, state, federation.model, part.client, memory)
        assert same(dict(own.tensors), part.payload.part("adapter"))


# The fusion


def second_round(backbone: Backbone, folder: Path, who=None, **options: object) -> tuple[Federation, Payload, list]:
    """Runs stage 1 and a round of stage 2; returns the state between them and the second round's uploads."""
    clients = [client(0, LARGE, 6), client(1, SMALL, 1), client(2, LARGE, 9)]
    federation = Federation(backbone, method(**options), clients, folder)
    state = federation.method.aggregate(federation.start(), federation.train(federation.start()))
    return federation, state, federation.train(state, 2, who=who)


class Recording:
    """A search that remembers what it tried and what it was told."""

    def __init__(self, search) -> None:
        self.search = search
        self.told: list[tuple[tuple[float, float], float]] = []

    def ask(self):
        return self.search.ask()

    def tell(self, candidate, value: float) -> None:
        self.told.append((tuple(candidate.value.tolist()), value))
        self.search.tell(candidate, value)

    def provide_recommendation(self):
        return self.search.provide_recommendation()


def test_the_search_against_merged_models(
    llama_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tried w gets the objective that a whole model with the fused weights has, and the best is kept."""
    searches: list[Recording] = []
    few_shot: list[list[Encoded]] = []
    original, search = FDLoRA._optimizer, FDLoRA._search

    def recording(self, cohort, who):
        searches.append(Recording(original(self, cohort, who)))
        return searches[-1]

    def listening(self, cohort, own, examples):
        few_shot.extend(examples)
        return search(self, cohort, own, examples)

    monkeypatch.setattr(FDLoRA, "_optimizer", recording)
    monkeypatch.setattr(FDLoRA, "_search", listening)
    federation, state, _ = second_round(llama_backbone, tmp_path, fusion_budget=6, regularisation=0.3)
    plan, plain = federation.method.plan(federation.model, LARGE), tiny_model("llama")
    shared = state.part("adapter")
    for who, held_out, made in zip(federation.clients, few_shot, searches, strict=True):
        memory = federation.memory.load(who.name, 3)
        assert len(made.told) == 6
        for tried, value in made.told:
            fused = {
                name: torch.tensor(
                    oracle.fuse(tried, old.flatten().tolist(), personal(memory)[name].flatten().tolist())
                )
                for name, old in shared.items()
            }
            merged = MergedModel(plain, federation.model, plan, {n: v.view_as(shared[n]) for n, v in fused.items()})
            tokens = [x for row in held_out for x in merged.losses(row.input_ids, row.prompt_length).tolist()]
            assert value == pytest.approx(oracle.objective(tokens, tried, 0.3), rel=1e-4)
        best, _ = min(made.told, key=lambda pair: pair[1])
        assert weights(memory) == pytest.approx(best, abs=1e-6)
    assert len({tuple(weights(federation.memory.load(who.name, 3))) for who in federation.clients}) > 1


def test_the_search_begins_at_nothing_and_stays_in_its_box(llama_backbone: Backbone, tmp_path: Path) -> None:
    federation, *_ = second_round(llama_backbone, tmp_path, fusion_budget=1)
    assert weights(federation.memory.load(federation.clients[0].name, 3)) == [0.0, 0.0]
    federation, *_ = second_round(llama_backbone, tmp_path / "long", fusion_budget=25)
    assert all(abs(w) <= 1.5 for who in federation.clients for w in weights(federation.memory.load(who.name, 3)))


def test_the_fusion_overwrites_nothing(llama_backbone: Backbone, tmp_path: Path) -> None:
    """However long the search, what is uploaded and what is kept are the trained adapters."""
    runs = [second_round(llama_backbone, tmp_path / str(budget), fusion_budget=budget) for budget in (1, 9)]
    for (federation, _, sent), (other, _, resent) in [(runs[0], runs[1])]:
        for first, second in zip(sent, resent, strict=True):
            assert same(first.payload.part("adapter"), second.payload.part("adapter"))
            memories = [known.memory.load(first.client.name, 3) for known in (federation, other)]
            assert same(*map(personal, memories))


def test_the_few_shot_examples_are_not_trained_on(llama_backbone: Backbone, tmp_path: Path) -> None:
    """0.4 of 9 examples would be 4, but one batch is 2; they are the same in every round."""
    seen = []
    server = method(held_out=0.4, fusion_batches=1)
    original = server._search

    def recording(cohort, own, few_shot):
        seen.append((cohort.work[0].examples, few_shot[0]))
        return original(cohort, own, few_shot)

    server._search = recording  # type: ignore[method-assign]
    federation = Federation(llama_backbone, server, [client(0, LARGE, 9)], tmp_path)
    state = federation.start()
    for round in (1, 2, 3):
        federation.train(state, round)
    (train, few_shot), again = seen
    assert (len(train), len(few_shot)) == (7, 2)
    assert {row.input_ids for row in train}.isdisjoint(row.input_ids for row in few_shot)
    assert again[1] == few_shot


# Bad input


def test_without_nevergrad(llama_backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    with pytest.raises(ConfigError, match=r"nevergrad, which is not installed\.\n.*fedguild\[fusion\]"):
        method().start(llama_backbone.info, Roster([LARGE]), torch.Generator())


def test_a_client_that_diverges_is_rejected_and_keeps_what_it_had(llama_backbone: Backbone, tmp_path: Path) -> None:
    """Its losses are no numbers, which must not stop the search of the others."""
    server = method(synchronise_every=1)
    federation = Federation(llama_backbone, server, [client(0, LARGE), client(1, LARGE)], tmp_path)
    state = server.aggregate(federation.start(), federation.train(federation.start()))
    before = federation.memory.load(federation.clients[0].name, 2)
    (sent, _) = federation.train(state, 2, learning_rate=float("nan"))
    with pytest.raises(UploadError, match="NaN or infin"):
        check_upload(sent.payload, server.schema(federation.model, sent.client, Payload()))
    assert same(dict(federation.memory.load(federation.clients[0].name, 3).tensors), dict(before.tensors))
