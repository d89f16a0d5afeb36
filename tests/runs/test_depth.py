"""Depth of a run's calls: the frames of FedGuild between `experiment.run` and the loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedguild
from fedguild.config import load_config
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from tests.runs.runs import SETTINGS

MOST = 12
"""It was 18 or 19 before 0.2.0."""


class ReachedError(Exception):
    """The loss of the first optimizer step is about to be computed."""


AGGREGATES = {
    "a mean": "fedavg",
    "weights of their own for each expert": "flame",
    "all uploads at once": "flora",
    "sketches of gradients": "fed-sb, rank: 2, start: sketch",
    "one of each client's experts": "fedmoe",
    "an average at every budget": "trivial",
}
"""What a server makes of the uploads -> a method that does."""


@pytest.mark.parametrize("method", AGGREGATES.values(), ids=AGGREGATES)
def test_a_loss_is_a_dozen_calls_from_the_run(method, olmoe_folder, tmp_path, monkeypatch):
    """`run` and `token_losses` count; contexts and decorators of other packages do not."""
    source, names = str(Path(fedguild.__file__).parent), []

    def record(*_: object, **__: object) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(source):
                names.insert(0, frame.f_code.co_qualname)
            frame = frame.f_back
        raise ReachedError

    monkeypatch.setattr("fedguild.runs.experiment.evaluate_state", lambda *_: [])
    monkeypatch.setattr("fedguild.runs.experiment.untrained_loss", lambda *_: None)
    monkeypatch.setattr(SlotModel, "token_losses", record)
    settings = [setting for setting in SETTINGS if not setting.startswith("method.")]
    config = load_config("flame/tiny-tasks", [f"model.path={olmoe_folder}", *settings, f"method={{name: {method}}}"])
    with pytest.raises(ReachedError):
        experiment.run(config, tmp_path / "run")
    assert names[0] == "run"
    assert "aggregate" in names[3], "the server's half asks for the uploads"
    assert len([*names, "token_losses"]) <= MOST, " > ".join(names)
