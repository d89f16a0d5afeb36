"""The files that a new site's settings name: its own data, or links to what this machine has.

A site's file holds no path of the machine on which it was written: `data.jsonl` is in the site's own folder, and
`model/NAME` there is a link, which an organisation that gets the folder replaces by its copy of the model.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedguild.config import Config
from fedguild.config.data import DataSettings
from fedguild.core.errors import ConfigError, DataError
from fedguild.core.files import make_folder
from fedguild.data.corpora import corpus_spec
from fedguild.data.corpora.source import HubDataset, locate
from fedguild.model.backbone import is_at_hand
from fedguild.model.packaged import PACKAGED

OWN_DATA = "data.jsonl"
"""The file in its folder that a site reads if the config names no other."""
MODEL, DATA = "model", "data"
"""The folders of a site with the links to a model and to data."""
_SUFFIX = re.compile(r"(?P<path>.+?)(?P<suffix>(:[\w.-]+)?(@[\w.+%:\[\]-]+)?)")


def with_own_data(config: Config, overrides: Sequence[str]) -> Config:
    """Returns a config whose data each client reads from a file in its own folder.

    A file that the config names keeps its name. Data that is the same for all, generated or on the hub, is replaced by
    `data.jsonl`, whose layout is recognised there.

    Raises:
        ConfigError: an override asks for data of the hub, or nothing is held out to score on.
    """
    data, given = config.data, {override.partition("=")[0] for override in overrides}
    changes: dict[str, object] = {}
    if data.train is None or _is_shared(data.train):
        if data.train is not None and "data.train" in given:
            raise ConfigError(
                f"data.train is {data.train}, the same data for every client.",
                "Give --shared-data to deal it to the clients, or name a file that each has in its folder.",
            )
        changes = {"train": OWN_DATA, "test": None, "split": data.split.model_copy(update={"test_source": "client"})}
        known = "data.dataset" in given
    else:
        changes = {name: _in_own_folder(getattr(data, name)) for name in ("train", "test")}
        known = True
    if not known or corpus_spec(data.dataset).generate is not None:
        changes |= {"dataset": "instructions", "template": None, "options": {}}
    own = DataSettings.model_validate({**data.model_dump(), **changes})
    if config.evaluation.split == "test" and own.test is None and own.split.own_test == 0:
        raise ConfigError(
            "Clients score on their own test examples, but data.split.test holds none out.",
            "Set data.split.test=0.1, or evaluation.split=validation.",
        )
    return config.model_copy(update={"data": own})


def site_settings(config: Config, site: Path, *, own: bool) -> tuple[dict[str, object], dict[str, object]]:
    """Returns the model and the data of a site's file, and writes the links and files that they name.

    Args:
        site: The site's folder.
        own: Whether its data is its own, and so is not linked.

    Raises:
        ConfigError: the model is a path at which there is nothing.
    """
    model, data = config.model.model_dump(mode="json"), config.data.model_dump(mode="json", exclude={"max_length"})
    require_model(config)
    path = Path(str(model["path"]))
    if model["path"] not in PACKAGED and path.exists():
        model["path"] = _linked(path, site, MODEL)
    if not own:
        for key in ("train", "test"):
            data[key] = _linked_data(data[key], site, f"{DATA}/{key}")
    template = config.data.chat_template
    if template is not None and "\n" not in template and Path(template).is_file():
        shutil.copyfile(template, site / Path(template).name)
        data["chat_template"] = Path(template).name
    return model, data


def require_model(config: Config) -> None:
    """Raises ConfigError if the model is a path at which there is nothing."""
    path = config.model.path
    if path.startswith(("/", ".")) and not is_at_hand(path, config.model.revision):
        raise ConfigError(
            f"There is no model at {path}.", "model.path is embedded, english, a hub id (owner/name) or a folder."
        )


def at_home(config: Config, *, shared_data: bool) -> Config:
    """Returns the server's config: its paths hold wherever its programs start."""
    path, data = Path(config.model.path), config.data
    model = config.model
    if config.model.path not in PACKAGED and path.exists():
        model = model.model_copy(update={"path": str(path.resolve())})
    found = {name: _absolute(getattr(data, name)) for name in ("train", "test") if shared_data}
    return config.model_copy(update={"model": model, "data": data.model_copy(update=found)})


def _absolute(given: str | list[str] | None) -> str | list[str] | None:
    if given is None or isinstance(given, list):
        return given and [str(_absolute(one)) for one in given]
    path, suffix = _split(given)
    return given if path is None else str(path.resolve()) + suffix


def _is_shared(given: str | list[str]) -> bool:
    """Whether data is on the hub, and not in a file, which need not be here."""
    try:
        where = locate(given)
    except DataError:
        return False
    return isinstance(where, HubDataset) and not where.is_local


def _in_own_folder(given: str | list[str] | None) -> str | list[str] | None:
    """Returns a source in the site's folder: of a path that leaves the folder, the name alone."""
    if given is None or isinstance(given, list):
        return given and [str(_in_own_folder(one)) for one in given]
    path = Path(given)
    return path.name if path.is_absolute() or given.startswith("~") or ".." in path.parts else given


def _linked_data(given: str | list[str] | None, site: Path, folder: str) -> str | list[str] | None:
    """Returns a source by its links in a folder of the site; what is not on this machine stays as it is."""
    if given is None:
        return None
    if isinstance(given, list):
        links = [_linked_data(one, site, f"{folder}/{number}") for number, one in enumerate(given)]
        return [link for one in links if one is not None for link in (one if isinstance(one, list) else [one])]
    path, suffix = _split(given)
    if path is not None:
        return _linked(path, site, folder) + suffix
    matches = sorted(glob.glob(str(Path(given).expanduser()), recursive=True)) if glob.has_magic(given) else []
    files = [Path(match) for match in matches if Path(match).is_file()]
    return [_linked(file, site, f"{folder}/{number}") for number, file in enumerate(files)] or given


def _split(given: str) -> tuple[Path | None, str]:
    """Returns the path of a source, and its `:config@split`; None if there is nothing at the path."""
    match = _SUFFIX.fullmatch(given)
    for text, suffix in ((given, ""), (match["path"], match["suffix"]) if match else (given, "")):
        path = Path(text).expanduser()
        if path.exists():
            return path, suffix
    return None, ""


def _linked(path: Path, site: Path, folder: str) -> str:
    """Makes a link to a path in a folder of the site; returns it relative to the site."""
    target, name = path.resolve(), Path(os.path.abspath(path)).name
    make_folder(site / folder)
    link = site / folder / name
    link.symlink_to(os.path.relpath(target, link.parent.resolve()), target_is_directory=target.is_dir())
    return f"{folder}/{name}"
