"""One of several ranks in the tests of sharding; a program: RANK SIZE PORT FOLDER.

`alone` computes the same on one backbone that is not sharded.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.cli.following import follows_torchrun
from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.training import train
from fedguild.config import Config
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import FedGuildError
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded, collate
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.kernels import fused
from fedguild.model.ranks import Ranks
from fedguild.model.sharding import own_part
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from tests.backbones import PAD, lora_plan, random_adapter, random_rows, tiny_model
from tests.model.test_fused import Calls
from tests.runs.runs import small_config

TARGETS = ("attention", "router", "experts")
STEPS = {"train": (3, 1), "shorter": (1, 2)}
"""Scenario -> optimizer steps of each rank's cohort."""
FAMILIES = ("olmoe", "switch")
SHORT_SECONDS = 2.0


def build(family: str, ranks: Ranks | None, checkpointing: bool = False, **sizes: int) -> Backbone:
    """Returns the backbone of a family, whose texts never end; Switch's in fp64, as Adam makes much of its rounding."""
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=None)
    model = tiny_model(family, dtype=torch.float64 if family == "switch" else torch.float32, **sizes)
    return make_backbone(model, tokenizer, name=family, ranks=ranks, gradient_checkpointing=checkpointing)


def fused_backbone(family: str, rank: int, ranks: Ranks | None) -> Backbone:
    """Returns a backbone with fused kernels in plain torch; as when it is loaded, only rank 0 has the weights."""
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused.kernels, "runs", lambda name, device: name in fused.FUSED)
        patch.setattr(fused, "on_a_cpu", calls.library)
        with torch.device("cpu" if ranks is None or rank == 0 else "meta"):
            model = tiny_model(family)
        backbone = make_backbone(model, None, name=family, ranks=ranks)
    assert calls.norm > 0
    assert calls.gate > 0
    assert all("forward" in vars(module) for module in backbone.model.modules() if fused.is_norm(module))
    return backbone


def trained(backbone: Backbone, rank: int, steps: int, targets: tuple[str, ...] = TARGETS) -> dict[str, Tensor]:
    """Returns the uploads of a rank's clients, 2 on rank 0 and 1 on rank 1, by `client/name`."""
    settings = TrainingSettings(batch_size=2, steps=steps, learning_rate=1e-2)
    budget = Budget("all", backbone.info.top_k, 4)
    plan = lora_plan(4, 1.0, targets)
    work = [
        LocalWork(
            ClientInfo(index, budget, 4),
            [Encoded(tuple(row), 2) for row in random_rows([9, 5, 7, 6], index)],
            Payload(),
            Payload(),
        )
        for index in ((0, 1) if rank == 0 else (2,))
    ]
    with SlotModel(backbone, [plan] * len(work)) as model:
        cohort = Cohort(model, work, settings, round_index=1, seed=1)
        for slot, part in enumerate(work):
            cohort.load(slot, random_adapter(backbone.info, plan, part.client.index))
        uploads = train(cohort)
    return {
        f"{part.client.index}/{name}": tensor
        for part, upload in zip(work, uploads, strict=True)
        for name, tensor in upload.tensors.items()
    }


def losses(backbone: Backbone, rank: int) -> Tensor:
    """Returns the losses of a rank's own rows."""
    plan = lora_plan(4, 1.0, TARGETS)
    rows = [[Encoded(tuple(row), 2) for row in random_rows([8, 5], 10 + rank)]]
    with SlotModel(backbone, [plan]) as model, torch.no_grad():
        model.load(0, random_adapter(backbone.info, plan, rank))
        return model.token_losses(collate(rows, PAD, backbone.info.seq2seq))


def generated(backbone: Backbone, rank: int, new: int) -> Any:
    """Returns what a rank generates from its own prompts."""
    plan = lora_plan(4, 1.0, TARGETS)
    with SlotModel(backbone, [plan]) as model:
        model.load(0, random_adapter(backbone.info, plan, rank))
        return model.generate([random_rows([5, 3, 4], 20 + rank)], new)


def changes(backbone: Backbone) -> dict[str, Tensor]:
    """Returns changes of all adapted weights."""
    plan = lora_plan(2, 1.0, TARGETS)
    return {f"1/{name}": tensor.float() for name, tensor in random_adapter(backbone.info, plan, 5).items()}


def scenarios(family: str, rank: int, ranks: Ranks | None) -> dict[str, Any]:
    """Returns what a rank computes in every scenario, where it takes part."""
    backbone, found = build(family, ranks), {}

    def wait() -> None:
        if ranks is not None:
            ranks.wait_for_others()

    for name, steps in STEPS.items():
        found[name] = trained(backbone, rank, steps[rank])
        wait()
    found["train beside losses"] = trained(backbone, 0, 2) if rank == 0 else losses(backbone, rank)
    wait()
    found["later layers alone"] = trained(backbone, rank, 1 + rank, ("q_proj",) if family == "olmoe" else ("q",))
    wait()
    found["generate"] = generated(backbone, rank, 5 - 3 * rank)
    wait()
    found["one generates"] = generated(backbone, rank, 3) if rank == 1 else None
    wait()
    with backbone.merged(changes(backbone)):
        found["merged"] = losses(backbone, rank)
        wait()
    found["after the merge"] = losses(backbone, rank)
    wait()
    if family == "olmoe":
        uneven = build(family, ranks, checkpointing=True, num_experts=5, num_experts_per_tok=2)
        found["checkpointing, five experts"] = trained(uneven, rank, 2 - rank)
        wait()
        found["fused"] = losses(fused_backbone(family, rank, ranks), rank)
        wait()
    parameters = dict(backbone.model.named_parameters())
    found["held"] = {name: own_part(value)[0].numel() for name, value in parameters.items()}
    found["empty passes"] = 0 if ranks is None else ranks.empty_passes
    return found


def hanging(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns what rank 0 says of rank 1, which comes too late: before a pass, and within one."""
    said = {}
    for place, late in (("before", 0), ("within", 1)):
        ranks = Ranks.join(rank, size, torch.device("cpu"), "127.0.0.1", port + 1 + late, SHORT_SECONDS)
        backbone = build("olmoe", ranks)
        losses(backbone, rank)
        try:
            if rank == 1 and place == "within":
                layer = backbone.model.model.layers[1]
                layer.register_forward_pre_hook(lambda *_: time.sleep(2 * SHORT_SECONDS), prepend=True)
            if rank == 0 or place == "within":
                with ranks.naming_who_hangs():
                    losses(backbone, rank)
            else:
                time.sleep(2 * SHORT_SECONDS)
        except FedGuildError as error:
            said[place] = error.message
        ranks.close()
    return said


def run(rank: int, size: int, port: int, folder: Path) -> None:
    """Runs a federation as torchrun would start it: rank 0 the rounds, the others what it asks for."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if follows_torchrun("cpu"):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedguild.runs.experiment.write_report", lambda folder: folder / "report.html")
        patch.setattr(
            "fedguild.runs.setup.preparation.load_model", lambda _: pytest.fail("rank 0 loaded a whole backbone")
        )
        experiment.run(federation(folder), folder / "together")


def federation(folder: Path) -> Config:
    """Returns a run of a method that changes the backbone and scores personal models, in cohorts of one client."""
    method = "method={name: flora, targets: [attention, router, experts]}"
    settings = ("federation.rounds=2", "federation.cohort_size=1", "evaluation.max_examples=3")
    return small_config(folder / "model", *settings, method, "evaluation.clients=true")


if __name__ == "__main__":
    own, size, port = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    torch.set_num_threads(1)
    together = Ranks.join(own, size, torch.device("cpu"), "127.0.0.1", port, 60.0)
    results: dict[str, Any] = {family: scenarios(family, own, together) for family in FAMILIES}
    together.close()
    run(own, size, port + 3, folder)
    results["hanging"] = hanging(own, size, port)
    torch.save(results, folder / f"rank-{own}.pt")
