"""Export of a model from a run's folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import Config, load_saved
from fedguild.core.errors import ConfigError, ModelError, nearest
from fedguild.core.files import write_text
from fedguild.core.layout import CONFIG, client_name
from fedguild.core.payload import Payload
from fedguild.export.adapter import obstacle, write_adapter
from fedguild.export.card import BASE_FOLDER, FILE, Origin, adapter_card, code_card, merged_card, per_expert_card
from fedguild.export.code import standalone_of, write_code
from fedguild.export.folder import new_folder, require_new
from fedguild.export.live import attached
from fedguild.export.merged import require_mergeable, write_merged
from fedguild.export.per_expert import write_per_expert
from fedguild.export.weights import beyond_weights, in_one_adapter
from fedguild.measuring.log.folder import load_run
from fedguild.model.packaged import PACKAGED, packaged
from fedguild.model.pretrained import is_gguf
from fedguild.runs.experiment import restore
from fedguild.runs.scoring import evaluated_plan
from fedguild.runs.setup import Experiment
from fedguild.server.method import Deployment, client_model
from fedguild.server.optimizer import own_state

BASE = "base"
"""Subfolder of an adapter's folder for the base model, if that is not on the hub."""


Form = Literal["peft", "per-expert", "merged", "code"]
AUDIENCES: dict[Form, str] = {
    "peft": "For peft and transformers. For vLLM or SGLang export --format per-expert: fused experts are not theirs.",
    "per-expert": "For vLLM and SGLang, which load an adapter beside the base model. For peft export --format peft.",
    "merged": "For anything that loads a Hugging Face checkpoint: transformers, vLLM, SGLang, llama.cpp's converter.",
    "code": "For transformers, with trust_remote_code=True: the method's own code comes with the weights.",
}


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Attributes:
        reason: Why another form than the requested one was written; empty otherwise.
    """

    folder: Path
    format: Form
    reason: str = ""

    @property
    def audience(self) -> str:
        """Who the form is for, in one sentence."""
        return AUDIENCES[self.format]


@dataclass(frozen=True)
class Subject:
    """The model to export: the global one at a budget, or a client's own.

    Attributes:
        budget: Name of the budget; empty if a client is named.
        client: Name of the client, `client-000`; empty if a budget is named.

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
        clients = [client_name(index) for index in range(config.federation.clients)]
        if self.budget and self.budget not in budgets:
            raise ConfigError(f"The run has no budget '{self.budget}'.", nearest(self.budget, budgets))
        if self.client and self.client not in clients:
            known = clients[0] if len(clients) == 1 else f"{clients[0]} to {clients[-1]}"
            raise ConfigError(f"The run has no client '{self.client}'.", f"Known: {known}.")


def export(
    run_folder: Path, subject: Subject | None, output: Path, format: Form = "peft", *, round: int | None = None
) -> Exported:
    """Writes a model of a run in a form that other programs load.

    `peft` is an adapter with fused experts, `per-expert` one with a key for every expert, `merged` a whole checkpoint
    with the number of active experts in its config. If an adapter alone cannot represent the model (an output scale
    other than 1, active experts other than the base model's own, weights trained in full, merged changes of a high
    rank), the merged form is written. If the weights cannot either, a checkpoint with the method's own modelling code
    (`code`) is written. `reason` then says why.

    Args:
        subject: The model to export; None for the global one at the largest budget.
        output: The folder to write; new or empty.
        round: The round to take the model from; the last by default.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, or there is no global model.
        ModelError: no form holds what the method trains, or the merged form is needed, but the backbone is in 4 bit.
        FedGuildError: the output folder is not empty, or cannot be written.
    """
    require_new(output)
    experiment, state, number, subject = _restored(run_folder, subject, round)
    return _write(experiment, *_chosen(experiment, state, number, subject), output, format)


def load_attached(run_folder: Path, subject: Subject | None = None, round: int | None = None) -> tuple[Any, Experiment]:
    """Returns a model of a run as a transformers model with its adapter and routing attached, and the run.

    Args:
        subject: The model; None for the global one at the largest budget.
        round: The round to take the model from; the last by default.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, or there is no global model.
        ModelError: the model cannot run outside of FedGuild.
    """
    experiment, state, number, subject = _restored(run_folder, subject, round)
    _, deployment = _deployed(experiment, state, number, subject)
    return attached(experiment.backbone, deployment), experiment


def export_own(experiment: Experiment, excerpt: Payload, number: int, output: Path) -> Exported:
    """Writes the own model of an experiment's only client, as `export` does.

    Args:
        excerpt: The client's excerpt of the state after the round.
        output: The folder to write; new or empty.

    Raises:
        ModelError: no form holds what the method trains.
        FedGuildError: the output folder is not empty, or cannot be written.
    """
    require_new(output)
    subject = Subject(client=experiment.clients[0].name)
    return _write(experiment, *_chosen(experiment, excerpt, number, subject), output, "peft")


def _write(experiment: Experiment, deployment: Deployment, origin: Origin, output: Path, format: Form) -> Exported:
    written, reason = _possible(experiment, deployment, format)
    backbone, settings = experiment.backbone, experiment.config.model
    model = backbone.info
    if written not in ("peft", "per-expert"):
        require_mergeable(backbone)
    with new_folder(output) as folder:
        if written == "merged":
            write_merged(folder, backbone, deployment)
            card = merged_card(origin, model, deployment)
        elif written == "code":
            write_code(folder, backbone, deployment)
            card = code_card(origin, model, deployment)
        else:
            deployment, base = in_one_adapter(deployment), _base(settings.path, folder)
            if written == "peft":
                write_adapter(folder, model, deployment, base=base, revision=settings.revision)
                card = adapter_card(origin, model, deployment)
            else:
                write_per_expert(folder, backbone, deployment, base=base, revision=settings.revision)
                card = per_expert_card(origin, model, deployment)
        if written in ("peft", "per-expert") and backbone.tokenizer.chat_template:
            backbone.tokenizer.save_pretrained(folder)  # with the template that the adapter was trained with
        write_text(folder / FILE, card + f"\n{AUDIENCES[written]}\n")
    return Exported(output, written, reason)


def _possible(experiment: Experiment, deployment: Deployment, format: Form) -> tuple[Form, str]:
    """Returns the form in which a deployment can be written, the requested one if possible, and the reason if not.

    Raises:
        ModelError: there is none.
    """
    beyond = beyond_weights(deployment.plan)
    if beyond:
        if standalone_of(experiment.backbone, deployment) is None:
            raise ModelError(
                f"The model of {experiment.method.name} has a part that acts beside the backbone's weights "
                f"({', '.join(beyond)}): no exported form can hold it.",
                "Use `fedguild generate` or `fedguild.load_model`, which need no export.",
            )
        if format == "code":
            return "code", ""
        return "code", f"a checkpoint with modelling code, as {', '.join(beyond)} acts beside the backbone's weights"
    if format == "code":
        return "merged", "the merged form, as nothing acts beside the backbone's weights"
    missing = "" if format == "merged" else obstacle(experiment.backbone.info, deployment)
    if not missing and format != "merged" and is_gguf(experiment.config.model.path):
        missing = "its base model is a GGUF file, which peft does not read"
    if missing:
        return "merged", f"the merged form, as an adapter alone cannot carry the model: {missing}"
    return format, ""


def _base(path: str, folder: Path) -> str:
    """Returns how an adapter names its base model; one that ships with FedGuild is copied into the folder."""
    if shipped := packaged(path):
        shutil.copytree(shipped, folder / BASE)
        return BASE
    return _named(path)


def _named(path: str) -> str:
    """Returns a base model's name: its id on the hub, or that of its folder, never where it is on this machine."""
    return Path(path).resolve().name if Path(path).exists() else path


def _largest(experiment: Experiment) -> Subject:
    return Subject(budget=max(experiment.budgets, key=lambda one: (one.active_experts, one.rank or 0)).name)


def _restored(run_folder: Path, subject: Subject | None, round: int | None) -> tuple[Experiment, Payload, int, Subject]:
    """Returns a run, the state of a round as its method knows it, the round, and the subject.

    For a client's own model the state is its excerpt. Cheap checks come before anything is loaded.
    """
    if subject is not None and (run_folder / CONFIG).is_file():
        subject.require_in(load_saved(run_folder / CONFIG))
    experiment, state, number = restore(run_folder, round)
    subject, state = subject or _largest(experiment), own_state(state)
    if subject.client:
        state = experiment.method.excerpt(state, _client(experiment, subject))
    return experiment, state, number, subject


def _client(experiment: Experiment, subject: Subject) -> ClientInfo:
    return next(client for client in experiment.clients if client.name == subject.client)


def _chosen(experiment: Experiment, state: Payload, number: int, subject: Subject) -> tuple[Deployment, Origin]:
    """Returns one of an experiment's models, and its origin.

    Args:
        state: The method's state; for a client's own model, its excerpt.
        number: The round that led to the state.
    """
    budget, deployment = _deployed(experiment, state, number, subject)
    path = experiment.config.model.path
    is_hub_id = path not in PACKAGED and not Path(path).exists()
    origin = Origin(
        run=experiment.config.name,
        method=experiment.method.title,
        round=number,
        budget=budget.name,
        client=subject.client,
        base=path if path in PACKAGED else _named(path),
        base_code=f'folder + "/{BASE}"' if path in PACKAGED else f'"{path}"' if is_hub_id else BASE_FOLDER,
        hub_id=path if is_hub_id else "",
        privacy="" if subject.client else _privacy(experiment, number),
    )
    return deployment, origin


def _privacy(experiment: Experiment, number: int) -> str:
    """Returns the privacy promised to the clients of the run's global model after a round; empty for none."""
    if experiment.config.privacy.unit == "none":
        return ""
    run = load_run(experiment.folder, needs_scores=False)
    spent = [record for record in run.privacy if record.round == number]
    assumptions = " ".join(run.guarantee)
    return " ".join(f"per {r.unit}, ε up to {max(r.epsilon):.3f} at δ = {r.delta:g}. {assumptions}" for r in spent)


def _deployed(experiment: Experiment, state: Payload, number: int, subject: Subject) -> tuple[Budget, Deployment]:
    """Returns the subject's budget and model, with the active experts of the run's tables.

    `state` is the method's state; for a client's own model, its excerpt.
    """
    method, model = experiment.method, experiment.backbone.info
    deployment: Deployment | None
    if subject.client:
        client = _client(experiment, subject)
        budget, memory = client.budget, experiment.memory.load(client.name, number + 1)
        deployment = client_model(method, state, model, client, memory)
    else:
        budget = next(known for known in experiment.budgets if known.name == subject.budget)
        deployment = method.deploy(state, model, budget)
    if deployment is None:
        raise ConfigError(
            f"Under {method.name} every client has its own model; there is no global one.",
            "Name a client, for example client-000 (`--client client-000`).",
        )
    return budget, replace(deployment, plan=evaluated_plan(experiment, budget, deployment))
