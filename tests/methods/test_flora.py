"""FLoRA: the stack is the exact average of the products, is merged, and every round starts afresh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.fresh_adapter import ADAPTER_SEED
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.methods.flexlora import FlexLoRA, FlexLoRASettings
from fedguild.methods.flora import Flora, FloraSettings
from fedguild.methods.florist import Florist, FloristSettings
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.server.low_rank import by_module
from fedguild.server.merge_history import echo, merges
from fedguild.server.method import Roster, Upload
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, SETTINGS, SMALL, Federation, client, random_tensors
from tests.oracles.flora import exact_change
from tests.oracles.low_rank import dense_product
from tests.oracles.merges import change_of, changed_weights

EVERYTHING = ("attention", "router", "experts")
QUERY = "model.layers.0.self_attn.q_proj"
BUDGETS = (Budget("two", 4, 2), Budget("three", 4, 3), Budget("five", 4, 5))


def flora(**options: object) -> Flora:
    return Flora(FloraSettings(**{"alpha": 6.0, "targets": EVERYTHING, **options}))


def start(method: Flora, model: ModelInfo) -> Payload:
    return method.start(model, Roster(BUDGETS), torch_rng(0, "start"))


def trained(method: Flora, state: Payload, model: ModelInfo, who: list[ClientInfo], **changes: Tensor) -> list[Upload]:
    """Uploads of random factors, at every client's own rank."""
    return [
        Upload(
            1,
            one,
            Payload(
                with_part(ADAPTER, {**random_tensors(model, method.plan(model, one.budget), seed), **changes}),
                echo(method.download(state, model, one)),
            ),
        )
        for seed, one in enumerate(who)
    ]


def clients_of(*examples: int) -> list[ClientInfo]:
    return [client(index, budget, count) for index, (budget, count) in enumerate(zip(BUDGETS, examples, strict=False))]


def modules_of(upload: Upload) -> list[str]:
    return list(by_module(upload.payload.part(ADAPTER)))


@pytest.mark.parametrize("scale", ["own", 2.0])
def test_the_change_is_the_exact_average_of_the_products(olmoe_backbone: Backbone, scale: float | str) -> None:
    """Over mixed ranks and scales, of linear layers, routers and every expert."""
    method, model = flora(scale=scale), olmoe_backbone.info
    state, who = start(method, model), clients_of(2, 5, 8)
    uploads = trained(method, state, model, who)
    after = method.aggregate(state, iter(uploads))
    scales = [scale if isinstance(scale, float) else 6.0 / one.budget.rank for one in who]
    for module in modules_of(uploads[0]):
        clients = [upload.payload.part(ADAPTER) for upload in uploads]
        expected = exact_change(clients, [2, 5, 8], scales, module)
        found = change_of(merges(after), module)
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_is_flexlora_at_full_rank_and_florist_at_threshold_one(olmoe_backbone: Backbone) -> None:
    method, model = flora(), olmoe_backbone.info
    state, who = start(method, model), clients_of(2, 5, 8)
    uploads = trained(method, state, model, who)
    flexlora = FlexLoRA(FlexLoRASettings(rank=10, alpha=6.0, targets=EVERYTHING))
    whole = flexlora.aggregate(flexlora.start(model, Roster(BUDGETS), torch_rng(0, "start")), iter(uploads))
    florist = Florist(FloristSettings(threshold=1.0, alpha=6.0, targets=EVERYTHING))
    pair = florist.aggregate(florist.start(model, Roster(BUDGETS), torch_rng(0, "start")), iter(uploads))
    after = method.aggregate(state, iter(uploads))
    for module in modules_of(uploads[0]):
        expected = change_of(merges(after), module)
        assert expected is not None
        product = dense_product(*(whole.part("adapter")[f"{module}.{factor}"] for factor in ("lora_A", "lora_B")))
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(change_of(merges(pair), module), expected, rtol=1e-4, atol=1e-4)


def test_every_client_starts_afresh_and_unlike_any_other(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """By a scalar alone; with B = 0, so that nothing is changed before the first step."""
    who = [client(0, LARGE), client(1, LARGE), client(2, SMALL)]
    federation = Federation(olmoe_backbone, flora(), who, tmp_path)
    state = federation.start()
    drawn = []
    for round in (1, 2):
        seeds = [federation.method.download(state, federation.model, one).scalars[ADAPTER_SEED] for one in who]
        assert len(set(seeds)) == len(seeds)
        uploads = federation.train(state, round, learning_rate=0.0)
        for sent in uploads:
            factors = by_module(sent.payload.part(ADAPTER))
            assert all(not pair.up.any() and pair.down.any() for pair in factors.values())
            drawn.append(factors[QUERY].down[0])
        state = federation.method.aggregate(state, uploads)
        assert not any(change_of(merges(state), module).any() for module in modules_of(uploads[0]))  # type: ignore[union-attr]
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn)
    again = Federation(tiny_backbone("olmoe"), flora(), who, tmp_path / "again")
    same = again.train(again.start(), learning_rate=0.0)
    assert torch.equal(by_module(same[0].payload.part(ADAPTER))[QUERY].down[0], drawn[0])


def first_loss(backbone: Backbone, method: Flora, state: Payload, folder: Path) -> float:
    """A client's loss over its examples before it changes anything."""
    federation = Federation(backbone, method, [client(0, LARGE, 4)], folder)
    (delivery,) = federation.deliver(state, 9, settings=SETTINGS.model_copy(update={"learning_rate": 0.0}))
    return delivery.report.loss


def test_a_round_trains_on_what_the_rounds_before_merged(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """A client starts at the loss of a model that has all rounds' changes in its weights."""
    method = flora()
    federation = Federation(olmoe_backbone, method, [client(0, LARGE, 4), client(1, SMALL, 5)], tmp_path)
    published = state = federation.start()
    for round in range(1, 4):
        state = method.aggregate(state, federation.train(state, round))
    deployment = method.deploy(state, federation.model, LARGE)
    assert deployment is not None
    assert not any(value.any() for value in deployment.tensors.values())
    assert {name.partition("/")[0] for name in deployment.merged} == {"1", "2", "3"}
    changed = tiny_backbone("olmoe")
    weights = changed_weights(changed.model.state_dict(), deployment.merged)
    changed.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    merged_loss = first_loss(olmoe_backbone, method, state, tmp_path)
    assert merged_loss == pytest.approx(first_loss(changed, method, published, tmp_path / "changed"), rel=1e-4)
    assert abs(merged_loss - first_loss(olmoe_backbone, method, published, tmp_path / "published")) > 0.01
