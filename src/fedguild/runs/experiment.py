"""A run from config to report, in the order in which it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedguild.client.budget import ClientInfo
from fedguild.client.merge_ledger import MergeLedger
from fedguild.client.preference import has_pairs
from fedguild.config import Config, load_saved
from fedguild.config.trust import trust
from fedguild.core.errors import CheckpointError, ConfigError, DivergedError, FedGuildError
from fedguild.core.files import write_json, write_text
from fedguild.core.layout import CHECKPOINTS, CONFIG, DIVERGED, ENVIRONMENT, METHOD, PARTITION, STOPPED
from fedguild.core.locking import run_lock
from fedguild.core.payload import Payload, is_unchanged
from fedguild.core.progress import Progress, Silent
from fedguild.core.sealed import remove_leftovers
from fedguild.core.text import printable
from fedguild.data.rendering import count_cut_prompts
from fedguild.measuring.log.activity import ActivityLog, noted
from fedguild.measuring.log.folder import config_of, read_mapping
from fedguild.measuring.log.index import REPORT_FILE
from fedguild.measuring.log.records import (
    EvaluationRecord,
    PartitionRecord,
    PrivacyRecord,
    Record,
    Rejection,
    RoundRecord,
    RunLog,
    StrayUpload,
)
from fedguild.measuring.log.samples import write_samples
from fedguild.measuring.scores.metrics import Metric
from fedguild.methods import METHODS
from fedguild.runs.byte_budget import ByteBudget, first_refusal
from fedguild.runs.callbacks import Callback, Delivery, check_scores, listed, make_callback
from fedguild.runs.environment import describe_environment
from fedguild.runs.guarantee import Privacy
from fedguild.runs.recording import believable_tokens, client_records, observation_records, routing_record
from fedguild.runs.results import RunResult, has_begun, result_of, write_stopping_reason
from fedguild.runs.scoring import (
    diagnosed,
    evaluate_state,
    recorded_scores,
    require_scorable,
    sampled,
    untrained_loss,
)
from fedguild.runs.setup import (
    Experiment,
    PreparedData,
    Split,
    aggregator_of,
    check_config,
    cut_of,
    dropped_of,
    largest_value,
    make_engine,
    method_of,
    method_record,
    prepare,
    prepare_data,
    require_examples,
    require_split,
    server_filters,
    what_a_member_can_do,
)
from fedguild.runs.tracking.sending import Tracking
from fedguild.server import checkpoint
from fedguild.server.checkpoint import Checkpoint
from fedguild.server.divergence import require_learning
from fedguild.server.engine import Engine
from fedguild.server.merge_history import merges, unheld
from fedguild.server.method import Roster, returned, starting_rng
from fedguild.server.optimizer import own_state
from fedguild.server.round import Again, Outcome, RoundSetup
from fedguild.server.rounds import run_round
from fedguild.server.sampling import quorum_count

__all__ = ["PreparedData", "RunResult", "evaluate", "prepare_data", "restore", "resume", "run"]

Preparation = Callable[[Config, Path, Progress | None], Experiment]

PRIVACY = "privacy.json"
"""The file in a run's folder with what its differential privacy protects, and under which assumptions."""
ACCEPTED = "accepted"
"""Key of the clients whose uploads of the round are included in a checkpoint's state."""
LOG_SEAL = "log_seal"
"""Key of the seal of the run's log, which the log must still have when the run resumes from a checkpoint."""


def run(
    config: Config,
    output: Path,
    *,
    progress: Progress | None = None,
    preparation: Preparation | None = None,
    callbacks: Iterable[Callback] = (),
) -> RunResult:
    """Runs a config in a new folder.

    Args:
        preparation: Builds the experiment; None for simulated clients on this machine alone.
        callbacks: Receivers of the run's events, in addition to those that the config names.

    Raises:
        CheckpointError: the folder already holds a run, or another process is working on it.
        FedGuildError: anything in the config, the data or the model that the user can fix.
    """
    check_config(config)  # before there is a folder
    with run_lock(output), _tracking(config, progress) as tracking:
        if has_begun(output):
            raise CheckpointError(
                f"{output} already holds a run.", f"Continue with `fedguild resume {output}`, or choose another folder."
            )
        every = callbacks_of(config, [tracking, *callbacks])
        _remove_failed_start(output)
        with noted(output, progress, CONFIG) as told, _divergence_noted(output):
            experiment = (preparation or prepare)(config, output, told)
            with _engine_of(experiment) as engine:
                return _Rounds(experiment, engine, _begin(experiment), first=1, callbacks=every).run()


def resume(
    output: Path,
    *,
    progress: Progress | None = None,
    preparation: Preparation | None = None,
    round: int | None = None,
    callbacks: Iterable[Callback] = (),
) -> RunResult:
    """Continues a run from its last complete round.

    A run that a callback stopped continues as if it had not been stopped.

    Args:
        progress: Receiver of progress reports; told if a damaged checkpoint is skipped for the one before it.
        preparation: As in `run`.
        round: Goes back to this round, whose checkpoint must still exist; later rounds are removed.
        callbacks: As in `run`.

    Raises:
        CheckpointError: the folder holds no run, another process is working on it, no checkpoint is left, or there is
            none of `round`.
    """
    config = _written_config(output)
    with run_lock(output), _tracking(config, progress) as tracking:
        remove_leftovers(output, below=True)
        every = callbacks_of(config, [tracking, *callbacks])
        was_stopped = (output / STOPPED).is_file()
        with noted(output, progress, CONFIG) as told, _divergence_noted(output):
            saved = _saved(config, output, told, round)
            if saved is None and has_begun(output):
                raise CheckpointError(
                    f"{output} has records of rounds, but no checkpoint.",
                    f"Restore {output / CHECKPOINTS}, or start the run again in another folder.",
                )
            if saved is None:
                (output / RunLog.FILE).unlink(missing_ok=True)
                experiment = (preparation or prepare)(config, output, told)
                with _engine_of(experiment) as engine:
                    return _Rounds(experiment, engine, _begin(experiment), first=1, callbacks=every).run()
            experiment = (preparation or prepare)(config, output, told)
            _require_same_data(experiment)
            with RunLog(output).truncating_after(saved.round, saved.extra.get(LOG_SEAL)):
                if round is not None:
                    checkpoint.remove_after(output / CHECKPOINTS, round)
            state, accepted = saved.state, saved.extra.get(ACCEPTED, ())
            _tell_other_method(config, output, told)
            if experiment.remote is None:
                experiment.memory.forget_after(saved.round)
                MergeLedger.beside(experiment.memory).refill(merges(state))
            elif round is not None:
                state = unheld(state)
            (output / REPORT_FILE).unlink(missing_ok=True)  # so that nobody takes the run for one that has ended
            again = not was_stopped and round is None and saved.round > 0
            with _engine_of(experiment) as engine:
                rounds = _Rounds(experiment, engine, state, saved.round + 1, accepted, every)
                return rounds.run(saved_again=again)


def _remove_failed_start(output: Path) -> None:
    """Removes the config and the records of a start that failed.

    Raises:
        CheckpointError: they are not of a run, as nothing says what happened in it.
    """
    for left in (output / CONFIG, output / RunLog.FILE):
        if left.exists() and not (output / ActivityLog.FILE).is_file():
            raise CheckpointError(f"{left} is of no run of FedGuild.", "Choose another folder for the run (--output).")
        left.unlink(missing_ok=True)


def _require_same_data(experiment: Experiment) -> None:
    """Raises CheckpointError if the simulated clients' data are not those with which the run began."""
    before = read_mapping(experiment.folder / PARTITION).get("digest")
    if before and experiment.remote is None and experiment.data.digest() != before:
        raise CheckpointError(
            f"The clients' data are not those with which the run in {experiment.folder} began.",
            "Restore the files of the data, or begin a new run with the new ones.",
        )


def _tell_other_method(config: Config, output: Path, progress: Progress) -> None:
    now = METHODS.origin(config.method.name)
    before = printable(str(read_mapping(output / METHOD).get("from", now)))
    if before != now:
        progress.message(f"Warning: the run began with the method of {before}, and continues with that of {now}.")


@contextmanager
def _engine_of(experiment: Experiment) -> Iterator[Engine]:
    """Makes a run's engine, which may also score its models, and closes it at the end."""
    engine, experiment.scorer = make_engine(experiment)
    with closing(engine):
        yield engine


@contextmanager
def _divergence_noted(folder: Path) -> Iterator[None]:
    """Records in a run's folder that its training diverged."""
    (folder / DIVERGED).unlink(missing_ok=True)
    try:
        yield
    except DivergedError as error:
        write_json(folder / DIVERGED, {"reason": error.message})
        raise


def _saved(config: Config, output: Path, progress: Progress, round: int | None) -> Checkpoint | None:
    folder, fingerprint = output / CHECKPOINTS, config.fingerprint()
    if round is None:
        return checkpoint.load_newest(folder, fingerprint=fingerprint, tell=progress.message)
    return checkpoint.load(folder, round, fingerprint=fingerprint)


def evaluate(
    output: Path,
    *,
    round: int | None = None,
    split: Split = "test",
    metrics: Mapping[str, Metric] | None = None,
) -> RunResult:
    """Scores the global model of one of a run's rounds again.

    Args:
        round: The round; the last by default.
        metrics: Metrics that were given in Python.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the config names a metric that is neither built in nor given, or the split has no example.
    """
    require_split(_written_config(output), split)
    experiment, state, number = restore(output, round, metrics=metrics or {})
    require_examples(experiment.data, split)
    records = evaluate_state(experiment, state, number, split)
    return result_of(experiment.folder, number, records, output / REPORT_FILE)


def restore(
    output: Path,
    round: int | None = None,
    *,
    metrics: Mapping[str, Metric] | None = None,
) -> tuple[Experiment, Payload, int]:
    """Returns a run with its state after a round, and the round's number.

    Args:
        round: The round; the last by default.
        metrics: Metrics that were given in Python; None if nothing is to be scored, and so none is needed.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
    """
    config = _written_config(output)
    number = checkpoint.latest(output / CHECKPOINTS) if round is None else round
    if number is None:
        raise CheckpointError(f"{output} has no complete round yet.", f"Continue with `fedguild resume {output}`.")
    saved = checkpoint.load(output / CHECKPOINTS, number, fingerprint=config.fingerprint())
    known = dict.fromkeys(config.evaluation.metrics, lambda *_: 0.0) if metrics is None else metrics
    experiment = prepare(config, output, None, metrics=known, trains=False, scores=metrics is not None)
    return experiment, saved.state, number


def _begin(experiment: Experiment) -> Payload:
    """Records the initial state of a run, scores it unless the config says not to, and returns it."""
    config = experiment.config
    roster = Roster(experiment.budgets, experiment.clients)
    method = experiment.method
    state = returned(method, "start", method.start(experiment.backbone.info, roster, starting_rng(method, config.seed)))
    if error := first_refusal(experiment.method, config, state, experiment.backbone.info, experiment.clients):
        raise error
    _write_facts(experiment)
    if config.evaluation.eval_on_start:
        RunLog(experiment.folder).append(*evaluate_state(experiment, state, 0))
        _sample(experiment, state, 0)
    else:
        require_scorable(experiment)
    return _save(experiment, 0, state)


def callbacks_of(config: Config, given: Iterable[Callback] = ()) -> list[Callback]:
    """Returns the callbacks that were given, and those that the config names.

    Raises:
        ConfigError: a callback is unknown or not a function, does not take its options, or needs a score that the run
            will not have.
    """
    every = [*listed(given), *(make_callback(named.name, named.options) for named in config.callbacks)]
    check_scores(every, recorded_scores(config, method_of(config)))
    return every


def _tracking(config: Config, progress: Progress | None) -> Tracking:
    return Tracking(config, (progress or Silent()).message)


class _Rounds:
    """The rounds of one run: what all of them share, and what each passes to the next.

    Args:
        state: The state before the first of these rounds.
        first: That round's number.
        accepted: The clients whose uploads of the round before are in the state.
    """

    def __init__(
        self,
        experiment: Experiment,
        engine: Engine,
        state: Payload,
        first: int,
        accepted: Collection[int] = (),
        callbacks: Iterable[Callback] = (),
    ) -> None:
        config, folder, privacy = experiment.config, experiment.folder, experiment.privacy
        self.experiment, self.state, self.accepted, self.last = experiment, state, accepted, first - 1
        self.log, self.activity, self.privacy = RunLog(folder), ActivityLog(folder), privacy
        self.saving_seconds = 0.0
        self.delivery = Delivery(callbacks, folder, config.federation.rounds, _evaluations(self.log.read()))
        judged = config.training.loss_limit == "auto" and experiment.remote is None and privacy is None
        self.is_dpo = experiment.remote is None and any(map(has_pairs, experiment.encoded.values()))
        self.untrained = untrained_loss(experiment) if judged and not self.is_dpo else None
        limit = config.federation.byte_limit
        self.bytes_left = None if limit is None else ByteBudget.after(limit, self.log.read())
        self.setup = RoundSetup(
            experiment.method,
            experiment.backbone.info,
            engine,
            config.federation,
            config.seed,
            server_filters(experiment),
            largest_value(experiment),
            _again(privacy, self.bytes_left),
            config.evaluation.diagnostics,
            self.note,
            quorum_count(config.federation.wanted_uploads, config.federation.quorum),
        )

    def run(self, *, saved_again: bool = False) -> RunResult:
        """Runs the rounds: each is trained and aggregated, evaluated, recorded, and saved.

        Args:
            saved_again: Whether to deliver the previous round's `Saved` to the callbacks once more.
        """
        if saved_again:
            self.delivery.saved(self.last)
        for number in range(self.last + 1, self.setup.rules.rounds + 1):
            clients = self._begin(number)
            if not clients:
                break
            started = time.perf_counter()
            with self._failures_noted(number):
                outcome = run_round(number, self.state, clients, self.setup, self.accepted)
            if is_unchanged(self.state, outcome.state):
                self.experiment.progress.message(
                    f"Warning: round {number} left the state as it was, bit for bit. Are the parts that the method's "
                    "`terms` or `aggregate` reads those that its clients send?"
                )
            self.state, self.accepted = outcome.state, outcome.accepted
            self._judge(outcome)
            records = [*self._records_of(outcome), *self._scores_of(outcome)]
            self._record(outcome, records, started)
            self._save(number)
        _sample(self.experiment, self.state, self.last)
        return _ended(self.experiment, self.last, self.delivery)

    def _begin(self, number: int) -> Sequence[ClientInfo]:
        """Announces a round and returns the clients that it may ask; none if the run ends before it."""
        experiment = self.experiment
        if self.delivery.reason:
            if not _evaluations(self.log.read()):  # a report needs a score, and the first was still to come
                self._score_last()
            return ()
        if experiment.remote is not None:
            experiment.clients = experiment.remote.current()
        clients = experiment.clients
        if self.privacy is not None:
            clients = [client for client in clients if self.privacy.accounts.affords(client, number)]
            if len(clients) < self.setup.least:
                self._stop_for_privacy(len(clients))
                return ()
            self.privacy.accounts.charge(number, self.setup.sampled(number, clients), clients)
        refusal = "" if self.bytes_left is None else self._bytes_refusal(self.bytes_left, clients, number)
        if refusal:
            self._score_last()
            self.delivery.stop(refusal)
            return ()
        experiment.progress.round_started(number, self.setup.rules.rounds)
        self.delivery.round_started(number)
        return clients

    def _stop_for_privacy(self, able: int) -> None:
        """Ends the run, as only `able` clients can afford another round, and scores the last one.

        Raises:
            ConfigError: not even the first round was affordable.
        """
        experiment, quorum = self.experiment, f"the quorum is {self.setup.least}"
        if self.last == 0:
            raise ConfigError(
                f"The first round is within the privacy budgets of {able} clients, but {quorum}.",
                "Raise privacy.max_epsilon or privacy.noise_multiplier, or lower training.steps.",
            )
        spent = "every client's privacy budget is spent"
        if able:
            spent = f"all but {able} of the clients' privacy budgets are spent, and {quorum}"
        experiment.progress.message(f"{spent[0].upper()}{spent[1:]}: the run ends after round {self.last}.")
        self._score_last()
        self.delivery.stop(spent)

    def _score_last(self) -> None:
        """Scores the last round of a run that ends early, unless it was scored already."""
        if not any(record.round == self.last for record in _evaluations(self.log.read())):
            records = evaluate_state(self.experiment, self.state, self.last)
            self.log.append(*records)
            self.delivery.recorded(self.last, records)
            self._save(self.last)

    def _bytes_refusal(self, bytes_left: ByteBudget, clients: Sequence[ClientInfo], number: int) -> str:
        """Returns why a round would exceed the limit on the run's bytes; empty if it would not."""
        setup, asked = self.setup, self.setup.sampled(number, clients)
        bytes_left.plan(setup.method, own_state(self.state), setup.model, asked, setup.rules.wire_dtype)
        return bytes_left.refusal(number)

    def note(self, event: str, **values: Any) -> None:
        """Records an event: for live views, and in the server's audit log for clients that were asked."""
        self.activity.append(event, **values)
        if event == "asked" and self.experiment.remote is not None:
            self.experiment.remote.note_asked(**values)

    @contextmanager
    def _failures_noted(self, number: int) -> Iterator[None]:
        """Records a failed round too, in a server's audit log."""
        try:
            yield
        except FedGuildError as error:
            if self.experiment.remote is not None:
                self.experiment.remote.note_failure(number, error.message)
            raise

    def _judge(self, outcome: Outcome) -> None:
        """Reports a round's faults, and ends the run if its training diverged.

        Under `federation.secure` the server has only a mean of the losses, which a single client can set to any value.
        """
        experiment = self.experiment
        _tell(experiment.progress, outcome)
        if experiment.remote is not None:
            experiment.remote.note(outcome)
        limit = experiment.config.training.loss_limit
        try:
            hint = self.setup.method.facts.start_hint
            require_learning(outcome, limit, self.setup.model.vocabulary, self.untrained, hint, dpo=self.is_dpo)
        except DivergedError:
            if not experiment.config.federation.secure:
                raise
            experiment.progress.message(
                f"Warning: by the clients' mean loss, the training of round {outcome.round} diverged "
                "(training.loss_limit). Under federation.secure one client's report may have done that: it goes on."
            )

    def _records_of(self, outcome: Outcome) -> list[Record]:
        """Returns the records of a round's clients, privacy, bytes and method."""
        experiment, number, model = self.experiment, outcome.round, self.setup.model
        rules = self.privacy.rules if self.privacy else None
        again = experiment.config.model.gradient_checkpointing
        records: list[Record] = [*client_records(outcome, model, rules, checkpointing=again)]
        if self.privacy is not None:
            spent = self.privacy.accounts.record(number, experiment.clients)
            records.append(spent)
            _tell_spent(experiment.progress, spent)
        if self.bytes_left is not None:
            records.append(self.bytes_left.record(number, outcome.moved_bytes))
        tokens = outcome.tokens()
        if experiment.remote is not None:
            tokens = believable_tokens(outcome.asked, tokens, experiment.config.training)
        records += routing_record(number, outcome.frequencies(), tokens)
        observed = [*self.setup.method.observe(self.state, model), *outcome.observations]
        return [*records, *observation_records(number, observed)]

    def _scores_of(self, outcome: Outcome) -> list[Record]:
        """Returns the scores after a round, if the config asks for them in it."""
        config, number = self.experiment.config, outcome.round
        with outcome.clock.phase("evaluate"):
            if number % config.evaluation.every and number < config.federation.rounds:
                return []
            self.note("phase", phase="evaluate")
            seen = diagnosed(self.experiment, self.state, number) if config.evaluation.diagnostics else []
            return [*evaluate_state(self.experiment, self.state, number), *seen]

    def _record(self, outcome: Outcome, records: list[Record], started: float) -> None:
        """Writes a round's records to the log, with the time since `started`, and delivers them to the callbacks."""
        outcome.phase_seconds["checkpoint"] = self.saving_seconds
        records.append(_round_record(outcome, time.perf_counter() - started + self.saving_seconds))
        self.log.append(*records)
        self.delivery.recorded(outcome.round, records)

    def _save(self, number: int) -> None:
        """Writes a round's checkpoint, which completes it."""
        started = time.perf_counter()
        self.state = _save(self.experiment, number, self.state, self.accepted)
        self.saving_seconds, self.last = time.perf_counter() - started, number
        (self.experiment.folder / STOPPED).unlink(missing_ok=True)
        self.note("checkpoint", round=number, seconds=round(self.saving_seconds, 3))
        self.delivery.saved(number)


def write_report(folder: Path) -> Path:
    from fedguild.report import html  # matplotlib takes a second to import, and only a whole run needs it

    return html.write_report(folder)


def _sample(experiment: Experiment, state: Payload, number: int) -> None:
    """Keeps what the global model answers to a few examples, for the report."""
    if experiment.config.evaluation.samples and (samples := sampled(experiment, state, number)):
        write_samples(experiment.folder, samples)


def _ended(experiment: Experiment, last: int, delivery: Delivery) -> RunResult:
    """Writes the report after the last round, and, if a callback stopped the run, the reason; returns the result."""
    experiment.progress.stage("Writing the report")
    report = write_report(experiment.folder)
    if delivery.reason and last < experiment.config.federation.rounds:
        write_stopping_reason(experiment.folder, last, delivery.reason)  # last: a run killed before is stopped again
        experiment.progress.message(f"Stopped after round {last}: {delivery.reason}")
    scored = _evaluations(RunLog(experiment.folder).read())
    evaluated = max((record.round for record in scored), default=last)
    result = result_of(experiment.folder, last, [one for one in scored if one.round == evaluated], report)
    delivery.finished(last, result)
    return result


def _evaluations(records: Iterable[Record]) -> list[EvaluationRecord]:
    return [record for record in records if isinstance(record, EvaluationRecord)]


def _again(privacy: Privacy | None, bytes_left: ByteBudget | None) -> Again | None:
    """Returns the function that decides who may be asked once more: by the clients' privacy and the bytes left."""
    if bytes_left is None:
        return None if privacy is None else privacy.accounts.again

    def able(round_index: int, clients: Sequence[ClientInfo]) -> Sequence[ClientInfo]:
        affordable = bytes_left.again(clients)
        return affordable if privacy is None else privacy.accounts.again(round_index, affordable)

    return able


def _tell_spent(progress: Progress, spent: PrivacyRecord) -> None:
    """Reports the privacy that the clients have spent, and who has stopped taking part."""
    highest = max(spent.epsilon, default=0.0)
    stopped = f"; stopped: {', '.join(map(str, spent.stopped))}" if spent.stopped else ""
    progress.message(f"Round {spent.round}: ε up to {highest:.3f} at δ = {spent.delta:g} per {spent.unit}{stopped}")


def _round_record(outcome: Outcome, seconds: float) -> RoundRecord:
    return RoundRecord(
        round=outcome.round,
        seconds=seconds,
        phase_seconds=outcome.phase_seconds,
        participants=[client.index for client in outcome.asked],
        rejected=[Rejection(client=client, reason=reason) for client, reason in sorted(outcome.rejected.items())],
        unneeded=outcome.unneeded,
        retried=outcome.retried,
        strays=[StrayUpload(**asdict(stray)) for stray in outcome.strays],
        faults=[Rejection(client=client, reason=what) for client, what in sorted(outcome.faults.items())],
    )


def _tell(progress: Progress, outcome: Outcome) -> None:
    """Reports a round's rejected and stray uploads and its clients' faults, which are also in its records."""
    for client, reason in outcome.rejected.items():
        progress.message(f"Round {outcome.round}: the upload of client {client} was rejected: {reason}")
    for stray in outcome.strays:
        what = f"an upload of client {stray.client} for round {stray.round}"
        fate = f"was dropped: {stray.dropped}" if stray.dropped else "came late and was aggregated"
        progress.message(f"Round {outcome.round}: {what} {fate}")
    for client, fault in outcome.faults.items():
        progress.message(f"Round {outcome.round}: client {client} did wrong, which the others made good: {fault}")


def _save(experiment: Experiment, number: int, state: Payload, accepted: Collection[int] = ()) -> Payload:
    """Writes a round's checkpoint; returns the state, its history memory-mapped from the files."""
    folder = experiment.folder / CHECKPOINTS
    saved = checkpoint.save(
        folder,
        number,
        state,
        fingerprint=experiment.config.fingerprint(),
        extra={ACCEPTED: list(accepted), LOG_SEAL: RunLog(experiment.folder).seal},
        keep=experiment.config.federation.save_total_limit,
    )
    experiment.memory.forget(checkpoint.rounds(folder)[0])
    return saved


def _write_facts(experiment: Experiment) -> None:
    """Writes the facts known before the first round, the config last because it marks the folder as a run's."""
    folder, table, backbone = experiment.folder, experiment.data.partition_table, experiment.backbone
    write_json(folder / ENVIRONMENT, describe_environment(backbone.device, backbone.dtype))
    partition_record = PartitionRecord(
        labels=list(table.labels),
        counts=[list(row) for row in table.counts],
        split=experiment.data.sizes(),
        dropped={} if experiment.remote else dropped_of(experiment.data, experiment.config),
        cut=_told_cut(experiment),
        digest="" if experiment.remote else experiment.data.digest(),
    )
    write_json(folder / PARTITION, partition_record.model_dump(mode="json"))
    method = method_record(method_of(experiment.config), experiment.method)
    write_json(folder / METHOD, method)
    if experiment.privacy is not None:
        guarantee = experiment.privacy.guarantee()
        write_json(folder / PRIVACY, {"guarantee": guarantee})
        for sentence in guarantee:
            experiment.progress.message(sentence)
    trust(folder / CONFIG, experiment.config.code)
    aggregator = ""
    if experiment.remote is not None:
        experiment.progress.message(what_a_member_can_do(experiment.config, experiment.method))
        aggregator = aggregator_of(experiment.config, experiment.method, real=True) or "none"
    write_text(folder / CONFIG, experiment.config.resolved_yaml(method["options"], aggregator))


def _told_cut(experiment: Experiment) -> dict[str, int]:
    """Reports and returns how many training texts are cut; empty if the texts are on other machines."""
    if experiment.remote is not None:
        return {}
    tokenizer, longest = experiment.backbone.tokenizer, experiment.config.data.max_length
    cut = cut_of(experiment.data, experiment.encoded, tokenizer, longest)
    for sentence in cut.sentences():
        experiment.progress.message(sentence)
    scored = experiment.config.evaluation
    asked = experiment.data.pooled(scored.split, scored.max_examples, experiment.config.seed)
    generated = [one for one in asked if one.is_open or (scored.answer_mode == "generation" and one.choices)]
    lost = count_cut_prompts(generated, tokenizer, longest - scored.max_new_tokens)
    if lost:
        experiment.progress.message(
            f"{lost} of {len(generated)} scored prompts lose their beginning (data.max_length is {longest}, of which "
            f"evaluation.max_new_tokens leaves {longest - scored.max_new_tokens})."
        )
    return {"texts": cut.texts, "prompts": cut.prompts, "responses": cut.responses, "scored_prompts": lost}


def _written_config(folder: Path) -> Config:
    return load_saved(config_of(folder))
