"""From a run's folder to an exported one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedguild.config import Config, load_config
from fedguild.errors import ConfigError, nearest
from fedguild.experiment import restore
from fedguild.export.adapter import obstacle, write_adapter
from fedguild.export.card import FILE, Origin, adapter_card, merged_card
from fedguild.export.folder import new_folder, require_new
from fedguild.export.merged import require_mergeable, write_merged
from fedguild.files import write_text
from fedguild.model.backbone import EMBEDDED
from fedguild.model.tiny import CHECKPOINT
from fedguild.server.method import Deployment, State
from fedguild.setup import Experiment

BASE = "base"
"""Folder, inside an adapter's, of the base model where that is not on the hub."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: The folder.
        form: A PEFT adapter, or a whole checkpoint.
        reason: Why the form is not the one that was asked for; empty where it is.
    """

    folder: Path
    form: Literal["adapter", "merged"]
    reason: str = ""


def export_adapter(run_folder: Path, budget: str, output: Path, round: int | None = None) -> Exported:
    """Writes a run's model for a budget as a PEFT adapter folder.

    Where an adapter alone cannot carry the model (an output scale other than 1, active experts
    other than the base model's own), the merged form is written and `reason` says why.

    Args:
        run_folder: A run.
        budget: Name of the budget that the model is for.
        output: The folder to write; new or empty.
        round: The round to take the model from; the last by default.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget is unknown.
        ModelError: the merged form is needed, but the backbone is in 4 bit.
        FedGuildError: the output folder holds something, or cannot be written.
    """
    experiment, deployment, origin = _restored(run_folder, budget, output, round)
    missing = obstacle(experiment.backbone.info, deployment)
    if missing:
        _merge(experiment, deployment, origin, output)
        return Exported(output, "merged", f"the merged form, as an adapter alone cannot carry the model: {missing}")
    model, settings = experiment.backbone.info, experiment.config.model
    with new_folder(output) as folder:
        base = settings.path
        if base == EMBEDDED:
            shutil.copytree(CHECKPOINT, folder / BASE)
            base = str(output.resolve() / BASE)
        write_adapter(folder, model, deployment, base=base, revision=settings.revision)
        write_text(folder / FILE, adapter_card(origin, model, deployment))
    return Exported(output, "adapter")


def export_merged(run_folder: Path, budget: str, output: Path, round: int | None = None) -> Exported:
    """Writes a run's model for a budget as a whole Hugging Face checkpoint, its adapter merged in.

    The budget's active experts stand in the checkpoint's config. The arguments and errors are
    those of `export_adapter`.

    Raises:
        ModelError: the backbone is in 4 bit.
    """
    experiment, deployment, origin = _restored(run_folder, budget, output, round)
    _merge(experiment, deployment, origin, output)
    return Exported(output, "merged")


def _merge(experiment: Experiment, deployment: Deployment, origin: Origin, output: Path) -> None:
    require_mergeable(experiment.backbone)
    with new_folder(output) as folder:
        write_merged(folder, experiment.backbone, deployment)
        write_text(folder / FILE, merged_card(origin, experiment.backbone.info, deployment))


def _restored(run_folder: Path, budget: str, output: Path, round: int | None) -> tuple[Experiment, Deployment, Origin]:
    """Returns a run with the model of a budget; what is cheap to check is checked before it is loaded."""
    require_new(output)
    if (run_folder / "config.yaml").is_file():
        _require_budget(load_config(str(run_folder / "config.yaml")), budget)
    experiment, state, number = restore(run_folder, round)
    deployment = _deployed(experiment, state, budget)
    path = experiment.config.model.path
    is_hub_id = path != EMBEDDED and not Path(path).exists()
    origin = Origin(
        run=experiment.config.name,
        method=experiment.method.title,
        round=number,
        budget=budget,
        base=path,
        base_code=f'folder + "/{BASE}"' if path == EMBEDDED else f'"{path}"',
        hub_id=path if is_hub_id else "",
    )
    return experiment, deployment, origin


def _require_budget(config: Config, budget: str) -> None:
    known = [tier.name for tier in config.federation.budgets]
    if budget not in known:
        raise ConfigError(f"The run has no budget '{budget}'.", nearest(budget, known))


def _deployed(experiment: Experiment, state: State, budget: str) -> Deployment:
    """Returns the global model for a budget, with as many active experts as the run's tables score it with."""
    model = experiment.backbone.info
    tier = next(known for known in experiment.budgets if known.name == budget)
    deployment = experiment.method.deploy(state, model, tier)
    if deployment is None:
        raise ConfigError(
            f"Under {experiment.method.name} every client has a model of its own; there is no global one to export.",
            "Export a client's: `--client client-000`.",
        )
    if not model.moe:
        return deployment
    by_method = experiment.config.evaluation.active_experts == "method"
    active = deployment.plan.active_experts or model.top_k if by_method else tier.active_experts
    return Deployment(replace(deployment.plan, active_experts=active), deployment.tensors)
