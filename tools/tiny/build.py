"""Rebuilds the embedded checkpoint: `python -m tools.tiny.build --out DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn
from transformers import OlmoeForCausalLM

from fedguild.core.files import write_text
from fedguild.data.corpora import tasks
from tools.tiny.architecture import new_model
from tools.tiny.card import Scores, model_card
from tools.tiny.pretrain import Recipe, pretrain, tokenizer_texts
from tools.tiny.scoring import exact_match
from tools.tiny.tokenizer import train_tokenizer

ACTIVE_EXPERTS = (8, 4, 2, 1)


def build(out: Path, *, recipe: Recipe, seed: int, examples: int = 256) -> Scores:
    """Trains tokenizer and model, and writes both with a model card into the folder `out`.

    Args:
        out: Folder to write to; created if absent.
        recipe: The training recipe.
        seed: The seed of the data and the initial weights.
        examples: Held-out questions per family and number of active experts, for the card.

    Returns:
        The exact match per family and number of active experts, of the weights as stored (bf16).
    """
    tokenizer = train_tokenizer(tokenizer_texts(seed))
    model = new_model(tokenizer, seed)
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("pre-training", total=recipe.steps, loss=float("nan"))
        for loss in pretrain(model, tokenizer, recipe, seed):
            progress.update(bar, advance=1, loss=loss)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.bfloat16().save_pretrained(out)
    scores = measure(model.float(), tokenizer, seed, examples)
    write_text(out / "README.md", model_card(model, recipe, seed, scores, examples))
    for file in out.iterdir():
        file.chmod(0o644)
    return scores


def measure(model: OlmoeForCausalLM, tokenizer: Any, seed: int, examples: int) -> Scores:
    """Returns the exact match on held-out examples per family and number of active experts."""
    scores: dict[str, dict[int, float]] = {}
    for name in tasks.FAMILIES:
        questions = tasks.load(train_examples=0, test_examples=examples, families=(name,), seed=seed).test
        scores[name] = {k: exact_match(model, tokenizer, questions, k) for k in ACTIVE_EXPERTS}
    return scores


def main(
    out: Annotated[Path, typer.Option(help="Folder to write the checkpoint into.")],
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps; the default takes about four minutes on one core.")
    ] = Recipe.steps,
    seed: Annotated[int, typer.Option(help="The same seed draws the same data and initial weights.")] = 0,
) -> None:
    """Rebuilds the embedded checkpoint from nothing but a seed."""
    build(out, recipe=Recipe(steps=steps), seed=seed)


if __name__ == "__main__":
    typer.run(main)
