"""A round of FedAlign-MoE's server against its equations."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
import torch

from fedguild.config import tables
from fedguild.core.payload import Payload
from fedguild.model.backbone import Backbone
from tests.methods.fedalign_moe.federation import (
    EXPERTS,
    LAYERS,
    fedalign,
    own_experts,
    random_round,
    vector,
)
from tests.methods.federation import LARGE, client
from tests.oracles import fedalign_moe as oracle

ABLATIONS = [
    {},
    {"experts": "full"},
    {"direction": "none"},
    {"fixed_threshold": 0.4},
    {"tolerance": 0.25, "similarity_temperature": 0.1},
    {"consistency_weights": False},
]


@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_a_round(clients: int, options: dict[str, object], olmoe_backbone: Backbone) -> None:
    method = fedalign(**options)
    state, uploads = random_round(method, olmoe_backbone, clients)
    after = method.aggregate(state, iter(uploads))
    chosen = {
        "tolerance": options.get("tolerance", 1.0),
        "fixed_threshold": options.get("fixed_threshold"),
        "use_direction": options.get("direction") != "none",
        "temperature": options.get("similarity_temperature", 1.0),
    }
    for layer in LAYERS:
        before, found = own_experts(state, layer), own_experts(after, layer)
        for expert in range(EXPERTS):
            sent = [part for part in uploads if f"update/{layer}/{expert}" in part.payload.tensors]
            updates, regions = (
                [part.payload.tensors[f"{kind}/{layer}/{expert}"] for part in sent] for kind in ("update", "region")
            )
            expected = oracle.aggregated(vector(before, expert), updates, regions, **chosen)
            torch.testing.assert_close(vector(found, expert).double(), expected.double(), rtol=1e-5, atol=1e-6)
        rows = [part.payload.part("routing")[layer].tolist() for part in uploads]
        margins = [part.payload.part("margin")[layer].tolist() for part in uploads]
        present = [i for i, row in enumerate(rows) if sum(row) > 0]
        if not present:
            assert f"reference/{layer}" not in after.tensors
            continue
        rows, margins = [rows[i] for i in present], [margins[i] for i in present]
        omega = oracle.consistency_weights(rows, margins)
        if options.get("consistency_weights") is False:
            omega = [[1 / len(rows)] * EXPERTS for _ in rows]
        torch.testing.assert_close(after.tensors[f"reference/{layer}"], torch.tensor(oracle.reference(rows, omega)))
        mean = [sum(row[e] for row in rows) / len(rows) for e in range(EXPERTS)]
        torch.testing.assert_close(after.tensors[f"consensus/{layer}"], torch.tensor(mean))


def test_what_nobody_activated_stays_bit_by_bit(olmoe_backbone: Backbone) -> None:
    """Also the experts of which the only update is zero, and everything where no upload came."""
    method = fedalign()
    state, uploads = random_round(method, olmoe_backbone, 1)
    after = method.aggregate(state, iter(uploads))
    for layer, same in ((LAYERS[0], {2, 3}), (LAYERS[1], set(range(EXPERTS)))):
        before, found = own_experts(state, layer), own_experts(after, layer)
        assert {e for e in range(EXPERTS) if torch.equal(vector(before, e), vector(found, e))} == same
    nothing = method.aggregate(after, iter([]))
    for part in ("experts", "reference", "consensus"):
        expected = after.part(part)
        assert all(torch.equal(nothing.part(part)[name], value) for name, value in expected.items())


def test_directions_of_the_product(olmoe_backbone: Backbone) -> None:
    """D from the formed changes of B A; what is added is still the change of A and of B."""
    method = fedalign(direction="product")
    state, uploads = random_round(method, olmoe_backbone, 3)
    after = method.aggregate(state, iter(uploads))
    before, found = own_experts(state, LAYERS[0]), own_experts(after, LAYERS[0])
    names = sorted(before)
    sizes = [before[name][0].numel() for name in names]
    for expert in (0, 1, 3, 5):
        key = f"{LAYERS[0]}/{expert}"
        sent = [part.payload for part in uploads if f"update/{key}" in part.payload.tensors]
        updates = [payload.tensors[f"update/{key}"] for payload in sent]
        directions = []
        for update in updates:
            start = {name: before[name][expert].double() for name in names}
            change = dict(zip(names, update.double().split(sizes), strict=True))
            after_it = {name: start[name] + change[name].view(start[name].shape) for name in names}
            products = [
                after_it[name[:-1] + "B"] @ after_it[name] - start[name[:-1] + "B"] @ start[name]
                for name in names
                if name.endswith("A")
            ]
            directions.append(torch.cat([product.flatten() for product in products]))
        regions = [payload.tensors[f"region/{key}"] for payload in sent]
        expected = oracle.aggregated(vector(before, expert), updates, regions, directions=directions)
        torch.testing.assert_close(vector(found, expert).double(), expected, rtol=1e-5, atol=1e-6)


def test_averaging_by_index(olmoe_backbone: Backbone) -> None:
    """Fig. 14 a: the plain mean over those who activated the expert."""
    method = fedalign(aggregation="index")
    state, uploads = random_round(method, olmoe_backbone, 4)
    after = method.aggregate(state, iter(uploads))
    for layer in LAYERS:
        before, found = own_experts(state, layer), own_experts(after, layer)
        for expert in range(EXPERTS):
            name = f"update/{layer}/{expert}"
            updates = [part.payload.tensors[name] for part in uploads if name in part.payload.tensors]
            mean = sum(updates) / len(updates) if updates else torch.zeros(1)
            torch.testing.assert_close(vector(found, expert), vector(before, expert) + mean, rtol=1e-5, atol=1e-6)


# Figures of a round


def test_what_is_observed(olmoe_backbone: Backbone) -> None:
    method = fedalign()
    state, uploads = random_round(method, olmoe_backbone, 4)
    seen = method.observe(method.aggregate(state, uploads), olmoe_backbone.info)
    assert [part.name.split()[0] for part in seen] == ["mean", "strength", "spread", "distance", "similarity", "share"]
    rows = [part.payload.part("routing")[LAYERS[0]].tolist() for part in uploads]
    margins = [part.payload.part("margin")[LAYERS[0]].tolist() for part in uploads]
    overlap = sum(oracle.overlap(rows, i, e) for i in range(4) for e in range(EXPERTS)) / (4 * EXPERTS)
    omega = torch.tensor(oracle.consistency_weights(rows, margins))
    names = [f"region/{LAYERS[0]}/{e}" for e in range(EXPERTS)]
    held = [[part.payload.tensors[name] for part in uploads if name in part.payload.tensors] for name in names]
    taus = [oracle.threshold(regions, 1.0) for regions in held if regions]
    spread = float(omega.std(dim=0, correction=0).mean())
    p_g = oracle.reference(rows, omega.tolist())
    distance = sum(oracle.distance(row, p_g) for row in rows) / 4
    found = [float(part.values[0]) for part in seen if not part.columns]
    assert found == pytest.approx([overlap, spread, distance, sum(taus) / len(taus), 7 / 8], rel=1e-5)
    assert seen[3].unit == "nats"
    for table in (table for table in tables() if table.name.startswith("fedalign-moe/")):
        names = {f"{one.name} / {column}" for one in seen for column in one.columns} | {one.name for one in seen}
        assert set(table.load().shows) <= names, table.name
    assert all(part.rows == ["layer 0", "layer 1"] for part in seen)


@pytest.mark.parametrize(("eta", "temperature"), [(0.1, 1.0), (0.01, 2e-3)])
def test_alpha_is_observed_as_the_next_round_has_it(olmoe_backbone: Backbone, eta: float, temperature: float) -> None:
    method = fedalign(overlap_threshold=eta, overlap_temperature=temperature)
    state, uploads = random_round(method, olmoe_backbone, 4)
    (seen,) = (
        one
        for one in method.observe(method.aggregate(state, uploads), olmoe_backbone.info)
        if one.name.startswith("strength of the alignment")
    )
    assert seen.columns == ("least", "largest", "deviation between experts", "deviation between clients")
    for layer, found in zip(LAYERS, seen.values.tolist(), strict=True):
        sent = [part.payload.part("routing")[layer].tolist() for part in uploads]
        rows = [row for row in sent if any(row)]  # the others had no tokens in this layer
        alpha = [
            [1 / (1 + math.exp((eta - oracle.overlap(rows, i, e)) / temperature)) for e in range(EXPERTS)]
            for i in range(len(rows))
        ]
        every = [value for row in alpha for value in row]
        by_expert = list(zip(*alpha, strict=True))
        expected = [
            min(every),
            max(every),
            pstdev([fmean(values) for values in by_expert]),
            fmean([pstdev(values) for values in by_expert]),
        ]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_distance_is_observed_without_the_regulariser_too(olmoe_backbone: Backbone) -> None:
    method = fedalign(regularisation=0.0)
    state, uploads = random_round(method, olmoe_backbone, 4)
    (distance,) = (
        one.values
        for one in method.observe(method.aggregate(state, uploads), olmoe_backbone.info)
        if one.name.startswith("distance of the gates to p_g")
    )
    assert len(distance) == 2
    assert float(distance[0]) > 0


def test_an_expert_whose_updates_are_all_zero_is_not_counted_as_aggregated(olmoe_backbone: Backbone) -> None:
    """Of one client: expert 2 was not activated, expert 3 did not change; in layer 1 it had no token."""
    method = fedalign()
    state, uploads = random_round(method, olmoe_backbone, 1)
    *_, share = method.observe(method.aggregate(state, uploads), olmoe_backbone.info)
    assert share.values.tolist() == [6 / 8, 0.0]


def test_an_experts_update_is_a_matrix(olmoe_backbone: Backbone) -> None:
    """`federation.wire_dtype` leaves vectors, which are statistics elsewhere, as they are."""
    method, who = fedalign(), client(0, LARGE)
    shapes = method.schema(olmoe_backbone.info, who, Payload()).shapes
    updates = {name: shape for name, shape in shapes.items() if name.startswith("update/")}
    assert len(updates) == len(LAYERS) * EXPERTS
    assert {len(shape) for shape in updates.values()} == {2}
