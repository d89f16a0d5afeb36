"""A selection bias for plain transformers: the class of an exported model, which needs no FedGuild.

`fedguild export` copies this file into the model's folder and puts the model's own class in place of `Base`. Load the
folder with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

LoRA and the output scale are merged into the weights; phi is in the buffers of `fedguild`, and the number of active
experts is the config's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel as Base


class FedGuildForCausalLM(Base):
    """The model with an offset phi on its routers' logits that selects experts and does not weigh them."""

    _keep_in_fp32_modules_strict = {"fedguild"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fedguild = nn.Module()
        for name, shape in config.fedguild["shapes"].items():
            self.fedguild.register_buffer(name.replace(".", "/"), torch.zeros(shape))
        for router, layer in config.fedguild["layers"].items():
            self.get_submodule(router).register_forward_hook(self._hook(layer))

    def _hook(self, layer: dict[str, Any]) -> Any:
        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, native, chosen = output
            phi = getattr(self.fedguild, layer["phi"].replace(".", "/"))
            indices = (logits.float() + phi.float()).topk(chosen.shape[-1], dim=-1).indices
            weights = logits.float().softmax(dim=-1).gather(-1, indices)
            if layer["renormalise"]:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, (weights * layer["scaling"]).to(native.dtype), indices

        return hook
