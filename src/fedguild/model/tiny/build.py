"""Rebuilds the embedded checkpoint: `python -m fedguild.model.tiny.build --out DIR`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from transformers import OlmoeForCausalLM

from fedguild.data.corpora import tasks
from fedguild.files import write_text
from fedguild.model.tiny.pretrain import Recipe, exact_match, new_model, pretrain, tokenizer_texts
from fedguild.model.tiny.tokenizer import train_tokenizer

ACTIVE_EXPERTS = (8, 4, 2, 1)
_EXAMPLES_PER_SCORE = 256

Scores = Mapping[str, Mapping[int, float]]
"""Family -> number of active experts -> exact match."""


def build(out: Path, *, recipe: Recipe, seed: int) -> Scores:
    """Trains tokenizer and model, and writes both with a model card into the folder `out`.

    Returns:
        The exact match per family and number of active experts, of the weights as stored (bf16).
    """
    tokenizer = train_tokenizer(tokenizer_texts(seed))
    model = new_model(tokenizer, seed)
    with Progress(
        *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"), console=Console(stderr=True)
    ) as progress:
        bar = progress.add_task("pre-training", total=recipe.steps, loss=float("nan"))
        for step, loss in pretrain(model, tokenizer, recipe, seed):
            progress.update(bar, completed=step + 1, loss=loss)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)
    scores = measure(model.float(), tokenizer, seed)
    write_text(out / "README.md", model_card(model, recipe, seed, scores))
    return scores


def measure(model: OlmoeForCausalLM, tokenizer: Any, seed: int) -> Scores:
    """Returns the exact match on held-out examples per family and number of active experts."""
    scores: dict[str, dict[int, float]] = {}
    for name in tasks.FAMILIES:
        examples = tasks.load(train_examples=0, test_examples=_EXAMPLES_PER_SCORE, families=(name,), seed=seed).test
        scores[name] = {k: exact_match(model, tokenizer, examples, k) for k in ACTIVE_EXPERTS}
    return scores


def model_card(model: OlmoeForCausalLM, recipe: Recipe, seed: int, scores: Scores) -> str:
    """Returns the checkpoint's README: what it is, how it was made, what it can do."""
    config = model.config
    rows = [
        f"| {name} | {family.kind.replace('_', ' ')} | {'yes' if family.seen else 'no'} | "
        + " | ".join(f"{scores[name][k]:.2f}" for k in ACTIVE_EXPERTS)
        + " |"
        for name, family in tasks.FAMILIES.items()
    ]
    return _CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        width=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        seed=seed,
        recipe=recipe,
        date=datetime.now(UTC).date(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
        header=" | ".join(f"k = {k}" for k in ACTIVE_EXPERTS),
        rule=" | ".join("---:" for _ in ACTIVE_EXPERTS),
        examples=_EXAMPLES_PER_SCORE,
        table="\n".join(rows),
    )


_CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [moe, olmoe, tiny]
---

# FedGuild's embedded checkpoint

A very small OLMoE for demos and tests: {parameters:.2f} M parameters, hidden {hidden}, {layers} layers, {heads} heads,
{experts} experts of width {width} per layer of which {top_k} are active, expert weights not renormalised,
{positions} positions, a byte-level BPE of {vocabulary} tokens, weights in bf16. It loads with plain
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

## How it was made

```
python -m fedguild.model.tiny.build --out DIR --steps {recipe.steps} --seed {seed}
```

on {date}, with Python {python}, torch {torch}, transformers {transformers}. AdamW, peak learning rate
{recipe.learning_rate:g}, cosine schedule, {recipe.batch_size} examples a step, all {top_k} experts active, with OLMoE's
load-balancing loss. The training data are drawn from the generator `fedguild.data.corpora.tasks` (the seen families)
and, one step in {recipe.english_every}, sentences of the grammar in `prose.py`. There is no other source: no text of
anybody is in it, and it knows no facts.

## What it can do

Exact match of the greedy response on {examples} held-out questions per family, with k active experts and no
fine-tuning. The families that it was not trained on are there to be learned by fine-tuning.

| family | kind | seen | {header} |
| --- | --- | --- | {rule} |
{table}
"""


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint into.")],
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps; 1500 take about six minutes on two cores.")
    ] = 1500,
    seed: Annotated[int, typer.Option(help="The same seed draws the same data and first weights.")] = 0,
) -> None:
    """Rebuilds the embedded checkpoint from nothing but a seed."""
    build(out, recipe=Recipe(steps=steps), seed=seed)


if __name__ == "__main__":
    typer.run(main)
