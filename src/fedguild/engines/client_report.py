"""Clients' training reports as JSON values, for the engines whose clients run in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedguild.client.cohort import LocalReport
from fedguild.errors import UploadError
from fedguild.model.info import ModelInfo
from fedguild.server.validation import ROUNDING
from fedguild.wire.schema import TrainAnswer, read_metadata


@dataclass(frozen=True)
class ClientReport:
    """The figures of one client's training that accompany its upload.

    Attributes:
        training: Steps, tokens, examples, loss and time.
        frequency: [L, M] share of its tokens that activated each expert, fp32; None for a dense model.
        peak_memory_bytes: Peak memory of its cohort; None where it was not measured.
    """

    training: LocalReport
    frequency: Tensor | None
    peak_memory_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values, from which `from_json` restores it exactly."""
        return {
            "steps": self.training.steps,
            "tokens": self.training.tokens,
            "examples": self.training.examples,
            "loss": self.training.loss,
            "seconds": self.training.seconds,
            "frequency": None if self.frequency is None else self.frequency.tolist(),
            "peak_memory_bytes": self.peak_memory_bytes,
            "withheld": self.training.withheld,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClientReport:
        """Returns the report that `to_json` wrote; other keys are ignored.

        What comes from a peer goes through `from_peer`.

        Raises:
            UploadError: the values are not of that form.
        """
        try:
            counts = {name: int(values[name]) for name in ("steps", "tokens", "examples")}
            withheld = bool(values.get("withheld", False))
            training = LocalReport(
                **counts, loss=float(values["loss"]), seconds=float(values["seconds"]), withheld=withheld
            )
            frequency = None if values["frequency"] is None else torch.tensor(values["frequency"], dtype=torch.float32)
            peak = None if values["peak_memory_bytes"] is None else int(values["peak_memory_bytes"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UploadError(f"A reply has no readable training report ({error}).") from error
        return cls(training, frequency, peak)

    @classmethod
    def from_peer(cls, values: Mapping[str, Any], model: ModelInfo) -> ClientReport:
        """Returns the report of a client on another machine, all of whose values are in range.

        Args:
            model: The backbone's description, of which the frequencies must have the shape.

        Raises:
            UploadError: a value is missing, of another type or out of range, or the frequencies are those of another
                model, or those of a layer sum to more than the experts of a token.
        """
        answer = read_metadata(TrainAnswer, values, "A reply has no readable training report")
        expected = (len(model.moe), model.moe[0].num_experts) if model.moe else None
        found = answer.shape()
        if found is not None and found != expected:
            raise UploadError(
                f"A reply reports the activations of {found[0]} layers with {found[1]} experts, but the model "
                f"{f'has {expected[0]} with {expected[1]}' if expected else 'is dense'}."
            )
        report = cls.from_json(values)
        for layer, shares in zip(model.moe, () if report.frequency is None else report.frequency, strict=False):
            total = float(shares.double().sum())
            if total > layer.top_k * (1 + ROUNDING):
                raise UploadError(
                    f"A reply reports activations of '{layer.name}' that sum to {total:.6g}, but a token activates at "
                    f"most {layer.top_k} expert(s)."
                )
        return report
