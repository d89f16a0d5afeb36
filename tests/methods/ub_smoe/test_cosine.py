"""The cosine of Table 8 against gradients of a plain transformers model, expert by expert."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.methods.ub_smoe.cosine import held_out_cosines
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import EXPERTS, TOP_K, random_adapter, tiny_backbone, tiny_model
from tests.client.clients import SETTINGS, Client, make_clients, make_cohort
from tests.oracles.flame import count_activations
from tests.oracles.lora import MergedModel

TARGETS = ("attention", "experts")


@pytest.fixture(scope="module")
def exact():
    return tiny_backbone("olmoe", dtype=torch.float64)


def clients_of(exact, active: tuple[int, ...]) -> list[Client]:
    """Clients with a few rows each, rank 2, and 1 to 4 of 4 active experts."""
    clients = []
    for k, other in zip(active, make_clients(exact, dropout=False), strict=False):
        plan = AdapterPlan((Lora(2, 1.0, TARGETS),), k)
        start = random_adapter(exact.info, plan, other.info.index)
        clients.append(Client(other.info, plan, other.examples[:3], start))
    return clients


def pseudo_of(client: Client, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    names = [name for name in client.start if ".experts." in name]
    return {name: torch.randn(client.start[name].shape, generator=rng, dtype=torch.float64) for name in names}


def slow_cosines(client: Client, pseudo: dict[str, Tensor], info) -> tuple[list[float], list[int]]:
    """Example by example: inactive at K_c by the router's logits, the true gradient at the model's own 4."""
    plain = tiny_model("olmoe", dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in client.start.items()}
    logits: list[Tensor] = [torch.empty(0)] * len(info.moe)
    for index, moe in enumerate(info.moe):

        def note(_, __, output, index=index) -> None:
            logits[index] = output[0].detach()

        plain.get_submodule(moe.router).register_forward_hook(note)
    true = {name: torch.zeros_like(value) for name, value in pseudo.items()}
    for row in client.examples:
        with torch.no_grad():
            MergedModel(plain, info, client.plan, leaves).logits(row.input_ids)
        counts = [count_activations(rows, [True] * len(rows), client.plan.active_experts or TOP_K) for rows in logits]
        everything = MergedModel(plain, info, AdapterPlan((Lora(2, 1.0, TARGETS),), TOP_K), leaves)
        loss = everything.losses(row.input_ids, row.prompt_length).sum()
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        for moe, count in zip(info.moe, counts, strict=True):
            for name in true:
                if name.startswith(f"{moe.experts}."):
                    for expert in range(EXPERTS):
                        if count[expert] == 0:
                            true[name][expert] += grads[name][expert]
    totals, values, measured = [0.0, 0.0, 0.0], [], []
    for moe in info.moe:
        names = [name for name in pseudo if name.startswith(f"{moe.experts}.")]
        sums, experts = [0.0, 0.0, 0.0], 0
        for expert in range(EXPERTS):
            right = torch.cat([true[name][expert].flatten() for name in names])
            if right.any():
                left = torch.cat([pseudo[name][expert].flatten() for name in names])
                pair = (float(left @ right), float(left @ left), float(right @ right))
                sums, experts = [a + b for a, b in zip(sums, pair, strict=True)], experts + 1
        totals = [a + b for a, b in zip(totals, sums, strict=True)]
        values.append(sums[0] / math.sqrt(sums[1] * sums[2]) if experts else 0.0)
        measured.append(experts)
    whole = totals[0] / math.sqrt(totals[1] * totals[2]) if sum(measured) else 0.0
    return [*values, whole], [*measured, sum(measured)]


def measure(exact, clients: list[Client], pseudo: list[dict[str, Tensor]]):
    with SlotModel(exact, [client.plan for client in clients]) as model:
        cohort = make_cohort(model, clients, SETTINGS)
        found = held_out_cosines(cohort, [client.examples for client in clients], pseudo)
        assert all(trainable.stored.grad is None for trainable in cohort.trainables.values())
        assert [plan.active_experts for plan in model.plans] == [client.plan.active_experts for client in clients]
        assert untouched(cohort, clients)
    return found


def untouched(cohort: Cohort, clients: list[Client]) -> bool:
    return all(
        torch.equal(cohort.read(slot)[name], value)
        for slot, client in enumerate(clients)
        for name, value in client.start.items()
    )


def test_every_slot_equals_the_slow_version(exact) -> None:
    clients = clients_of(exact, (1, 2, 4))
    pseudo = [pseudo_of(client, seed) for seed, client in enumerate(clients)]
    for client, guess, found in zip(clients, pseudo, measure(exact, clients, pseudo), strict=True):
        values, measured = slow_cosines(client, guess, exact.info)
        assert found.measured.tolist() == measured
        assert found.values.tolist() == pytest.approx(values, rel=1e-4, abs=1e-6)
    assert measured[-1] == 0  # nothing is inactive and reachable for whoever has all active experts


@pytest.mark.parametrize("has", ["nothing", "zeros"])
def test_without_a_pseudo_gradient_nothing_is_measured(has: str, exact) -> None:
    (client,) = clients_of(exact, (1,))
    zeros = {name: torch.zeros_like(value) for name, value in pseudo_of(client, 0).items()}
    (found,) = measure(exact, [client], [zeros if has == "zeros" else {}])
    assert not found.measured.any()
    assert not found.values.any()
