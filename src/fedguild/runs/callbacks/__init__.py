"""Callbacks: functions that receive the events of a run as it goes on, and may stop it.

A callback is any callable that takes one event, or an object with some of the methods `on_round_begin`, `on_record`,
`on_round_end` and `on_run_end`, each of which takes its event. The events come in the order of the classes below. What
happens several times a round, such as a training step, is reported by `fedguild.core.progress` instead. A built-in
callback is a module of this package with a class or function `CALLBACK` that returns a callback; one of another package
is an entry point in the group `fedguild.callbacks`. A config lists them under `callbacks`. If a callback has a method
`require`, it is called before the run with the scores that the run will have.

A resumed run delivers the last complete round's `Saved` again, because the killed run may not have delivered it. A
callback that decides from `history` alone, as `EarlyStopping` does, ends a resumed run where an uninterrupted one would
end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from fedguild.core.errors import ConfigError
from fedguild.core.plugins import Plugins
from fedguild.measuring.log.records import EvaluationRecord, Record
from fedguild.runs.results import RunResult


@dataclass
class _Brake:
    """The request of a callback to stop the run."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    Attributes:
        folder: The run's folder.
        round: The round; 0 is before training.
        rounds: The number of rounds that the config asks for.
        history: All scores so far in order, those of round 0 included; empty before the first evaluation.

    Examples:
        >>> import fedguild
        >>> from fedguild.runs.callbacks import Saved
        >>> def two_rounds(event: fedguild.Event) -> None:
        ...     if isinstance(event, Saved) and event.round == 2:
        ...         event.stop("two rounds are enough")
        >>> two_rounds(Saved(folder="runs/first", round=1, rounds=4, history=[]))
        >>> callbacks = [two_rounds]  # what `fedguild.run` takes
    """

    folder: Path
    round: int
    rounds: int
    history: Sequence[EvaluationRecord] = field(repr=False)
    _brake: _Brake = field(default_factory=_Brake, repr=False, compare=False)

    def stop(self, reason: str) -> None:
        """Stops the run once the current round is saved; it then ends as a finished run does, with its report.

        Args:
            reason: One sentence, kept in the run's folder and in `RunResult.stopped`.
        """
        self._brake.reason = self._brake.reason or reason or "a callback stopped it"


@dataclass(frozen=True, kw_only=True)
class RoundStarted(Event):
    """A round begins."""


@dataclass(frozen=True, kw_only=True)
class Recorded(Event):
    """A round's records were written. Those of scores that the last round of an early end lacked come in a second one.

    Attributes:
        records: The records: clients, routing, observations, scores (if it was evaluated) and the round itself.
    """

    records: Sequence[Record] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A round is complete and its checkpoint written."""


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The run is over and its report written.

    Attributes:
        result: The result.
    """

    result: RunResult


Callback = Callable[[Event], object]
"""A function of an event; what it returns is ignored. In Python also an object with methods (`METHODS`)."""


def _accepted(name: str, loaded: object) -> Callable[..., Callback]:
    if not callable(loaded):
        raise TypeError(f"a callback is made by a class or function, not by a {type(loaded).__name__}")
    return loaded


CALLBACKS = Plugins("callback", __name__, "fedguild.callbacks", _accepted, attribute="CALLBACK", dashes=True)


def make_callback(name: str, options: Mapping[str, Any]) -> Callback:
    """Returns a built-in callback or one of an installed package.

    Raises:
        ConfigError: there is none of this name, or it does not take the options.
    """
    make = CALLBACKS.load(name)
    try:
        callback = make(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"callbacks: {name} does not take {dict(options)}: {error}.", _options_of(make)) from error
    if not callable(callback):
        raise ConfigError(f"callbacks: {name} returns a {type(callback).__name__}, which is not callable.")
    return callback


def _options_of(make: Callable[..., Callback]) -> str:
    """Returns a hint at the options that a callback takes; empty if it has no signature."""
    try:
        options = [str(option.replace(annotation=option.empty)) for option in signature(make).parameters.values()]
    except (TypeError, ValueError):
        return ""
    return f"Its options: {', '.join(options)}." if options else "It takes no options."


METHODS: Mapping[type[Event], str] = {
    RoundStarted: "on_round_begin",
    Recorded: "on_record",
    Saved: "on_round_end",
    Finished: "on_run_end",
}
"""Event -> the method that takes it, of a callback that is an object with methods."""


class _ByMethod:
    """A callback that calls an object's method for each event that it has one for."""

    def __init__(self, holder: object) -> None:
        self._holder = holder
        if callable(require := getattr(holder, "require", None)):
            self.require = require

    def __call__(self, event: Event) -> None:
        if callable(method := getattr(self._holder, METHODS[type(event)], None)):
            method(event)


def _checked(callback: object) -> Callback:
    """Returns a callback given in Python; raises ConfigError if it cannot be called."""
    if any(callable(getattr(callback, name, None)) for name in METHODS.values()):
        return _ByMethod(callback)
    if not callable(callback):
        raise ConfigError(
            f"A callback is a function of an event, or an object with {', '.join(METHODS.values())}, not {callback!r}.",
            f"Those that ship are settings: 'callbacks={callback}'." if callback in CALLBACKS else "",
        )
    return callback


def listed(callbacks: object) -> tuple[Callback, ...]:
    """Returns the callbacks given in Python; raises ConfigError if they are not a sequence of callables."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks takes a sequence of functions, not {callbacks!r}.", "Give it as a list: [...].")
    return tuple(map(_checked, callbacks))


def check_scores(callbacks: Iterable[Callback], scores: Mapping[str, Collection[str]]) -> None:
    """Calls `require` of every callback that has it, before anything of the run is loaded.

    Args:
        scores: The budgets and means that the run will score -> the metrics that each may have.

    Raises:
        ConfigError: a callback needs a score that the run will not have.
    """
    for callback in callbacks:
        require = getattr(callback, "require", None)
        if callable(require):
            require(scores)


class Delivery:
    """Delivers a run's events to its callbacks.

    Args:
        callbacks: The callbacks, in the order in which each event reaches them.
        rounds: The number of rounds that the config asks for.
        history: The scores of the rounds before.
    """

    def __init__(
        self, callbacks: Iterable[Callback], folder: Path, rounds: int, history: Iterable[EvaluationRecord]
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._folder, self._rounds = folder, rounds
        self._history = list(history)
        self._brake = _Brake()

    @property
    def reason(self) -> str:
        """Why a callback wants the run to stop; empty if none does."""
        return self._brake.reason

    def stop(self, reason: str) -> None:
        self._brake.reason = self._brake.reason or reason

    def round_started(self, number: int) -> None:
        self._send(RoundStarted, number)

    def recorded(self, number: int, records: Sequence[Record]) -> None:
        """Delivers `Recorded`, after adding the scores among the records to the history."""
        self._history += [record for record in records if isinstance(record, EvaluationRecord)]
        self._send(Recorded, number, records=tuple(records))

    def saved(self, number: int) -> None:
        self._send(Saved, number)

    def finished(self, number: int, result: RunResult) -> None:
        self._send(Finished, number, result=result)

    def _send(self, kind: type[Event], number: int, **more: Any) -> None:
        if self._callbacks:
            facts: dict[str, Any] = {"folder": self._folder, "round": number, "rounds": self._rounds}
            event = kind(**facts, history=tuple(self._history), _brake=self._brake, **more)
            for callback in self._callbacks:
                callback(event)
