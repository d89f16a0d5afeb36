"""A folder of text as rows of tokens: documents, the held-out split, and the order of training.

Every `.txt` and `.txt.gz` file in the folder and its sub-folders is read as UTF-8. Blank lines separate
documents, and a longer section is cut between paragraphs into documents of at most `DOCUMENT_CHARACTERS`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from fedguild.core.errors import FedGuildError
from fedguild.core.files import replacing
from fedguild.core.seeding import numpy_rng
from tools.tiny.tokenizer import train_tokenizer

DOCUMENT_CHARACTERS = 8_000
HELD_OUT_EVERY = 200
"""One in this many documents is held out and never trained on."""
_ENCODED_AT_ONCE = 1_000


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenised corpus.

    Attributes:
        digest: Digest of the text and the size of the vocabulary.
        tokenizer: Trained on the training documents.
        train: Tokens of the training documents, each followed by the end token.
        starts: [documents + 1], where each training document starts in `train`, and the end of the last.
        held_out: Tokens of the held-out documents, laid out in the same way.
        held_out_characters: Length of the held-out documents as text.
    """

    digest: str
    tokenizer: Any
    train: NDArray[np.uint16]
    starts: NDArray[np.int64]
    held_out: NDArray[np.uint16]
    held_out_characters: int

    def rows(self, first: int, count: int, length: int, seed: int) -> NDArray[np.int64]:
        """Returns training rows [count, length + 1], from number `first` of an endless sequence of passes.

        A row depends on nothing but its number and the seed. Every pass puts the documents and then the
        rows into a new order; the last token of a row is predicted but not read.

        Raises:
            FedGuildError: the corpus is shorter than a row.
        """
        per_pass = (len(self.train) - 1) // length
        if per_pass == 0:
            raise FedGuildError(
                f"The corpus has {len(self.train)} tokens, fewer than a row of {length} needs.",
                "Give a folder with more text, or shorter rows.",
            )
        chosen = []
        for number in range(first, first + count):
            stream, order = _pass(self, number // per_pass, length, seed)
            start = int(order[number % per_pass]) * length
            chosen.append(stream[start : start + length + 1])
        return np.stack(chosen).astype(np.int64)


@lru_cache(maxsize=2)
def _pass(corpus: Corpus, number: int, length: int, seed: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Returns the stream of tokens of pass `number`, and the order of its rows."""
    rng = numpy_rng(seed, "english", "pass", number)
    documents = rng.permutation(len(corpus.starts) - 1)
    stream = np.concatenate([corpus.train[corpus.starts[i] : corpus.starts[i + 1]] for i in documents])
    return stream, rng.permutation((len(stream) - 1) // length)


def read_documents(folder: Path) -> list[str]:
    """Returns the documents of a folder in the order of the files' paths.

    Raises:
        FedGuildError: the folder holds no text, or a file is not UTF-8.
    """
    files = sorted(path for path in folder.rglob("*") if path.name.endswith((".txt", ".txt.gz")) and path.is_file())
    documents: list[str] = []
    for path in files:
        try:
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise FedGuildError(f"Cannot read {path}: {error}.", "A corpus is UTF-8 text, plain or gzip.") from error
        documents.extend(_documents(text))
    if len(documents) < 2:
        raise FedGuildError(
            f"{folder} holds {len(documents)} documents of text.",
            "Give a folder with .txt or .txt.gz files, in which blank lines separate documents.",
        )
    return documents


def load_corpus(folder: Path, cache_folder: Path, vocabulary: int) -> Corpus:
    """Returns the tokenised corpus of a folder, from the cache where it holds this text.

    Raises:
        FedGuildError: the folder holds no text, or the cache was made from other text.
    """
    texts = read_documents(folder)
    digest = hashlib.sha256(json.dumps([vocabulary, *texts]).encode()).hexdigest()
    held_out = texts[::HELD_OUT_EVERY]
    train = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY]
    tokens = cache_folder / "corpus.safetensors"
    if not tokens.exists():
        tokenizer = train_tokenizer(train, vocabulary)
        tokenizer.save_pretrained(cache_folder / "tokenizer")
        parts = {"train": list(_encoded(tokenizer, train)), "held_out": list(_encoded(tokenizer, held_out))}
        arrays: dict[str, Any] = {name: np.concatenate(documents) for name, documents in parts.items()}
        arrays["starts"] = np.cumsum([0, *map(len, parts["train"])])
        with replacing(tokens) as temporary:
            save_file(arrays, temporary, {"digest": digest})
    with safe_open(tokens, "np") as stored:
        if stored.metadata()["digest"] != digest:
            raise FedGuildError(
                f"{cache_folder} was made from other text than {folder} now holds, or with another vocabulary.",
                "Give another output folder, or delete this one to begin again.",
            )
        return Corpus(
            digest=digest,
            tokenizer=AutoTokenizer.from_pretrained(cache_folder / "tokenizer"),
            train=stored.get_tensor("train"),
            starts=stored.get_tensor("starts"),
            held_out=stored.get_tensor("held_out"),
            held_out_characters=sum(map(len, held_out)),
        )


def _documents(text: str) -> Iterator[str]:
    """Yields the sections of a text, longer ones in pieces of whole paragraphs."""
    for section in text.replace("\r\n", "\n").split("\n\n"):
        piece: list[str] = []
        length = 0
        for line in section.strip("\n").split("\n"):
            if piece and length + len(line) > DOCUMENT_CHARACTERS:
                yield "\n".join(piece)
                piece, length = [], 0
            piece.append(line)
            length += len(line) + 1
        if any(line.strip() for line in piece):
            yield "\n".join(piece)


def _encoded(tokenizer: Any, texts: list[str]) -> Iterator[NDArray[np.uint16]]:
    """Yields each text's tokens and the end token."""
    for first in range(0, len(texts), _ENCODED_AT_ONCE):
        for ids in tokenizer(texts[first : first + _ENCODED_AT_ONCE], verbose=False)["input_ids"]:
            yield np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16)
