"""Randomness as an argument: every generator derives from (seed, *purpose).

A result therefore does not depend on the engine, on the order of the clients, or on earlier random draws. No global
generator is read or set anywhere in the package, except to sample text (`fedguild.runs.api.generating`), because
transformers' `generate` takes no generator.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Returns a 63-bit seed for a purpose, for example `derive(7, "shuffle", round, client)`."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def numpy_rng(seed: int, *purpose: str | int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *purpose))


def torch_rng(seed: int, *purpose: str | int) -> torch.Generator:
    """Returns a CPU torch generator for a purpose."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *purpose))


def new_seed(rng: torch.Generator) -> int:
    """Draws a seed once per run, for later random draws of its clients."""
    import torch

    return int(torch.randint(2**62, (), generator=rng))
