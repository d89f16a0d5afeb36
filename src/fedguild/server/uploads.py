"""Combination of a round's uploads: means of adapters, in the clear or as linear sums, and lists of all uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.payload import ADAPTER, Payload
from fedguild.secure.form import Contribution, Form
from fedguild.server.aggregation import WeightedMean
from fedguild.server.linear import CLIENTS, EXAMPLES, SecureMeans, changes_of, means_of, one, values_of
from fedguild.server.method import Upload

WEIGHT_NAMES: Mapping[Literal["size", "uniform"], str] = {"size": EXAMPLES, "uniform": CLIENTS}
"""How clients are weighed -> the name of their weight in a form, whose sum the server knows."""


def mean_adapter(
    state: Payload, uploads: Iterable[Upload], weights: Literal["size", "uniform"] = "size"
) -> dict[str, Tensor]:
    """Returns the mean of the uploaded adapters, sum_c w_c theta_c / sum_c w_c, or the state's without uploads.

    Args:
        state: The state with the adapter before the round.
        uploads: The uploads with the trained adapters.
        weights: w_c, a client's number of examples, or 1 for a client that has any.
    """
    mean = WeightedMean()
    for upload in uploads:
        mean.add(upload.payload.part(ADAPTER), weight_of(upload, weights))
    return mean.result(state.part(ADAPTER))


def mean_form(shapes: Mapping[str, tuple[int, ...]], weights: Literal["size", "uniform"] = "size") -> Form:
    """Returns the form of `mean_adapter` for secure aggregation: one weight for each client.

    Args:
        shapes: Name -> shape of the tensors of the adapter that are averaged.
        weights: As in `mean_adapter`.
    """
    weight = WEIGHT_NAMES[weights]
    return Form(means_of(ADAPTER, shapes, weight), {weight: 1})


def mean_terms(
    client: ClientInfo, download: Payload, upload: Payload, weights: Literal["size", "uniform"] = "size"
) -> Contribution:
    """Returns a client's terms in the form of `mean_form`: the change of its adapter, and w_c.

    Args:
        client: The client.
        download: What it received; where that has no adapter, the upload's counts as a whole.
        upload: What it has trained.
        weights: As in `mean_adapter`.
    """
    trained, received = upload.part(ADAPTER), download.part(ADAPTER)
    values = changes_of(ADAPTER, trained, received) if received else values_of(ADAPTER, trained)
    return Contribution(values, {WEIGHT_NAMES[weights]: one(weight_of(Upload(0, client, upload), weights))})


def moved_adapter(state: Payload, means: SecureMeans) -> dict[str, Tensor]:
    """Returns the state's adapter, moved by the clients' mean change: `mean_adapter`, from secure means."""
    return means.moved(ADAPTER, state.part(ADAPTER))


def weight_of(upload: Upload, weights: Literal["size", "uniform"]) -> float:
    """Returns a client's weight in an average: its number of examples, or 1; 0 for a client without examples."""
    return float(upload.client.examples) if weights == "size" else float(upload.client.examples > 0)


def collected(uploads: Iterable[Upload]) -> list[Upload]:
    """Returns copies of all uploads in client order, for a sum that needs them all at once."""
    copies = []
    for upload in uploads:  # a comprehension would be a call on Python 3.11
        copies.append(replace(upload, payload=_copy(upload.payload)))
    return sorted(copies, key=lambda upload: (upload.client.index, upload.round))


def shares_of(uploads: Sequence[Upload], weights: Literal["size", "uniform"]) -> list[float]:
    """Returns p_c = w_c / sum w of each upload, with the weights of `weight_of`; empty if no client has an example."""
    each = [weight_of(upload, weights) for upload in uploads]
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
