"""The ranks of torchrun: one that fails ends instead of leaving the others to wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedguild.core.errors import FedGuildError
from fedguild.engines import torchrun
from fedguild.engines.torchrun import RankWorkers
from fedguild.model.ranks import Ranks

ERROR = {"error": "The memory is too small", "hint": "Lower training.batch_size."}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("name", "result"), [("train", (ERROR, [])), ("compute", ERROR)])
def test_a_rank_that_fails_does_not_wait_for_the_others(
    rank: int, name: str, result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(own: list[Any], _: Any, src: int) -> None:
        own[0] = name, ()

    monkeypatch.setattr(torchrun.dist, "scatter_object_list", receive)
    monkeypatch.setattr(torchrun.dist, "gather_object", lambda *_, dst: pytest.fail("it waits"))
    workers = RankWorkers(Ranks(rank, 2, torch.device("cpu"), None))  # type: ignore[arg-type]
    workers.actor = SimpleNamespace(**{name: lambda: result})  # type: ignore[assignment]
    with pytest.raises(FedGuildError, match="The memory is too small") as caught:
        workers.call(name, [(), ()]) if rank == 0 else workers.answer()
    assert caught.value.hint == ERROR["hint"]
    assert workers.has_failed is (rank == 0)
