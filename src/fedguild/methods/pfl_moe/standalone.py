"""PFL-MoE's mixture of two adapters' logits for plain transformers: the class of an exported client's model.

`fedguild export` copies this file into the model's folder and puts the model's own class in place of `Base`. Load the
folder with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.

Source: PFL-MoE (APWeb-WAIM 2021): z = g z_first + (1 - g) z_second with g = sigmoid(w . phi + b), phi the mean of the
prompt's features in the model without any adapter. The prompt is the whole row where a pass has no cache. On the first
pass both adapters are added to copies of the weights that they change, which are kept in memory beside the weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache
from transformers import PreTrainedModel as Base


class FedGuildForCausalLM(Base):
    """The model under two LoRAs, and the gate that mixes their logits."""

    _keep_in_fp32_modules_strict = {"fedguild"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.fedguild = nn.Module()
        for name, shape in config.fedguild["shapes"].items():
            self.fedguild.register_buffer(name.replace(".", "/"), torch.zeros(shape))
        self._sides: list[dict[str, Tensor]] = []
        self._plain = False
        self._gate = torch.zeros(0)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as usual, but not by beams, which would have to be followed in two caches."""
        settings = kwargs.get("generation_config") or self.generation_config
        if (kwargs.get("num_beams") or settings.num_beams or 1) > 1:
            raise ValueError("This model mixes two models' logits and cannot search by beams: set num_beams=1.")
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the output of the first model, with the mixed logits; `past_key_values` holds both caches."""
        if self._plain:
            named = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}
            return super().forward(**named, **kwargs)
        if input_ids is None:
            raise ValueError("The gate needs input_ids, not inputs_embeds.")
        second = None
        if past_key_values is not None:
            if not hasattr(past_key_values, "fedguild_second"):
                past_key_values.fedguild_second = DynamicCache(config=self.config)
            second = past_key_values.fedguild_second
        if past_key_values is None or not past_key_values.get_seq_length():
            self._gate = self._gated(input_ids, attention_mask)
        if not self._sides:
            self._sides = [self._weights("first"), self._weights("second")]
        outputs = []
        self._plain = True
        try:
            for weights, cache in zip(self._sides, (past_key_values, second), strict=True):
                named = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": cache, **kwargs}
                outputs.append(functional_call(self, weights, (), named))
        finally:
            self._plain = False
        one, two = (output.logits.float() for output in outputs)
        outputs[0].logits = two.lerp(one, self._gate.to(one)[:, None, None])
        if labels is not None:
            outputs[0].loss = self.loss_function(outputs[0].logits, labels, self.config.vocab_size)
        return outputs[0]

    def _stored(self, name: str) -> Tensor:
        kept: Tensor = getattr(self.fedguild, name.replace(".", "/"))
        return kept

    @torch.no_grad()
    def _weights(self, side: str) -> dict[str, Tensor]:
        """Returns name -> W + scale B A of every weight that an adapter changes."""
        settings: dict[str, Any] = self.config.fedguild
        changed: dict[str, Tensor] = {}
        for name, modules in settings["weights"].items():
            weight = self.get_parameter(name)
            change = torch.cat(
                [self._stored(f"{side}.{m}.lora_B") @ self._stored(f"{side}.{m}.lora_A") for m in modules], dim=-2
            )
            changed[name] = (weight.float() + settings["scale"] * change.to(weight.device)).to(weight.dtype)
        return changed

    @torch.no_grad()
    def _gated(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Returns g [R] of the rows of a prompt."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        if self.config.fedguild["features"] == "embedding":
            states = self.get_input_embeddings()(input_ids)
        else:
            routers = {self.get_submodule(name): count for name, count in self.config.fedguild["routers"].items()}
            budget = {router: router.top_k for router in routers}
            try:  # phi is a feature of the model as it was published, with all its active experts
                for router, count in routers.items():
                    router.top_k = count
                states = self.base_model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
            finally:
                for router, count in budget.items():
                    router.top_k = count
        real = mask[..., None].float()
        phi = (states.float() * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
        weight, bias = (self._stored(f"logit_gate.{name}").to(phi) for name in ("weight", "bias"))
        gate: Tensor = (phi @ weight + bias).sigmoid()
        return gate
