"""Models of runs for serving: in this process, or in a folder that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedguild.config.renamed import answers_old_arguments
from fedguild.core.errors import ConfigError
from fedguild.runs.results import RunResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fedguild.export.manifest import Form
    from fedguild.runs.exporting import Exported, Subject


def load_model(
    run: str | Path | RunResult, budget: str | None = None, client: str | None = None, *, round: int | None = None
) -> PreTrainedModel:
    """Returns a model of a run as a transformers model, with the method's adapters and routing attached.

    It `generate`s, and lm-evaluation-harness takes it: `HFLM(pretrained=model, tokenizer=model.tokenizer)`. The model
    lives in this process only: `fedguild export` writes one that other programs load.

    Args:
        run: A run's folder, or its result.
        budget: Name of the budget whose active experts it runs; by default the largest.
        client: Name of the client whose own model to load, `client-000`, instead of the global model.
        round: The round to take it from; the last by default.

    Returns:
        The model, on the device that the run's config names, in evaluation mode; its tokenizer is `model.tokenizer`.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, both are given, or the method has no global model and no
            client is named.
        ModelError: the model cannot run outside of FedGuild.

    Examples:
        >>> import fedguild
        >>> model = fedguild.load_model("runs/first", budget="b4")
        >>> prompt = model.tokenizer("3 + 4 =", return_tensors="pt")
        >>> tuple(model.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape)[1] == len(prompt.input_ids[0]) + 2
        True
    """
    from fedguild.runs.exporting import load_attached

    model, _ = load_attached(folder_of(run), subject_of(budget, client), round)
    return model  # type: ignore[no-any-return]


@answers_old_arguments
def export_model(
    run: str | Path | RunResult,
    output: str | Path,
    budget: str | None = None,
    client: str | None = None,
    *,
    format: Form = "peft",
    round: int | None = None,
) -> Exported:
    """Writes a model of a run in a form that other programs load.

    `peft` is an adapter with fused experts, for peft and transformers; `per-expert` one with a key for every expert,
    for vLLM and SGLang; `merged` a whole checkpoint with the budget's active experts in its config; `code` a checkpoint
    with the method's own modelling code. If an adapter alone cannot represent the model, the merged form is written; if
    the weights cannot either, the one with code. `reason` then says why.

    Args:
        run: A run's folder, or its result.
        output: The folder to write; new or empty.
        budget: Name of the budget whose active experts the global model runs; by default the largest.
        client: Name of the client whose own model to export, `client-000`, instead of the global model.
        format: The form.
        round: The round to take it from; the last by default.

    Returns:
        The export: its `folder`, its `format`, the `reason` if that differs from the requested one, and its `audience`.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, both are given, or the method has no global model and no
            client is named.
        ModelError: no form holds what the method trains, or the merged form is needed, but the backbone is in 4 bit.
        FedGuildError: the output folder is not empty, or cannot be written.

    Examples:
        >>> import fedguild
        >>> exported = fedguild.export_model("runs/first", "model", budget="b4", format="merged")
        >>> exported.format, (exported.folder / "config.json").is_file()
        ('merged', True)
    """
    from fedguild.runs.exporting import export

    return export(folder_of(run), subject_of(budget, client), Path(output), format, round=round)


def folder_of(run: str | Path | RunResult) -> Path:
    return run.folder if isinstance(run, RunResult) else Path(run)


def subject_of(budget: str | None, client: str | None) -> Subject | None:
    """Returns the named model; None if neither a budget nor a client is named.

    Raises:
        ConfigError: both are.
    """
    from fedguild.runs.exporting import Subject

    if budget and client:
        raise ConfigError(
            "One model is either the global one at a budget, or a client's own.",
            "Give either --budget or --client; in Python, budget or client.",
        )
    return Subject(budget or "", client or "") if budget or client else None
