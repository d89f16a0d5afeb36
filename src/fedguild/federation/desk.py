"""What a client's trainer answers: it holds the backbone in memory for as long as its process lives."""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

import fedguild
from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.client.schedule import plan_steps
from fedguild.config import Config
from fedguild.config.data import DataSettings
from fedguild.config.site import SiteSettings
from fedguild.data import ClientData
from fedguild.data.batches import encode as encode_example
from fedguild.engines.flower.engine import read_upload, training_facts
from fedguild.engines.flower.parcel import Kind, Parcel
from fedguild.engines.local import LocalEngine
from fedguild.environment import installed
from fedguild.errors import ConfigError, FedGuildError, UploadError, nearest
from fedguild.evaluation.metrics import load_metrics
from fedguild.export.run import export_own
from fedguild.federation.agreement import Agreement
from fedguild.federation.secret import private_seed, run_secret
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.payload import Payload
from fedguild.progress import Silent
from fedguild.scoring import score_clients
from fedguild.seeding import numpy_rng
from fedguild.server.rounds import Task
from fedguild.server.sampling import quorum_count, wanted_count
from fedguild.setup import (
    MEMORY,
    Experiment,
    PreparedData,
    fit_method,
    load_model,
    method_of,
    prepare_data,
)
from fedguild.wire.accounting import size_bytes
from fedguild.wire.codec import encode, shrink

MODELS, LATEST = "models", "latest"
"""Where the models that a client takes home are, and the link to the newest."""
RUN_NAME = re.compile(r"[0-9a-f]{32}")
"""Identity of a run, which is also the name of its folder at a client."""
_DATA_ONLY = {"seed", "shares", "share"}


@dataclass(frozen=True)
class _Session:
    """One run as this client sees it."""

    experiment: Experiment
    engine: LocalEngine
    secret: bytes


class Desk:
    """Answers the server's parcels with this site's model, data and memory.

    Args:
        site: The site's settings.
        folder: The site's folder; its relative paths start here.
        load: Loads the backbone of a config.

    Attributes:
        loads: How often the backbone was loaded in the life of this object.
    """

    def __init__(self, site: SiteSettings, folder: Path, *, load: Callable[[Config], Backbone] = load_model) -> None:
        self.site = site
        self.work = folder / site.work
        self.agreement = Agreement(**dict(site.accept))
        self.loads = 0
        self._load = load
        self._backbone: Backbone | None = None
        self._data: PreparedData | None = None
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._answers: dict[Kind, Callable[[Parcel], Parcel]] = {
            "hello": self._hello,
            "train": self._train,
            "score": self._score,
            "deliver": self._deliver,
        }

    def answer(self, parcel: Parcel) -> Parcel:
        """Returns the answer to a parcel; what goes wrong is its `failure`, and the trainer lives on."""
        print(f"{parcel.kind}, round {parcel.round}.", flush=True)
        try:
            return self._answers[parcel.kind](parcel)
        except FedGuildError as error:
            print(f"{parcel.kind}, round {parcel.round}: {error}", file=sys.stderr, flush=True)
            return parcel.answer(failure=error.message)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            traceback.print_exc()
            return parcel.answer(failure=f"its trainer failed: {type(error).__name__}: {error}")

    def prepare(self) -> None:
        """Reads the data and loads the backbone, once."""
        self._own_data()
        self._loaded(self._data_config())

    def _hello(self, parcel: Parcel) -> Parcel:
        config, own = self._config(parcel), self._own_data()
        backbone = self._loaded(config)
        here = Parcel("hello", parcel.run, parcel.round, self.site.client)
        if refusal := self._refuses(config):
            return here.answer(failure=f"refused by its site: {refusal}")
        session = self._session(parcel.run, config)
        sizes = {name: len(getattr(own, name)) for name in ("train", "validation", "test")}
        facts = {
            "budget": session.experiment.clients[0].budget.name,
            "sizes": sizes,
            "fedguild": fedguild.__version__,
            "torch": installed("torch"),
            "model": model_digest(backbone.info),
            "backbone_loads": self.loads,
            "summary": f"{sizes['train']} training examples, budget {session.experiment.clients[0].budget.name}, "
            f"{backbone.info.name} on {backbone.device}",
        }
        return here.answer(facts=facts)

    def _train(self, parcel: Parcel) -> Parcel:
        config = self._addressed(parcel)
        session = self._session(parcel.run, config)
        experiment = session.experiment
        method, model, client = experiment.method, experiment.backbone.info, experiment.clients[0]
        task = Task(parcel.round, client, read_upload(parcel.body, "The download"))
        expected = method.expected_upload(model, client, task.download)
        if refusal := self._refuses(config) or self.agreement.refuses_names(expected):
            return parcel.answer(failure=f"refused by its site: {refusal}")
        experiment.memory.forget(max(0, parcel.round - config.federation.keep_checkpoints))
        secret = private_seed(session.secret, experiment.config, parcel.body)
        (delivery,) = session.engine.train(method.with_secret(secret), model, [task])
        if delivery.upload is None:
            return parcel.answer(failure=delivery.failure)
        upload = shrink(delivery.upload, config.federation.codec)
        refusal = self.agreement.refuses_names(delivery.upload.tensors)
        if refusal := refusal or self.agreement.refuses_size(size_bytes(upload)):
            return parcel.answer(failure=f"refused by its site: {refusal}")
        facts = {**training_facts(delivery), "backbone_loads": self.loads}
        return parcel.answer(facts=facts, body=encode(upload))

    def _score(self, parcel: Parcel) -> Parcel:
        experiment = self._session(parcel.run, self._addressed(parcel)).experiment
        scope, split = parcel.facts["scope"], parcel.facts["split"]
        excerpt = _state(parcel)
        records = score_clients(experiment, scope, lambda _: excerpt, parcel.round, split)
        return parcel.answer(facts={"records": [record.model_dump(mode="json") for record in records]})

    def _deliver(self, parcel: Parcel) -> Parcel:
        """Writes the client's own model as a folder that plain transformers and peft load."""
        experiment = self._session(parcel.run, self._addressed(parcel)).experiment
        folder = self.work / MODELS / f"{experiment.config.name}-{parcel.run[:8]}-round-{parcel.round:05d}"
        if folder.exists():
            return parcel.answer(facts={"folder": folder.name, "form": "already there"})
        exported = export_own(experiment, _state(parcel), parcel.round, folder)
        _point(folder.with_name(LATEST), folder.name)
        return parcel.answer(facts={"folder": folder.name, "form": exported.form, "reason": exported.reason})

    def _addressed(self, parcel: Parcel) -> Config:
        """Returns the run's config of a parcel that is meant for this client."""
        if parcel.client != self.site.client:
            raise UploadError(f"a message for client {parcel.client} reached client {self.site.client}")
        return self._config(parcel)

    def _config(self, parcel: Parcel) -> Config:
        """Returns the run's config, with this site's model and data in place of the server's."""
        try:
            config = Config.model_validate(parcel.facts["config"])
        except (KeyError, pydantic.ValidationError) as error:
            raise ConfigError(
                "the server's config cannot be read here: is the same version of fedguild installed on both sides? "
                f"({str(error).splitlines()[0]})"
            ) from error
        own = self._data_config().data.model_copy(update={"max_tokens": config.data.max_tokens})
        return config.model_copy(update={"model": self.site.model, "data": own, "output": None})

    def _refuses(self, config: Config) -> str:
        wanted = wanted_count(config.federation.clients, config.federation.participation)
        aggregated = quorum_count(wanted, config.federation.quorum)
        examples = len(self._own_data().train)
        steps = len(plan_steps(examples, config.training, numpy_rng(0, "counting steps")))
        return self.agreement.refuses_run(config.method.name, steps, aggregated)

    def _session(self, run: str, config: Config) -> _Session:
        key = (run, config.fingerprint())
        if key not in self._sessions:
            self._sessions = {key: self._begun(run, config)}
        return self._sessions[key]

    def _begun(self, run: str, config: Config) -> _Session:
        if not RUN_NAME.fullmatch(run):
            raise UploadError(f"a message names a run that is none: {run!r:.50}")
        method = method_of(config)
        load_metrics(config.evaluation.metrics)
        backbone, own = self._loaded(config), self._own_data()
        method, tiers = fit_method(method, config, backbone.info)
        client = ClientInfo(self.site.client, self._budget(config, tiers), len(own.train))
        folder = self.work / "runs" / run
        memory = ClientMemory(folder / MEMORY)
        data = self._dealt()
        experiment = Experiment(
            config,
            folder,
            method,
            replace(data, clients=[own]),
            backbone,
            list(tiers.values()),
            [client],
            memory,
            Silent(),
        )
        encoded = [encode_example(example, backbone.tokenizer, config.data.max_tokens) for example in own.train]
        engine = LocalEngine(
            backbone, {client.index: encoded}, config.training, memory, cohort_size=1, seed=config.seed
        )
        return _Session(experiment, engine, run_secret(folder))

    def _budget(self, config: Config, tiers: dict[str, Budget]) -> Budget:
        if self.site.client >= config.federation.clients:
            raise ConfigError(f"the federation has {config.federation.clients} clients, from 0")
        name = self.site.budget or config.federation.budget_per_client()[self.site.client].name
        if name not in tiers:
            raise ConfigError(f"its site says budget '{name}', which the run does not have", nearest(name, tiers))
        return tiers[name]

    def _data_config(self) -> Config:
        """Returns a config that says where the site's data is and nothing of any run."""
        data = DataSettings(**self.site.data.model_dump(exclude=_DATA_ONLY))
        return Config.model_validate(
            {
                "method": "fedit",
                "model": self.site.model.model_dump(),
                "data": data.model_dump(),
                "federation": {"clients": self.site.data.shares},
                "seed": self.site.data.seed,
            }
        )

    def _dealt(self) -> PreparedData:
        if self._data is None:
            self._data = prepare_data(self._data_config())
        return self._data

    def _own_data(self) -> ClientData:
        return self._dealt().clients[self.site.data.share]

    def _loaded(self, config: Config) -> Backbone:
        if self._backbone is None:
            self._backbone = self._load(config)
            self.loads += 1
        return self._backbone


def _point(link: Path, target: str) -> None:
    """Lets a symbolic link point to a folder beside it, whatever it pointed to before."""
    temporary = link.with_name(f".{link.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def model_digest(model: ModelInfo) -> str:
    """Returns 16 hexadecimal digits that are the same on machines whose models look the same."""
    return hashlib.sha256(repr(replace(model, name="")).encode()).hexdigest()[:16]


def facts_of(config: Config) -> dict[str, Any]:
    """Returns what a server tells its clients with every question: the run's config, without its folders."""
    settings = config.model_dump(mode="json")
    settings["output"] = None
    settings["data"] = {**DataSettings().model_dump(mode="json"), "max_tokens": config.data.max_tokens}
    settings["model"] = {**settings["model"], "path": "embedded", "revision": None}
    return {"config": settings}


def _state(parcel: Parcel) -> Payload:
    return read_upload(parcel.body, "The state")
