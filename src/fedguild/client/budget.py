"""Budgets of compute, and clients as the server knows them."""

from __future__ import annotations

from dataclasses import dataclass

from fedguild.core.layout import client_name


@dataclass(frozen=True)
class Budget:
    """A tier of compute shared by several clients (FLAME's beta_1 … beta_4).

    Attributes:
        name: The tier's name, as in the tables of a report.
        active_experts: Active experts per token that a client of this tier can run; 0 for a
            dense model.
        rank: LoRA rank that a client of this tier can train under rank-based methods.
    """

    name: str
    active_experts: int
    rank: int


@dataclass(frozen=True)
class ClientInfo:
    """A client as the server knows it.

    Attributes:
        index: Position in the federation, from 0; sorts uploads and seeds the client's randomness.
        budget: The client's tier.
        examples: |D_i|, number of its training examples.
    """

    index: int
    budget: Budget
    examples: int

    @property
    def name(self) -> str:
        """The client's name in files and tables, `client-000`."""
        return client_name(self.index)
