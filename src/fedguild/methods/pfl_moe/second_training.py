"""A second training of the same clients within a round, in the same slots."""

from __future__ import annotations

from fedguild.client.cohort import Cohort
from fedguild.config.training import TrainingSettings
from fedguild.core.seeding import derive


def second_training(cohort: Cohort, settings: TrainingSettings) -> Cohort:
    """Returns the same clients in the same slots, for a training beside the round's own.

    Its optimizer and its reports are new; `add_cost` adds the reports. Its held-out examples, batches and dropout are
    drawn anew.

    Args:
        cohort: The clients.
        settings: The settings of this training.

    Raises:
        ConfigError: the cohort trains with differential privacy per example, whose account is for one training.
    """
    cohort.require_not_private("trains twice in a round")
    return Cohort(
        cohort.model,
        cohort.work,
        settings,
        round_index=cohort.round,
        seed=derive(cohort.seed, "personal"),
        pad_id=cohort.pad_id,
    )


def add_cost(cohort: Cohort, second: Cohort) -> None:
    """Adds a second training's examples and tokens, those only read too, to a cohort's reports; steps and loss stay.

    Args:
        cohort: The clients.
        second: What `second_training` returned, after its training.
    """
    for report, more in zip(cohort.reports, second.reports, strict=True):
        report.tokens += more.tokens
        report.examples += more.examples
        report.forward_tokens += more.forward_tokens
