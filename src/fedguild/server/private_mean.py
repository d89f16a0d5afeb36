"""A mean of the clients' changes with noise, in the place of every upload: central differential privacy.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
Algorithm 1 with flat clipping and the fixed-denominator estimator of section 3:

    theta + (sum_c clip(theta_c - theta) + N(0, (sigma C)^2)) / W

with W the number of uploads that the round wants, which does not depend on any client's data, and equal weights. It
goes onward as every client's adapter, as a mean of equal tensors is that tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedguild.core.errors import UploadError
from fedguild.core.payload import ADAPTER, Payload, digest_of, with_part
from fedguild.privacy.dp.clipping import clipped, with_noise
from fedguild.privacy.dp.noise import Noise
from fedguild.server.round import Onward, Passage
from fedguild.server.terms import Upload


@dataclass(frozen=True)
class PrivateMean:
    """The central mechanism of a run, a filter of the server; holds one upload and the sum.

    The method's aggregate is a mean (`is_client_mean`).

    Attributes:
        clip: C.
        noise_multiplier: sigma.
        noise: The run's noise.
    """

    clip: float
    noise_multiplier: float
    noise: Noise

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        total: dict[str, Tensor] = {}
        kept: list[Upload] = []
        for upload in uploads:
            try:
                change = clipped(change_of(upload.payload, upload.download), self.clip)
            except UploadError as error:
                passage.withdraw(upload, error.message)
                continue
            for name, value in change.items():
                total[name] = total[name] + value if name in total else value
            kept.append(replace(upload, payload=Payload({}, upload.payload.scalars)))
        mean = self._noisy(total, passage.state.part(ADAPTER), passage.outcome.round, passage.wanted)
        return onward(replace(upload, payload=Payload(mean, upload.payload.scalars)) for upload in kept)

    def _noisy(
        self, total: Mapping[str, Tensor], before: Mapping[str, Tensor], round_index: int, wanted: int
    ) -> dict[str, Tensor]:
        """Returns the adapter before the round plus the noisy mean change, in the form of an upload.

        The noise depends on the sum that it hides, through a hash under the noise's key: a round that is repeated with
        other uploads gets other noise, so that two answers never differ by what they hide.
        """
        noise = self.noise.child("round", round_index, digest_of(total))
        noisy = with_noise(total, self.noise_multiplier * self.clip, noise)
        return with_part(
            ADAPTER,
            {name: (before[name].double() + value / wanted).to(torch.float32) for name, value in noisy.items()},
        )


def change_of(upload: Payload, download: Payload) -> dict[str, Tensor]:
    """Returns an uploaded adapter's difference from the one that its client received, in fp64.

    Raises:
        UploadError: the upload has another part, or a tensor that was not received in its shape and so has no change.
    """
    received, change = download.part(ADAPTER), {}
    for whole, tensor in upload.tensors.items():
        part, _, name = whole.partition("/")
        before = received.get(name)
        if part != ADAPTER:
            raise UploadError(f"its upload would release '{whole}', which no privacy noise covers")
        if before is None or before.shape != tensor.shape:
            raise UploadError(f"its upload has '{name}', which the client did not receive, so it has no change to clip")
        change[name] = tensor.double() - before.double()
    return change
