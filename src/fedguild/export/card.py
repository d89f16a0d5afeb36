"""Model cards: the README of an exported folder, with its content, origin and usage."""

from __future__ import annotations

from dataclasses import dataclass

from fedguild import __version__
from fedguild.client.merge_ledger import by_version
from fedguild.export.weights import output_scales
from fedguild.model.adapters.lora import Lora
from fedguild.model.info import ModelInfo
from fedguild.server.method import Deployment

FILE = "README.md"
TRUSTING = ", trust_remote_code=True"
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank` (`vllm/config/lora.py`, `MaxLoRARanks`)."""


@dataclass(frozen=True)
class Origin:
    """Origin of an exported model.

    Attributes:
        run: The run's name.
        method: The method's title.
        round: The round after which the model was taken.
        budget: The name of the budget whose active experts the model runs.
        base: The base model as the config names it.
        base_code: The base model as arguments of `from_pretrained` in Python; `folder` is the exported folder.
        hub_id: The base model on the hub; empty if it is a folder.
        client: The client whose own model it is; empty for the global one.
        privacy: The differential privacy promised to its clients; empty for none.
    """

    run: str
    method: str
    round: int
    budget: str
    base: str
    base_code: str
    hub_id: str = ""
    client: str = ""
    privacy: str = ""

    @property
    def owner(self) -> str:
        return self.client or f"budget {self.budget}"


def adapter_card(origin: Origin, model: ModelInfo, deployment: Deployment) -> str:
    auto_class = _auto_class(model)
    load = (
        "from peft import PeftModel",
        f"from transformers import {auto_class}",
        f"base = {auto_class}.from_pretrained({origin.base_code})",
        "model = PeftModel.from_pretrained(base, folder)",
    )
    remark = _PATTERN_REMARK if "experts" in deployment.plan.lora.targets and not model.seq2seq else ""
    return _card("peft", "A LoRA adapter", origin, _facts(origin, model, deployment), load, remark)


def per_expert_card(origin: Origin, model: ModelInfo, deployment: Deployment) -> str:
    rank = deployment.plan.lora.rank
    most = next((most for most in _VLLM_RANKS if most >= rank), 0)
    served = (
        "from vllm import LLM",
        "from vllm.lora.request import LoRARequest",
        f"llm = LLM({origin.base_code}, tokenizer=folder, enable_lora=True, max_lora_rank={most})",
        'adapter = LoRARequest("adapter", 1, folder)',
        'print(llm.generate("A prompt.", lora_request=adapter)[0].outputs[0].text)',
        'question = [{"role": "user", "content": "A question."}]  # by the chat template, if it was trained on chats',
        "print(llm.chat(question, lora_request=adapter)[0].outputs[0].text)",
    )
    load = served if most else (f"# vLLM takes ranks up to {_VLLM_RANKS[-1]}: export with --format merged for it.",)
    remark = _SERVER_REMARK.format(rank=rank, router=_ROUTER if "router" in deployment.plan.lora.targets else "")
    what = "A LoRA adapter with a key for every expert"
    return _card("peft", what, origin, _facts(origin, model, deployment), load, remark)


def code_card(origin: Origin, model: ModelInfo, deployment: Deployment) -> str:
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained(folder{TRUSTING})",
        f"model = AutoModelForCausalLM.from_pretrained(folder{TRUSTING})",
    )
    parts = ", ".join(type(part).__name__ for part in deployment.plan.parts if not part.folds_into_weights)
    facts = {**_facts(origin, model, deployment), "beside the weights": f"{parts}, in `modeling_fedguild.py`"}
    return _card("transformers", "A language model with the method's own routing", origin, facts, load)


def merged_card(origin: Origin, model: ModelInfo, deployment: Deployment, *, own_code: bool = False) -> str:
    """Returns the card of a merged checkpoint; `own_code` as of `has_own_code`."""
    facts = _facts(origin, model, deployment)
    scales = output_scales(model, deployment).values()
    if any(scale != 1.0 for scale in scales):
        facts["output scale"] = f"{min(scales):.4g} to {max(scales):.4g}, folded into the experts' down projections"
    auto_class, arguments = _auto_class(model), f"folder{TRUSTING if own_code else ''}"
    load = (
        f"from transformers import {auto_class}, AutoTokenizer",
        f"tokenizer = AutoTokenizer.from_pretrained({arguments})",
        f"model = {auto_class}.from_pretrained({arguments})",
    )
    return _card("transformers", "A language model with a LoRA adapter merged in", origin, facts, load)


def gguf_card(origin: Origin, model: ModelInfo, deployment: Deployment) -> str:
    facts = _facts(origin, model, deployment)
    load = ("from llama_cpp import Llama", 'model = Llama(folder + "/model.gguf")')
    return _card("gguf", "A language model with a LoRA adapter merged in", origin, facts, load)


def _auto_class(model: ModelInfo) -> str:
    return "AutoModelForSeq2SeqLM" if model.seq2seq else "AutoModelForCausalLM"


def _facts(origin: Origin, model: ModelInfo, deployment: Deployment) -> dict[str, str]:
    plan = deployment.plan
    lora = plan.part(Lora)
    facts = {
        "base model": f"{origin.base} ({model.family})",
        "method": origin.method,
        "run": origin.run,
        "round": str(origin.round),
        "budget": origin.budget,
        **({"client": origin.client} if origin.client else {}),
        **({"differential privacy": origin.privacy} if origin.privacy else {}),
        **({"LoRA": f"rank {lora.rank}, scale {lora.scale:g}, on {', '.join(lora.targets)}"} if lora else {}),
        **(
            {"merged into the base": f"the changes of {max(by_version(deployment.merged))} rounds"}
            if deployment.merged
            else {}
        ),
    }
    if model.moe:
        experts = model.moe[0].num_experts
        facts["active experts"] = f"{plan.active_experts or model.top_k} of {experts} per token"
    return facts


def _card(
    library: str, what: str, origin: Origin, facts: dict[str, str], load: tuple[str, ...], remark: str = ""
) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return _CARD.format(
        base=f"base_model: {origin.hub_id}\n" if origin.hub_id else "",
        library=library,
        run=origin.run,
        owner=origin.owner,
        what=what,
        version=__version__,
        rows=rows,
        load="\n".join(load),
        remark=remark,
    )


_PATTERN_REMARK = """
peft 0.21 warns that `rank_pattern` and `alpha_pattern` match no module. It compares them with modules only; they do
apply to the experts, which are parameters.
"""

_SERVER_REMARK = """
SGLang serves it with `--enable-lora --max-lora-rank {rank}` and `--lora-paths adapter=FOLDER`. The factors of an expert
have the names of the base model's repository; one rank and one alpha hold for all of them.{router}
"""
_ROUTER = """
The adapter also changes the routers: a server that adapts no routers refuses it or leaves that out."""

_CARD = """\
---
{base}library_name: {library}
tags: [federated-learning, lora, fedguild]
---

# {run}, {owner}

{what}, trained by clients that kept their data, with FedGuild {version}.

| | |
| --- | --- |
{rows}

## How to load it

`folder` is the path of this folder.

```python
{load}
```
{remark}"""
