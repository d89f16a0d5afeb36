"""The embedded checkpoint's tokenizer: byte-level BPE with a small vocabulary.

All 256 bytes are tokens of their own, so any UTF-8 text encodes and decodes without loss.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
MAX_TOKENS = 2048
PAD, END = "<|padding|>", "<|endoftext|>"
_PIECES = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
"""Words, single digits and runs of punctuation, each with the space before it."""


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of this vocabulary size; `END` both opens and closes a text, as in OLMoE's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=END,
        eos_token=END,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
