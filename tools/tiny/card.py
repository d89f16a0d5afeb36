"""The embedded checkpoint's model card: what it is, how it was made, what it can do."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime

import torch
import transformers
from transformers import OlmoeForCausalLM

from fedguild.data.corpora import tasks
from tools.tiny.pretrain import Recipe

Scores = Mapping[str, Mapping[int, float]]
"""Family -> number of active experts -> exact match."""


def model_card(model: OlmoeForCausalLM, recipe: Recipe, seed: int, scores: Scores, examples: int) -> str:
    """Returns the card as Markdown; `examples` is the number of questions behind every score."""
    config = model.config
    counts = list(next(iter(scores.values())))
    lines = ["| family | kind | seen |" + "".join(f" k = {k} |" for k in counts)]
    lines.append("| --- | --- | --- |" + " ---: |" * len(counts))
    for name, family in tasks.FAMILIES.items():
        seen = "yes" if family.seen else "no"
        cells = "".join(f" {scores[name][k]:.2f} |" for k in counts)
        lines.append(f"| {name} | {family.kind.replace('_', ' ')} | {seen} |{cells}")
    return _CARD.format(
        config=config,
        recipe=recipe,
        seed=seed,
        examples=examples,
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        date=datetime.now(UTC).date(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        table="\n".join(lines),
    )


_CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [moe, olmoe, tiny]
---

# FedGuild's embedded checkpoint

A very small OLMoE for demos and tests. It loads with plain `AutoModelForCausalLM.from_pretrained` and
`AutoTokenizer.from_pretrained`.

| | |
| --- | --- |
| parameters | {parameters:.2f} M, stored in bf16 |
| layers, hidden size | {config.num_hidden_layers}, {config.hidden_size} |
| experts per layer, active, width | {config.num_experts}, {config.num_experts_per_tok}, {config.intermediate_size} |
| weights of the active experts | softmax over all experts, not renormalised |
| attention heads, key and value heads | {config.num_attention_heads}, {config.num_key_value_heads} |
| positions | {config.max_position_embeddings} |
| tokenizer | byte-level BPE of {config.vocab_size} tokens; any UTF-8 text encodes |

## How it was made

```
OMP_NUM_THREADS=1 python -m tools.tiny.build --out DIR --steps {recipe.steps} --seed {seed}
```

on {date}, with Python {python}, torch {torch} and transformers {transformers}: AdamW, peak learning rate
{recipe.learning_rate:g}, cosine schedule, {recipe.batch_size} examples a step, all {config.num_experts_per_tok} experts
active, OLMoE's load-balancing loss, and a reward of {recipe.router_entropy_weight:g} per nat of router entropy, which
keeps the routing soft, as it is in a large model. On one machine the command gives the same bytes again; between
machines and numbers of threads rounding differs, and with it the weights in detail.

The training text comes from the generator `fedguild.data.corpora.tasks` (the seen families) and, one step in
{recipe.english_every}, from the sentence grammar in `prose.py`. There is no other source: the checkpoint holds nobody's
text, and knows no facts.

## What it can do

Exact match of the greedy response on {examples} held-out questions per family, with k active experts and no
fine-tuning. The families that it has not seen are there to be learned by fine-tuning.

{table}
"""
