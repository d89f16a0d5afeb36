"""A client's trainer service: answers the server's requests with a backbone that stays in memory."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

import fedguild
from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.client.schedule import steps_in_round
from fedguild.config import Config
from fedguild.config.data import DataSettings
from fedguild.core.accounting import size_bytes
from fedguild.core.codec import decode, encode, shrink
from fedguild.core.errors import CheckpointError, ConfigError, FedGuildError, UploadError, nearest
from fedguild.core.files import make_folder, write_bytes
from fedguild.core.layout import MEMORY
from fedguild.core.payload import Payload, digest_of
from fedguild.core.progress import Silent
from fedguild.core.score_names import names_of
from fedguild.core.sealed import remove_leftovers
from fedguild.data import ClientData
from fedguild.data.batches import Encoded
from fedguild.data.rendering import CONVERSATIONS, require_chat_template, set_chat_template
from fedguild.data.rendering import encode as encode_example
from fedguild.engines.client_report import ClientReport
from fedguild.engines.local import LocalEngine
from fedguild.engines.private import PrivateAnswers
from fedguild.export.gguf import require_converter
from fedguild.federation.exposure import Exposure, exposure
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.federation.schema import REFUSED, MessageKind, Request, ScoreRequest, SecureRequest, read_metadata
from fedguild.federation.site import SiteSettings, data_config
from fedguild.federation.site_policy import RequestLog, SitePolicy, Terms
from fedguild.federation.sum_log import FILE as SUMS
from fedguild.federation.sum_log import SumLog
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import EvaluationRecord
from fedguild.measuring.scores.metrics import load_metrics
from fedguild.methods import METHODS, require_registered
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import adapter_shapes, trainable_shapes
from fedguild.privacy.dp.accounting import IN_THE_CLEAR, epsilon
from fedguild.privacy.dp.ledger import FILE as LEDGER
from fedguild.privacy.dp.ledger import Ledger
from fedguild.privacy.dp.noise import Noise
from fedguild.privacy.dp.secret import private_seed, run_secret
from fedguild.privacy.secure_sum.session import Session as SecureParameters
from fedguild.runs.exporting import export_own
from fedguild.runs.guarantee import rules_of
from fedguild.runs.privacy_accounts import SLACK
from fedguild.runs.scoring import measures_of, score_clients
from fedguild.runs.setup import (
    Experiment,
    PreparedData,
    Split,
    budgets_of,
    check_fit,
    data_sentences,
    dropped_of,
    fitted,
    load_model,
    method_of,
    of_client,
    prepare_data,
)
from fedguild.server.engine import Engine, FilteredEngine, Task
from fedguild.server.method import Method, always_sent
from fedguild.server.sampling import quorum_count
from fedguild.server.validation import check_received

if TYPE_CHECKING:
    from fedguild.engines.secure import SecureClients

LEDGER_NAME = "site"
"""The name in the site's ledger of the one client that it has."""
CLEAR = "in-the-clear"
"""The end of the key in the site's ledger of a run to which the site adds no noise."""
MODELS, LATEST = "models", "latest"
"""Folder of the models that a client takes home, and the link to the newest."""
ANSWER = "answer"
"""File of a private run's last answer, after the digest of its request, beside the client's memory."""
BOUND = "fingerprint"
"""File of the fingerprint of a run's first config, beside the client's memory."""
REQUESTS = "requests.json"
"""File of a run's requests that were answered, beside the client's memory."""
EARLIER_SUMS = "sums.json"
"""File of the sums that a run's trainings went into, beside it, as 0.3 wrote it."""
SECURE_LIMIT = "the limit where uploads are summed (accept.repeat_sessions lifts it)"
"""What limits the trainings of a round of a run that aggregates securely."""
RUN_NAME = re.compile(r"[0-9a-f]{32}")
"""Identity of a run, which is also the name of its folder on a client's machine."""
LOG_BYTES = 16 * 2**20
"""Largest log of a site's requests; its older half is then removed."""
SCORES = "scores"
"""What `federation.secure_disclose` and `accept.disclose` call the scores of a client's own model."""
WITHHELD = "it failed; the reason is in its site's log, as it may tell of the site's data"
"""What a private run's server hears of an error that is no refusal."""


class _RefusalError(FedGuildError):
    """A refusal by the site's policy, whose message reveals nothing that differential privacy withholds."""


@dataclass
class _Session:
    experiment: Experiment
    engine: LocalEngine
    secret: bytes
    requests: RequestLog
    rules: PrivacyRules | None
    clients: SecureClients | None = None

    @cached_property
    def needed(self) -> frozenset[str]:
        """The names of the adapter's tensors that this client is always sent."""
        run = self.experiment
        return always_sent(run.method, run.backbone.info, run.budgets, run.clients[0])


class TrainerService:
    """Handles the server's requests with this site's model, data and memory.

    Args:
        folder: The site's folder; its relative paths start here.

    Attributes:
        loads: Number of times that this object has loaded the backbone.
    """

    def __init__(self, site: SiteSettings, folder: Path, *, load: Callable[[Config], Backbone] = load_model) -> None:
        self.site = site
        self.folder, self.work = folder, folder / site.work
        self.policy = SitePolicy(**dict(site.accept))
        self.ledger = Ledger(self.work / LEDGER)
        self.loads = 0
        self._load = load
        self._backbone: Backbone | None = None
        self._data: PreparedData | None = None
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._hellos: deque[float] = deque()
        self._handlers: dict[MessageKind, Callable[[Message], Message]] = {
            "hello": self._hello,
            "train": self._train,
            "score": self._score,
            "deliver": self._deliver,
            "secure": self._secure,
        }

    def handle(self, message: Message) -> Message:
        """Returns the reply to a request; an error becomes its `failure`, and the service continues.

        A `hello` beyond `accept.hellos_per_hour` costs nothing: it is neither looked at nor written down.
        """
        started = time.monotonic()
        if message.kind == "hello" and (refusal := self._hello_refusal(started)):
            return message.reply(failure=REFUSED + refusal)
        reply = self._reply(message)
        make_folder(self.work)
        ActivityLog(self.work, LOG_BYTES).append(
            "request",
            kind=message.kind,
            run=message.run,
            round=message.round,
            outcome="failed" if reply.failure else "answered",
            seconds=round(time.monotonic() - started, 3),
            received_bytes=len(message.body),
            sent_bytes=len(reply.body),
        )
        return reply

    def _hello_refusal(self, now: float) -> str:
        """Counts a `hello`; returns why it is one too many, empty if it is not."""
        most = self.policy.hellos_per_hour
        while self._hellos and self._hellos[0] <= now - 3600:
            self._hellos.popleft()
        if most is not None and len(self._hellos) >= most:
            return f"it was asked who it is {most} times within an hour (accept.hellos_per_hour)"
        if most is not None:
            self._hellos.append(now)
            if len(self._hellos) == most:
                print(f"The server asked {most} times within an hour who this site is.", file=sys.stderr, flush=True)
        return ""

    def _reply(self, message: Message) -> Message:
        print(f"{message.kind}, round {message.round}.", flush=True)
        try:
            return self._handlers[message.kind](message)
        except FedGuildError as error:
            cause = f" ({error.__cause__})" if isinstance(error.__cause__, FedGuildError) else ""
            print(f"{message.kind}, round {message.round}: {error}{cause}", file=sys.stderr, flush=True)
            told = not _is_private(message) or isinstance(error, (_RefusalError, UploadError, ConfigError))
            return message.reply(failure=error.message if told else WITHHELD)
        except (RuntimeError, ValueError, KeyError, OSError, ArithmeticError, MemoryError) as error:
            traceback.print_exc()
            if _is_private(message):
                return message.reply(failure=WITHHELD)
            what = "" if self._keeps_figures(message) else f": {error}"
            return message.reply(failure=f"its trainer failed: {type(error).__name__}{what}")

    def _keeps_figures(self, message: Message) -> bool:
        """Whether error messages must omit this client's figures: its site or the run aggregates securely."""
        federation = message.metadata.get("config", {})
        federation = federation.get("federation", {}) if isinstance(federation, dict) else {}
        return self.policy.secure or bool(isinstance(federation, dict) and federation.get("secure"))

    def prepare(self) -> None:
        """Reads the data and loads the backbone, once.

        Raises:
            FedGuildError: they have a fault, or the site takes its model home as GGUF and has no converter.
        """
        if self.site.model_format == "gguf":
            require_converter()
        config, data = data_config(self.site), self._prepared_data()
        for sentence in data_sentences(data.corpus, dropped_of(data, config)):
            print(sentence, flush=True)
        backbone = self._load_once(config)
        for example in data.corpus.train[:1]:
            require_chat_template(example, backbone.tokenizer)

    def _hello(self, message: Message) -> Message:
        config, data = self._config(message), self._client_data()
        backbone = self._load_once(config)
        reply = Message("hello", message.run, message.round, self.site.client)
        if refusal := self.policy.kind_refusal("train") or self._run_refusal(config):
            print(f"hello: {REFUSED}{refusal}", file=sys.stderr, flush=True)
            return reply.reply(failure=REFUSED + refusal)
        budget = self._session(message.run, config).experiment.clients[0].budget.name
        sizes = {name: len(getattr(data, name)) for name in ("train", "validation", "test")}
        rules = rules_of(config)
        if rules is not None and not rules.sizes_are_public:
            sizes = {"train": rules.said_examples(sizes["train"]), "validation": 0, "test": 0}
        backbone_text = f"{backbone.info.name} on {backbone.device}"
        description = {
            "budget": budget,
            "sizes": sizes,
            "fedguild": fedguild.__version__,
            "model": model_digest(backbone.info),
            "method": METHODS.origin(config.method.name),
            "texts": self._texts(backbone) if rules is None else "",  # whether they are conversations is the data's
            "summary": f"{sizes['train']} training examples, budget {budget}, {backbone_text}",
        }
        return reply.reply(metadata=description)

    def _train(self, message: Message) -> Message:
        config = self._admitted_config(message)
        session = self._session(message.run, config)
        if session.clients is not None:
            session.clients.forget(self.site.client)
        experiment = session.experiment
        method, model, client = experiment.method, experiment.backbone.info, experiment.clients[0]
        task = Task(message.round, client, read_payload(message.body, "The download"))
        check_received(task.download, session.needed, "the download")
        schema = method.schema(model, client, task.download, task.round)
        _require_none(self.policy.names_refusal(schema.tensors) or self._count_refusal(message, session))
        _require_memory(session, message.round, config.federation.save_total_limit)
        experiment.memory.forget(max(0, message.round - config.federation.save_total_limit))
        secret = private_seed(session.secret, experiment.config.fingerprint(), message.body)
        if session.rules is not None and (answer := _stored_answer(experiment.folder, message)) is not None:
            return answer
        _require_none(self._spent(session, message.run))
        experiment.memory.forget_after(message.round - 1)  # of a run that went back
        (delivery,) = self._engine(session, secret).train(method, model, [task])
        if delivery.upload is None:
            if session.clients is not None:
                print(f"train, round {message.round}: {delivery.failure}", file=sys.stderr, flush=True)
                return message.reply(failure="it could not train")
            raise FedGuildError(delivery.failure)
        if session.clients is not None:
            upload_bytes = size_bytes(delivery.upload)
            _require_none(self.policy.names_refusal(delivery.upload.tensors) or self.policy.size_refusal(upload_bytes))
            told = json.dumps(message.metadata["config"], sort_keys=True).encode()
            session.clients.keep(method, model, task, delivery.upload, delivery.report, delivery.frequency, told)
            return message.reply()
        upload = shrink(delivery.upload, config.federation.wire_dtype)
        _require_none(
            self.policy.names_refusal(delivery.upload.tensors) or self.policy.size_refusal(size_bytes(upload))
        )
        report = ClientReport(delivery.report, delivery.frequency, delivery.peak_memory_bytes)
        reply = message.reply(metadata=report.to_json(), body=encode(upload))
        if session.rules is not None:
            try:
                write_bytes(experiment.folder / ANSWER, _digest(message) + reply.to_bytes())
            except FedGuildError as error:  # its privacy is spent; asked again, the site trains and spends anew
                print(f"train, round {message.round}: {error}", file=sys.stderr, flush=True)
        return reply

    def _spent(self, session: _Session, run: str) -> str:
        """Enters a training in the site's ledger; returns why it is refused if the privacy budget does not allow it."""
        rules, released = session.rules, self.ledger.releases(LEDGER_NAME)
        if rules is None or rules.settings.is_central:
            return ""  # the ledger has the run as one without noise since its first request
        following = rules.release(len(self._client_data().train))
        if refusal := self.policy.epsilon_refusal(released.values(), following):
            return refusal
        of_run = [release for key, release in released.items() if key.startswith(run)]
        budget, spent = rules.settings.budget, epsilon([*of_run, following], rules.settings.delta)
        if budget is not None and spent > budget * (1 + SLACK):
            return f"its privacy is spent: another round would bring this run to an epsilon of {spent:.3f}"
        self.ledger.add(LEDGER_NAME, f"{run}-{secrets.token_hex(16)}", following)
        return ""

    def _engine(self, session: _Session, secret: int) -> Engine:
        session.engine.trainer = replace(session.engine.trainer, noise_seed=secret)
        rules, examples = session.rules, len(self._client_data().train)
        if rules is None:
            return session.engine
        noise = Noise(session.secret).child("training", secrets.token_hex(32))
        private = (lambda client, number: rules.dp_sgd(examples, noise)) if rules.per_example else None
        session.engine.trainer = replace(session.engine.trainer, private=private)
        return FilteredEngine(session.engine, [PrivateAnswers(rules, lambda task: noise, lambda client: examples)])

    def _secure(self, message: Message) -> Message:
        """Answers a step of a secure aggregation of what was trained in the same round."""
        config = self._admitted_config(message)
        clients, rules = self._session(message.run, config).clients, config.federation
        request = read_metadata(SecureRequest, message.metadata, "the step cannot be read")
        session = SecureParameters(**request.session.model_dump())
        agreed = (message.run, message.round, rules.secure_share, rules.secure_clients, rules.secure_unheld)
        if (session.run, session.round, session.share, session.fewest, session.unheld) != agreed or clients is None:
            raise UploadError("the session is not that of the run's config")
        body = decode(message.body, "A step of the secure aggregation")
        return message.reply(body=encode(clients.answer(self.site.client, session, request.step, body)))

    def _score(self, message: Message) -> Message:
        config = self._admitted_config(message)
        if config.privacy.unit != "none" and "scores" not in config.privacy.public:
            _require_none("scores are not among the run's privacy.public")
        wanted = read_metadata(ScoreRequest, message.metadata, "the request for scores cannot be read")
        scored = self._scored(config, wanted.split)
        session = self._session(message.run, config)
        withheld = session.rules is not None and not session.rules.sizes_are_public
        refusal = self.policy.score_refusal(scored, withheld=withheld)
        _require_none(refusal or self._count_refusal(message, session))
        experiment, excerpt = session.experiment, _state(message)
        records = score_clients(experiment, wanted.scope, lambda _: excerpt, message.round, wanted.split)
        if session.clients is not None and SCORES not in config.federation.secure_disclose:
            self._keep_score(message, session.clients, records[0], excerpt, measures_of(config))
            return message.reply()
        if withheld:
            records = [record.model_copy(update={"examples": min(record.examples or 0, 1)}) for record in records]
        return message.reply(metadata={"records": [record.model_dump(mode="json") for record in records]})

    def _keep_score(
        self,
        message: Message,
        clients: SecureClients,
        record: EvaluationRecord,
        excerpt: Payload,
        measures: Sequence[str],
    ) -> None:
        """Keeps a score until a session sums it with those of other sites.

        A client's model may be the same as trained and as received, so that their sums count as of one score.
        """
        asked = {name: message.metadata[name] for name in ("config", "scope", "split")}
        once = None
        if clients.once is not None:
            enter = clients.once(message.round, excerpt)
            once = lambda half, among, stated: enter(f"scores {asked['split']} {half}", among, stated)  # noqa: E731
        told = json.dumps({**asked, "round": message.round}, sort_keys=True).encode()
        places = [measures.index(name) for name in names_of(record.metric)]
        clients.keep_score(self.site.client, message.round, record.score, record.examples or 0, places, told, once)

    def _deliver(self, message: Message) -> Message:
        """Writes the client's own model as a folder that plain transformers and peft load."""
        session = self._session(message.run, self._admitted_config(message))
        _require_none(self._count_refusal(message, session))
        experiment = session.experiment
        state = _state(message)
        check_received(state, session.needed, "the model's state")
        # a run that went back to an earlier round delivers another model of the same round
        name = f"{experiment.config.name}-{message.run[:8]}-round-{message.round:05d}-{digest_of(state.tensors)[:8]}"
        folder = self.work / MODELS / name
        if folder.exists():
            _relink(folder.with_name(LATEST), folder.name)
            return message.reply(metadata={"folder": folder.name, "form": "already there"})
        exported = export_own(experiment, state, message.round, folder, self.site.model_format)
        _relink(folder.with_name(LATEST), folder.name)
        return message.reply(metadata={"folder": folder.name, "form": exported.format, "reason": exported.reason})

    def _admitted_config(self, message: Message) -> Config:
        """Returns the run's config of a message, which must be addressed to this client and of an accepted run."""
        if message.client != self.site.client:
            raise UploadError(f"a message for client {message.client} reached client {self.site.client}")
        config = self._config(message)
        kind = "train" if message.kind == "secure" else message.kind  # how the upload of a training leaves
        refusal = self.policy.kind_refusal(kind) or self.policy.round_refusal(message.round, config.federation.rounds)
        _require_none(refusal or self._run_refusal(config))
        return config

    def _config(self, message: Message) -> Config:
        """Returns the run's config, with this site's model and data in place of the server's."""
        try:
            request = read_metadata(Request, message.metadata, "the request names no run")
            config = Config.model_validate(request.config)
        except (UploadError, pydantic.ValidationError) as error:
            raise ConfigError(
                "the server's config cannot be read here: is the same version of fedguild installed on both sides? "
                f"({str(error).splitlines()[0]})"
            ) from error
        return self._at_this_site(config)

    def _at_this_site(self, config: Config) -> Config:
        require_registered(config.method.name)
        data = data_config(self.site).data.model_copy(update={"max_length": config.data.max_length})
        return config.model_copy(update={"model": self.site.model, "data": data, "output": None})

    def _count_refusal(self, message: Message, session: _Session) -> str:
        """Returns why a request exceeds its limits; records it if it does not."""
        in_run, secure = self.policy.most_in_run(message.kind), session.clients is not None
        most = self.policy.most_in_round(message.kind, secure=secure)
        limit = "accept.requests_per_round" if most == self.policy.requests_per_round else SECURE_LIMIT
        return session.requests.refusal(message, most, in_run, limit)

    def _run_refusal(self, config: Config) -> str:
        """Returns why this site's policy refuses a run; empty if it does not."""
        examples, training = len(self._client_data().train), config.training
        steps, batch = steps_in_round(examples, training), training.batch_size * training.gradient_accumulation_steps
        rules, privacy = config.federation, rules_of(config)
        aggregated = quorum_count(rules.wanted_uploads, rules.quorum)
        withheld = privacy is not None and not privacy.sizes_are_public
        limits = self.policy.session_refusal(rules.secure_clients, rules.secure_share) if rules.secure else ""
        return (
            self.policy.clients_refusal(rules.clients)
            or self.policy.privacy_refusal(privacy)
            or self.policy.disclosure_refusal(rules.secure, rules.secure_disclose)
            or limits
            or self.policy.run_refusal(
                Terms(config.method.name, steps, batch, min(examples, steps * batch), aggregated, withheld)
            )
        )

    def _session(self, run: str, config: Config) -> _Session:
        key = (run, config.fingerprint())
        if key not in self._sessions:
            self._sessions = {key: self._new_session(run, config)}
        return self._sessions[key]

    def _new_session(self, run: str, config: Config) -> _Session:
        if not RUN_NAME.fullmatch(run):
            raise UploadError(f"a message names an invalid run: {run!r:.50}")
        method = method_of(config)
        load_metrics(config.evaluation.metrics)
        backbone, client_data = self._load_once(config), of_client(self._client_data(), config, "this site's")
        method = fitted(method, config, backbone.info)
        check_fit(method, config, backbone.info)
        tiers = budgets_of(config, backbone.info)
        encoded = [encode_example(example, backbone.tokenizer, config.data.max_length) for example in client_data.train]
        rules = rules_of(config)
        if rules is None or rules.settings.is_central:  # else the upload has the site's noise in it
            exposed, refusal = self._exposed(config, method, encoded)
            print(exposed, flush=True)
            _require_none(refusal)
        if unscored := self.unscored(config):
            print(unscored, flush=True)
        folder = self.work / "runs" / run
        if not (folder / BOUND).exists():
            _require_none(self.policy.begin_refusal(_begun_within_a_day(self.work / "runs")))
        _bind(folder, config)
        remove_leftovers(folder, below=True)
        examples = len(client_data.train)
        if rules is None or rules.settings.is_central:
            self.ledger.add(LEDGER_NAME, f"{run}-{CLEAR}", IN_THE_CLEAR)
        said = examples if rules is None else rules.said_examples(examples)
        client = ClientInfo(self.site.client, self._budget(config, tiers), said)
        memory = ClientMemory(folder / MEMORY, trained=config.evaluation.trained)
        experiment = Experiment(
            config,
            folder,
            method,
            replace(self._prepared_data(), clients=[client_data]),
            backbone,
            list(tiers.values()),
            [client],
            memory,
            Silent(),
        )
        engine = LocalEngine(
            backbone, {client.index: encoded}, config.local_training, memory, cohort_size=1, seed=config.seed
        )
        secure = self._secure_clients(run, config, experiment.budgets)
        return _Session(experiment, engine, run_secret(folder), RequestLog(folder / REQUESTS), rules, secure)

    def exposure(self, config: Config) -> tuple[Exposure, str]:
        """Returns what a run's settings leave in this site's uploads, and why the site refuses it; empty if not."""
        config = self._at_this_site(config)
        backbone = self._load_once(config)
        method = fitted(method_of(config), config, backbone.info)
        examples = of_client(self._client_data(), config, "this site's").train
        encoded = [encode_example(one, backbone.tokenizer, config.data.max_length) for one in examples]
        found, refusal = self._exposed(config, method, encoded)
        return found, self._run_refusal(config) or refusal

    def unscored(self, config: Config) -> str:
        """Returns why this site will refuse every score of a run; empty if it will not, or if it gives none."""
        split, most = config.evaluation.split, config.evaluation.max_examples
        refusal = self.policy.score_refusal(self._scored(config, split))
        if not refusal or self.policy.kind_refusal("score"):
            return ""
        held = f"this site has {len(getattr(self._client_data(), split))} {split} example(s)"
        limit = "" if most is None else f", and evaluation.max_examples is {most}"
        return (
            f"This site will refuse every score of the run: {refusal} ({held}{limit}). Hold out more of its examples "
            "(data.split, data.test), or lower accept.min_scored."
        )

    def _scored(self, config: Config, split: Split) -> int:
        """Returns the number of this site's examples that a score is a mean over."""
        return len(getattr(self._client_data(), split)[: config.evaluation.max_examples])

    def _exposed(self, config: Config, method: Method, encoded: Sequence[Encoded]) -> tuple[Exposure, str]:
        info = self._load_once(config).info
        budget = self._budget(config, budgets_of(config, info))
        plan = method.plan(info, budget)
        trained = trainable_shapes(info, plan)
        found = exposure(
            config.training,
            steps_in_round(len(encoded), config.training),
            (row.input_ids for example in encoded for row in example.rows),
            trained.values(),
        )
        return found, self.policy.exposure_refusal(
            found,
            freezes=trained.keys() != adapter_shapes(info, plan).keys(),
            dropout=getattr(method.settings, "dropout", 0.0),
            length=config.data.max_length,
        )

    def _secure_clients(self, run: str, config: Config, budgets: Sequence[Budget]) -> SecureClients | None:
        """Returns the site's half of secure aggregation, with its key and those of its peers; None for a plain run."""
        if not config.federation.secure:
            return None
        from fedguild.engines.secure import SecureClients
        from fedguild.privacy.secure_sum.keys import load_peers, load_private

        index = self.site.client
        identity = {index: load_private(self.folder / self.site.key)}
        peers = load_peers(self.folder / self.site.peers)
        rules = config.federation
        aggregated = quorum_count(rules.wanted_uploads, rules.quorum)
        least = max(aggregated, self.site.accept.min_clients)
        reported = config.privacy.unit == "none"
        fewest = None if self.policy.repeat_sessions else self.policy.secure_difference
        log = SumLog(self.work / SUMS, fewest, self.work / "runs" / run / EARLIER_SUMS)
        return SecureClients(
            budgets, identity, peers, rules.max_update_norm, least, reported, partial(log.training, run)
        )

    def _budget(self, config: Config, tiers: dict[str, Budget]) -> Budget:
        if self.site.client >= config.federation.clients:
            raise ConfigError(f"the federation's clients are 0 to {config.federation.clients - 1}")
        name = self.site.budget or config.federation.budget_per_client()[self.site.client].name
        if name not in tiers:
            raise ConfigError(f"its site sets budget '{name}', which the run does not have", nearest(name, tiers))
        return tiers[name]

    def _prepared_data(self) -> PreparedData:
        if self._data is None:
            self._data = prepare_data(data_config(self.site))
        return self._data

    def _client_data(self) -> ClientData:
        return self._prepared_data().clients[self.site.data.share]

    def _texts(self, backbone: Backbone) -> str:
        """Returns how this site's texts are written and what of them is learned."""
        data = self.site.data
        if not any(example.messages for example in self._client_data().train):
            return f"prompts by the template {data.template or 'of the corpus'}, special_tokens {data.special_tokens}"
        template = hashlib.sha256(str(backbone.tokenizer.chat_template).encode()).hexdigest()[:8]
        learned = f"train_on {data.train_on}, special_tokens {data.special_tokens}"
        return f"{CONVERSATIONS} {template}, {learned}"

    def _load_once(self, config: Config) -> Backbone:
        if self._backbone is None:
            self._backbone = self._load(config)
            set_chat_template(self._backbone.tokenizer, self.site.data.chat_template)
            self.loads += 1
        return self._backbone


def _require_none(refusal: str) -> None:
    """Raises a refusal of the site, unless it is empty; `TrainerService.handle` makes it the reply."""
    if refusal:
        raise _RefusalError(REFUSED + refusal)


def _require_memory(session: _Session, round: int, keep: int) -> None:
    """Raises CheckpointError if the site no longer has what it kept before a round to which a run went back."""
    experiment = session.experiment
    trained = session.requests.rounds("train")
    if experiment.memory.is_pruned(experiment.clients[0].name, round, keep) and min(trained) < round:
        raise CheckpointError(
            f"its site has trained round {max(trained)} of this run, and what it kept before round {round} is gone "
            f"(federation.save_total_limit: {keep})",
            f"Continue the run from a newer state of the server, or restore {experiment.memory.folder} as it was when "
            f"round {round - 1} ended.",
        )


def _is_private(message: Message) -> bool:
    """Whether a request is of a run with differential privacy, as far as it can be read."""
    config = message.metadata.get("config")
    privacy = config.get("privacy") if isinstance(config, dict) else None
    return isinstance(privacy, dict) and privacy.get("unit", "none") != "none"


def _digest(message: Message) -> bytes:
    """Returns a digest that messages share only if they are the same, bit for bit."""
    return hashlib.sha256(message.to_bytes()).digest()


def _stored_answer(folder: Path, message: Message) -> Message | None:
    """Returns the stored answer to a request that repeats the last answered one word for word.

    The same bits reveal nothing more, so repeating them costs no privacy; a new training would have other noise.
    """
    path, digest = folder / ANSWER, _digest(message)
    content = path.read_bytes() if path.is_file() else b""
    return Message.from_bytes(content[len(digest) :]) if content.startswith(digest) else None


def _begun_within_a_day(runs: Path) -> int:
    """Returns how many runs began here in the last 24 hours."""
    since = time.time() - 86400
    return sum(path.stat().st_mtime > since for path in runs.glob(f"*/{BOUND}"))


def _bind(folder: Path, config: Config) -> None:
    """Binds a run to the config of its first request, without what the site sets itself.

    The client's memory of a run outlives a request: a second config could otherwise ask for what the first kept there,
    on other terms.

    Raises:
        UploadError: the run began with another config.
        FedGuildError: the file cannot be written.
    """
    path, model = folder / BOUND, type(config.model)(path="embedded")
    common = config.model_copy(update={"model": model, "data": DataSettings(max_length=config.data.max_length)})
    fingerprint = common.fingerprint().encode()
    if not path.exists():
        make_folder(folder)
        write_bytes(path, fingerprint)
    elif path.read_bytes() != fingerprint:
        raise UploadError("the run began here with another config; a new config needs a new run")


def _relink(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def model_digest(model: ModelInfo) -> str:
    """Returns 16 hexadecimal digits that are equal for models that differ in their names only."""
    return hashlib.sha256(repr(replace(model, name="")).encode()).hexdigest()[:16]


def run_metadata(config: Config) -> dict[str, Any]:
    """Returns what a server sends its clients with every request: the run's config without folders and trackers."""
    settings = config.model_dump(mode="json", exclude={"tracking"})
    settings["output"] = None
    settings["data"] = {**DataSettings().model_dump(mode="json"), "max_length": config.data.max_length}
    settings["model"] = {**settings["model"], "path": "embedded", "revision": None}
    return {"config": settings}


def _state(message: Message) -> Payload:
    return read_payload(message.body, "The state")
