"""A run's protections: one list of filters on the server's side, one on the clients'."""

from __future__ import annotations

import math

from fedguild.config import Config
from fedguild.core.layout import SPOOL
from fedguild.core.progress import unnoted
from fedguild.engines.coded import CodedEngine
from fedguild.runs.setup.experiment import Experiment, run_identity
from fedguild.server.engine import Engine, FilteredEngine
from fedguild.server.guard import FEWEST_COMPARED, LARGEST_VALUE, NORM_FACTOR, Finite, Held, NormBound, NotRevoked
from fedguild.server.method import Method, takes_means
from fedguild.server.robust import Aggregator, RobustMean, left_out
from fedguild.server.round import Filter
from fedguild.server.secure_round import SecureAggregation


def aggregator_of(config: Config, method: Method, *, real: bool) -> Aggregator | None:
    """Returns the robust estimate that a run takes in place of the method's means; None for its own aggregate.

    Args:
        real: Whether the clients train on their own machines.
    """
    federation, chosen = config.federation, config.federation.aggregator
    if chosen != "auto":
        return None if chosen == "none" else chosen
    sees_uploads = not federation.secure and not config.privacy.is_central
    compared = federation.wanted_uploads >= FEWEST_COMPARED and takes_means(method)
    return "trimmed_mean" if real and sees_uploads and compared else None


def what_a_member_can_do(config: Config, method: Method) -> str:
    """Returns what limits a hostile member of a run with real clients, a sentence for its first lines."""
    federation, clients = config.federation, config.federation.wanted_uploads
    if federation.secure:
        return (
            "Aggregator: masked sums. Nobody sees a single upload, so no robust aggregator and no bound on the change "
            "is possible: one member can move the model by any amount."
        )
    if config.privacy.is_central:
        return "Aggregator: the mean of clipped changes, with noise: a member counts as much as any other."
    robust = aggregator_of(config, method, real=True)
    factor = NORM_FACTOR if federation.norm_factor == "auto" else federation.norm_factor
    bound = "nothing bounds the norm of a change" if factor is None else f"a change counts up to {factor:g} medians"
    if robust is not None:
        out = f", {left_out(clients, federation.trim)} clients left out at either end" * (robust == "trimmed_mean")
        return f"Aggregator: {robust}{out}; {bound}."
    if clients < FEWEST_COMPARED:
        return f"Aggregator: that of {method.name}. With {clients} client(s) a round nothing bounds what one can do."
    kind = "the mean" if takes_means(method) else f"that of {method.name}, which is no mean and has no robust form"
    return f"Aggregator: {kind}; {bound}."


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
    aggregator = aggregator_of(experiment.config, experiment.method, real=remote is not None)
    robust: list[Filter] = [] if aggregator is None else [RobustMean(aggregator, rules.trim)]
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
