"""The round, the same on every engine and for every method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing

from fedguild.client.budget import ClientInfo
from fedguild.core.payload import Payload
from fedguild.server.divergence import require_finite
from fedguild.server.engine import Task
from fedguild.server.intake import Intake
from fedguild.server.method import returned
from fedguild.server.optimizer import own_state, server_step
from fedguild.server.round import Outcome, RoundSetup
from fedguild.server.uploads import Once


def run_round(
    number: int,
    state: Payload,
    clients: Sequence[ClientInfo],
    setup: RoundSetup,
    accepted_before: Collection[int] = (),
) -> Outcome:
    """Runs one round.

    Uploads are validated as they arrive and aggregated as running sums, so that the server holds one at a time (and
    those of late clients): first those of the first attempt in client order, then those of each retry, then late ones.
    One that fails validation is left out and recorded; none is aggregated twice.

    Args:
        number: The round, from 1.
        state: The state before the round.
        clients: All clients that could take part.
        setup: What all rounds of the run have in common.
        accepted_before: `Outcome.accepted` of the round before, whose uploads `state` holds.

    Raises:
        DivergedError: every upload has NaN or infinity; the earlier state is unchanged.
        QuorumError: there were too few valid uploads; the earlier state is unchanged.
        CheckpointError: the state, before the round or after it, has NaN or infinity.
    """
    method, model, rules, own = setup.method, setup.model, setup.rules, own_state(state)
    require_finite(state, f"before round {number}")
    # sample
    asked = setup.sampled(number, clients)
    outcome = Outcome(number, state, asked)
    # download
    with outcome.clock.phase("download"):
        tasks = [Task(number, client, method.download(own, model, client)) for client in asked]
    # train and validate: an upload after the other, as the aggregate takes them; closing ends the engine's work
    intake = Intake(setup, outcome, tasks, setup.wanted(len(clients)), accepted_before)
    with outcome.clock.phase("aggregate"), closing(intake.uploads()) as uploads:
        # aggregate
        after = returned(method, "aggregate", intake.onward(own)(Once(uploads)))
        outcome.state = server_step(state, after, step=rules.server_step, momentum=rules.server_momentum)
    # record
    intake.close()
    require_finite(outcome.state, f"after round {number}")
    return outcome
