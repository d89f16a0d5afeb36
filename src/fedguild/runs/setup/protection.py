"""A run's protections: one list of filters on the server's side, one on the clients'."""

from __future__ import annotations

import math

from fedguild.engines.coded import CodedEngine
from fedguild.runs.setup.experiment import Experiment, run_identity
from fedguild.server.engine import Engine, FilteredEngine
from fedguild.server.guard import LARGEST_VALUE, NORM_FACTOR, Finite, Held, NormBound, NotRevoked
from fedguild.server.robust import RobustMean
from fedguild.server.round import Filter
from fedguild.server.secure_round import SecureAggregation, unnoted

SPOOL = "spool"
"""The folder in a run's folder with the uploads that are held."""


def server_filters(experiment: Experiment) -> list[Filter]:
    """Returns the filters between the uploads and the method's aggregate, if there are any.

    With real clients there always are, in a simulation only if the config asks for them: its clients run this program's
    own code, and its engines agree bit for bit. Masked uploads cannot be compared. Noise that the server adds already
    bounds every upload, and comparing them would reveal something about them.
    """
    rules, remote, privacy = experiment.config.federation, experiment.remote, experiment.privacy
    if rules.secure:
        return [
            SecureAggregation(
                run_identity(experiment.folder),
                experiment.budgets,
                rules.secure_share,
                rules.secure_clients,
                rules.secure_unheld,
                reported=privacy is None,
                note=unnoted if remote is None else remote.note_session,
            )
        ]
    if privacy is not None and (mean := privacy.mean()) is not None:
        return [mean]
    factor = (None if remote is None else NORM_FACTOR) if rules.norm_factor == "auto" else rules.norm_factor
    compared: list[Filter] = [] if remote is None else [NotRevoked(remote.is_revoked)]
    compared += [] if factor is None else [NormBound(factor)]
    robust: list[Filter] = [] if rules.aggregator == "none" else [RobustMean(rules.aggregator, rules.trim)]
    return [Held(experiment.folder / SPOOL), *compared, Finite(), *robust] if compared or robust else []


def largest_value(experiment: Experiment) -> float | None:
    """Returns the largest magnitude of a value in a valid upload (`RoundSetup.largest_value`)."""
    if experiment.config.privacy.is_central:
        return None
    return math.inf if experiment.remote is None else LARGEST_VALUE


def protected(engine: Engine, experiment: Experiment) -> Engine:
    """Wraps the engine of simulated clients so that their answers pass the filters, or the codec, of the config."""
    federation, privacy = experiment.config.federation, experiment.privacy
    filters = [] if privacy is None else [privacy.answers()]  # noise before anything else sees an upload
    if federation.secure:
        from fedguild.engines.secure import SecureEngine

        budgets, limit = experiment.budgets, federation.max_update_norm
        return SecureEngine(engine, budgets, federation.clients, limit, filters=filters, reported=privacy is None)
    engine = FilteredEngine(engine, filters) if filters else engine
    return engine if federation.wire_dtype == "fp32" else CodedEngine(engine, federation.wire_dtype)
