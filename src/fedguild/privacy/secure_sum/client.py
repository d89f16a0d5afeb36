"""A client's half of an aggregation: it answers each step once, and opens nothing that would expose a single client."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedguild.core.errors import UploadError
from fedguild.privacy.secure_sum import fixed_point
from fedguild.privacy.secure_sum.form import Bits, Contribution, Floats, Form
from fedguild.privacy.secure_sum.graph import FEWEST_CLIENTS
from fedguild.privacy.secure_sum.keys import (
    PrivateKey,
    PublicKey,
    agree,
    exchange_key,
    public_bytes,
    sign,
    verify,
)
from fedguild.privacy.secure_sum.levels import MOST_LEVELS, Levels, above, chain, levels_of, lowest_open
from fedguild.privacy.secure_sum.masks import add_mask, add_masks
from fedguild.privacy.secure_sum.session import (
    ADVERT_COLUMNS,
    DIGEST_BYTES,
    SECRETS,
    STEPS,
    Advert,
    Arrays,
    Roster,
    Session,
    Step,
    array_in,
    commitment,
    digest_of,
    envelope,
    envelope_bytes,
    list_in,
    listed,
    own_mask,
    pair_mask,
    rows,
    rows_in,
)
from fedguild.privacy.secure_sum.shares import parted, seal, split, unseal
from fedguild.privacy.secure_sum.sizes import SEED_BYTES, SIGNATURE_BYTES

LEAST_SHARE = 0.5
"""No client takes part where half of the clients could open two different sums."""
HALVES = ("weights", "values")


@dataclass(frozen=True)
class Stated:
    """What the server states of the weights.

    Attributes:
        clients: The clients whose weights were summed.
        numbers: The sums of those weights that enough clients have, and the ranges of the values.
    """

    clients: tuple[int, ...]
    numbers: Floats


Once = Callable[[str, Sequence[int], Stated | None], None]
"""Called before a sum is opened, with `weights` or `values`, the clients in the sum, and for the values what the server
states of the weights. Raises UploadError if the same training has been in a sum from which that one must not differ.
"""


class ClientSession:
    """A client's part in one session.

    Args:
        session: The public parameters, as the server names them.
        form: What is summed, according to the client's own method.
        numbers: The client's numbers.
        identity: Its registered private key.
        registered: Client index -> registered public key, from a source that is not the server.
        least: Fewest clients among whom this one hides, whatever the server says.
        trained: [32 bytes] digest of what it was told to train, as far as it is the same for all clients.
        once: Called before anything is opened; see `Once`.

    Raises:
        UploadError: the session is not one that a client may take part in.
    """

    def __init__(
        self,
        client: int,
        session: Session,
        form: Form,
        numbers: Contribution,
        identity: PrivateKey,
        registered: Mapping[int, PublicKey],
        least: int = FEWEST_CLIENTS,
        trained: bytes = bytes(DIGEST_BYTES),
        once: Once | None = None,
    ) -> None:
        if session.form != form.digest():
            raise UploadError("the server sums something else than this client's method")
        if session.share <= LEAST_SHARE or session.fewest < FEWEST_CLIENTS or session.unheld not in ("omit", "zeros"):
            raise UploadError("the server asks for an aggregation that protects too little")
        self.client, self.session, self.form, self.numbers = client, session, form, numbers
        self._identity, self._registered, self._least = identity, registered, max(least, FEWEST_CLIENTS)
        self._trained, self._once = trained, once or (lambda half, clients, stated: None)
        self._context = session.context()
        self._done = 0
        self._seeds = [secrets.token_bytes(SEED_BYTES) for _ in range(4)]
        self._own, self._pair_keys = self._seeds[0], [exchange_key(seed) for seed in self._seeds[2:]]
        self._envelope_key = exchange_key(secrets.token_bytes(SEED_BYTES))
        self._answers: dict[Step, Callable[[Arrays], dict[str, NDArray[Any]]]] = {
            "join": self._join,
            "share": self._share,
            "check": self._check,
            "weigh": self._weigh,
            "open_weights": self._open_weights,
            "send": self._send,
            "agree": self._agree,
            "open": self._open,
        }

    def answer(self, step: Step, request: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the answer to a step's request.

        Raises:
            UploadError: the step is out of turn, or its request must not be answered; the session is over then.
        """
        if self._done >= len(STEPS) or STEPS[self._done] != step:
            self._done = len(STEPS)
            raise UploadError(f"'{step}' is not what comes next in this aggregation")
        self._done = len(STEPS)  # an error ends the session
        answer = self._answers[step](request)
        self._done = STEPS.index(step) + 1
        return answer

    def _join(self, request: Arrays) -> dict[str, NDArray[Any]]:
        keys = b"".join(public_bytes(key) for key in (self._envelope_key, *self._pair_keys))
        held = np.packbits(self.form.holdings(self.numbers.held)).tobytes()
        committed = (self._own, above(self._seeds[1], MOST_LEVELS - 1))
        commitments = b"".join(commitment(self._context, self.client, secret) for secret in committed)
        advert = Advert(self.client, keys, held, commitments, self._trained, b"")
        self._advert = replace(advert, signature=sign(self._identity, advert.signed(self._context)))
        return {name: np.frombuffer(getattr(self._advert, name), np.uint8) for name in ADVERT_COLUMNS}

    def _share(self, request: Arrays) -> dict[str, NDArray[Any]]:
        roster = Roster.from_arrays(self.session, request, self.form.group_count)
        if roster.adverts.get(self.client) != self._advert:
            raise UploadError("the list of clients is not the one that this client joined")
        if not self._least <= len(roster.adverts) <= fixed_point.MOST_CLIENTS:
            raise UploadError(f"{len(roster.adverts)} clients are not enough to hide among: at least {self._least} are")
        self._roster, self._graph = roster, roster.graph(complete=self.form.is_unequal)
        self._neighbours = self._graph[self.client]
        for peer in self._verified():
            key = self._registered.get(peer)
            if key is None:
                raise UploadError(f"no key of client {peer} is known here")
            advert = roster.adverts[peer]
            verify(key, advert.signed(self._context), advert.signature, f"the key of client {peer}")
            if advert.trained != self._trained:
                raise UploadError(f"client {peer} was told to train something else than this client")
        self._holders = tuple(sorted((*self._neighbours, self.client)))
        threshold = roster.threshold(self._holders)
        self._survived = roster.survived()
        self._level_secrets = chain(self._seeds[1], len(self._survived))
        secrets = (self._seeds[0], *self._seeds[2:], *self._level_secrets)
        shares = [split(secret, self._holders, threshold) for secret in secrets]
        self._held_shares = {self.client: [share[self.client] for share in shares]}
        self._weighs = {self.client: fixed_point.weighed(self.form, self.numbers)}
        bits = np.packbits(self._weighs[self.client]).tobytes()
        envelopes = [
            seal(self._envelope_secret(self.client, peer, peer), b"".join(share[peer] for share in shares) + bits)
            for peer in self._neighbours
        ]
        return {"clients": listed(self._neighbours), "envelopes": rows(envelopes)}

    def _check(self, request: Arrays) -> dict[str, NDArray[Any]]:
        self._shared = self._still(list_in(request, "clients"), self._roster.clients)
        senders = [peer for peer in self._neighbours if peer in self._shared]
        size = envelope_bytes(len(self._survived), self.form.weight_count)
        envelopes = rows_in(request, "envelopes", len(senders), size)
        shares_bytes = (SECRETS + len(self._survived)) * SEED_BYTES
        for peer, content in zip(senders, envelopes, strict=True):
            with suppress(UploadError):
                opened = unseal(self._envelope_secret(peer, self.client, peer), content)
                bits = np.frombuffer(opened, np.uint8, offset=shares_bytes)
                self._weighs[peer] = np.unpackbits(bits, count=self.form.weight_count).astype(np.bool_)
                self._held_shares[peer] = parted(opened[:shares_bytes])
        return {"complaints": listed(set(senders) - self._held_shares.keys())}

    def _weigh(self, request: Arrays) -> dict[str, NDArray[Any]]:
        self._shared = self._still(list_in(request, "clients"), self._shared)
        words = fixed_point.weight_words(self.form, self.numbers)
        add_mask(words, self._own, self._context + own_mask(self.client, HALVES[0]))
        self._mask(words, 0, [peer for peer in self._neighbours if peer in self._shared])
        return {"masked": words}

    def _open_weights(self, request: Arrays) -> dict[str, NDArray[Any]]:
        self._weighed = self._still(list_in(request, "clients"), self._shared)
        self._once(HALVES[0], self._weighed, None)
        return self._opened(0, self._shared, self._weighed, 0)

    def _send(self, request: Arrays) -> dict[str, NDArray[Any]]:
        if tuple(list_in(request, "clients")) != self._weighed:
            raise UploadError("the clients are not those whose weights were opened")
        words = array_in(request, "sums", np.uint64, (self.form.word_count,))
        sums = fixed_point.weight_sums(self.form, words)
        self._require_true_counts(sums.counts)
        totals = sums.totals[sums.counts >= self.session.fewest]
        self._stated = Stated(self._weighed, np.concatenate([totals, sums.ranges]))
        self._transcript = transcript(self._roster, self._shared, self._weighed, words)
        held = np.sum([self._holds(peer) for peer in self._weighed], axis=0)
        self._large = held >= self.session.fewest
        weight_levels, value_levels = part_levels(self.form, sums.counts, held, self.session.fewest, self._survived)
        values, shares = fixed_point.value_words(self.form, self.numbers, sums, len(self._weighed), self.session.fewest)
        peers = [peer for peer in self._neighbours if peer in self._weighed]
        covers = {peer: self._cover(peer) for peer in (*peers, self.client)}
        own = covers[self.client]
        if own is not None:
            values[~own] = 0
        purpose = self._context + own_mask(self.client, HALVES[1])
        add_masks(values, self._level_secrets, value_levels, purpose)
        add_masks(shares, self._level_secrets, weight_levels, purpose + b" shares")
        self._mask(values, 1, peers, covers)
        self._mask(shares, 1, peers, purpose=b" shares")
        sent = values if own is None else values[own]
        return {
            "values": sent,
            "masked": shares,
            "signature": np.frombuffer(sign(self._identity, b"send" + self._transcript), np.uint8),
        }

    def _agree(self, request: Arrays) -> dict[str, NDArray[Any]]:
        sent = self._still(list_in(request, "clients"), self._weighed)
        signatures = rows_in(request, "signatures", len(sent), SIGNATURE_BYTES)
        for peer, signature in zip(sent, signatures, strict=True):
            if peer in self._verified():
                what = f"what client {peer} was told about the weights"
                verify(self._registered[peer], b"send" + self._transcript, signature, what)
        self._sent = sent
        return {"signature": np.frombuffer(sign(self._identity, agreement(self._transcript, self._sent)), np.uint8)}

    def _open(self, request: Arrays) -> dict[str, NDArray[Any]]:
        sent, agreed = tuple(list_in(request, "clients")), list_in(request, "agreed")
        if sent != self._sent or not set(agreed) <= set(sent):
            raise UploadError("the clients are not those that this client agreed to")
        signatures = rows_in(request, "signatures", len(agreed), SIGNATURE_BYTES)
        if len(agreed) < self._roster.fewest_left():
            raise UploadError(f"only {len(agreed)} of {len(sent)} clients agree on who is left")
        for peer, signature in zip(agreed, signatures, strict=True):
            key = self._registered.get(peer)
            if key is None:
                raise UploadError(f"no key of client {peer} is known here")
            verify(key, agreement(self._transcript, self._sent), signature, f"whom client {peer} was told is left")
        self._once(HALVES[1], sent, self._stated)
        level = lowest_open(len(self._weighed) - len(sent), self._survived)
        return self._opened(1, self._weighed, sent, SECRETS + level)

    def _require_true_counts(self, counts: NDArray[np.int64]) -> None:
        """Checks how many clients have each weight against what they said themselves, sealed for this client.

        What fewer than the threshold have a weight for would otherwise be sent as soon as the server says that more do.
        Along a sparse graph, where all weights are everybody's, the neighbours that are left have to be enough.

        Raises:
            UploadError: the server states other counts, or not everybody's are known here.
        """
        known = [self._weighs[client] for client in self._weighed if client in self._weighs]
        found = np.sum(known, axis=0)
        wrong = found > counts
        if self.form.is_unequal:
            wrong = found != counts
        elif self.form.weight_count:
            wrong |= (found < self.session.fewest) & (counts >= self.session.fewest)
        if bool(wrong.any()) or (self.form.is_unequal and len(known) < len(self._weighed)):
            raise UploadError("the server states other numbers of clients with a weight than these clients themselves")

    def _still(self, clients: list[int], before: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the clients that are left, after checking that they are enough to hide one another."""
        left = tuple(clients)
        if self.client not in left or not set(left) <= set(before):
            raise UploadError("the list of clients that are left is not one of those before")
        near = [client for client in left if client in self._holders]
        needed = max(self._roster.fewest_left(), self._least)
        if len(left) < needed or len(near) < self._roster.threshold(self._holders):
            raise UploadError(
                f"only {len(left)} of {len(self._roster.clients)} clients are left, but the sum of at least "
                f"{needed} may be opened"
            )
        return left

    def _verified(self) -> tuple[int, ...]:
        """Returns the peers whose signatures this client checks: all if what they have matters, else its neighbours."""
        everybody = tuple(client for client in self._roster.clients if client != self.client)
        return everybody if self.form.is_unequal else self._neighbours

    def _opened(self, half: int, before: tuple[int, ...], left: tuple[int, ...], own: int) -> dict[str, NDArray[Any]]:
        """Returns the shares of the own masks of clients that are left, and of the exchange keys of the others.

        Args:
            half: 0 for the weights, 1 for the values.
            before: The clients whose keys are in the masks.
            left: Those of them who sent.
            own: The index of the own mask's secret among the shared ones.
        """
        about = [client for client in self._holders if client in before and client in self._held_shares]
        shares = [self._held_shares[client][own if client in left else 1 + half] for client in about]
        return {"clients": listed(about), "shares": rows(shares)}

    def _mask(
        self,
        words: NDArray[Any],
        half: int,
        peers: list[int],
        covers: Mapping[int, Bits | None] | None = None,
        purpose: bytes = b"",
    ) -> None:
        """Adds the pairwise mask of every peer; the other of the two subtracts it."""
        for peer in peers:
            secret = agree(
                self._pair_keys[half],
                self._roster.adverts[peer].key(1 + half),
                self._context + pair_mask(self.client, peer, HALVES[half]),
            )
            where = None if covers is None else both(covers[self.client], covers[peer])
            add_mask(words, secret, b"mask" + purpose, subtract=self.client > peer, where=where)

    def _envelope_secret(self, sender: int, receiver: int, peer: int) -> bytes:
        purpose = self._context + envelope(sender, receiver)
        return agree(self._envelope_key, self._roster.adverts[peer].key(0), purpose)

    def _holds(self, peer: int) -> Bits:
        return self._roster.adverts[peer].groups(self.form.group_count)

    def _cover(self, peer: int) -> Bits | None:
        """Returns [values], which ones a client sends; None for all."""
        return cover_of(self.form, self.session, self._holds(peer), self._large)


def transcript(roster: Roster, shared: tuple[int, ...], weighed: tuple[int, ...], sums: NDArray[np.uint64]) -> bytes:
    """Returns a digest of everything that the clients were told before they send their values."""
    return digest_of(roster.digest(), listed(shared).tobytes(), listed(weighed).tobytes(), sums.tobytes())


def agreement(told: bytes, sent: tuple[int, ...]) -> bytes:
    """Returns what a client signs to agree on who has sent values: that list, and everything told before."""
    return b"agree" + told + listed(sent).tobytes()


def cover_of(form: Form, session: Session, held: Bits, large: Bits) -> Bits | None:
    """Returns [values], which ones a client sends; None for all.

    Args:
        session: Its `unheld` says whether a client sends zeros for what it does not hold of large groups.
        held: [groups], which ones the client is in.
        large: [groups], which ones are large enough.
    """
    return form.covered(large & held if session.unheld == "omit" else large)


def part_levels(
    form: Form, counts: NDArray[np.int64], held: NDArray[np.int64], fewest: int, survived: Sequence[int]
) -> tuple[Levels, Levels]:
    """Returns the levels of the shares, [weights], and of the values, [values].

    Args:
        counts: [weights] clients with each weight.
        held: [groups] clients in each group.
        fewest: Fewest clients behind a mean.
        survived: [levels] how many dropouts each survives.
    """
    weights = levels_of(counts, fewest, survived)
    return weights, form.by_value(weights, levels_of(held, fewest, survived))


def both(one: Bits | None, other: Bits | None) -> Bits | None:
    """Returns the conjunction of two masks; None is true everywhere."""
    if one is None or other is None:
        return one if other is None else other
    return one & other
