"""UB-SMoE's modulated routing for plain transformers: the class of an exported model, which needs no FedGuild.

`fedguild export` copies this file into the model's folder and puts the model's own class in place of `Base`. Load the
folder with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

Source: UB-SMoE, Section 5.1, Equations 2 and 10, and Algorithm 2. LoRA is merged into the weights; phi is in the
buffers of `fedguild`, and the number of active experts is the config's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel as Base


class FedGuildForCausalLM(Base):
    """The model with a learned offset phi on its routers' logits."""

    _keep_in_fp32_modules_strict = {"fedguild"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fedguild = nn.Module()
        for name, shape in config.fedguild["shapes"].items():
            self.fedguild.register_buffer(name.replace(".", "/"), torch.zeros(shape))
        for router, layer in config.fedguild["layers"].items():
            self.get_submodule(router).register_forward_hook(self._hook(layer))

    def _hook(self, layer: dict[str, Any]) -> Any:
        settings = self.config.fedguild

        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, native, chosen = output
            weights, indices = self._routed(logits.float(), layer, chosen.shape[-1], settings)
            return logits, weights.to(native.dtype), indices

        return hook

    def _routed(
        self, scores: Tensor, layer: dict[str, Any], active: int, settings: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Returns weights and experts [N, active] of router logits [N, M]."""
        largest = scores.topk(settings["candidates"], dim=-1).indices
        modulated = scores
        if settings["modulation"] != "none":
            phi = getattr(self.fedguild, layer["phi"].replace(".", "/")).to(scores)
            among = torch.zeros_like(scores).scatter_(-1, largest, 1.0)
            modulated = scores + phi * (among if settings["modulation"] == "candidate" else 1.0 - among)
        if settings["modulation"] == "preserve":
            kept = largest[:, :active]
            others = modulated.scatter(-1, kept, float("-inf")).topk(active - kept.shape[1], dim=-1).indices
            indices = torch.cat([kept, others], dim=-1)
        else:
            indices = modulated.topk(active, dim=-1).indices
        values = modulated.gather(-1, indices)
        if settings["gating"] == "renormalised" or layer["renormalise"]:
            return values.softmax(dim=-1) * layer["scaling"], indices
        return (values - modulated.logsumexp(dim=-1, keepdim=True)).exp() * layer["scaling"], indices
