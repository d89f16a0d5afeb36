"""Models of runs that serve: in this process, or on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedguild.errors import ConfigError
from fedguild.results import RunResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fedguild.export import Subject


def load_model(
    run: str | Path | RunResult, budget: str | None = None, client: str | None = None, *, round: int | None = None
) -> PreTrainedModel:
    """Returns a model of a run as a transformers model, with the method's adapters and routing attached.

    It `generate`s, and lm-evaluation-harness takes it: `HFLM(pretrained=model, tokenizer=model.tokenizer)`. The model
    lives in this process only: `fedguild export` writes one that other programs load.

    Args:
        run: A run's folder, or its result.
        budget: Name of the budget whose active experts it runs; by default the largest.
        client: Name of the client whose own model it is, `client-000`, in place of the global model.
        round: The round to take it from; the last by default.

    Returns:
        The model, on the device that the run's config names, in evaluation mode; its tokenizer is `model.tokenizer`.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, both are given, or under this method every client has its own
            model and none is named.
        ModelError: the model cannot run outside of FedGuild.

    Examples:
        >>> import tempfile, fedguild
        >>> small = ["federation.clients=4", "federation.rounds=1", "training.steps=1", "evaluation.max_examples=2"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fedguild.run("ub-smoe/tiny-tasks", *small, output=f"{folder}/run")
        ...     model = fedguild.load_model(result, budget="b4")
        >>> prompt = model.tokenizer("3 + 4 =", return_tensors="pt")
        >>> tuple(model.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape)[1] == len(prompt.input_ids[0]) + 2
        True
    """
    from fedguild.export.run import load_attached

    model, _ = load_attached(folder_of(run), subject_of(budget, client), round)
    return model  # type: ignore[no-any-return]


def folder_of(run: str | Path | RunResult) -> Path:
    """Returns the folder of a run."""
    return run.folder if isinstance(run, RunResult) else Path(run)


def subject_of(budget: str | None, client: str | None) -> Subject | None:
    """Returns the model that is named; None if neither a budget nor a client is.

    Raises:
        ConfigError: both are.
    """
    from fedguild.export import Subject

    if budget and client:
        raise ConfigError(
            "One model is either the global one at a budget, or a client's own.", "Give either a budget or a client."
        )
    return Subject(budget or "", client or "") if budget or client else None
