"""How deep a run calls: the frames of FedGuild between `experiment.run` and the loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedguild
from fedguild import experiment
from fedguild.model.slots import SlotModel
from tests.experiment.runs import save_model, small_config

MOST = 12
"""docs/log.md, 0.2.0: from 18 or 19 before."""


class ReachedError(Exception):
    """The loss of the first optimizer step is about to be computed."""


def test_a_loss_is_a_dozen_calls_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and `token_losses` count; contexts and decorators of other packages do not."""
    source, names = str(Path(fedguild.__file__).parent), []

    def record(*_: object, **__: object) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(source):
                names.insert(0, frame.f_code.co_name)
            frame = frame.f_back
        raise ReachedError

    monkeypatch.setattr("fedguild.experiment.evaluate_state", lambda *_: [])
    monkeypatch.setattr(SlotModel, "token_losses", record)
    config = small_config(save_model(tmp_path / "model"), "method={name: fedavg, rank: 2, gate: lora}")
    with pytest.raises(ReachedError):
        experiment.run(config, tmp_path / "run")
    assert names[0] == "run"
    assert len([*names, "token_losses"]) <= MOST, " > ".join(names)
