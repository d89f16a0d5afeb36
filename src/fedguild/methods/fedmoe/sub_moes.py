"""Sub-MoEs of FedMoE's clients as the server keeps them: held experts, measured activations, and progress.

C clients; a layer is named by the path of its experts, of which it has M. Everything is a tensor, so
that it is saved with the state as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fedguild.core.payload import SERVER, Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.methods.fedmoe.fitting import Limits, fitted_sets

SEARCHING, TRYING, FROZEN = 0, 1, 2
"""A client's status: its sets may be adjusted; were adjusted, without a gain so far; stay as they are for good."""


@dataclass
class SubMoes:
    """The clients' sub-MoEs.

    Attributes:
        held: Layer -> [C, M] bool, what each client holds.
        previous: Layer -> [C, M] bool, what it held before the last adjustment of its sets.
        activation: Layer -> [C, M] p as last measured, zero for a client that never measured it.
        room: [C, 2 L + 1] int64, each client's `Limits`: sizes, least, most.
        poor: [C] bool, the clients that cannot hold the full MoE.
        task: [C] int64, the clients' tasks by number.
        examples: [C] int64, |D_k|.
        known: [C] bool, the clients that have measured p.
        loss: [C] the last validation loss, in nats.
        accuracy: [C] the last validation accuracy.
        scored: [C] bool, the clients that have validated in stage 2.
        best: [C] the best score of stage 2, the larger the better.
        stale: [C] int64, rounds without a gain since the best, or since the last adjustment.
        status: [C] int64, `SEARCHING`, `TRYING` or `FROZEN`.
    """

    held: dict[str, Tensor]
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
    def new(
        cls,
        layers: Mapping[str, int],
        limits: Sequence[Limits],
        *,
        poor: Sequence[bool],
        tasks: Sequence[int],
        examples: Sequence[int],
        seed: int,
    ) -> SubMoes:
        """Returns the clients before the first round: full MoEs, and random sets that fit for the poor.

        Args:
            layers: Path of a layer's experts -> M.
            limits: The bounds of each client's sets.
            poor: Whether each client cannot hold the full MoE.
            tasks: The clients' tasks by number.
            examples: |D_k|.
            seed: The seed of the random sets.
        """
        clients = len(limits)
        held = {name: torch.ones(clients, experts, dtype=torch.bool) for name, experts in layers.items()}
        for client in (client for client in range(clients) if poor[client]):
            rng = torch_rng(seed, "provisional experts", client)
            drawn = [torch.rand(experts, generator=rng) for experts in layers.values()]
            for name, mask in zip(layers, fitted_sets(drawn, limits[client])[0], strict=True):
                held[name][client] = mask
        number, count = torch.zeros(clients), torch.zeros(clients, dtype=torch.int64)
        return cls(
            held=held,
            previous={name: masks.clone() for name, masks in held.items()},
            activation={name: torch.zeros(clients, experts) for name, experts in layers.items()},
            room=torch.tensor([[*bounds.sizes, *bounds.least, bounds.most] for bounds in limits]),
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
    def of(cls, state: Payload) -> SubMoes:
        """Reads them from a state; later changes do not affect the state."""
        by_layer = {
            part: {name: value.clone() for name, value in state.part(f"{SERVER}/{part}").items()}
            for part in ("held", "previous", "activation")
        }
        by_client = {name: value.clone() for name, value in state.part(f"{SERVER}/clients").items()}
        return cls(**by_layer, **by_client)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Returns them as tensors of a state."""
        named: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                named |= with_part(f"{SERVER}/{field.name}", value)
            else:
                named[f"{SERVER}/clients/{field.name}"] = value
        return named

    @property
    def clients(self) -> int:
        """C."""
        return len(self.poor)

    def layers(self) -> dict[str, int]:
        """Returns layer -> M."""
        return {name: masks.shape[1] for name, masks in self.held.items()}

    def ids(self, client: int) -> dict[str, Tensor]:
        """Returns layer -> [n] ids of the experts that a client holds, ascending."""
        return {name: masks[client].nonzero().flatten() for name, masks in self.held.items()}

    def sets(self, client: int) -> list[Tensor]:
        """Returns what a client holds of each layer, copies of [M] bool."""
        return [masks[client].clone() for masks in self.held.values()]

    def counts(self) -> Tensor:
        """Returns [C, L], the number of experts of each layer that every client holds."""
        return torch.stack([masks.sum(dim=1) for masks in self.held.values()], dim=1)

    def limits(self, client: int) -> Limits:
        """Returns the bounds of a client's sets."""
        *bounds, most = self.room[client].tolist()
        layers = len(self.held)
        return Limits(bounds[:layers], bounds[layers:], most)

    def activations(self) -> Tensor:
        """Returns [C, L M], the clients' p of all layers, one after the other."""
        return torch.cat(list(self.activation.values()), dim=1)

    def activation_for(self, client: int) -> list[Tensor]:
        """Returns p [M] of every layer: the client's own, or the mean of the clients that stand in for it, by size.

        These are the clients of its task that measured p on the full MoE; without any, all such clients;
        without any, all that measured p at all. If none did, p is zero.
        """
        if bool(self.known[client]) and not bool(self.poor[client]):
            return [p[client] for p in self.activation.values()]
        full = self.known & ~self.poor
        groups = (full & (self.task == self.task[client]), full, self.known)
        group = next((group for group in groups if bool(group.any())), self.known)
        weight = (self.examples * group).double()
        share = weight / weight.sum().clamp(min=1)
        return [(p.double() * share[:, None]).sum(dim=0) for p in self.activation.values()]

    def note(self, client: int, activation: Mapping[str, Tensor], loss: float, accuracy: float) -> None:
        """Records a client's measurements on its held-out examples; p is 0 for what it did not hold."""
        for name, p in activation.items():
            self.activation[name][client] = p.float().clamp(min=0)
        self.known[client] = True
        self.loss[client], self.accuracy[client] = loss, accuracy

    def is_stuck(self, client: int, gain: str, patience: int) -> bool:
        """Compares a client's validation with its best one; a gain makes a tried adjustment final.

        Args:
            client: A client that has validated in this round.
            gain: The figure that has to improve, `accuracy` or `loss`.
            patience: Rounds without a gain after which action is due.

        Returns:
            Whether action is due now; if so, the count of rounds starts again.
        """
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

    def give(self, client: int, sets: Sequence[Tensor]) -> None:
        """Sets what a client holds."""
        for name, mask in zip(self.held, sets, strict=True):
            self.held[name][client] = mask

    def attempt(self, client: int, sets: Sequence[Tensor]) -> None:
        """Gives a client new sets, to be undone if they bring no gain; does nothing if it holds these already."""
        held = self.sets(client)
        if any(not torch.equal(before, after) for before, after in zip(held, sets, strict=True)):
            for name, mask in zip(self.previous, held, strict=True):
                self.previous[name][client] = mask
            self.give(client, sets)
            self.status[client] = TRYING

    def undo(self, client: int) -> None:
        """Gives a client back what it held before its last adjustment, for good (line 10)."""
        self.give(client, [masks[client] for masks in self.previous.values()])
        self.status[client] = FROZEN
