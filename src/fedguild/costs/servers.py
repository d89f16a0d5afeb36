"""What a profile has to be told about each method: the order of its server's work, and what its payloads depend on.

A method's own code says the rest. A test holds that every registered method has its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedguild.client.merges import VERSION, merge_version
from fedguild.payload import Payload, Scalar

Varies = Literal["no", "at most", "mean"]


def _nothing(download: Payload) -> dict[str, Scalar]:
    return {}


def _merge_version(download: Payload) -> dict[str, Scalar]:
    return {VERSION: merge_version(download)}


def _whether_lost(download: Payload) -> dict[str, Scalar]:
    return {"lost": False} if download.scalars.get("stage") == "training" else {}


@dataclass(frozen=True)
class Server:
    """A method's entry; n is the size of an upload, C the number of clients that take part in a round.

    Attributes:
        memory: Order of the server's memory while it aggregates.
        time: Order of its time in a round.
        holds: Whether it holds one upload at a time, or all of a round's.
        varies: `no`: payloads are as counted; `at most`: they depend on the data, and the most there may
            be is counted; `mean`: they differ between clients as the data decides, their mean does not.
        note: What else there is to know about the figures.
        bound: Options under which the most there may be is reached.
        leave_out: Whether the server half runs on uploads without what may be left out.
        scalars: The scalars of an upload, from the download that it answers.
        rounds: The round in which payloads have the form that they have from then on.
        trains: Whether a client trains its own budget's adapter, or one for every budget.
    """

    memory: str
    time: str
    holds: Literal["one", "all"] = "one"
    varies: Varies = "no"
    note: str = ""
    bound: Mapping[str, Any] = field(default_factory=dict)
    leave_out: bool = False
    scalars: Callable[[Payload], dict[str, Scalar]] = _nothing
    rounds: int = 2
    trains: Literal["own", "every budget"] = "own"


_MEAN = Server("O(n), whatever C is: a running mean", "O(C n)")
_HISTORY = "the state keeps every round's merge, which a client that missed rounds downloads"

SERVERS: dict[str, Server] = {
    "a3smoe": _MEAN,
    "fdlora": Server(
        "O(n): a running mean and a momentum",
        "O(C n)",
        note="A client's search for its fusion weights runs forward passes that are not counted.",
    ),
    "fed-sb": Server(
        "O(n); in the first round one module's gradient [out, in]",
        "O(C n), n = r² a module; once O(out in r) a module for A and B",
        scalars=_whether_lost,
        note="The first round sends sketches of gradients up and trains nothing; A and B go down once to each client.",
        rounds=3,
    ),
    "fedalign-moe": Server(
        "O(n + C n_e): the uploads wait on disk, one expert's C versions (n_e each) are in memory",
        "O(C² n): a Gram matrix over the clients for every expert",
        varies="at most",
        leave_out=True,
        note="An upload leaves out the experts that the client did not activate. After its training a client runs "
        "forward passes over its data, as much of it as `statistics_tokens` says, that are not counted.",
    ),
    "fedamole": Server(
        "O(E n / b) for the pool of experts, and C E scores a module",
        "O(C n), and a linear program of C E variables a module",
        varies="mean",
        note="Clients hold between k^e and b experts of a module; over all of them the mean is E k^c / C.",
    ),
    "fedavg": _MEAN,
    "fedex-lora": Server(
        f"O(C n): the residual needs all uploads, as factors of rank (C - 1) r; {_HISTORY}",
        "O(C n)",
        holds="all",
        scalars=_merge_version,
        rounds=3,
    ),
    "fedit": _MEAN,
    "fedmoe": Server(
        "O(n) and C L M shares of tokens",
        "O(C n + C² L M)",
        varies="at most",
        note="Counted as in stage 1, in which a client holds as many experts as fit; later its data chooses fewer or "
        "as many.",
        rounds=3,
    ),
    "fedprompt": _MEAN,
    "fedprox": _MEAN,
    "fedptuning": _MEAN,
    "ffa-lora": _MEAN,
    "flame": _MEAN,
    "flexlora": Server(
        "O(C n): all factors are stacked",
        "O((in + out) R² + R³) a module, R the sum of the clients' ranks",
        holds="all",
    ),
    "flora": Server(
        f"O(C n): the stack of all factors, of rank R = sum of the clients' ranks; {_HISTORY}",
        "O(C n)",
        holds="all",
        scalars=_merge_version,
        note="The download is the whole stack of the round before.",
        rounds=3,
    ),
    "florist": Server(
        f"O(C n): all uploads, and one module's stack of rank R = sum of the clients' ranks; {_HISTORY}",
        "O((in + out) R² + R³) a module",
        holds="all",
        varies="at most",
        bound={"threshold": 1.0},
        scalars=_merge_version,
        note="The threshold keeps as many ranks as the uploads need; all of them are counted.",
        rounds=3,
    ),
    "hetlora": Server(
        "O(n): a running mean at the highest rank",
        "O(C n r) for the norms of the products",
        varies="at most",
        note="Pruning takes ranks from a client for good; none is counted.",
    ),
    "pfl-moe": Server(
        "O(n), whatever C is: a running mean",
        "O(C n)",
        note="A client's personal adapter and gate stay with it; their training comes on top of the FLOPs here.",
    ),
    "smoe-llb": _MEAN,
    "trivial": Server(
        "O(n), whatever C is: a running mean for every budget",
        "O(C n)",
        trains="every budget",
        note="Every client takes part in the federation of every budget: FLOPs and bytes of a round are their sum.",
    ),
    "ub-smoe": Server(
        "O(n): a running mean, and the pseudo-gradient (as large as the experts' LoRA)",
        "O(C n)",
        note="A client that took part in the round before derives the pseudo-gradient; others download it.",
    ),
}
