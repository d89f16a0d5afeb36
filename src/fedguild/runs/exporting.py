"""Export of a model from a run's folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import Config, load_saved
from fedguild.config.schema import ModelSettings
from fedguild.config.trust import code_of_model, require_trusted, trust
from fedguild.core.errors import ConfigError, ModelError, nearest
from fedguild.core.files import write_json, write_text
from fedguild.core.layout import CONFIG, client_name
from fedguild.core.payload import Payload
from fedguild.export.adapter import WEIGHTS_FILE, factors_from_peft, obstacle, write_adapter
from fedguild.export.card import (
    FILE,
    TRUSTING,
    Origin,
    adapter_card,
    code_card,
    gguf_card,
    merged_card,
    per_expert_card,
)
from fedguild.export.code import standalone_of, write_code
from fedguild.export.folder import new_folder, require_new
from fedguild.export.gguf import FILE as GGUF
from fedguild.export.gguf import require_converter, write_gguf
from fedguild.export.live import attached
from fedguild.export.manifest import (
    BASE,
    MANIFEST,
    BaseModelOf,
    Form,
    Manifest,
    digest_of_base,
    place_of_base,
    read_manifest,
    write_manifest,
)
from fedguild.export.merged import has_own_code, is_own, require_mergeable, write_merged
from fedguild.export.per_expert import factors_from_experts, write_per_expert
from fedguild.export.weights import beyond_weights, in_one_adapter
from fedguild.measuring.log.folder import load_run
from fedguild.model.backbone import Backbone, load_backbone
from fedguild.model.packaged import PACKAGED, is_on_hub, packaged
from fedguild.model.pretrained import is_gguf, load_tokenizer
from fedguild.runs.experiment import restore
from fedguild.runs.scoring import evaluated_plan
from fedguild.runs.setup import Experiment
from fedguild.server.method import Deployment, client_model, excerpt_of
from fedguild.server.optimizer import own_state

AUDIENCES: dict[Form, str] = {
    "peft": "For peft and transformers. vLLM and SGLang do not take fused experts: `fedguild export` makes the form "
    "per-expert for them, also from this folder. Where peft warns that it ignored keys of rank_pattern or "
    "alpha_pattern, it used them.",
    "per-expert": "For vLLM and SGLang, which load an adapter beside the base model. For peft export --format peft.",
    "merged": "For anything that loads a Hugging Face checkpoint: transformers, vLLM, SGLang, llama.cpp's converter.",
    "code": "For transformers, with trust_remote_code=True: the method's own code comes with the weights.",
    "gguf": "For llama.cpp and what is built on it.",
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
        run_folder: A run's folder, or a folder that was exported or that a site took home.
        subject: The model to export; None for the global one at the largest budget.
        output: The folder to write; new or empty.
        round: The round to take the model from; the last by default.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the budget or the client is unknown, or there is no global model.
        ModelError: no form holds what the method trains, or the merged form is needed, but the backbone is in 4 bit; or
            there is no converter to GGUF.
        FedGuildError: the output folder is not empty, or cannot be written.
    """
    require_new(output)
    if format == "gguf":
        require_converter()
    if (run_folder / MANIFEST).is_file():
        _require_whole(run_folder, subject, round)
        return _converted(run_folder, output, format)
    experiment, state, number, subject = _restored(run_folder, subject, round)
    return _write(_source(experiment, *_chosen(experiment, state, number, subject)), output, format)


def _require_whole(folder: Path, subject: Subject | None, round: int | None) -> None:
    """Raises ConfigError if a part of an exported folder is asked for, which holds one model."""
    if subject is not None or round is not None:
        raise ConfigError(
            f"{folder} is an exported model, not a run: it has one budget or client, and one round.",
            "Leave --budget, --client and --round out, or give the run's folder.",
        )


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


def export_own(experiment: Experiment, excerpt: Payload, number: int, output: Path, format: Form = "peft") -> Exported:
    """Writes the own model of an experiment's only client, as `export` does.

    Args:
        excerpt: The client's excerpt of the state after the round.
        output: The folder to write; new or empty.

    Raises:
        ModelError: no form holds what the method trains, or there is no converter to GGUF.
        FedGuildError: the output folder is not empty, or cannot be written.
    """
    require_new(output)
    subject = Subject(client=experiment.clients[0].name)
    return _write(_source(experiment, *_chosen(experiment, excerpt, number, subject)), output, format)


@dataclass(frozen=True)
class _Source:
    """A model that can be written.

    Attributes:
        path: The base model's `model.path`; its folder, if it is in an exported one.
        method: The name of the method.
        copied: Whether the base model goes along as a copy, and not as a link.
    """

    backbone: Backbone
    path: str
    revision: str | None
    deployment: Deployment
    origin: Origin
    method: str
    copied: bool = False


def _source(experiment: Experiment, deployment: Deployment, origin: Origin) -> _Source:
    model = experiment.config.model
    path, copied = (str(packaged(model.path)), True) if model.path in PACKAGED else (model.path, False)
    return _Source(experiment.backbone, path, model.revision, deployment, origin, experiment.method.name, copied)


def _write(source: _Source, output: Path, format: Form) -> Exported:
    written, reason = _possible(source, format)
    backbone, deployment, origin = source.backbone, source.deployment, source.origin
    model, adapter = backbone.info, written in ("peft", "per-expert")
    own_code = has_own_code(backbone)
    if not adapter:
        require_mergeable(backbone)
    with new_folder(output) as folder:
        base = _base(source, folder, output) if adapter else origin.base
        if written == "merged":
            write_merged(folder, backbone, deployment)
            card = merged_card(origin, model, deployment, own_code=own_code)
        elif written == "gguf":
            with tempfile.TemporaryDirectory(dir=folder) as merged:
                write_merged(Path(merged), backbone, deployment)
                write_gguf(Path(merged), folder / GGUF)
            card = gguf_card(origin, model, deployment)
        elif written == "code":
            write_code(folder, backbone, deployment)
            card = code_card(origin, model, deployment)
        else:
            deployment = in_one_adapter(deployment)
            if written == "peft":
                write_adapter(folder, model, deployment, base=base, revision=source.revision)
                card = adapter_card(origin, model, deployment)
            else:
                write_per_expert(folder, backbone, deployment, base=base, revision=source.revision)
                card = per_expert_card(origin, model, deployment)
        if backbone.tokenizer is not None:
            backbone.tokenizer.save_pretrained(folder)  # with the template that the adapter was trained with
        described = BaseModelOf(
            model=base,
            revision=source.revision,
            sha256=digest_of_base(source.path, source.revision),
            dtype=str(backbone.dtype).removeprefix("torch."),
            trust_remote_code=adapter and own_code,
        )
        write_manifest(folder, written, described, deployment.plan, origin)
        write_text(folder / FILE, card + f"\n{AUDIENCES[written]}\n")
    if described.trust_remote_code:
        trust(output / MANIFEST, [code_of_model(place_of_base(output, described), described.revision)])
    return Exported(output, written, reason)


def _converted(folder: Path, output: Path, format: Form) -> Exported:
    """Writes an exported adapter in another form, or an exported checkpoint as GGUF.

    Raises:
        ModelError: the folder is not complete or has links, its base model is not the one that it was trained on, or
            the form cannot be made from it.
    """
    _require_own_files(folder)
    manifest = read_manifest(folder)
    if manifest.lora is None:
        return _checkpoint_as_gguf(folder, manifest, output, format)
    base = manifest.base
    path = place_of_base(folder, base)
    if (known := digest_of_base(path, base.revision)) and base.sha256 and known != base.sha256:
        raise ModelError(
            f"The base model of {folder}, {path}, is not the one that it adapts: their hashes differ ({MANIFEST}).",
            f"Put that model there; it was {manifest.origin['base']}.",
        )
    if base.trust_remote_code:
        require_trusted(folder / MANIFEST, code_of_model(path, base.revision))
    given = {"path": path, **base.model_dump(include={"revision", "dtype", "trust_remote_code"})}
    backbone = load_backbone(**ModelSettings(**given).model_dump())
    if (folder / "tokenizer_config.json").is_file():  # with the base model's code, which alone is trusted
        own = type(backbone.tokenizer).from_pretrained if is_own(backbone.tokenizer) else load_tokenizer
        backbone.tokenizer = own(str(folder))
    tensors = load_file(folder / WEIGHTS_FILE)
    if manifest.form == "peft":
        factors = factors_from_peft(backbone.info, manifest.plan, tensors)
    else:
        factors = factors_from_experts(backbone, manifest.plan, tensors)
    origin = Origin(**manifest.origin)  # type: ignore[arg-type]
    copied = base.model == BASE and not (folder / BASE).is_symlink()
    deployment = Deployment(manifest.plan, factors)
    return _write(_Source(backbone, path, base.revision, deployment, origin, origin.method, copied), output, format)


def _require_own_files(folder: Path) -> None:
    """Raises ModelError if a file of an exported folder is a link, whose target the export would copy.

    Only the base model is linked to, which is not copied then.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() and path != folder / BASE:
            raise ModelError(
                f"{path} is a link, to {os.path.realpath(path)}: an export would copy what is there.",
                f"If you want that, `cp -rL {folder} COPY` makes a file of every link; export the copy.",
            )


def _checkpoint_as_gguf(folder: Path, manifest: Manifest, output: Path, format: Form) -> Exported:
    if manifest.form != "merged" or format != "gguf":
        raise ModelError(
            f"{folder} is a model in the form {manifest.form}, from which the form {format} cannot be made.",
            "A merged model can be exported as gguf; other forms need the adapter's folder or the run.",
        )
    with new_folder(output) as new:
        write_gguf(folder, new / GGUF)
        load_tokenizer(str(folder)).save_pretrained(new)
        write_json(new / MANIFEST, manifest.model_copy(update={"form": format}).model_dump(mode="json"))
        card = (folder / FILE).read_text("utf-8").partition("## How to load it")[0]
        write_text(new / FILE, f"{card}{AUDIENCES[format]}\n")
    return Exported(output, format)


def _possible(source: _Source, format: Form) -> tuple[Form, str]:
    """Returns the form in which a deployment can be written, the requested one if possible, and the reason if not.

    Raises:
        ModelError: there is none.
    """
    beyond = beyond_weights(source.deployment.plan)
    if beyond:
        if standalone_of(source.backbone, source.deployment) is None:
            raise ModelError(
                f"The model of {source.method} has a part that acts beside the backbone's weights "
                f"({', '.join(beyond)}): no exported form can hold it.",
                "Use `fedguild generate` or `fedguild.load_model`, which need no export.",
            )
        if format == "code":
            return "code", ""
        return "code", f"a checkpoint with modelling code, as {', '.join(beyond)} acts beside the backbone's weights"
    if format == "code":
        return "merged", "the merged form, as nothing acts beside the backbone's weights"
    is_adapter = format in ("peft", "per-expert")
    missing = obstacle(source.backbone.info, source.deployment) if is_adapter else ""
    if not missing and is_adapter and is_gguf(source.path):
        missing = "its base model is a GGUF file, which peft does not read"
    if missing:
        return "merged", f"the merged form, as an adapter alone cannot carry the model: {missing}"
    return format, ""


def _base(source: _Source, folder: Path, output: Path) -> str:
    """Returns how an adapter names its base model: by its hub id, or by the path of its copy or link in the folder."""
    if source.copied:
        shutil.copytree(source.path, folder / BASE)
        return BASE
    if not Path(source.path).exists():
        return source.path
    place = Path(os.path.abspath(source.path))  # itself a link, in a site's folder
    target = os.path.relpath(Path(os.path.realpath(place.parent)) / place.name, os.path.realpath(output.parent))
    (folder / BASE).symlink_to(Path(os.pardir) / target, target_is_directory=True)
    return BASE


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
        state = excerpt_of(experiment.method, state, experiment.backbone.info, _client(experiment, subject))
    return experiment, state, number, subject


def _client(experiment: Experiment, subject: Subject) -> ClientInfo:
    """Returns the client whose model it is.

    Raises:
        ConfigError: the client is real, and its data at its site.
    """
    for client in experiment.clients:
        if client.name == subject.client:
            return client
    raise ConfigError(
        f"The model of {subject.client} is at its site.",
        "There it is in work/models/latest; `fedguild export` writes that in other formats.",
    )


def _chosen(experiment: Experiment, state: Payload, number: int, subject: Subject) -> tuple[Deployment, Origin]:
    """Returns one of an experiment's models, and its origin.

    Args:
        state: The method's state; for a client's own model, its excerpt.
        number: The round that led to the state.
    """
    budget, deployment = _deployed(experiment, state, number, subject)
    path, revision = experiment.config.model.path, experiment.config.model.revision
    on_hub = is_on_hub(path)
    base_code = f'"{path}"' if on_hub else f'folder + "/{BASE}"'
    if on_hub and revision:
        base_code += f', revision="{revision}"'
    if has_own_code(experiment.backbone):
        base_code += TRUSTING
    origin = Origin(
        run=experiment.config.name,
        method=experiment.method.title,
        round=number,
        budget=budget.name,
        client=subject.client,
        base=path if path in PACKAGED else _named(path),
        base_code=base_code,
        hub_id=path if on_hub else "",
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
