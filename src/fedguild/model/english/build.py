"""Trains the English checkpoint from a folder of text: `python -m fedguild.model.english.build --corpus DIR`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from fedguild.heap import keep_freed_pages
from fedguild.model.english.corpus import load_corpus
from fedguild.model.english.pretrain import Pretraining, Recipe

_LINE_SECONDS = 30
_SAVE_SECONDS = 300


def build(
    corpus_folder: Path,
    output: Path,
    *,
    recipe: Recipe,
    tokens: int,
    decay_tokens: int,
    finish: bool = False,
) -> None:
    keep_freed_pages()
    corpus = load_corpus(corpus_folder, output, recipe.sizes.vocabulary)
    print(f"{len(corpus.train):,} tokens in {len(corpus.starts) - 1:,} documents, {len(corpus.held_out):,} held out", flush=True)
    training = Pretraining(corpus, recipe)
    state = output / "state.safetensors"
    if state.exists():
        training.load(state)
        print(f"resuming at step {training.step:,}", flush=True)
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    last_line = last_save = time.monotonic()
    since = training.tokens
    losses = []
    total = tokens // recipe.step_tokens - decay_tokens // recipe.step_tokens
    for loss in training.run(total - training.step):
        losses.append(loss)
        now = time.monotonic()
        if now - last_line >= _LINE_SECONDS:
            rate = (training.tokens - since) / (now - last_line)
            nats = sum(l.nats for l in losses) / len(losses)
            balance = sum(l.balance for l in losses) / len(losses)
            print(f"step {training.step:,}: {training.tokens / 1e6:.2f} M tokens, {nats:.3f} nats, balance {balance:.2f}, {rate:,.0f} tokens/s", flush=True)
            last_line, since, losses = now, training.tokens, []
        if stop or now - last_save >= _SAVE_SECONDS:
            training.save(state)
            last_save = now
        if stop:
            print("stopped", flush=True)
            return
    training.save(state)


def main(
    corpus: Annotated[Path, typer.Option(help="Folder of .txt or .txt.gz files.")],
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("english-build"),
    tokens: Annotated[int, typer.Option(help="Tokens")] = 16_000_000,
    decay_tokens: Annotated[int, typer.Option(help="Tokens")] = 1_000_000,
) -> None:
    build(corpus, output, recipe=Recipe(), tokens=tokens, decay_tokens=decay_tokens)


if __name__ == "__main__":
    typer.run(main)
