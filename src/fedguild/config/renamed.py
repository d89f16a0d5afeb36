"""Settings renamed in 0.4: an old name is answered with the new one, and runs of 0.3 are read by the same table.

docs/reference/names.md has the table too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fedguild.core.errors import ConfigError

_DATA = {
    "data.corpus": "data.dataset",
    "data.limit": "data.max_samples",
    "data.max_tokens": "data.max_length",
    "data.split.caps.train": "data.split.max_train_samples",
    "data.split.caps.validation": "data.split.max_validation_samples",
    "data.split.caps.test": "data.split.max_test_samples",
}
SETTINGS = {
    **_DATA,
    "federation.participation": "federation.client_fraction",
    "federation.late": "federation.straggler_policy",
    "federation.robust": "federation.aggregator",
    "federation.norm_limit": "federation.max_update_norm",
    "federation.codec": "federation.wire_dtype",
    "federation.keep_checkpoints": "federation.save_total_limit",
    "training.accumulation": "training.gradient_accumulation_steps",
    "training.clip_norm": "training.max_grad_norm",
    "training.schedule": "training.lr_scheduler",
    "privacy.noise": "privacy.trust_model",
    "evaluation.by": "evaluation.answer_mode",
    "evaluation.normalise": "evaluation.length_normalization",
    "evaluation.initial": "evaluation.eval_on_start",
    "evaluation.diagnosis": "evaluation.diagnostics",
}
"""Old name of a config's setting -> the new one."""
SITE = {**_DATA, "certificate": "ca_certificate"}
"""The same for `site.yaml`."""
SERVER = {"authority": "ca_certificate", "reads_data": "server_evaluation"}
"""The same for `server.yaml`."""
ARGUMENTS = {"form": "format", "engine": "launcher"}
"""Old name of an argument of a Python function -> the new one."""
OPTIONS = {"--engine": "--launcher"}
"""Old name of an option of the command line -> the new one."""

STATE = {
    "^merge_holders$": "server/merge_holders",
    "^rescaler/([^/]+)/": r"budget/\1/rescaler/",
    "^figures/([^/]+)/(idle|ratio)$": r"server/figures/\1/figures/\2",
}
"""Pattern of the name of a tensor in a state of 0.3 -> its name now."""
STATE_OF = {
    "^token_embedding/": {"^": "server/"},  # FedAMoLE: the server keeps it all to itself
    "^client/poor$": {
        "^clients/": "server/",
        "^client/": "server/clients/",
        "^(experts/|round$)": r"server/\1",
    },  # FedMoE
}
"""Pattern of a name that only one method's state of 0.3 has -> the patterns of its other names, scalars among them."""

P = ParamSpec("P")
T = TypeVar("T")


def state_names(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> its name now of a state's tensors and scalars, from a checkpoint of this version or of 0.3."""
    own = {name: name for name in names}
    methods = [patterns for mark, patterns in STATE_OF.items() if any(re.search(mark, name) for name in own)]
    for patterns in (STATE, *methods):
        for before, now in patterns.items():
            own = {name: re.sub(before, now, renamed) for name, renamed in own.items()}
    return own


def refuse_old_names(settings: Mapping[str, Any], source: str, renamed: Mapping[str, str] = SETTINGS) -> None:
    """Raises ConfigError if settings have old names; the message lists each with the new one."""
    told = [
        f"{source}: '{old}' is now called '{new}'"
        for old, new in renamed.items()
        if old.partition(".")[0] in settings and _has(settings, old)
    ]
    if told:
        raise ConfigError("\n".join(told), "docs/reference/names.md lists the names that changed with 0.4.")


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the settings that a run of 0.3 wrote."""
    return _moved(settings, SETTINGS)


def with_old_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings under their names of 0.3, by which fingerprints are computed."""
    return _moved(settings, {new: old for old, new in SETTINGS.items()})


def answers_old_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Lets a function reject the old name of an argument with the new one."""

    @wraps(function)
    def answering(*args: P.args, **kwargs: P.kwargs) -> T:
        for old in ARGUMENTS.keys() & kwargs.keys():
            raise ConfigError(f"{function.__name__}: the argument '{old}' is now called '{ARGUMENTS[old]}'.")
        return function(*args, **kwargs)

    return answering


def _has(settings: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    return True


def _moved(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    result = _copied(settings)
    for before, after in names.items():
        if _has(result, before):
            *above, last = before.split(".")
            holders = [result]
            for part in above:
                holders.append(holders[-1][part])
            value = holders[-1].pop(last)
            if above and not holders[-1]:
                del holders[-2][above[-1]]
            *above, last = after.split(".")
            holder = result
            for part in above:
                holder = holder.setdefault(part, {})
            holder[last] = value
    return result


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
