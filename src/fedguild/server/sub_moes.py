"""What FedMoE's server knows of its clients: which experts each one holds, what it measured, and how it fares.

C clients; a layer is named by the path of its experts, of which it has M. Everything is a tensor, so
that it is saved with the state as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from fedguild.payload import Payload, with_part
from fedguild.seeding import torch_rng
from fedguild.server.expert_sets import (
    Room,
    adjusted_sets,
    fitted_sets,
    recommendation,
    similarities,
    top_peers,
)

SEARCHING, TRYING, FROZEN = 0, 1, 2
"""A client's status: its sets may be adjusted; were adjusted, without a gain so far; stay as they are for good."""


@dataclass
class SubMoes:
    """The clients' sub-MoEs.

    Attributes:
        held: Layer -> [C, M] bool, what each client holds.
        before: Layer -> [C, M] bool, what it held in the round before.
        previous: Layer -> [C, M] bool, what it held before its sets were last adjusted.
        activation: Layer -> [C, M] p as last measured, zero for a client that never did.
        room: [C, 2 L + 1] int64, each client's `Room`: sizes, least, limit.
        poor: [C] bool, who cannot hold the full MoE.
        task: [C] int64, the clients' tasks by number.
        examples: [C] int64, |D_k|.
        known: [C] bool, who has measured p.
        loss: [C] the last validation loss, in nats.
        accuracy: [C] the last validation accuracy.
        scored: [C] bool, who has validated in stage 2.
        best: [C] the best score of stage 2, the larger the better.
        stale: [C] int64, rounds without a gain since the best, or since the last adjustment.
        status: [C] int64, `SEARCHING`, `TRYING` or `FROZEN`.
    """

    held: dict[str, Tensor]
    before: dict[str, Tensor]
    previous: dict[str, Tensor]
    activation: dict[str, Tensor]
    room: Tensor
    poor: Tensor
    task: Tensor
    examples: Tensor
    known: Tensor
    loss: Tensor
    accuracy: Tensor
    scored: Tensor
    best: Tensor
    stale: Tensor
    status: Tensor

    @classmethod
    def enrolled(
        cls,
        layers: Mapping[str, int],
        rooms: Sequence[Room],
        *,
        poor: Sequence[bool],
        tasks: Sequence[int],
        examples: Sequence[int],
        seed: int,
    ) -> SubMoes:
        """Returns the clients before the first round: full MoEs, and random sets that fit for the poor.

        Args:
            layers: Path of a layer's experts -> M.
            rooms: What bounds each client's sets.
            poor: Who cannot hold the full MoE.
            tasks: The clients' tasks by number.
            examples: |D_k|.
            seed: Of the random sets.
        """
        clients = len(rooms)
        held = {name: torch.ones(clients, experts, dtype=torch.bool) for name, experts in layers.items()}
        for client in (client for client in range(clients) if poor[client]):
            rng = torch_rng(seed, "provisional experts", client)
            drawn = [torch.rand(experts, generator=rng) for experts in layers.values()]
            for name, own in zip(layers, fitted_sets(drawn, rooms[client])[0], strict=True):
                held[name][client] = own
        number, count = torch.zeros(clients), torch.zeros(clients, dtype=torch.int64)
        return cls(
            held=held,
            before={name: own.clone() for name, own in held.items()},
            previous={name: own.clone() for name, own in held.items()},
            activation={name: torch.zeros(clients, experts) for name, experts in layers.items()},
            room=torch.tensor([[*room.sizes, *room.least, room.limit] for room in rooms]),
            poor=torch.tensor(poor),
            task=torch.tensor(tasks),
            examples=torch.tensor(examples),
            known=count.bool(),
            loss=number,
            accuracy=number.clone(),
            scored=count.bool(),
            best=number.clone(),
            stale=count,
            status=count.clone(),
        )

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> SubMoes:
        """Reads them from a state; what is changed later leaves the state as it was."""
        parts = Payload(tensors)
        layered = {
            part: {name: value.clone() for name, value in parts.part(f"clients/{part}").items()}
            for part in ("held", "before", "previous", "activation")
        }
        own = {name: value.clone() for name, value in parts.part("client").items()}
        return cls(**layered, **own)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Returns them as tensors of a state."""
        named: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                named |= with_part(f"clients/{field.name}", value)
            else:
                named[f"client/{field.name}"] = value
        return named

    def ids(self, client: int, *, earlier: bool = False) -> dict[str, Tensor]:
        """Returns layer -> [n] ids of the experts that a client holds, or held in the round before, ascending."""
        sets = self.before if earlier else self.held
        return {name: own[client].nonzero().flatten() for name, own in sets.items()}

    def counts(self) -> Tensor:
        """Returns [C, L], how many experts of each layer every client holds."""
        return torch.stack([own.sum(dim=1) for own in self.held.values()], dim=1)

    def measured(self, client: int, activation: Mapping[str, Tensor], loss: float, accuracy: float) -> None:
        """Takes in what a client found on its held-out examples; p is 0 for what it did not hold."""
        for name, own in activation.items():
            self.activation[name][client] = own.float().clamp(min=0)
        self.known[client] = True
        self.loss[client], self.accuracy[client] = loss, accuracy

    def close_round(self) -> None:
        """Remembers what was held in the round that is over; what late uploads of it are about."""
        self.before = {name: own.clone() for name, own in self.held.items()}

    def fit(self) -> None:
        """Gives every client the sets that fit, by its own p or that of others (lines 3 and 4)."""
        for client in range(len(self.poor)):
            found, _ = fitted_sets(self._likely(client), self._room(client))
            for name, own in zip(self.held, found, strict=True):
                self.held[name][client] = own

    def adjust(self, clients: Sequence[int], gain: Literal["accuracy", "loss"], patience: int, peers: int) -> None:
        """Adjusts the sets of those who do not get better, or undoes the last adjustment (lines 9 and 10).

        Args:
            clients: Who has validated in this round.
            gain: Which figure has to get better.
            patience: Rounds without a gain until something is done.
            peers: K.
        """
        activation = torch.cat(list(self.activation.values()), dim=1)
        similarity, totals = similarities(activation), self.counts().sum(dim=1)
        for client in clients:
            if not self._is_stuck(client, gain, patience):
                continue
            if self.status[client] == TRYING:
                self._set(client, [own[client] for own in self.previous.values()])
                self.status[client] = FROZEN
                continue
            chosen = top_peers(similarity, client, self.known, peers)
            wanted = recommendation(similarity[client, chosen], activation[chosen])
            if wanted is None:
                continue
            now = [own[client].clone() for own in self.held.values()]
            per_layer = wanted.split([len(own) for own in now])
            found = adjusted_sets(now, per_layer, totals[chosen].tolist(), self._room(client))
            if any(not torch.equal(a, b) for a, b in zip(now, found, strict=True)):
                for name, own in zip(self.previous, now, strict=True):
                    self.previous[name][client] = own
                self._set(client, found)
                self.status[client] = TRYING

    def _set(self, client: int, sets: Sequence[Tensor]) -> None:
        for name, own in zip(self.held, sets, strict=True):
            self.held[name][client] = own

    def _is_stuck(self, client: int, gain: str, patience: int) -> bool:
        """Notes a client's validation; returns whether something is to be done, and begins to count anew if so."""
        score = self.accuracy[client] if gain == "accuracy" else -self.loss[client]
        if not bool(self.scored[client]) or bool(score > self.best[client]):
            self.scored[client], self.best[client], self.stale[client] = True, score, 0
            if self.status[client] == TRYING:
                self.status[client] = SEARCHING
            return False
        self.stale[client] += 1
        if int(self.stale[client]) < patience or self.status[client] == FROZEN:
            return False
        self.stale[client] = 0
        return True

    def _likely(self, client: int) -> list[Tensor]:
        """Returns p of every layer: the client's own, or the mean of the clients that stand in for it, by size.

        These are the clients of its task that measured p on the full MoE; without any, all such clients;
        without any, all that measured p at all. Where nobody did, p is zero.
        """
        if bool(self.known[client]) and not bool(self.poor[client]):
            return [own[client] for own in self.activation.values()]
        full = self.known & ~self.poor
        groups = (full & (self.task == self.task[client]), full, self.known)
        group = next((group for group in groups if bool(group.any())), self.known)
        weight = (self.examples * group).double()
        share = weight / weight.sum().clamp(min=1)
        return [(own.double() * share[:, None]).sum(dim=0) for own in self.activation.values()]

    def _room(self, client: int) -> Room:
        """Returns what bounds a client's sets."""
        *bounds, limit = self.room[client].tolist()
        layers = len(self.held)
        return Room(bounds[:layers], bounds[layers:], limit)
