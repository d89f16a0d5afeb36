"""FedGuild: federated fine-tuning of mixture-of-experts language models.

Nine stages, each importing only from those before it: config, data, model, client, wire,
server, evaluation, costs, report. Methods sit after the server, engines after the methods, the
command line last. `experiment.py` has the whole flow, from a config to the report.

The names of `__all__` are the documented Python API (docs/guides/python.md). They are imported when they are first
used, so that `import fedguild` is fast; `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.4.0"

_MODULES = {
    "Comparison": "results",
    "EarlyStopping": "callbacks.early_stopping",
    "Event": "callbacks",
    "FedGuildError": "errors",
    "RunResult": "results",
    "Sweep": "results",
    "compare": "api.comparing",
    "evaluate": "api.runs",
    "export_model": "api.models",
    "load_model": "api.models",
    "load_run": "results",
    "partition": "api.looking",
    "premise": "api.looking",
    "profile": "api.looking",
    "push": "api.pushing",
    "resume": "api.runs",
    "run": "api.runs",
    "sweep": "api.sweeping",
}
"""Public name -> the module below `fedguild` that defines it."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedguild' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"fedguild.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
