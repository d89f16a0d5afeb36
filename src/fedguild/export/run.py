"""Export of a model from a run's folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import Config, load_config
from fedguild.errors import ConfigError, ModelError, nearest
from fedguild.experiment import restore
from fedguild.export.adapter import obstacle, write_adapter
from fedguild.export.card import FILE, Origin, adapter_card, merged_card
from fedguild.export.folder import new_folder, require_new
from fedguild.export.live import attached
from fedguild.export.merged import require_mergeable, write_merged
from fedguild.export.weights import beyond_weights, in_one_adapter
from fedguild.files import write_text
from fedguild.model.packaged import PACKAGED, packaged
from fedguild.model.plan import AdapterPlan
from fedguild.payload import Payload
from fedguild.scoring import evaluated_plan
from fedguild.server.method import Deployment
from fedguild.setup import Experiment

BASE = "base"
"""Subfolder of an adapter's folder for the base model, if that is not on the hub."""


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Attributes:
        folder: The folder.
        form: A PEFT adapter, or a whole checkpoint.
        reason: Why another form than the requested one was written; empty otherwise.
    """

    folder: Path
    form: Literal["adapter", "merged"]
    reason: str = ""


@dataclass(frozen=True)
class Subject:
    """The model to export: the global one as a budget runs it, or a client's own.

    Attributes:
        budget: Name of the budget; empty where a client is named.
        client: Name of the client, `client-000`; empty where a budget is named.

    Raises:
        ConfigError: not exactly one of them is named.
    """

    budget: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        if bool(self.budget) == bool(self.client):
            raise ConfigError(
                "An export contains one model: the global one for a budget, or a client's own.",
                "Give either --budget or --client, for example --client client-000.",
            )

    def require_in(self, config: Config) -> None:
        """Raises ConfigError unless the run of this config has the budget or the client."""
        budgets = [tier.name for tier in config.federation.budgets]
        clients = [f"client-{index:03d}" for index in range(config.federation.clients)]
        if self.budget and self.budget not in budgets:
            raise ConfigError(f"The run has no budget '{self.budget}'.", nearest(self.budget, budgets))
        if self.client and self.client not in clients:
            known = clients[0] if len(clients) == 1 else f"{clients[0]} to {clients[-1]}"
            raise ConfigError(f"The run has no client '{self.client}'.", f"Known: {known}.")


def export_adapter(run_folder: Path, subject: Subject, output: Path, round: int | None = None) -> Exported:
    """Writes a model of a run as a PEFT adapter folder.

    Where an adapter alone cannot carry the model (an output scale other than 1, active experts
    other than the base model's own, weights trained in full, merged changes of a high rank), the
    merged form is written and `reason` says why.

    Args:
        run_folder: A run.
        subject: The model to export.
        output: The folder to write; new or empty.
        round: The round to take the model from; the last by default.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, or there is no global model.
        ModelError: no form holds what the method trains, or the merged form is needed, but the
            backbone is in 4 bit.
        FedGuildError: the output folder is not empty, or cannot be written.
    """
    return _write(*_restored(run_folder, subject, output, round), output)


def load_attached(run_folder: Path, subject: Subject | None = None, round: int | None = None) -> tuple[Any, Experiment]:
    """Returns a model of a run as a transformers model with its adapter and routing attached, and the run.

    Args:
        run_folder: A run.
        subject: The model; None for the global one as the largest budget runs it.
        round: The round to take the model from; the last by default.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, or there is no global model.
        ModelError: the model cannot run outside of FedGuild.
    """
    if subject is not None and (run_folder / "config.yaml").is_file():
        subject.require_in(load_config(str(run_folder / "config.yaml")))
    experiment, state, number = restore(run_folder, round)
    if subject is None:
        subject = Subject(budget=max(experiment.budgets, key=lambda one: (one.active_experts, one.rank or 0)).name)
    if subject.client:
        state = experiment.method.excerpt(state, experiment.backbone.info, _client(experiment, subject))
    _, deployment = _deployed(experiment, state, number, subject)
    return attached(experiment.backbone, deployment), experiment


def export_own(experiment: Experiment, excerpt: Payload, number: int, output: Path) -> Exported:
    """Writes the own model of an experiment's only client, as `export_adapter` does.

    Args:
        experiment: One client's part of a run.
        excerpt: The client's excerpt of the state after the round.
        number: The round.
        output: The folder to write; new or empty.

    Raises:
        ModelError: no form holds what the method trains.
        FedGuildError: the output folder is not empty, or cannot be written.
    """
    require_new(output)
    subject = Subject(client=experiment.clients[0].name)
    return _write(experiment, *_chosen(experiment, excerpt, number, subject), output)


def _write(experiment: Experiment, deployment: Deployment, origin: Origin, output: Path) -> Exported:
    missing = obstacle(experiment.backbone.info, deployment)
    if missing:
        _merge(experiment, deployment, origin, output)
        return Exported(output, "merged", f"the merged form, as an adapter alone cannot carry the model: {missing}")
    model, settings = experiment.backbone.info, experiment.config.model
    deployment = in_one_adapter(deployment)
    with new_folder(output) as folder:
        base = settings.path
        shipped = packaged(base)
        if shipped:
            shutil.copytree(shipped, folder / BASE)
            base = str(output.resolve() / BASE)
        write_adapter(folder, model, deployment, base=base, revision=settings.revision)
        write_text(folder / FILE, adapter_card(origin, model, deployment))
    return Exported(output, "adapter")


def export_merged(run_folder: Path, subject: Subject, output: Path, round: int | None = None) -> Exported:
    """Writes a model of a run as a whole Hugging Face checkpoint, its adapter merged in.

    The checkpoint's config has the number of active experts. The arguments and errors are those of
    `export_adapter`.

    Raises:
        ModelError: the backbone is in 4 bit, or no form holds what the method trains.
    """
    experiment, deployment, origin = _restored(run_folder, subject, output, round)
    _merge(experiment, deployment, origin, output)
    return Exported(output, "merged")


def _merge(experiment: Experiment, deployment: Deployment, origin: Origin, output: Path) -> None:
    require_mergeable(experiment.backbone)
    with new_folder(output) as folder:
        write_merged(folder, experiment.backbone, deployment)
        write_text(folder / FILE, merged_card(origin, experiment.backbone.info, deployment))


def _restored(
    run_folder: Path, subject: Subject, output: Path, round: int | None
) -> tuple[Experiment, Deployment, Origin]:
    """Returns a run with one of its models; cheap checks come before anything is loaded."""
    require_new(output)
    if (run_folder / "config.yaml").is_file():
        subject.require_in(load_config(str(run_folder / "config.yaml")))
    experiment, state, number = restore(run_folder, round)
    if subject.client:
        client = _client(experiment, subject)
        state = experiment.method.excerpt(state, experiment.backbone.info, client)
    return experiment, *_chosen(experiment, state, number, subject)


def _client(experiment: Experiment, subject: Subject) -> ClientInfo:
    return next(client for client in experiment.clients if client.name == subject.client)


def _chosen(experiment: Experiment, state: Payload, number: int, subject: Subject) -> tuple[Deployment, Origin]:
    """Returns one of an experiment's models, and where it comes from.

    Args:
        experiment: The run.
        state: The method's state; for a client's own model, its excerpt.
        number: The round that led to the state.
        subject: The model to return.
    """
    budget, deployment = _deployed(experiment, state, number, subject)
    _require_writable(experiment, deployment.plan)
    path = experiment.config.model.path
    is_hub_id = path not in PACKAGED and not Path(path).exists()
    origin = Origin(
        run=experiment.config.name,
        method=experiment.method.title,
        round=number,
        budget=budget.name,
        client=subject.client,
        base=path,
        base_code=f'folder + "/{BASE}"' if path in PACKAGED else f'"{path}"',
        hub_id=path if is_hub_id else "",
    )
    return deployment, origin


def _deployed(experiment: Experiment, state: Payload, number: int, subject: Subject) -> tuple[Budget, Deployment]:
    """Returns the subject's budget and model, with as many active experts as the run's tables score it with.

    `state` is the method's state; for a client's own model, its excerpt.
    """
    method, model = experiment.method, experiment.backbone.info
    deployment: Deployment | None
    if subject.client:
        client = _client(experiment, subject)
        budget, memory = client.budget, experiment.memory.load(client.name, number + 1)
        deployment = method.personalize(state, model, client, memory)
    else:
        budget = next(known for known in experiment.budgets if known.name == subject.budget)
        deployment = method.deploy(state, model, budget)
    if deployment is None:
        raise ConfigError(
            f"Under {method.name} every client has its own model; there is no global one.",
            "Name a client, for example client-000 (`--client client-000`).",
        )
    return budget, replace(deployment, plan=evaluated_plan(experiment, budget, deployment))


def _require_writable(experiment: Experiment, plan: AdapterPlan) -> None:
    """Raises ModelError where a model has parts that act beside the backbone's weights."""
    beyond = beyond_weights(plan)
    if beyond:
        raise ModelError(
            f"The model of {experiment.method.name} has a part that acts beside the backbone's weights "
            f"({', '.join(beyond)}): neither a PEFT adapter nor a merged checkpoint can hold it.",
            "Score it with `fedguild evaluate`, which needs no export.",
        )
