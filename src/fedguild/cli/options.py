"""Arguments and options that several sub-commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A preset (see `fedguild presets`) or a YAML file.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings that override the config's; later ones win.", show_default=False
    ),
]
RunFolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a run.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
