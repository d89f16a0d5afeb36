"""Clients' training reports as JSON values, for the engines whose clients run in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedguild.client.cohort import LocalReport
from fedguild.core.errors import UploadError


@dataclass(frozen=True)
class ClientReport:
    """The figures of one client's training that accompany its upload.

    Attributes:
        training: Steps, tokens, examples, loss and time.
        frequency: [L, M] share of its tokens that activated each expert, fp32; None for a dense model.
        peak_memory_bytes: Peak memory of its cohort; None if it was not measured.
    """

    training: LocalReport
    frequency: Tensor | None
    peak_memory_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.training.steps,
            "tokens": self.training.tokens,
            "examples": self.training.examples,
            "loss": self.training.loss,
            "first_loss": self.training.first_loss,
            "seconds": self.training.seconds,
            "frequency": None if self.frequency is None else self.frequency.tolist(),
            "peak_memory_bytes": self.peak_memory_bytes,
            "withheld": self.training.withheld,
            "reference_tokens": self.training.reference_tokens,
            "forward_tokens": self.training.forward_tokens,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClientReport:
        """Returns the report that `to_json` wrote; other keys are ignored.

        Raises:
            UploadError: the values are not of that form.
        """
        try:
            counts = {name: int(values[name]) for name in ("steps", "tokens", "examples")}
            withheld = bool(values.get("withheld", False))
            first_loss = values.get("first_loss")
            training = LocalReport(
                **counts,
                loss=float(values["loss"]),
                seconds=float(values["seconds"]),
                withheld=withheld,
                first_loss=None if first_loss is None else float(first_loss),
                reference_tokens=int(values.get("reference_tokens", 0)),
                forward_tokens=int(values.get("forward_tokens", 0)),
            )
            frequency = None if values["frequency"] is None else torch.tensor(values["frequency"], dtype=torch.float32)
            peak = None if values["peak_memory_bytes"] is None else int(values["peak_memory_bytes"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UploadError(f"A reply has no readable training report ({error}).") from error
        return cls(training, frequency, peak)
