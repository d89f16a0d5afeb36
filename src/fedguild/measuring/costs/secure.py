"""Bytes of a secure aggregation's messages, from the form of the sums alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedguild.core.accounting import size_bytes
from fedguild.core.payload import Payload, with_part
from fedguild.privacy.secure_sum.form import Form
from fedguild.privacy.secure_sum.graph import degree_of
from fedguild.privacy.secure_sum.levels import capacities
from fedguild.privacy.secure_sum.session import Step, advert_sizes, envelope_bytes, fewest_left
from fedguild.privacy.secure_sum.sizes import SEED_BYTES, SIGNATURE_BYTES
from fedguild.server.secure_round import PART

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def session_bytes(form: Form, clients: int, share: float = 2 / 3) -> tuple[int, int]:
    """Returns the bytes that a client receives and sends in a session without dropouts.

    It is counted as holding every value; a client sends four bytes less for each value that it lacks.

    Args:
        form: All that the round sums (`fedguild.server.secure_round.whole_form`).
        share: `federation.secure_share`, which determines how many dropouts a session provides for.
    """
    requests, answers = _messages(form, clients, share)
    return tuple(sum(_bytes(shapes) for shapes in side.values()) for side in (requests, answers))  # type: ignore[return-value]


def _messages(form: Form, clients: int, share: float) -> tuple[dict[Step, Shapes], dict[Step, Shapes]]:
    byte, number, word = torch.uint8, torch.int32, torch.int64
    near = clients - 1 if form.is_unequal else degree_of(clients)
    sums = (word, (form.word_count,))
    signature = (byte, (SIGNATURE_BYTES,))
    everybody = (number, (clients,))
    opened: Shapes = {"clients": (number, (near + 1,)), "shares": (byte, (near + 1, SEED_BYTES))}
    levels = len(capacities(clients - fewest_left(clients, share)))
    envelopes = (byte, (near, envelope_bytes(levels, form.weight_count)))
    columns = advert_sizes(form.group_count)
    requests: dict[Step, Shapes] = {
        "join": {},
        "share": {"clients": everybody, **{name: (byte, (clients, width)) for name, width in columns.items()}},
        "check": {"clients": everybody, "envelopes": envelopes},
        "weigh": {"clients": everybody},
        "open_weights": {"clients": everybody},
        "send": {"clients": everybody, "sums": sums},
        "agree": {"clients": everybody, "signatures": (byte, (clients, SIGNATURE_BYTES))},
        "open": {"clients": everybody, "agreed": everybody, "signatures": (byte, (clients, SIGNATURE_BYTES))},
    }
    answers: dict[Step, Shapes] = {
        "join": {name: (byte, (width,)) for name, width in columns.items()},
        "share": {"clients": (number, (near,)), "envelopes": envelopes},
        "check": {"complaints": (number, (0,))},
        "weigh": {"masked": sums},
        "open_weights": opened,
        "send": {
            "values": (number, (form.value_count,)),
            "masked": (word, (form.weight_count,)),
            "signature": signature,
        },
        "agree": {"signature": signature},
        "open": opened,
    }
    return requests, answers


def _bytes(shapes: Shapes) -> int:
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in shapes.items()}
    return size_bytes(Payload(with_part(PART, tensors)))
