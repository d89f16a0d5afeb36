"""Trust in files: which ones may run Python code that is not FedGuild's or a plug-in's, by this user's word.

`model.trust_remote_code` runs code from the model's folder or repository; `module:Class` as the method and
`module:function` in `evaluation.metrics` import a module; a Ray cluster answers with pickles, which run code. In a file
that somebody else wrote (a run's folder, a config, a site) it is not this user's word. It counts where the user gives
it, as an override or in Python, or has said `fedguild trust` of the file. That is recorded in
`$XDG_CONFIG_HOME/fedguild/trusted.json`, by the file's path and the code. What a run of this user writes is recorded as
it is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder, write_json


@dataclass(frozen=True)
class Code:
    """Python code that a file asks to run.

    Attributes:
        setting: The setting that asks.
        recorded: What is recorded of it.
        described: What it is, in words.
        override: The override that would ask for it, too.
    """

    setting: str
    recorded: str
    described: str
    override: str


def code_of_model(path: str, revision: str | None = None, *, start: Path = Path()) -> Code:
    """Returns the code of a model: of the folder that the path means now, or of a revision on the hub.

    Args:
        start: The folder in which a relative path starts.
    """
    setting, place = "model.trust_remote_code", os.path.join(start, path)
    model = os.path.realpath(place) if os.path.exists(place) else path
    model += f"@{revision}" if revision else ""
    return Code(setting, model, f"the Python code that comes with the model {model}", f"{setting}=true")


def code_of_method(name: str) -> Code:
    return Code("method.name", f"method {name}", f"the Python class {name}", f"method={name}")


def code_of_metric(name: str) -> Code:
    setting = "evaluation.metrics"
    return Code(setting, f"function {name}", f"the Python function {name}", f"'{setting}=[{name}]'")


def code_of_cluster(address: str) -> Code:
    setting = "federation.engine.ray.address"
    described = f"Python code from the Ray cluster {address}, which gets the training data"
    return Code(setting, f"cluster {address}", described, f"{setting}={address}")


def trust(file: Path, code: Iterable[Code]) -> None:
    """Records that a file may run some code.

    Raises:
        FedGuildError: the record cannot be read or written.
    """
    wanted, record = [each.recorded for each in code], _record()
    if not wanted:
        return
    make_folder(record.parent)
    try:
        with FileLock(record.with_name(f".{record.name}.lock"), mode=PRIVATE_FILE):  # several runs may start at once
            known = json.loads(record.read_text("utf-8")) if record.exists() else {}
            said = known.setdefault(_key(file), [])
            said += [each for each in wanted if each not in said]
            write_json(record, known)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise FedGuildError(f"{record} cannot be read ({error}).", "Repair or remove it.") from error


def require_trusted(file: Path, code: Code) -> None:
    """Checks that this user has said that a file may run some code.

    Raises:
        ConfigError: that is not so.
    """
    try:
        known = json.loads(_record().read_text("utf-8"))
        if code.recorded in known.get(_key(file), []):
            return
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    raise ConfigError(
        f"{file} asks to run {code.described} ({code.setting}), and you have not said that it may.",
        f"If you trust both: `fedguild trust {file}`; or give {code.override} as an override where the command takes "
        "them.",
    )


def _record() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "fedguild" / "trusted.json"


def _key(file: Path) -> str:
    return str(file.expanduser().resolve())
