"""The parameters that clients and server of one aggregation agree on, and the arrays that they exchange.

Messages are named arrays (`Arrays`); a list of clients is [n] int32, ascending, and keys, shares and signatures are
rows of uint8. The steps, each a request to every client that is left and its answer:

    join    the session alone                     -> `keys` [96], `held` [groups / 8], `commitments` [64],
            `trained` [32], `signature`
    share   `clients`, everybody's answer to join -> `clients` (its neighbours),
            `envelopes` [k, 64 + 16 levels + weights / 8]
    check   `clients` (who shared), `envelopes` for it -> `complaints` (whose envelope it cannot open)
    weigh   `clients` (who is left after that)    -> `masked` uint64, its weights
    open_weights   `clients` (who weighed)        -> `clients`, `shares` [k, 16]
    send    `clients`, `sums` uint64              -> `values` uint32, `masked` uint64 (its shares), `signature`
    agree   `clients` (who sent), `signatures`    -> `signature`, over who sent
    open    `clients` (who sent), `agreed`, `signatures` of these -> `clients`, `shares` [k, 16]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedguild.core.errors import UploadError
from fedguild.privacy.secure_sum.graph import FEWEST_CLIENTS, degree_of, neighbours, threshold_of
from fedguild.privacy.secure_sum.levels import capacities
from fedguild.privacy.secure_sum.sizes import KEY_BYTES, SEED_BYTES, SIGNATURE_BYTES, TAG_BYTES

Arrays = Mapping[str, NDArray[Any]]
Step = Literal["join", "share", "check", "weigh", "open_weights", "send", "agree", "open"]
STEPS: tuple[Step, ...] = get_args(Step)
Unheld = Literal["omit", "zeros"]

SECRETS = 3
"""A client's secrets beside those of its levels: the seeds of the weights' own mask, and of both exchange keys."""
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Session:
    """The public parameters of one aggregation.

    Attributes:
        run: Identity of the run.
        nonce: Drawn by the server for this aggregation alone, 32 hexadecimal digits.
        form: Digest of the form.
        share: Share of the clients that must be left at every step, also of each client's neighbours.
        fewest: Fewest clients behind a mean; what fewer hold, or have a weight for, is not sent.
        unheld: What a client sends for values that it does not hold: nothing, or masked zeros.
    """

    run: str
    round: int
    nonce: str
    form: str
    share: float
    fewest: int
    unheld: Unheld

    def context(self) -> bytes:
        """Returns bytes that bind keys and signatures to this session."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class Advert:
    """A client's answer to `join`, signed by its registered key.

    Attributes:
        keys: Its public keys, for envelopes, for the masks of the weights, and for those of the values.
        held: [groups / 8] the groups of holders that it is in, as bits.
        commitments: Digests of the seeds of its own two masks.
        trained: Digest of what it was told to train, as far as it is the same for all clients.
        signature: Over all of this and the session.
    """

    client: int
    keys: bytes
    held: bytes
    commitments: bytes
    trained: bytes
    signature: bytes

    def signed(self, context: bytes) -> bytes:
        """Returns the content that is signed."""
        parts = (self.client.to_bytes(8, "little"), self.keys, self.commitments, self.trained, self.held)
        return b"join" + context + b"".join(parts)

    def key(self, place: int) -> bytes:
        return self.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]

    def groups(self, count: int) -> NDArray[np.bool_]:
        """Returns [groups], which groups of holders the client is in."""
        return np.unpackbits(np.frombuffer(self.held, np.uint8), count=count).astype(np.bool_)


def advert_sizes(group_count: int) -> dict[str, int]:
    """Returns attribute of an advert -> its bytes, in the order in which they are sent."""
    return {
        "keys": 3 * KEY_BYTES,
        "held": -(-group_count // 8),
        "commitments": 2 * DIGEST_BYTES,
        "trained": DIGEST_BYTES,
        "signature": SIGNATURE_BYTES,
    }


ADVERT_COLUMNS = tuple(advert_sizes(0))


@dataclass(frozen=True)
class Roster:
    """All clients of a session, as each of them and the server know them."""

    session: Session
    adverts: Mapping[int, Advert]

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self.adverts))

    def digest(self) -> bytes:
        """Returns a digest of the session and all adverts."""
        parts = [self.session.context()]
        parts += [self.adverts[client].signed(parts[0]) for client in self.clients]
        return digest_of(*parts)

    def graph(self, *, complete: bool) -> dict[int, tuple[int, ...]]:
        """Returns client -> its neighbours, in the order given by the digest.

        Args:
            complete: Whether all pairs mask, however many clients there are. Needed if clients hold unequal parts, or
                have weights for unequal parts: two neighbours of a sparse graph may have nothing in common, which would
                leave one client's part unmasked, and a client learns from its neighbours alone who has a weight.
        """
        degree = len(self.adverts) if complete else degree_of(len(self.adverts))
        return neighbours(self.clients, degree, self.digest())

    def fewest_left(self) -> int:
        """Returns how many clients must be left."""
        return max(fewest_left(len(self.adverts), self.session.share), self.session.fewest)

    def survived(self) -> tuple[int, ...]:
        """Returns [levels], how many dropouts after the weights the parts of each level survive."""
        return capacities(len(self.adverts) - fewest_left(len(self.adverts), self.session.share))

    def threshold(self, holders: Sequence[int]) -> int:
        """Returns how many of the holders of a client's shares must be left."""
        return threshold_of(len(holders), self.session.share)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        ordered = [self.adverts[client] for client in self.clients]
        columns = {name: rows([getattr(advert, name) for advert in ordered]) for name in ADVERT_COLUMNS}
        return {"clients": listed(self.clients), **columns}

    @classmethod
    def from_arrays(cls, session: Session, arrays: Arrays, group_count: int) -> Roster:
        """Returns the roster that was sent.

        Raises:
            UploadError: it is malformed.
        """
        clients = list_in(arrays, "clients")
        sizes = advert_sizes(group_count)
        columns = {name: rows_in(arrays, name, len(clients), size) for name, size in sizes.items()}
        adverts = {
            client: Advert(client, **{name: column[row] for name, column in columns.items()})
            for row, client in enumerate(clients)
        }
        return cls(session, adverts)


def fewest_left(clients: int, share: float) -> int:
    """Returns how many of a session's clients must be left, regardless of single means."""
    return max(FEWEST_CLIENTS, threshold_of(clients, share))


def envelope_bytes(levels: int, weights: int) -> int:
    """Returns the size of an envelope with the shares of all secrets of a client, and with a bit for each weight."""
    return (SECRETS + levels) * SEED_BYTES + -(-weights // 8) + TAG_BYTES


def own_mask(client: int, half: str) -> bytes:
    """Returns the purpose of a client's own mask, for the `weights` or the `values`."""
    return f"own mask {half} {client}".encode()


def pair_mask(one: int, other: int, half: str) -> bytes:
    return f"pair mask {half} {min(one, other)} {max(one, other)}".encode()


def envelope(sender: int, receiver: int) -> bytes:
    """Returns the purpose of the secret that an envelope is sealed with."""
    return f"envelope {sender} {receiver}".encode()


def digest_of(*parts: bytes) -> bytes:
    """Returns a digest of parts and of their lengths."""
    sizes = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return hashlib.sha256(sizes + b"".join(parts)).digest()


def commitment(context: bytes, client: int, secret: bytes) -> bytes:
    """Returns the digest by which a client commits to a secret."""
    return digest_of(b"commitment", context, client.to_bytes(8, "little"), secret)


def listed(clients: Iterable[int]) -> NDArray[np.int32]:
    return np.array(sorted(clients), dtype=np.int32)


def rows(contents: Sequence[bytes]) -> NDArray[np.uint8]:
    if not contents:
        return np.zeros((0, 0), np.uint8)
    return np.frombuffer(b"".join(contents), np.uint8).reshape(len(contents), -1).copy()


def list_in(arrays: Arrays, name: str) -> list[int]:
    """Returns the list of clients in a message.

    Raises:
        UploadError: it is missing, of another form, or not ascending.
    """
    found = array_in(arrays, name, np.int32, None)
    clients: list[int] = found.tolist()
    if found.ndim != 1 or any(one >= other for one, other in pairwise(clients)):
        raise UploadError(f"'{name}' is no ascending list of clients")
    return clients


def rows_in(arrays: Arrays, name: str, count: int, width: int) -> list[bytes]:
    """Returns the rows in a message.

    Raises:
        UploadError: they are missing or of another form.
    """
    found = array_in(arrays, name, np.uint8, (count, width) if count else None)
    return [row.tobytes() for row in found] if count else []


def array_in(arrays: Arrays, name: str, dtype: Any, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Returns an array of a message.

    Raises:
        UploadError: it is missing, of another dtype or shape.
    """
    found = arrays.get(name)
    if found is None or found.dtype != dtype or (shape is not None and found.shape != shape):
        described = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
        wanted = "" if shape is None else f" {list(shape)}"
        raise UploadError(f"'{name}' is {described}, but {np.dtype(dtype)}{wanted} was expected")
    return np.ascontiguousarray(found)
