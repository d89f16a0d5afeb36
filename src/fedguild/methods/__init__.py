"""The methods, one file per paper. After the server stage, before the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedguild.errors import ConfigError, nearest
from fedguild.methods.a3smoe import A3Smoe
from fedguild.methods.fdlora import FDLoRA
from fedguild.methods.fed_sb import FedSB
from fedguild.methods.fedalign_moe import FedAlignMoe
from fedguild.methods.fedamole import FedAMoLE
from fedguild.methods.fedavg import FedAvg
from fedguild.methods.fedex_lora import FedExLoRA
from fedguild.methods.fedit import FedIT
from fedguild.methods.fedmoe import FedMoe
from fedguild.methods.fedprompt import FedPrompt
from fedguild.methods.fedprox import FedProx
from fedguild.methods.fedptuning import FedPTuning
from fedguild.methods.ffa_lora import FFALoRA
from fedguild.methods.flame import Flame
from fedguild.methods.flexlora import FlexLoRA
from fedguild.methods.flora import Flora
from fedguild.methods.florist import Florist
from fedguild.methods.hetlora import HetLoRA
from fedguild.methods.pfl_moe import PflMoe
from fedguild.methods.smoe_llb import SmoeLlb
from fedguild.methods.trivial import Trivial
from fedguild.methods.ub_smoe import UbSmoe
from fedguild.server.method import Method

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        A3Smoe,
        FDLoRA,
        FedSB,
        FedAlignMoe,
        FedAMoLE,
        FedAvg,
        FedExLoRA,
        FedIT,
        FedMoe,
        FedPrompt,
        FedProx,
        FedPTuning,
        FFALoRA,
        Flame,
        FlexLoRA,
        Flora,
        Florist,
        HetLoRA,
        PflMoe,
        SmoeLlb,
        Trivial,
        UbSmoe,
    )
}

__all__ = [
    "METHODS",
    "A3Smoe",
    "FDLoRA",
    "FFALoRA",
    "FedAMoLE",
    "FedAlignMoe",
    "FedAvg",
    "FedExLoRA",
    "FedIT",
    "FedMoe",
    "FedPTuning",
    "FedPrompt",
    "FedProx",
    "FedSB",
    "Flame",
    "FlexLoRA",
    "Flora",
    "Florist",
    "HetLoRA",
    "PflMoe",
    "SmoeLlb",
    "Trivial",
    "UbSmoe",
    "build_method",
]


def build_method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Returns a method by its registered name, its options checked.

    Raises:
        ConfigError: the method or an option is unknown, or a value is out of range.
    """
    if name not in METHODS:
        raise ConfigError(f"Unknown method '{name}'.", nearest(name, METHODS))
    method = METHODS[name]
    try:
        settings = method.Settings(**(options or {}))
    except ValidationError as error:
        raise _explained(name, method, error) from error
    return method(settings)


def _explained(name: str, method: type[Method], error: ValidationError) -> ConfigError:
    known = method.Settings.model_fields
    for problem in error.errors():
        key = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden":
            return ConfigError(f"method.{key}: {name} has no such option.", nearest(key, known))
    problem = error.errors()[0]
    where = ".".join(str(part) for part in ("method", *problem["loc"]))
    help_text = known[str(problem["loc"][0])].description if problem["loc"] else ""
    return ConfigError(
        f"{where}: {problem['msg']}, got {problem['input']!r}.", f"It is: {help_text}" if help_text else ""
    )
