"""HMoLE, FedAMoLE's mixture of LoRA experts, for plain transformers: the class of an exported client's model.

`fedguild export` copies this file into the model's folder and puts the model's own class in place of `Base`. Load the
folder with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

Source: FedAMoLE, Section 4.2, Equations 4 to 9 (and 18 for the vanilla router). The experts that the client holds, the
shared expert and the routers are in the buffers of `fedguild`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel as Base


class FedGuildForCausalLM(Base):
    """The model with a mixture of LoRA experts on some of its linear layers."""

    _keep_in_fp32_modules_strict = {"fedguild"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fedguild = nn.Module()
        for name, shape in config.fedguild["shapes"].items():
            self.fedguild.register_buffer(name.replace(".", "/"), torch.zeros(shape))
        for module, score_scale in config.fedguild["modules"].items():
            self.get_submodule(module).register_forward_hook(self._hook(module, score_scale))

    def _hook(self, module: str, score_scale: float | None) -> Any:
        settings = self.config.fedguild

        def stored(name: str, like: Tensor) -> Tensor:
            kept: Tensor = getattr(self.fedguild, f"{module}.{name}".replace(".", "/"))
            return kept.to(like)

        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hidden = args[0]
            low = torch.einsum("jri,...i->...jr", stored("experts.lora_A", hidden), hidden)  # A_j h
            routed = hidden @ stored("router", hidden).T
            if score_scale is None:  # vanilla, Eq. 18
                scores = routed.float()
            else:  # <W^t h, A_j h>, Eq. 6
                scores = (low.float() * routed[..., None, :].float()).sum(-1) * score_scale
            p, active = scores.softmax(dim=-1).topk(settings["top_k"], dim=-1)  # Eq. 7
            if settings["renormalise"]:
                p = p / p.sum(dim=-1, keepdim=True)
            weights = torch.zeros_like(scores).scatter_(-1, active, p).to(hidden.dtype)
            total = torch.einsum("...jr,jor->...o", low * weights[..., None], stored("experts.lora_B", hidden))
            if settings["shared"]:
                total = total + hidden @ stored("shared.lora_A", hidden).T @ stored("shared.lora_B", hidden).T
            scale: float = settings["scale"]
            return output + scale * total  # Eq. 9

        return hook
