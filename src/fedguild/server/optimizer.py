"""The server's optimizer: a step with momentum towards the aggregate, in place of the aggregate itself.

S. Reddi et al., "Adaptive Federated Optimization" (FedOpt), ICLR 2021, arXiv 2003.00295, Algorithm 1 with SGD as the
server's optimizer; the momentum as in T.-M. H. Hsu et al. (FedAvgM), arXiv 1909.06335. With theta the state's adapter
before a round, and mean what the method aggregates to:

    v = beta v + (mean - theta);  theta = theta + eta v

eta is `federation.server_step` and beta `federation.server_momentum`. At eta = 1 and beta = 0 the aggregate is returned
as it is, bit for bit, and there is no v. The momentum is in the checkpoint's state, as the part `server_momentum`. The
method does not see it, and clients are not sent it; nor the last round's change, which centered clipping keeps there
(`fedguild.server.robust`).
"""

from __future__ import annotations

import torch

from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.server.method import Method, takes_means

MOMENTUM = "server_momentum"
"""The part of a state with v, by the names of the adapter's tensors that have moved."""
LAST_CHANGE = "last_change"
"""The part of a state with the mean change of its tensors in the last round that trained them, by their whole names."""


def server_step(before: Payload, after: Payload, *, step: float, momentum: float) -> Payload:
    """Returns the next state with the server's step in the adapter, and with the new momentum.

    A tensor that the aggregate left as it was, bit for bit, stays as it is and keeps its momentum: nobody trained it in
    this round, for example the other factor of RoLoRA.

    Args:
        before: The state before the round, with its momentum.
        after: The state that the method aggregated to.
        step: eta > 0.
        momentum: 0 <= beta < 1; without it no v is kept.
    """
    if step == 1.0 and momentum == 0.0:
        return after
    theta, velocity, moved = before.part(ADAPTER), before.part(MOMENTUM), {}
    for name, mean in after.part(ADAPTER).items():
        if torch.equal(mean, theta[name]):
            continue
        change = mean - theta[name]
        if momentum:
            change = change + momentum * velocity[name] if name in velocity else change
            velocity[name] = change
        moved[name] = theta[name] + step * change
    kept = with_part(MOMENTUM, velocity) if momentum else {}
    return Payload({**after.tensors, **with_part(ADAPTER, moved), **kept}, after.scalars)


def own_state(state: Payload) -> Payload:
    """Returns the state as its method knows it; the same object where the server remembers nothing besides."""
    own = {
        name: value for name, value in state.tensors.items() if name.partition("/")[0] not in (MOMENTUM, LAST_CHANGE)
    }
    return state if len(own) == len(state.tensors) else Payload(own, state.scalars)


def takes_steps(method: Method) -> bool:
    """Returns whether the server can step towards the method's mean."""
    return takes_means(method) and not method.facts.not_stepped
