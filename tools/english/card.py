"""The English checkpoint's model card: what it is, what it was trained on, and what was measured."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import torch
import transformers
from transformers import OlmoeForCausalLM

from tools.english.measure import Measurements
from tools.english.pretrain import Pretraining
from tools.english.tasks import TaskRecord, with_tasks

SOURCES = "SOURCE.md"
"""File of a corpus with the licences and attributions of its text."""


def model_card(
    model: OlmoeForCausalLM,
    training: Pretraining,
    measured: Measurements,
    sources: str,
    tasks: Sequence[TaskRecord] = (),
) -> str:
    """Returns the card as Markdown.

    Args:
        model: The model as stored.
        training: Its training.
        measured: The measurements on the held-out text.
        sources: Lists and tables of the text's licences and attributions; may be empty.
        tasks: Records of its fine-tuning; `with_tasks` adds them to a card later.
    """
    recipe, corpus = training.recipe, training.corpus
    decay_tokens = (training.step - (training.decay_from or 0)) * recipe.step_tokens
    losses = [
        f"| {count} | {nats:.3f} | {nats * measured.tokens_per_character:.3f} |"
        for count, nats in measured.nats.items()
    ]
    unigram = measured.unigram_nats
    losses.append(f"| token frequencies alone | {unigram:.3f} | {unigram * measured.tokens_per_character:.3f} |")
    layers = [(layer.use_entropy, layer.gini, layer.token_entropy, layer.top_mass) for layer in measured.routing]
    rows: dict[str, tuple[float, ...]] = {str(number): figures for number, figures in enumerate(layers)}
    rows["mean"] = tuple(fmean(column) for column in zip(*layers, strict=True))
    card = _CARD.format(
        config=model.config,
        recipe=recipe,
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        tokens=training.tokens,
        decay=decay_tokens,
        corpus_tokens=len(corpus.train) / 1e6,
        documents=len(corpus.starts) - 1,
        passes=training.tokens / len(corpus.train),
        held_out=measured.tokens,
        date=datetime.now(UTC).date(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        losses="\n".join(losses),
        routing="\n".join(f"| {name} |" + "".join(f" {value:.3f} |" for value in row) for name, row in rows.items()),
        sources=sources or "The corpus has no list of its sources.",
    )
    return with_tasks(card, tasks)


def read_sources(corpus_folder: Path) -> str:
    """Returns the lists and tables in a corpus's `SOURCE.md`, which carry the attributions; empty without that file."""
    path = corpus_folder / SOURCES
    if not path.exists():
        return ""
    kept: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        belongs = line.startswith(("- ", "|")) or (line.startswith("  ") and bool(kept) and bool(kept[-1]))
        if belongs or (kept and kept[-1] and not line.strip()):
            kept.append(line.rstrip())
    return "\n".join(kept).strip()


_CARD = """\
---
license: apache-2.0
library_name: transformers
language: en
tags: [moe, olmoe, tiny]
---

# FedGuild's English checkpoint

A small OLMoE trained on textbooks and novels, for experiments with federated fine-tuning: 8 of its 64 experts are
active, and its routing is what pre-training with a load-balancing loss produced. It loads with plain
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`; in FedGuild it is `model.path=english`.
It is far too small to know facts reliably.

| | |
| --- | --- |
| parameters | {parameters:.2f} M, stored in bf16, embeddings tied |
| layers, hidden size | {config.num_hidden_layers}, {config.hidden_size} |
| experts per layer, active, width | {config.num_experts}, {config.num_experts_per_tok}, {config.intermediate_size} |
| weights of the active experts | softmax over all experts, not renormalised |
| attention heads, key and value heads | {config.num_attention_heads}, {config.num_key_value_heads} |
| positions | {config.max_position_embeddings}, trained in rows of {recipe.row_tokens} |
| tokenizer | byte-level BPE of {config.vocab_size} tokens, trained on the same text; any UTF-8 text encodes |

## How it was made

```
python -m tools.english.build --corpus DIR --tokens {tokens} --decay-tokens {decay} --seed {recipe.seed}
```

on {date}, with Python {python}, torch {torch} and transformers {transformers}: {tokens:,} tokens, which is
{passes:.2f} passes over the {corpus_tokens:.2f} M tokens of {documents:,} documents. A step's rows are shared by
{recipe.workers} workers with one thread each, so that on one machine the command gives the same bytes again, in one
session or several, whatever the number of threads; between machines rounding differs, and so do the weights a bit.

| | |
| --- | --- |
| step | {recipe.batch_rows} rows of {recipe.row_tokens} tokens |
| optimizer | AdamW (0.9, 0.95), weight decay {recipe.weight_decay:g}, gradients clipped to norm 1 |
| learning rate | {recipe.learning_rate:g} after {recipe.warm_up_steps} steps; then to zero in {decay:,} tokens |
| routing losses | OLMoE's: load balancing ({recipe.balance:g}), router z ({recipe.router_z:g}) |
| precision | products in bf16, weights and optimizer in fp32 |

## What was measured

On {held_out:,} tokens of held-out documents, one in 200 of the corpus, with the stored weights:

| active experts | nats per token | nats per character |
| ---: | ---: | ---: |
{losses}

Routing of the same tokens, {config.num_experts_per_tok} experts active: how often each expert is chosen (*use*:
entropy divided by ln M, 1 = all alike, and Gini coefficient, 0 = all alike), the entropy of one token's routing
probabilities divided by ln M (*token*, 1 = no preference), and the sum of its active experts' weights (*mass*).

| layer | use: entropy | use: Gini | token: entropy | mass |
| ---: | ---: | ---: | ---: | ---: |
{routing}

## Text and attribution

The text was cut into documents, tokenised and shuffled; the model may reproduce short parts of it.

{sources}
"""
