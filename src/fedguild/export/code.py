"""A model whose method acts in addition to the weights, as a folder with its own modelling code.

The folder is a merged checkpoint with further tensors, and `modeling_fedguild.py`, the stand-alone file of the method's
part (`AdapterPart.standalone`). Plain transformers load it with `trust_remote_code=True`; FedGuild is not needed.
"""

from __future__ import annotations

from pathlib import Path

from fedguild.core.errors import ModelError
from fedguild.core.files import write_text
from fedguild.export.merged import require_mergeable, write_merged
from fedguild.model.adapters.part import AdapterPart, Standalone
from fedguild.model.backbone import Backbone
from fedguild.server.method import Deployment

MODULE = "modeling_fedguild"
CLASS = "FedGuildForCausalLM"
"""The name of the class in `AdapterPart.standalone`; in a folder, the base class's name is in it."""
_BASE = "from transformers import PreTrainedModel as Base\n"


def standalone_of(backbone: Backbone, deployment: Deployment) -> tuple[AdapterPart, Standalone] | None:
    """Returns the part of a deployment that the weights cannot hold, with its stand-alone form; None if there is none.

    There is none for several such parts, for a part without stand-alone code, and for an encoder-decoder model.
    """
    beyond = [part for part in deployment.plan.parts if not part.folds_into_weights]
    if len(beyond) != 1 or backbone.info.seq2seq is not None:
        return None
    standalone = beyond[0].standalone(backbone, deployment.plan.parts, deployment.tensors)
    return None if standalone is None else (beyond[0], standalone)


def write_code(folder: Path, backbone: Backbone, deployment: Deployment) -> None:
    """Writes weights, further tensors, modelling code, config and tokenizer into a folder.

    Args:
        folder: Where to write; it must exist.
        backbone: The model; not changed.

    Raises:
        ModelError: the backbone's weights are quantised, or no code runs what is trained.
    """
    require_mergeable(backbone)
    found = standalone_of(backbone, deployment)
    kind = type(backbone.model)
    if found is None or not kind.__module__.startswith("transformers."):
        raise ModelError(
            f"There is no stand-alone code for this model of {backbone.info.name}.",
            "Use `fedguild.load_model` or `fedguild generate`, which need no export.",
        )
    part, standalone = found
    name = f"FedGuild{kind.__name__}"  # transformers chooses MiniMax's cache by the name of the class
    kept = [one for one in deployment.plan.parts if one is not part and standalone.merges]
    plan = deployment.plan.without(*(type(one) for one in deployment.plan.parts if one not in kept))
    held = {key for one in kept for key in one.shapes(backbone.info)}
    rest = {key: value for key, value in deployment.tensors.items() if key in held}
    further = {f"fedguild.{key.replace('.', '/')}": value.float() for key, value in standalone.tensors.items()}
    shapes = {key: list(value.shape) for key, value in standalone.tensors.items()}
    settings = {
        "architectures": [name],
        "auto_map": {"AutoModelForCausalLM": f"{MODULE}.{name}"},
        "fedguild": {**standalone.settings, "shapes": shapes},
    }
    write_merged(folder, backbone, Deployment(plan, rest, deployment.merged), further=further, settings=settings)
    code = standalone.source.read_text("utf-8")
    code = code.replace(_BASE, f"from transformers import {kind.__name__} as Base\n").replace(CLASS, name)
    write_text(folder / f"{MODULE}.py", code)
