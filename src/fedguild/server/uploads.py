"""All uploads of a round at once, for servers that take other than means of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.core.errors import FedGuildError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.server.terms import Upload, weight_of


class Once(Iterable[Upload]):
    """A round's uploads as they arrive, which are there only once: a second loop would find none and say nothing.

    Args:
        uploads: The uploads.
    """

    def __init__(self, uploads: Iterator[Upload]) -> None:
        self._uploads: Iterator[Upload] | None = uploads

    def __iter__(self) -> Iterator[Upload]:
        """Returns the uploads.

        Raises:
            FedGuildError: they have been taken already.
        """
        if self._uploads is None:
            raise FedGuildError(
                "The method's `aggregate` goes through the round's uploads twice, but each is there only once, as it "
                "arrives.",
                "Take what is needed in one loop, or keep all: `collected(uploads)` of fedguild.server.uploads.",
            )
        taken, self._uploads = self._uploads, None
        return taken


def collected(uploads: Iterable[Upload]) -> list[Upload]:
    """Returns copies of all uploads in client order, for a sum that needs them all at once."""
    copies = []
    for upload in uploads:  # a comprehension would be a call on Python 3.11
        copies.append(replace(upload, payload=_copy(upload.payload)))
    return sorted(copies, key=lambda upload: (upload.client.index, upload.round))


def shares_of(uploads: Sequence[Upload], weights: Literal["size", "uniform"]) -> list[float]:
    """Returns p_c = w_c / sum w of each upload, with the weights of `weight_of`; empty if no client has an example."""
    each = [weight_of(upload.client, weights)[1] for upload in uploads]
    total = sum(each)
    return [weight / total for weight in each] if total else []


def scaled_products(
    uploads: Sequence[Upload], scale_of: Callable[[Budget], float]
) -> list[tuple[dict[str, Tensor], float]]:
    """Returns (A_c and B_c, p_c s_c) of each upload, as `weighted_product` takes them.

    Args:
        uploads: With LoRA in the part `adapter`.
        scale_of: The scale s_c on the product B A of a budget's clients.

    Returns:
        A pair for each upload; empty if no client has an example.
    """
    shares = shares_of(uploads, "size")
    weighed = zip(uploads, shares, strict=True) if shares else ()
    return [(upload.payload.part(ADAPTER), share * scale_of(upload.client.budget)) for upload, share in weighed]


def _copy(payload: Payload) -> Payload:
    return Payload({name: tensor.detach().clone() for name, tensor in payload.tensors.items()}, payload.scalars)
