"""Answers to a few held-out examples, before and after training: `samples.json` in a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedguild.core.errors import CheckpointError
from fedguild.core.files import write_json
from fedguild.core.layout import SAMPLES


class Sample(BaseModel):
    """What the global model answers at one budget to one example.

    Attributes:
        round: The round after which it was asked; 0 is before training.
        likeliest: The choice with the highest likelihood; empty for an example without choices.
        generated: The generated text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    round: int
    budget: str
    prompt: str
    reference: str
    likeliest: str = ""
    generated: str


_SAMPLES: TypeAdapter[list[Sample]] = TypeAdapter(list[Sample])


def write_samples(folder: Path, samples: Sequence[Sample]) -> None:
    """Writes the answers after a round besides those before training; answers after other rounds are dropped.

    Raises:
        FedGuildError: the file cannot be written.
    """
    rounds = {sample.round for sample in samples}
    before = [sample for sample in read_samples(folder) if sample.round == 0 and 0 not in rounds]
    write_json(folder / SAMPLES, _SAMPLES.dump_python([*before, *samples], mode="json"))


def read_samples(folder: Path) -> list[Sample]:
    """Returns the answers in a run's folder, in order of writing; empty if it has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / SAMPLES
    if not path.exists():
        return []
    try:
        return _SAMPLES.validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} does not hold a run's answers: {str(error).splitlines()[0]}.") from error
