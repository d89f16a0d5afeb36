"""FedGuild: federated fine-tuning of mixture-of-experts language models.

Fifteen packages, each importing only from those before it: core, config, data, model, privacy, client, server, methods,
measuring, engines, report, export, runs, federation, cli. `runs/experiment.py` has the whole flow, from a config to the
report.

The names of `__all__` are the documented Python API (docs/guides/python.md). They are imported when they are first
used, so that `import fedguild` is fast; `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.4.0"

_MODULES = {
    "Comparison": "runs.results",
    "EarlyStopping": "runs.callbacks.early_stopping",
    "Event": "runs.callbacks",
    "FedGuildError": "core.errors",
    "RunResult": "runs.results",
    "Sweep": "runs.results",
    "compare": "runs.api.comparing",
    "evaluate": "runs.api.runs",
    "export_model": "runs.api.models",
    "inspect_data": "runs.api.looking",
    "load_comparison": "runs.api.comparing",
    "load_model": "runs.api.models",
    "load_run": "runs.results",
    "partition": "runs.api.looking",
    "premise": "runs.api.looking",
    "profile": "runs.api.looking",
    "push": "runs.api.pushing",
    "resume": "runs.api.runs",
    "run": "runs.api.runs",
    "sweep": "runs.api.sweeping",
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
