"""`fedguild trust`: let a file run Python code that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedguild.config import asking_files
from fedguild.config.trust import code_of_model, trust
from fedguild.core.errors import ConfigError
from fedguild.core.layout import CONFIG
from fedguild.federation.site import SITE_FILE, SiteSettings, read_settings

EXAMPLES = ("fedguild trust runs/from-a-colleague", "fedguild trust config.yaml", "fedguild trust union/client-000")


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="The folder of a run, an exported model or a site, or a config.", show_default=False
        ),
    ],
) -> None:
    """Let a file that somebody else wrote run Python code: a model's, a method, metrics, or a Ray cluster's."""
    from fedguild.export.manifest import MANIFEST, place_of_base, read_manifest

    inside = [path / name for name in (CONFIG, SITE_FILE, MANIFEST) if (path / name).is_file()]
    if path.is_dir() and not inside:
        raise ConfigError(
            f"{path} holds no {CONFIG}, no {SITE_FILE} and no {MANIFEST}.",
            "Give the folder of a run, of a site or of an exported model.",
        )
    file = inside[0] if inside else path
    if file.name == SITE_FILE:
        model = read_settings(file, SiteSettings).model
        code = code_of_model(model.path, model.revision, start=file.parent)
        asking = [(file, code)] if model.trust_remote_code else []
    elif file.name == MANIFEST:
        base = read_manifest(file.parent).base
        code = code_of_model(place_of_base(file.parent, base), base.revision)
        asking = [(file, code)] if base.trust_remote_code else []
    else:
        asking = asking_files(file)
    if not asking:
        asked = (
            "a model's code (model.trust_remote_code), a class (method), a function (evaluation.metrics) or that of a "
            "Ray cluster (federation.engine.ray.address)"
        )
        typer.echo(f"{file} does not ask to run {asked}: nothing to say.")
    for each, code in asking:
        trust(each, [code])
        typer.echo(f"{each} may run {code.described}.")
