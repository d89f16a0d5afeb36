"""Limits on what a run's settings leave in an upload, and the settings that a site refuses for it."""

from __future__ import annotations

import pytest
import yaml

from fedguild.config import load_config
from fedguild.config.training import TrainingSettings
from fedguild.federation.exposure import exposure
from fedguild.federation.flower.message import Message
from fedguild.federation.project import write_project
from fedguild.federation.site import AcceptSettings
from fedguild.federation.trainer_service import run_metadata
from tests.federation.flower.loopback_federation import QUICK, small_config, trainers_of

TEXTS = [(1, 2, 3, 4), (1, 2, 3, 4), (5, 6, 7), (8, 8, 9, 10, 11, 12), (13, 14)]


@pytest.mark.parametrize(
    ("training", "steps", "shape", "expected"),
    [
        ({"optimizer": "sgd", "weight_decay": 1.0}, 5, (64, 128), (1, 5, 64)),
        ({"optimizer": "sgd", "weight_decay": 0.0}, 2, (8, 64, 3), (2, 10, 3)),
        ({"optimizer": "sgd", "weight_decay": 0.0}, 9, (64, 128), (9, 14, 64)),
        ({"optimizer": "sgd", "weight_decay": 0.9}, 5, (64, 128), (3, 14, 64)),
        (
            {"optimizer": "sgd", "batch_size": 1, "gradient_accumulation_steps": 3, "weight_decay": 1.0},
            5,
            (4,),
            (1, 9, 1),
        ),
        ({"optimizer": "adam", "weight_decay": 1.0}, 5, (64, 128), (5, 14, 64)),
        ({"optimizer": "adam", "weight_decay": 1.0, "eps": 1e6}, 5, (64, 128), (1, 5, 64)),
        ({"optimizer": "adamw", "weight_decay": 1.0}, 5, (64, 128), (1, 5, 64)),
    ],
)
def test_what_is_left_in_an_upload(training, steps, shape, expected):
    """Of batches of the two shortest texts, which have five distinct tokens; equal texts count once."""
    given = {"learning_rate": 1.0, "batch_size": 2, "steps": steps, **training}
    found = exposure(TrainingSettings(**given), steps, TEXTS, [shape, (2, 2)] if len(shape) > 1 else [shape])
    assert (found.steps, found.tokens, found.rank) == expected
    sgd = training["optimizer"] == "sgd" or "eps" in training
    assert found.optimizer == ("sgd" if sgd else training["optimizer"])
    readable = expected[1] < expected[2]
    ends = "can be read from the upload." if readable and sgd else "keeps the tokens" if readable else "cannot be read"
    assert ends in str(found)


HOSTILE = {"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 1.0}


@pytest.mark.parametrize(
    ("accept", "training", "reason"),
    [
        ({"optimizers": ["adam", "adamw"]}, HOSTILE, "the optimizer is sgd, and accept.optimizers are adam, adamw"),
        ({"optimizers": ["adam", "adamw"]}, {"eps": 1e6}, "the optimizer is sgd"),
        ({"max_decay": 0.1}, HOSTILE, "learning_rate × weight_decay is 1, beyond accept.max_decay of 0.1"),
        ({"max_rank": 2}, {}, "a trained tensor has the rank 3, beyond accept.max_rank of 2"),
        ({"min_length": 64}, {}, "texts are cut to 32 tokens, below accept.min_length of 64"),
        ({"max_dropout": 0.1}, {}, "the method's dropout is 0.5, beyond accept.max_dropout of 0.1"),
        ({"frozen_factors": False}, {}, "the method freezes a factor of LoRA, but accept.frozen_factors is false"),
        ({"min_tokens_per_rank": 1000}, HOSTILE, "too few distinct tokens are behind an upload for the rank"),
        ({}, HOSTILE, ""),
    ],
)
def test_a_site_bounds_what_it_lets_an_upload_reveal(accept, training, reason, olmoe_folder, tmp_path):
    """A server could have 52 of 52 tokens of the last batch, with the guide's own minimum."""
    base = (*QUICK, "method.rank=3", "method.dropout=0.5", "data.max_length=32")
    config = small_config(olmoe_folder, *base, base="ffa-lora/tiny-tasks")
    config = config.model_copy(update={"training": config.training.model_copy(update=training)})
    trainer = trainers_of(config, tmp_path, [{}, {"accept": accept}, {}])[1]
    failure = trainer.handle(Message("hello", "ab" * 16, metadata=run_metadata(config))).failure
    assert reason in failure
    assert bool(failure) == bool(reason)
    found, refusal = trainer.exposure(config)
    assert str(found).startswith("What this setting can reveal: ")
    assert reason in refusal


def test_a_new_site_gets_limits_that_fit_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr("fedguild.federation.project._make_certificates", lambda folder: None)
    monkeypatch.setattr("fedguild.federation.project._require_openssl", lambda: None)
    monkeypatch.setattr("shutil.copyfile", lambda *_: None)
    overrides = ["training.optimizer=sgd", "training.weight_decay=0.5", "training.learning_rate=1", "method.rank=100"]
    for name, given in (("plain", []), ("wide", overrides)):
        write_project(tmp_path / name, 2, "fedit/tiny-tasks", given, shared_data=True)
        found = yaml.safe_load((tmp_path / name / "client-000/site.yaml").read_text())["accept"]
        accept = AcceptSettings.model_validate(found)
        assert accept.optimizers == (("adamw", "adam", "sgd") if given else ("adamw", "adam"))
        assert (accept.max_decay, accept.max_rank) == ((0.5, 100) if given else (0.1, 64))
        assert accept.min_tokens_per_rank == 1
        assert accept.min_length == min(64, load_config("fedit/tiny-tasks").data.max_length)
