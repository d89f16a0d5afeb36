"""Protection of a run's aggregate: a guard, secure aggregation, a private mean, or none."""

from __future__ import annotations

from fedguild.runs.setup.experiment import Experiment, run_identity
from fedguild.server.guard import LARGEST_VALUE, NORM_FACTOR, Guard
from fedguild.server.private_mean import PrivateMean
from fedguild.server.secure_round import SecureAggregation, unnoted

SPOOL = "spool"
"""The folder in a run's folder with the uploads that a guard holds."""


def protection_of(experiment: Experiment) -> Guard | SecureAggregation | PrivateMean | None:
    """Returns the protection between the uploads and the method's aggregate, if there is one.

    With real clients there always is, in a simulation only if the config asks for it: its clients run this program's
    own code, and its engines agree bit for bit. A guard compares uploads. Masked uploads cannot be compared. Noise that
    the server adds already bounds every upload, and comparing them would reveal something about them.
    """
    rules, real, privacy = experiment.config.federation, experiment.remote is not None, experiment.privacy
    if rules.secure:
        return SecureAggregation(
            run_identity(experiment.folder),
            experiment.budgets,
            rules.secure_share,
            rules.secure_clients,
            rules.secure_unheld,
            reported=privacy is None,
            note=unnoted if experiment.remote is None else experiment.remote.note_session,
        )
    if privacy is not None and (mean := privacy.mean()) is not None:
        return mean
    factor = (NORM_FACTOR if real else None) if rules.norm_factor == "auto" else rules.norm_factor
    if not real and factor is None and rules.aggregator == "none":
        return None
    return Guard(
        experiment.folder / SPOOL,
        norm_factor=factor,
        robust=rules.aggregator,
        trim=rules.trim,
        largest_value=LARGEST_VALUE if real else None,
        revoked=experiment.remote.is_revoked if experiment.remote is not None else lambda client: False,
    )
