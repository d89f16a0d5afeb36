"""Trust in files: which ones may run the Python code that comes with a model, by this user's word.

`model.trust_remote_code` runs code from the model's folder or repository. In a file that somebody else wrote (a run's
folder, a config, a site) it is not this user's word. It counts where the user gives it, as an override or in Python, or
has said `fedguild trust` of the file. That is recorded in `$XDG_CONFIG_HOME/fedguild/trusted.json`, by the file's path
and the model's. What a run of this user writes is recorded as it is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.files import write_json

SETTING = "trust_remote_code"


def trust(file: Path, model: str) -> None:
    """Records that a file may run the code that comes with a model.

    Raises:
        FedGuildError: the record cannot be read or written.
    """
    record = _record()
    try:
        known = json.loads(record.read_text("utf-8")) if record.exists() else {}
        if model not in known.setdefault(_key(file), []):
            known[_key(file)].append(model)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise FedGuildError(f"{record} cannot be read ({error}).", "Repair or remove it.") from error
    write_json(record, known)


def require_trusted(file: Path, model: str) -> None:
    """Checks that this user has said that a file may run the code that comes with a model.

    Raises:
        ConfigError: that is not so.
    """
    try:
        known = json.loads(_record().read_text("utf-8"))
        if model in known.get(_key(file), []):
            return
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    raise ConfigError(
        f"{file} asks to run the Python code that comes with the model {model} (model.{SETTING}), and you have not "
        "said that it may.",
        f"If you trust both: `fedguild trust {file}`; or give model.{SETTING}=true as an override where the command "
        "takes them.",
    )


def _record() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "fedguild" / "trusted.json"


def _key(file: Path) -> str:
    return str(file.expanduser().resolve())
