"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio receive the records of a run as it goes on.

`points` turns records into named values, the same for every tracker. A built-in tracker is a module of this package
with a class `TRACKER`; one of another package is an entry point in the group `fedguild.trackers`. `Tracking` is the
callback that feeds them. Each has its own thread: a slow tracker delays no round, and one that fails leaves a message
and does not end the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fedguild.core.errors import ConfigError
from fedguild.core.plugins import Plugins


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers show it.

    Attributes:
        folder: The run's folder.
        project: The project, which holds many runs.
        name: The run's name.
        group: Label shared by the runs that belong together; empty for a single run.
        tags: The run's tags.
        settings: The config, without its folder, and of other paths of this machine the last name alone.
        id: The tracker's own id of the run, to continue it; empty for a new run.
        round: The last round whose values the tracker got; -1 for a new run.
    """

    folder: Path
    project: str
    name: str
    group: str = ""
    tags: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    id: str = ""
    round: int = -1

    def flat_settings(self) -> dict[str, Any]:
        """Returns the config with dotted keys, lists as they are."""
        return dict(_flat(self.settings, ""))


def _flat(settings: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        inside = isinstance(value, Mapping) and value
        found += _flat(value, f"{prefix}{key}.") if inside else [(f"{prefix}{key}", value)]
    return found


@dataclass(frozen=True)
class Begun:
    """What a tracker returns when it has started a run.

    Attributes:
        id: Its id of the run, needed to continue it.
        round: The last round whose values it holds as far as the tracker knows; None if it does not.
    """

    id: str
    round: int | None = None


class Tracker(Protocol):
    """One run in one tracker. All methods but the constructor are called in one thread, which is not the main one.

    Attributes:
        PACKAGE: The package that it imports.
        EXTRA: The extra of FedGuild that installs it; empty for a tracker of another package.
        TAKES_BACK: Whether `begin` drops what was sent after `TrackedRun.round`. Where it does not, a run that goes
            back to an earlier round begins a new run of the tracker.
    """

    PACKAGE: ClassVar[str]
    EXTRA: ClassVar[str]
    TAKES_BACK: ClassVar[bool]

    def begin(self, run: TrackedRun) -> Begun:
        """Begins a run, or continues it if it has an id."""
        ...

    def add(self, round: int, values: Mapping[str, float]) -> None:
        """Adds the values of a round; rounds come in order, each once."""
        ...

    def finish(self, *, failed: bool) -> None:
        """Sends what was not sent yet and ends the run. `failed` says that it was interrupted or raised an error."""
        ...


def _accepted(name: str, loaded: Any) -> type[Tracker]:
    absent = [
        each for each in ("PACKAGE", "EXTRA", "TAKES_BACK", "begin", "add", "finish") if not hasattr(loaded, each)
    ]
    if absent:
        raise TypeError(f"a tracker has {', '.join(absent)}")
    return loaded  # type: ignore[no-any-return]


TRACKERS: Plugins[type[Tracker]] = Plugins(
    "tracker", __name__, "fedguild.trackers", _accepted, attribute="TRACKER", dashes=True
)


def check_trackers(names: Sequence[str]) -> None:
    """Checks that every tracker is known and its package installed, without importing the package.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        kind = TRACKERS.load(name)
        if not _is_installed(kind.PACKAGE):
            extra = f"fedguild[{kind.EXTRA}]" if kind.EXTRA else kind.PACKAGE
            raise ConfigError(
                f"tracking: {name} needs the package {kind.PACKAGE}, which is not installed.",
                f"pip install '{extra}', or take {name} out of tracking.trackers.",
            )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
