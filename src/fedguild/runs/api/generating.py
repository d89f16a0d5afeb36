"""Generation from a run's model, piece by piece."""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedguild.core.errors import ConfigError
from fedguild.core.layout import MEMBERS
from fedguild.data.batches import Seq2Seq
from fedguild.data.conversation import as_conversation
from fedguild.data.corpora import corpus_spec
from fedguild.data.example import ELSEWHERE, Example
from fedguild.data.prompts import render
from fedguild.data.rendering import CONVERSATIONS, ends_of, prompt_ids
from fedguild.runs.api.models import subject_of
from fedguild.runs.exporting import load_attached
from fedguild.runs.setup import Experiment

LEAST_TEMPERATURE = 1e-3
"""The least temperature of sampling; below it logits overflow."""


@dataclass(frozen=True)
class Generator:
    """A run's model with its tokenizer and the prompt template that it was trained with.

    Attributes:
        template: Name of the template; `chat` for the chat template; empty if only the run's sites know it.
        seq2seq: The input form of an encoder-decoder model; None for a causal model.
    """

    model: Any
    template: str
    seq2seq: Seq2Seq | None = None

    def stream(
        self, prompt: str, max_new_tokens: int = 128, *, temperature: float = 0.0, seed: int = 0, raw: bool = False
    ) -> Iterator[str]:
        """Yields the answer in pieces of text, as they are generated.

        Args:
            prompt: The instruction; with `raw`, the whole prompt.
            max_new_tokens: Longest answer, in tokens.
            temperature: 0 to take the likeliest token each time; above 0 to sample.
            seed: Seed of the sampling.
            raw: Whether to give the prompt to the model without the template.

        Raises:
            ConfigError: the prompt is empty, an argument is out of range, or the template is not known.
        """
        if not raw and not self.template:
            raise ConfigError(
                "The template of the run's prompts is not known: its texts are at its sites, which keep their form to "
                "themselves, and neither data.template nor data.chat_template is set.",
                "Give the prompt as the sites' texts are written, with --raw.",
            )
        if raw and not prompt:
            raise ConfigError("The prompt is empty, and without the template nothing else stands before the answer.")
        if not (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf):
            raise ConfigError(f"temperature is 0, or at least {LEAST_TEMPERATURE}, got {temperature}.")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"The seed of the sampling is at least 0 and below 2**63, got {seed}.")
        pieces: queue.Queue[str | BaseException | None] = queue.Queue()
        thread = threading.Thread(
            target=self._generate, args=(prompt, max_new_tokens, temperature, seed, raw, pieces), daemon=True
        )
        thread.start()
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            if piece:
                yield piece
        thread.join()

    def _generate(
        self,
        prompt: str,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        raw: bool,
        pieces: queue.Queue[str | BaseException | None],
    ) -> None:
        from transformers import TextStreamer

        class Streamer(TextStreamer):
            """Puts finalised text into the queue."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                pieces.put(text)

        tokenizer = self.model.tokenizer
        try:
            example = Example(prompt if raw else render(self.template, prompt, ""), "x", label="", task="")
            chat = self.template == "chat" and not raw
            ids = prompt_ids(as_conversation(example) if chat else example, tokenizer)
            causal = self.seq2seq is None
            inputs = torch.tensor([ids if self.seq2seq is None else self.seq2seq.closed(ids)], device=self.model.device)
            sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
            start = {} if self.seq2seq is None else {"decoder_start_token_id": self.seq2seq.start}
            if sampling["do_sample"]:
                torch.manual_seed(seed)  # transformers draws from the global generator alone
            self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=sorted(ends_of(tokenizer)) if chat else tokenizer.eos_token_id,
                streamer=Streamer(tokenizer, skip_prompt=causal, skip_special_tokens=True),
                **sampling,
                **start,
            )
        except BaseException as error:
            pieces.put(error)
        finally:
            pieces.put(None)


def open_generator(
    folder: Path, budget: str | None = None, client: str | None = None, round: int | None = None
) -> Generator:
    """Returns the generator of a run's model; arguments and errors as in `load_model`."""
    model, experiment = load_attached(folder, subject_of(budget, client), round)
    return Generator(model, _template(experiment), experiment.backbone.info.seq2seq)


def _template(experiment: Experiment) -> str:
    """Returns the template of a run's prompts, on a federation's server as the sites say; empty if they do not."""
    data, corpus = experiment.config.data, experiment.data.corpus
    usual = data.template or corpus_spec(data.dataset).template
    if corpus is not ELSEWHERE:
        return "chat" if any(example.messages for example in corpus.train[:1]) else usual
    members = experiment.folder / MEMBERS
    known = json.loads(members.read_text("utf-8")).values() if members.is_file() else ()
    texts = [said for member in known if (said := member.get("texts"))]
    if texts:
        return "chat" if any(said.startswith(CONVERSATIONS) for said in texts) else usual
    return data.template or ("chat" if data.chat_template else "")
