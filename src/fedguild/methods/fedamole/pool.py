"""The pool: FedAMoLE's state, typed, and the names of experts in the payloads between server and clients.

A stack `{module}.experts.{leaf}` [n, ..] holds one expert in each row. On its own, the expert with
the id j of the pool is `{module}.experts.{j}.{leaf}` [..]. The leaves are `lora_A`, `lora_B` and, on the
server, `embedding`. The server and a client's slot have stacks; payloads have single experts, because
every client holds different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedguild.core.payload import SERVER, Payload, with_part

COMMON = "common"
"""The payload part with the shared experts and W^t, which every client gets."""
EXPERTS = "experts"
"""The part with a client's domain experts by their ids: `{module}.experts.{id}.lora_A` [r, in], `.lora_B` [out, r]."""
TOKEN = "token_embedding"
"""The part with h^t_mi: for each module [r], or the mean logits [E] of a vanilla router."""
EXPERT = "expert_embedding"
"""The part with h^e_mij: for each module [held, r], in ascending order of the ids."""
STACK = ".experts"
ROUTER = "router"
FACTORS = ("lora_A", "lora_B")
EMBEDDING = "embedding"


@dataclass(frozen=True)
class Pool:
    """The server's state: C clients, E experts.

    Attributes:
        common: The shared experts and W^t, by the names of their trainables.
        experts: `{module}.experts.lora_A` [E, r, in], `.lora_B` [E, out, r] and `.embedding` [E, r], h^e.
        token: Module -> h^t [C, r], each client's last; mean logits [C, E] of a vanilla router.
        assigned: Module -> D [C, E] bool, the experts that each client gets in the next round.
        before: Module -> the D of the round that led here.
        known: [C] bool, whether a client has ever uploaded its h^t.
        seed: The seed of the random scores.
        round: Number of completed rounds.
        drift: Module -> the norm of the last round's change of W^t (of W_r with a vanilla router) over its norm before;
            empty before the first round.
    """

    common: dict[str, Tensor]
    experts: dict[str, Tensor]
    token: dict[str, Tensor]
    assigned: dict[str, Tensor]
    before: dict[str, Tensor]
    known: Tensor
    seed: int
    round: int
    drift: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def new(
        cls, tensors: Mapping[str, Tensor], embedding_width: int | None, seed: int, clients: int, token_width: int
    ) -> Pool:
        """Returns the pool before the first round and its assignment, h^e = 0 and h^t = 0.

        Args:
            tensors: The trainables, the experts' as stacks [E, ..].
            embedding_width: r; None where the router has no h^e.
            seed: The seed of the random scores.
            clients: C.
            token_width: Of h^t.
        """
        common, experts = dict[str, Tensor](), dict[str, Tensor]()
        for name, value in tensors.items():
            if f"{STACK}." not in name:
                common[name] = value
                continue
            experts[name] = value
            if embedding_width is not None:
                experts[f"{name.rpartition('.')[0]}.{EMBEDDING}"] = torch.zeros(len(value), embedding_width)
        pool = cls(common, experts, {}, {}, {}, torch.zeros(clients, dtype=torch.bool), seed, 0)
        return replace(pool, token={module: torch.zeros(clients, token_width) for module in pool.modules})

    @classmethod
    def of(cls, state: Payload) -> Pool:
        """Reads a state, all of which stays with the server."""
        return cls(
            common=state.part(f"{SERVER}/{COMMON}"),
            experts=state.part(f"{SERVER}/{EXPERTS}"),
            token=state.part(f"{SERVER}/{TOKEN}"),
            assigned=state.part(f"{SERVER}/assigned"),
            before=state.part(f"{SERVER}/before"),
            known=state.tensors[f"{SERVER}/known"],
            seed=int(state.scalars[f"{SERVER}/seed"]),
            round=int(state.scalars[f"{SERVER}/round"]),
            drift=state.part(f"{SERVER}/drift"),
        )

    def state(self) -> Payload:
        """Returns it as a state."""
        parts = {COMMON: self.common, EXPERTS: self.experts, TOKEN: self.token}
        parts |= {"assigned": self.assigned, "before": self.before, "drift": self.drift}
        tensors = {**Payload.of(parts).tensors, "known": self.known}
        return Payload(with_part(SERVER, tensors), {f"{SERVER}/seed": self.seed, f"{SERVER}/round": self.round})

    @property
    def modules(self) -> list[str]:
        """The modules, in alphabetical order."""
        return sorted({name.rpartition(f"{STACK}.")[0] for name in self.experts})

    @property
    def size(self) -> int:
        """E, the experts of a module."""
        return len(next(iter(self.experts.values())))

    @property
    def clients(self) -> int:
        """C."""
        return len(self.known)

    def sent_to(self, client: int) -> Payload:
        """Returns what a client gets: the shared experts, W^t, and the domain experts with d_ij = 1, by their ids."""
        rows = {module: assigned[client].nonzero().flatten() for module, assigned in self.assigned.items()}
        names = [(f"{module}{STACK}.{factor}", module) for module in rows for factor in FACTORS]
        stacks = {name: self.experts[name][rows[module]] for name, module in names}
        experts = single_experts(stacks, {module: ids.tolist() for module, ids in rows.items()})
        return Payload.of({COMMON: self.common, EXPERTS: experts})

    def one_by_one(self) -> dict[str, Tensor]:
        """Returns everything that uploads contribute to, as `uploaded_tensors` names it."""
        return {**self.common, **single_experts(self.experts, dict.fromkeys(self.modules, range(self.size)))}

    def after_round(self, means: Mapping[str, Tensor], token: Mapping[int, Mapping[str, Tensor]]) -> Pool:
        """Returns the pool after a round, without the next assignment.

        Args:
            means: The new values of `one_by_one`.
            token: Client -> its h^t, of those that took part.
        """
        latest, known = {module: rows.clone() for module, rows in self.token.items()}, self.known.clone()
        for client, embeddings in token.items():
            known[client] = True
            for module, embedding in embeddings.items():
                latest[module][client] = embedding
        experts = {name: value for name, value in means.items() if name not in self.common}
        return replace(
            self,
            common={name: means[name] for name in self.common},
            experts=stacked_experts(experts, self.size),
            token=latest,
            known=known,
            before=self.assigned,
            round=self.round + 1,
            drift={module: relative_change(self.common[name], means[name]) for module, name in self._routers()},
        )

    def _routers(self) -> list[tuple[str, str]]:
        """Returns every module with the name of its W^t, or W_r."""
        return [(module, f"{module}.{ROUTER}") for module in self.modules]

    def token_embeddings(self) -> Tensor:
        """Returns h^t [modules, C, r] in fp64; a client that never took part has the others' mean."""
        token = torch.stack([self.token[module] for module in self.modules]).double()
        if self.known.any():
            token[:, ~self.known] = token[:, self.known].mean(dim=1, keepdim=True)
        return token

    def expert_embeddings(self) -> Tensor:
        """Returns h^e [modules, E, r] in fp64."""
        return torch.stack([self.experts[f"{module}{STACK}.{EMBEDDING}"] for module in self.modules]).double()

    def widths(self, of: Literal["rank", "hidden"]) -> Tensor:
        """Returns r of every module, or the width of its input, [modules]."""
        axis = 1 if of == "rank" else 2
        return torch.tensor([self.experts[f"{module}{STACK}.lora_A"].shape[axis] for module in self.modules])


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Returns ||after - before|| / ||before||, a scalar in fp32; 0 where nothing changed."""
    change = torch.linalg.vector_norm(after.double() - before.double())
    return torch.where(change > 0, change / torch.linalg.vector_norm(before.double()), 0.0).float()


def uploaded_tensors(payload: Payload) -> dict[str, Tensor]:
    """Returns what a client trained, and its experts' h^e, each expert by itself."""
    experts = payload.part(EXPERTS)
    embeddings = {f"{module}{STACK}.{EMBEDDING}": rows for module, rows in payload.part(EXPERT).items()}
    return {**payload.part(COMMON), **experts, **single_experts(embeddings, held_experts(experts))}


def client_trainables(payload: Payload, capacity: int) -> dict[str, Tensor]:
    """Returns a client's trainables from what it received or kept, its experts in the order of their ids."""
    return {**payload.part(COMMON), **stacked_experts(payload.part(EXPERTS), capacity)}


def named_by_ids(trainables: Mapping[str, Tensor], held: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Returns a client's trainables as it sends and keeps them, in the parts `common` and `experts`.

    Args:
        trainables: By the names in its slot.
        held: Module -> the ids of its experts.
    """
    stacks = {name: value for name, value in trainables.items() if f"{STACK}." in name}
    common = {name: value for name, value in trainables.items() if name not in stacks}
    return {**with_part(COMMON, common), **with_part(EXPERTS, single_experts(stacks, held))}


def held_experts(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Returns module -> the ids of its experts in ascending order, read from the names of single experts."""
    held: dict[str, set[int]] = {}
    for name in names:
        stack, expert, _ = name.rsplit(".", 2)
        held.setdefault(stack.removesuffix(STACK), set()).add(int(expert))
    return {module: tuple(sorted(ids)) for module, ids in held.items()}


def single_experts(stacks: Mapping[str, Tensor], held: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Returns the experts of stacks one by one, as views.

    Args:
        stacks: `{module}.experts.{leaf}` -> [n, ..].
        held: Module -> the ids of the first rows; rows beyond them are left out.
    """
    experts = {}
    for name, rows in stacks.items():
        stack, _, leaf = name.rpartition(".")
        ids = held[stack.removesuffix(STACK)]
        experts.update({f"{stack}.{expert}.{leaf}": row for expert, row in zip(ids, rows[: len(ids)], strict=True)})
    return experts


def stacked_experts(experts: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Returns stacks of `rows` rows: the experts in ascending order of their ids, then zeros.

    Args:
        experts: `{module}.experts.{id}.{leaf}` -> [..].
        rows: At least as many as a module has experts.
    """
    members: dict[str, dict[int, Tensor]] = {}
    for name, value in experts.items():
        stack, expert, leaf = name.rsplit(".", 2)
        members.setdefault(f"{stack}.{leaf}", {})[int(expert)] = value
    stacks = {name: torch.stack([by_id[expert] for expert in sorted(by_id)]) for name, by_id in members.items()}
    return {
        name: pad(stack, (*[0] * (2 * stack.dim() - 1), rows - len(stack))) if len(stack) < rows else stack
        for name, stack in stacks.items()
    }
