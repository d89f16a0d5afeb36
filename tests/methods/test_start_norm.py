"""`start_norm`, an option of every method that draws LoRA's A: it reaches what the method draws."""

from __future__ import annotations

import pytest
import torch

from fedguild.client.fresh_adapter import fresh_adapter
from fedguild.methods import METHODS, build_method
from fedguild.methods.ffa_lora import shared_factors
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.server.method import Roster
from tests.methods.federation import LARGE, client

WITH_START = [name for name in METHODS if "start_norm" in METHODS.load(name).Settings.model_fields]


def test_the_methods_without_it_draw_no_a_of_lora() -> None:
    """FedAMoLE draws experts, Fed-SB its A and B from gradients, and the prompts have none."""
    assert set(METHODS) - set(WITH_START) == {"fed-sb", "fedamole", "fedprompt", "fedptuning"}


@pytest.mark.parametrize("name", WITH_START)
def test_a_begins_with_orthogonal_rows_of_that_norm(name: str, olmoe_backbone: Backbone) -> None:
    """In the state, or where clients draw A by themselves."""
    options = {"start_norm": 3.0} | ({} if name in ("flora", "florist", "trivial") else {"rank": LARGE.rank})
    options |= {"basis": "received"} if name == "guild" else {}
    method, model = build_method(name, options), olmoe_backbone.info
    (lora,) = (part for part in method.plan(model, LARGE).parts if isinstance(part, Lora))
    assert lora.start_norm == 3.0
    if name == "ffa-lora":
        start = shared_factors(model, method.plan(model, LARGE), seed=0)
    elif name in ("flora", "florist"):
        start = fresh_adapter(model, method.plan(model, LARGE), seed=0)
    else:
        start = dict(method.start(model, Roster([LARGE], [client(0, LARGE)]), torch.Generator().manual_seed(0)).tensors)
    drawn = {key: value for key, value in start.items() if key.endswith("lora_A") and bool(value.any())}
    assert drawn
    for value in drawn.values():
        gram = value @ value.mT
        expected = 9 * torch.eye(value.shape[-2])
        torch.testing.assert_close(gram, expected.expand_as(gram), rtol=1e-4, atol=1e-4)
