"""The text that the mixture is made and measured on: passages of fixed length, in an order that a seed decides."""

import gzip
import json
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ROW_TOKENS = 256
HELD_OUT = "gutenberg-Dracula.txt.gz"
PASSAGE_CHARACTERS = 1200


class Tokenizer(Protocol):
    """What turns text into token ids."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Returns `input_ids`."""
        ...


def read(path: Path) -> str:
    """Returns the text of a file, plain or gzipped."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as file:
            return file.read()
    return path.read_text(encoding="utf-8", errors="ignore")


def passages_of_a_book(text: str, count: int) -> list[str]:
    """Returns `count` passages spread evenly over a book, without its front matter."""
    starts = range(20_000, min(len(text), 20_000_000), max(1, len(text) // count))
    return [text[start : start + PASSAGE_CHARACTERS] for start in starts]


def training(data: Path, passages_per_book: int = 40, seed: int = 0) -> list[str]:
    """Returns the training passages in a random order: books but the held-out one, Dolly, Natural Instructions.

    Args:
        data: A folder with `english/*.txt.gz`, `dolly/*.train.jsonl` and `natural_instructions/tasks/*.json`.
        passages_per_book: How many passages of 1,200 characters each book gives.
        seed: Decides the order.
    """
    found = []
    for book in sorted((data / "english").glob("*.txt.gz")):
        if book.name != HELD_OUT:
            found += passages_of_a_book(read(book), passages_per_book)
    for file in sorted((data / "dolly").glob("*.train.jsonl")):
        records = [json.loads(line) for line in read(file).splitlines()]
        found += ["\n\n".join(filter(None, (r["instruction"], r["context"], r["response"]))) for r in records]
    for file in sorted((data / "natural_instructions" / "tasks").glob("*.json")):
        task = json.loads(read(file))
        for instance in task["Instances"]:
            found.append(f"{task['Definition'][0]}\n\n{instance['input']}\n\n{instance['output'][0]}")
    np.random.default_rng(seed).shuffle(found)
    return [text[:PASSAGE_CHARACTERS] for text in found]


def held_out(data: Path, seed: int = 0) -> list[str]:
    """Returns passages of the book that no training passage is from."""
    text = read(data / "english" / HELD_OUT)
    found = [text[i : i + PASSAGE_CHARACTERS] for i in range(20_000, min(len(text), 400_000), len(text) // 40)]
    np.random.default_rng(seed).shuffle(found)
    return found


def rows(tokenizer: Tokenizer, passages: list[str], count: int | None = None) -> Tensor:
    """Returns the passages one after another as rows of `ROW_TOKENS` tokens, [rows, ROW_TOKENS]."""
    ids: list[int] = []
    for text in passages:
        ids += tokenizer(text + "\n")["input_ids"]
        if count is not None and len(ids) >= count * ROW_TOKENS:
            break
    whole = len(ids) // ROW_TOKENS if count is None else min(count, len(ids) // ROW_TOKENS)
    return torch.tensor(ids[: whole * ROW_TOKENS]).view(whole, ROW_TOKENS)
