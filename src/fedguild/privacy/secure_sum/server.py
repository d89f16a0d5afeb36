"""The server's half of an aggregation: it forwards what clients send each other, adds up, and removes masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedguild.core.errors import QuorumError, UploadError
from fedguild.privacy.secure_sum import fixed_point
from fedguild.privacy.secure_sum.client import HALVES, agreement, both, cover_of, part_levels, transcript
from fedguild.privacy.secure_sum.fixed_point import Means
from fedguild.privacy.secure_sum.form import Bits, Form
from fedguild.privacy.secure_sum.keys import PublicKey, agree, exchange_key, public_bytes, verify
from fedguild.privacy.secure_sum.levels import above, lowest_open
from fedguild.privacy.secure_sum.masks import add_mask, add_masks
from fedguild.privacy.secure_sum.session import (
    DIGEST_BYTES,
    STEPS,
    Advert,
    Arrays,
    Roster,
    Session,
    Step,
    advert_sizes,
    array_in,
    commitment,
    envelope_bytes,
    list_in,
    listed,
    own_mask,
    pair_mask,
    rows,
    rows_in,
)
from fedguild.privacy.secure_sum.shares import recover
from fedguild.privacy.secure_sum.sizes import SEED_BYTES, SIGNATURE_BYTES

Answers = Mapping[int, Arrays]


class ServerSession:
    """The server's part in one session: `requests` and `receive` for every step, then `means`.

    Args:
        session: The public parameters.
        form: What is summed.
        clients: The clients that are asked to join.
        registered: Client index -> its registered public key, as far as the server knows them. A client that does not
            sign with it is excluded; the others' signatures are checked by their peers alone.

    Attributes:
        left: The clients that have answered all steps so far.
        dropped: Client -> why it is not left.
        faults: Client -> what it did wrong that the others could repair.
        weighers: The clients whose weights are in the sums of the first half.
        contributors: The clients whose numbers are in the sums, after the last step.
    """

    def __init__(
        self, session: Session, form: Form, clients: Sequence[int], registered: Mapping[int, PublicKey] | None = None
    ) -> None:
        self.session, self.form = session, form
        self._registered = registered or {}
        self.left: tuple[int, ...] = tuple(sorted(clients))
        self.dropped: dict[int, str] = {}
        self.faults: dict[int, str] = {}
        self.weighers: tuple[int, ...] = ()
        self.contributors: tuple[int, ...] = ()
        self._context = session.context()
        self._receivers: dict[Step, Callable[[Answers], None]] = {
            "join": self._joined,
            "share": self._shared,
            "check": self._checked,
            "weigh": self._weighed,
            "open_weights": self._weights_opened,
            "send": self._sent,
            "agree": self._agreed,
            "open": self._opened,
        }
        self._adverts: dict[int, Advert] = {}
        self._members: tuple[int, ...] = ()
        self._envelopes: dict[int, dict[int, bytes]] = {}
        self._signatures: dict[int, bytes] = {}
        self._covers: dict[bytes, Bits | None] = {}
        self._before: tuple[int, ...] = ()
        self._values = np.zeros(form.value_count, np.uint32)
        self._large: Bits = np.ones(form.group_count, np.bool_)

    def requests(self, step: Step) -> dict[int, dict[str, NDArray[Any]]]:
        """Returns client -> the request of a step, for all clients that are left."""
        everybody: dict[str, NDArray[Any]] = {}
        if step == "share":
            everybody = self._roster.to_arrays()
        elif step in ("weigh", "open_weights"):
            everybody = {"clients": listed(self.left)}
        elif step == "send":
            everybody = {"clients": listed(self.left), "sums": self._words}
        elif step in ("agree", "open"):
            signatures = rows([self._signatures[client] for client in self.left])
            everybody = {"clients": listed(self.contributors), "signatures": signatures}
            if step == "open":
                everybody["agreed"] = listed(self.left)
        if step != "check":
            return dict.fromkeys(self.left, everybody)
        return {client: self._check_request(client) for client in self.left}

    def receive(self, step: Step, answers: Answers, failures: Mapping[int, str]) -> None:
        """Processes a step's answers; clients without a usable one drop out.

        Args:
            answers: Client -> its answer.
            failures: Client -> why it has not answered.

        Raises:
            QuorumError: too few clients are left; nothing that they sent in this step can be opened.
        """
        self._before = self.left
        self._dropping = dict(failures)
        self._receivers[step]({client: answers[client] for client in self.left if client in answers})
        for client in self._before:
            if client not in self.left:
                self.dropped[client] = self._dropping.get(client, "it did not answer")
        needed = self._roster.fewest_left()
        if len(self.left) < needed:
            reasons = "".join(f"\n  client {client}: {reason}" for client, reason in sorted(self.dropped.items()))
            after = STEPS.index(step) > STEPS.index("open_weights")
            opened = "Only sums of weights were opened." if after else "Nothing was opened."
            raise QuorumError(
                f"Secure aggregation: {len(self.left)} of {len(self._roster.clients)} clients are left after "
                f"'{step}', but {needed} are needed. {opened}{reasons}",
                "federation.secure_share says which share has to be left; at least 3 clients are needed.",
            )

    def facts(self) -> dict[str, Any]:
        """Returns the session's figures for the audit log: its clients, how many had to be left, and the dropouts."""
        return {
            "session": self.session.nonce,
            "round": self.session.round,
            "members": list(self._members),
            "threshold": self._roster.fewest_left() if self._members else None,
            "left": list(self.left),
            "dropped": {str(client): reason for client, reason in sorted(self.dropped.items())},
            "faults": {str(client): fault for client, fault in sorted(self.faults.items())},
        }

    def means(self) -> Means:
        large, opened = self.form.covered(self._large), self._value_levels >= self._open_level
        return fixed_point.means(
            self.form,
            self._sums,
            self._values,
            self._value_words,
            len(self.weighers),
            len(self.contributors),
            self.session.fewest,
            opened if large is None else opened & large,
            self._weight_levels >= self._open_level,
        )

    @property
    def weights(self) -> dict[str, NDArray[np.float64]]:
        """Name -> the sum of the clients' weights, from the step `open_weights` on."""
        return {key: self._sums.totals[place] for key, place in self.form.places.items()}

    def holdings(self, client: int) -> dict[str, Bits]:
        """Returns name of groups -> [n], which parts a client holds according to its answer to `join`."""
        held = self._adverts[client].groups(self.form.group_count)
        return {key: held[place] for key, place in self.form.group_places.items()}

    def _read(self, answers: Answers, read: Callable[[int, Arrays], None]) -> None:
        """Reads every answer; a client whose answer cannot be read drops out."""
        left = []
        for client, arrays in sorted(answers.items()):
            try:
                read(client, arrays)
            except UploadError as error:
                self._dropping[client] = error.message
            else:
                left.append(client)
        self.left = tuple(left)

    def _joined(self, answers: Answers) -> None:
        sizes = advert_sizes(self.form.group_count)

        def read(client: int, arrays: Arrays) -> None:
            columns = {name: array_in(arrays, name, np.uint8, (size,)).tobytes() for name, size in sizes.items()}
            advert = Advert(client, **columns)
            for place in range(3):  # a key that cannot be used would drive out the neighbours
                agree(exchange_key(self._context), advert.key(place), b"trial")
            self._require_signed(client, advert.signed(self._context), advert.signature, "what it joined with")
            self._adverts[client] = advert

        self._read(answers, read)
        self._leave_out_the_odd_ones()
        self._members = self.left
        self._roster = Roster(self.session, {client: self._adverts[client] for client in self.left})
        self._graph = self._roster.graph(complete=self.form.is_unequal)
        self._survived = self._roster.survived()

    def _leave_out_the_odd_ones(self) -> None:
        """Excludes clients that report other training instructions than most; all were given the same.

        A client checks its peers' reports too, because the server could give them different instructions, and refuses
        to go on.
        """
        told = Counter(self._adverts[client].trained for client in self.left)
        usual = max(told, key=lambda digest: told[digest], default=b"")
        for client in self.left:
            if self._adverts[client].trained != usual:
                self._dropping[client] = "it says that it was told to train something else than the others"
        self.left = tuple(client for client in self.left if self._adverts[client].trained == usual)

    def _shared(self, answers: Answers) -> None:
        def read(client: int, arrays: Arrays) -> None:
            peers = self._graph[client]
            if tuple(list_in(arrays, "clients")) != peers:
                raise UploadError("it shared with others than its neighbours")
            size = envelope_bytes(len(self._survived), self.form.weight_count)
            envelopes = rows_in(arrays, "envelopes", len(peers), size)
            self._envelopes[client] = dict(zip(peers, envelopes, strict=True))

        self._read(answers, read)

    def _check_request(self, client: int) -> dict[str, NDArray[Any]]:
        senders = [peer for peer in self._graph[client] if peer in self.left]
        envelopes = rows([self._envelopes[peer][client] for peer in senders])
        return {"clients": listed(self.left), "envelopes": envelopes}

    def _checked(self, answers: Answers) -> None:
        complaints: dict[int, set[int]] = {}

        def read(client: int, arrays: Arrays) -> None:
            accused = set(list_in(arrays, "complaints"))
            if not accused <= set(self._graph[client]) & set(self._before):
                raise UploadError("it complains about clients that have sent it nothing")
            complaints[client] = accused

        self._read(answers, read)
        tolerated = len(self._roster.clients) - self._roster.fewest_left()
        for client, reason in disputed(complaints, self.left, tolerated).items():
            self._dropping[client] = reason
        self.left = tuple(client for client in self.left if client not in self._dropping)
        self._sharers = self.left

    def _weighed(self, answers: Answers) -> None:
        self._words = np.zeros(self.form.word_count, np.uint64)

        def read(client: int, arrays: Arrays) -> None:
            np.add(self._words, array_in(arrays, "masked", np.uint64, self._words.shape), out=self._words)

        self._read(answers, read)
        self.weighers = self.left

    def _weights_opened(self, answers: Answers) -> None:
        shares = self._shares(answers)
        own, keys = self._secrets(0, shares, self._sharers, self.weighers)
        for client, secret in own.items():
            add_mask(self._words, secret, self._context + own_mask(client, HALVES[0]), subtract=True)
        for client, peer, secret in self._pairs(0, keys, self.weighers):
            add_mask(self._words, secret, b"mask", subtract=client > peer)
        self._sums = fixed_point.weight_sums(self.form, self._words)
        # The values are asked of all whose weights were opened, whether or not they sent their shares.
        self.left = self.weighers
        held = np.sum([self._holds(client) for client in self.weighers], axis=0)
        self._large = held >= self.session.fewest
        self._weight_levels, self._value_levels = part_levels(
            self.form, self._sums.counts, held, self.session.fewest, self._survived
        )
        self._covers.clear()

    def _sent(self, answers: Answers) -> None:
        self._value_words = np.zeros(self.form.weight_count, np.uint64)
        self._told = transcript(self._roster, self._sharers, self.weighers, self._words)

        def read(client: int, arrays: Arrays) -> None:
            cover = self._cover(client)
            size = self.form.value_count if cover is None else int(cover.sum())
            values = array_in(arrays, "values", np.uint32, (size,))
            words = array_in(arrays, "masked", np.uint64, self._value_words.shape)
            self._signatures[client] = self._signature(
                client, arrays, b"send" + self._told, "what it was told about the weights"
            )
            if cover is None:
                np.add(self._values, values, out=self._values)
            else:
                self._values[cover] += values
            np.add(self._value_words, words, out=self._value_words)

        self._read(answers, read)
        self.contributors = self.left
        self._open_level = lowest_open(len(self.weighers) - len(self.contributors), self._survived)

    def _agreed(self, answers: Answers) -> None:
        def read(client: int, arrays: Arrays) -> None:
            message = agreement(self._told, self.contributors)
            self._signatures[client] = self._signature(client, arrays, message, "whom it was told is left")

        self._read(answers, read)

    def _opened(self, answers: Answers) -> None:
        shares = self._shares(answers)
        own, keys = self._secrets(1, shares, self.weighers, self.contributors)
        for client, secret in own.items():
            purpose = self._context + own_mask(client, HALVES[1])
            secrets = [
                None if level < self._open_level else above(secret, level - self._open_level)
                for level in range(len(self._survived))
            ]
            cover = self._cover(client)
            add_masks(self._values, secrets, self._value_levels, purpose, subtract=True, where=cover)
            add_masks(self._value_words, secrets, self._weight_levels, purpose + b" shares", subtract=True)
        for client, peer, secret in self._pairs(1, keys, self.contributors):
            where = both(self._cover(client), self._cover(peer))
            add_mask(self._values, secret, b"mask", subtract=client > peer, where=where)
            add_mask(self._value_words, secret, b"mask shares", subtract=client > peer)
        self.left = self.contributors

    def _signature(self, client: int, arrays: Arrays, message: bytes, what: str) -> bytes:
        """Returns the signature in an answer.

        Raises:
            UploadError: it is not that of the client's registered key over the message.
        """
        signature = array_in(arrays, "signature", np.uint8, (SIGNATURE_BYTES,)).tobytes()
        self._require_signed(client, message, signature, what)
        return signature

    def _require_signed(self, client: int, message: bytes, signature: bytes, what: str) -> None:
        if client in self._registered:
            verify(self._registered[client], message, signature, what)

    def _shares(self, answers: Answers) -> dict[int, dict[int, bytes]]:
        """Returns client -> holder -> the share that the holder has opened."""
        opened: dict[int, dict[int, bytes]] = {}

        def read(holder: int, arrays: Arrays) -> None:
            clients = list_in(arrays, "clients")
            shares = rows_in(arrays, "shares", len(clients), SEED_BYTES)
            if not set(clients) <= {holder, *self._graph[holder]}:
                raise UploadError("it opened shares that it cannot have")
            for client, share in zip(clients, shares, strict=True):
                opened.setdefault(client, {})[holder] = share

        self._read(answers, read)
        return opened

    def _secrets(
        self, half: int, shares: Mapping[int, Mapping[int, bytes]], before: Sequence[int], left: Sequence[int]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Returns the secrets of the own masks of clients that are left, and of the exchange keys of the others.

        Raises:
            QuorumError: too few shares of one were opened, or they do not give the secret that its client committed to.
        """
        own: dict[int, bytes] = {}
        keys: dict[int, bytes] = {}
        for client in before:
            holders = tuple(sorted((client, *self._graph[client])))
            try:
                secret = self._recovered(half, client, shares.get(client, {}), holders, own_mask=client in left)
            except UploadError as error:
                faults = {**self._dropping, **self.faults}
                reasons = "".join(f"\n  client {one}: {why}" for one, why in sorted(faults.items()))
                raise QuorumError(
                    f"Secure aggregation: the masks of client {client} cannot be taken away: {error.message}.{reasons}",
                    "federation.secure_share says which share of the clients has to be left.",
                ) from error
            (own if client in left else keys)[client] = secret
        return own, keys

    def _recovered(
        self, half: int, client: int, shares: Mapping[int, bytes], holders: Sequence[int], *, own_mask: bool
    ) -> bytes:
        """Returns a client's secret; if one holder's share is false, from the others' shares, and records the holder.

        Raises:
            UploadError: there are too few shares, or they do not fit together, whichever one is left out.
        """
        threshold = self._roster.threshold(holders)
        try:
            secret = recover(shares, holders, threshold)
            self._require_true(half, client, secret, own_mask=own_mask)
        except UploadError as error:
            for holder in sorted(shares) if len(shares) > threshold else ():
                others = {one: share for one, share in shares.items() if one != holder}
                with suppress(UploadError):
                    secret = recover(others, holders, threshold)
                    self._require_true(half, client, secret, own_mask=own_mask)
                    self.faults[holder] = f"it opened a false share of client {client}'s secret"
                    return secret
            raise error
        return secret

    def _require_true(self, half: int, client: int, secret: bytes, *, own_mask: bool) -> None:
        """Raises UploadError unless a recovered secret matches what its client advertised."""
        advert = self._adverts[client]
        if own_mask:
            top = secret if half == 0 else above(secret, len(self._survived) - 1 - self._open_level)
            found = commitment(self._context, client, top)
            expected = advert.commitments[half * DIGEST_BYTES : (half + 1) * DIGEST_BYTES]
        else:
            found, expected = public_bytes(exchange_key(secret)), advert.key(1 + half)
        if found != expected:
            raise UploadError("the shares of its secret do not fit together: it or several holders of them lied")

    def _pairs(self, half: int, keys: Mapping[int, bytes], left: Sequence[int]) -> list[tuple[int, int, bytes]]:
        """Returns (missing client, neighbour that is left, their secret) of all masks that have no counterpart."""
        found = []
        for client, seed in keys.items():
            key = exchange_key(seed)
            for peer in self._graph[client]:
                if peer in left:
                    purpose = self._context + pair_mask(client, peer, HALVES[half])
                    found.append((client, peer, agree(key, self._adverts[peer].key(1 + half), purpose)))
        return found

    def _holds(self, client: int) -> Bits:
        return self._adverts[client].groups(self.form.group_count)

    def _cover(self, client: int) -> Bits | None:
        held = self._adverts[client].held
        if held not in self._covers:
            self._covers[held] = cover_of(self.form, self.session, self._holds(client), self._large)
        return self._covers[held]


def disputed(complaints: Mapping[int, Collection[int]], left: Collection[int], tolerated: int) -> dict[int, str]:
    """Returns who is excluded for complaints about envelopes, and why, so that no dispute is left between the others.

    Nobody can tell whether sender or reader lies: a proof would disclose the key to all envelopes of the reader. Two
    honest clients have no dispute with each other, which gives two rules:

    1. A client in dispute with more than `tolerated` others lies, unless more than that many do, and is excluded alone.
    2. For each remaining dispute both sides are excluded, one pair after the other, the client with most disputes
       first. One of the two lies, so f liars exclude at most f honest clients.

    Args:
        complaints: Client -> those whose envelope it cannot open, or says so.
        left: The clients that are left otherwise.
        tolerated: How many clients may be missing at the end.
    """
    disputes: dict[int, set[int]] = {client: set() for client in left}
    for client, accused in complaints.items():
        for peer in set(accused) & disputes.keys() if client in disputes else ():
            disputes[client].add(peer)
            disputes[peer].add(client)
    told = {
        client: f"it is in dispute with {len(peers)} other(s) about envelopes with shares, which more than "
        f"{tolerated} liars would have to cause"
        for client, peers in disputes.items()
        if len(peers) > tolerated
    }

    def open_disputes(client: int) -> list[int]:
        return [] if client in told else [peer for peer in sorted(disputes[client]) if peer not in told]

    while pairs := [client for client in sorted(disputes) if open_disputes(client)]:
        one = max(pairs, key=lambda client: len(open_disputes(client)))
        other = max(open_disputes(one), key=lambda client: len(open_disputes(client)))
        for client, peer in ((one, other), (other, one)):
            sender, reader = (client, peer) if client in complaints.get(peer, ()) else (peer, client)
            told[client] = f"client {reader} says that it cannot open what client {sender} shared: one of the two lies"
    return told
