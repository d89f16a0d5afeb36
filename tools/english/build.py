"""Training of the English checkpoint from a folder of text: `python -m tools.english.build --corpus DIR`."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import OlmoeForCausalLM

from fedguild.core.files import write_text
from fedguild.model.heap import keep_freed_pages
from tools.english.architecture import Sizes
from tools.english.card import model_card, read_sources
from tools.english.corpus import load_corpus
from tools.english.experts import use_trainable_experts
from tools.english.measure import measure
from tools.english.pretrain import Losses, Pretraining, Recipe

ACTIVE_EXPERTS = (8, 4, 2, 1)
STATE, DECAYING, CHECKPOINT = "state.safetensors", "decaying-{start}-{end}.safetensors", "checkpoint"
_LINE_SECONDS = 30


@dataclass
class Session:
    """One session of a build, which may take several.

    Attributes:
        say: Takes each line of progress.
        stopping: Whether to save and end after the current step.
        save_seconds: How often the state is saved.
    """

    say: Callable[[str], None] = lambda line: typer.echo(line, err=True)
    stopping: Callable[[], bool] = lambda: False
    save_seconds: float = 300.0
    _losses: list[Losses] = field(default_factory=list, init=False)

    def advance(self, training: Pretraining, until: int, state: Path, *, decaying: bool) -> bool:
        """Trains until a step, saving the state on the way; returns whether the step was reached."""
        line = saved = time.monotonic()
        for losses in training.run(until - training.step, decay_to=until if decaying else None):
            self._losses.append(losses)
            now = time.monotonic()
            if now - line >= _LINE_SECONDS or training.step == until:
                self.say(self._line(training, until, now - line))
                line = now
            stopping = self.stopping()
            if stopping or now - saved >= self.save_seconds:
                training.save(state)
                saved = now
            if stopping:
                self.say(f"stopped; {state} is saved, and the same command continues from it")
                return False
        training.save(state)
        return True

    def _line(self, training: Pretraining, until: int, seconds: float) -> str:
        tokens_per_second = len(self._losses) * training.recipe.step_tokens / max(seconds, 1e-9)
        nats = sum(losses.nats for losses in self._losses) / len(self._losses)
        balance = sum(losses.balance for losses in self._losses) / len(self._losses)
        left = (until - training.step) * training.recipe.step_tokens / tokens_per_second / 60
        self._losses.clear()
        return (
            f"step {training.step:,} of {until:,}: {training.tokens / 1e6:.2f} M tokens, {nats:.3f} nats a token, "
            f"balance {balance:.2f}, {tokens_per_second:,.0f} tokens/s, {left:.0f} minutes left"
        )


def build(
    corpus_folder: Path,
    output: Path,
    *,
    recipe: Recipe,
    tokens: int,
    decay_tokens: int,
    finish: bool = False,
    session: Session | None = None,
) -> Path | None:
    """Trains the model, and writes it with its tokenizer and card into `output/checkpoint`.

    Every part of it continues from what `output` holds, so a build that was killed ends with the same
    weights. The state before the decay is kept: a later build with more tokens continues from it.

    Args:
        corpus_folder: Text to train on.
        output: Folder to write to; created if absent.
        recipe: The training recipe.
        tokens: Tokens in total, including the decay's.
        decay_tokens: Tokens over which the learning rate falls to zero at the end.
        finish: Whether to decay now, from the last saved state, instead of training on first.
        session: How to report and when to stop.

    Returns:
        The checkpoint; None if it was stopped before.

    Raises:
        FedGuildError: the corpus cannot be read, or `output` holds a build of another recipe or corpus.
    """
    keep_freed_pages()
    session = session or Session()
    output.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(corpus_folder, output, recipe.sizes.vocabulary)
    training = Pretraining(corpus, recipe)
    if (output / STATE).exists():
        training.load(output / STATE)
    session.say(
        f"{len(corpus.train):,} tokens in {len(corpus.starts) - 1:,} documents, {len(corpus.held_out):,} tokens held "
        f"out; at step {training.step:,}"
    )
    decay_steps = max(1, decay_tokens // recipe.step_tokens)
    constant_steps = max(0, tokens // recipe.step_tokens - decay_steps)
    if not finish and not session.advance(training, constant_steps, output / STATE, decaying=False):
        return None
    start, end = training.step, training.step + decay_steps
    decaying = output / DECAYING.format(start=start, end=end)
    training.decay_from = start
    if decaying.exists():
        training.load(decaying)
    if not session.advance(training, end, decaying, decaying=True):
        return None
    session.say("writing and measuring the checkpoint")
    checkpoint = _write(training, output / CHECKPOINT, read_sources(corpus_folder))
    decaying.unlink()
    return checkpoint


def _write(training: Pretraining, folder: Path, sources: str) -> Path:
    """Writes weights in bf16, tokenizer and card; the measurements are of the weights as written."""
    shutil.rmtree(folder, ignore_errors=True)
    training.corpus.tokenizer.save_pretrained(folder)
    training.exported().save_pretrained(folder)
    model = OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    use_trainable_experts(model)
    counts = [count for count in ACTIVE_EXPERTS if count <= training.recipe.sizes.active]
    measured = measure(model, training.corpus, counts, training.recipe.row_tokens)
    write_text(folder / "README.md", model_card(model, training, measured, sources))
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def main(
    corpus: Annotated[Path, typer.Option(help="Folder of .txt or .txt.gz files, blank lines between documents.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the state, which a later call continues from, and the checkpoint.")
    ] = Path("english-build"),
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to train on in all; the default is one pass over 64 M characters.")
    ] = 16_000_000,
    decay_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the final decay, part of the total.")] = 1_500_000,
    finish: Annotated[bool, typer.Option("--finish", help="Decay now, from the last saved state.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of the text.")] = 0,
) -> None:
    """Trains the English checkpoint from a folder of text; SIGTERM or Ctrl-C saves the state and ends."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    recipe = Recipe(sizes=Sizes(), seed=seed)
    session = Session(stopping=lambda: bool(signals))
    build(corpus, output, recipe=recipe, tokens=tokens, decay_tokens=decay_tokens, finish=finish, session=session)


if __name__ == "__main__":
    typer.run(main)
