"""Arguments and options that several sub-commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedguild.core.errors import ConfigError

CONFIG = "fedguild.yaml"
"""The config that commands take where none is given, and that `fedguild init` writes by default."""

ConfigArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help=f"A preset (see `fedguild presets`) or a YAML file; by default {CONFIG}, as `fedguild init` writes it.",
        show_default=False,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings that override the config's; later ones win.", show_default=False
    ),
]
RunFolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class Launcher(StrEnum):
    """What starts the runs of a comparison or a sweep."""

    LOCAL = "local"
    RAY = "ray"


JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", min=1, help="Runs at the same time, each in a process with its share of the CPU cores."
    ),
]
LauncherOption = Annotated[
    Launcher, typer.Option("--launcher", help="local: on this machine; ray: each run as a task of a Ray cluster.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="The Ray cluster, for example auto; by default Ray is started on this machine."),
]
CoresOption = Annotated[int, typer.Option("--cores", min=1, help="With ray: CPU cores of each run.")]


def config_and_settings(config: str | None, settings: Sequence[str] | None) -> tuple[str, list[str]]:
    """Returns the config and the settings of a command line that need not name a config.

    Raises:
        ConfigError: no config is named, and the default one is not in the current folder.
    """
    given = list(settings or ())
    if config is not None and is_setting(config):
        given.insert(0, config)
        config = None
    if config is not None:
        return config, given
    if not Path(CONFIG).is_file():
        raise ConfigError(
            f"No config is named, and there is no {CONFIG} in this folder.",
            "`fedguild init` writes one, `fedguild presets` lists those that ship, for example flame/tiny-tasks.",
        )
    return CONFIG, given


def is_setting(text: str) -> bool:
    """Whether an argument is a setting, `key.sub=value`, and not a file whose name contains an equals sign."""
    return "=" in text and not os.path.exists(text)  # False for a text too long for a name


def parsed_seeds(text: str | None) -> tuple[int, ...] | None:
    """Returns the seeds of an option; None if it was not given."""
    if text is None:
        return None
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers separated by commas, got '{text}'.") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names a seed twice: '{text}'.")
    return seeds
