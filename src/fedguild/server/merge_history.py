"""Server half of merging: the history of a run's changes to its backbone, as a part of the state.

Every round that changes the backbone appends a version, a pair of factors for each module with the
scale folded in: W_t = W_0 + sum_{v <= t} B_v A_v. The state keeps all of them, because a client may join at any time. A
client whose upload contributed to the newest version holds all earlier ones and receives only the newest; all
others receive the whole history (`fedguild.client.merge_ledger` is the client half).

When the factors hold more values than the weights that they change, the versions before the newest are folded into one
dense change, by the server and by each site that holds them (`fedguild.model.folding`): W_t = W_0 + D + sum B_v A_v
over the versions since. The state, a newcomer's download and a site's disk stay below a bound however long a run is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import LocalWork
from fedguild.client.merge_ledger import DIGEST, FOLDED, MERGE, VERSION, by_version, digest, merge_version
from fedguild.core.packing import pack
from fedguild.core.payload import Payload, Scalar, with_part
from fedguild.model.folding import CHANGE, dense_sizes, folded
from fedguild.server.low_rank import Factors, named
from fedguild.server.schema import Schema
from fedguild.server.terms import Upload

HOLDERS, HELD = "server/merge_holders", "merge_held"
"""In the state: the indices of the clients that hold every version up to the scalar `merge_held` (`HELD`)."""

HISTORY_COST = (
    "the state keeps every round's merge, or the dense change once that is smaller; a client that missed rounds "
    "downloads it"
)
FLOOR = 1 << 24
"""Values of factors (64 MiB in fp32) that are never folded: a small model's exact factors are worth their place."""


def no_merges() -> Payload:
    """Returns the part of a state for an unchanged backbone."""
    return Payload({HOLDERS: torch.zeros(0, dtype=torch.int64)}, {VERSION: 0, HELD: 0, DIGEST: ""})


def merges(state: Payload) -> dict[str, Tensor]:
    """Returns all changes, `{version}/{module}.lora_A` and `.lora_B`, or `.change`, as `Backbone.merged` takes them."""
    return state.part(MERGE)


def part_of(state: Payload) -> Payload:
    """Returns a state's tensors and scalars about merges only."""
    tensors = {name: value for name, value in state.tensors.items() if name.startswith(f"{MERGE}/") or name == HOLDERS}
    return Payload(tensors, _scalars(state, VERSION, HELD, DIGEST, FOLDED))


def delivery(state: Payload, client: ClientInfo) -> Payload:
    """Returns a download's part about merges: the versions that the client lacks, and the newest version's number."""
    held = int(state.scalars[HELD]) if client.index in state.tensors[HOLDERS].tolist() else 0
    lacking = {
        f"{version}/{name}": value
        for version, factors in by_version(merges(state)).items()
        if version > held
        for name, value in factors.items()
    }
    return Payload(with_part(MERGE, lacking), _scalars(state, VERSION, DIGEST, FOLDED))


def unheld(state: Payload) -> Payload:
    """Returns a run's state to which it goes back: every client gets the whole history, as sites may have folded it."""
    nobody = {HOLDERS: torch.zeros(0, dtype=torch.int64)} if HOLDERS in state.tensors else {}
    return Payload({**state.tensors, **nobody}, state.scalars)


def _scalars(state: Payload, *names: str) -> dict[str, Scalar]:
    return {name: state.scalars[name] for name in names if name != FOLDED or name in state.scalars}


def echoed(uploads: Iterable[Payload], work: Iterable[LocalWork]) -> list[Payload]:
    """Returns uploads of a cohort with what `echo` has of each client's download in place of scalars."""
    return [Payload(upload.tensors, echo(one.download)) for upload, one in zip(uploads, work, strict=True)]


def with_echo(schema: Schema, download: Payload) -> Schema:
    """Returns the schema of an upload that `echoed` returned."""
    return Schema(schema.tensors, echo(download))


def echo(download: Payload) -> dict[str, Scalar]:
    """Returns the scalars of an upload with the version that the client trained on and therefore holds."""
    return {VERSION: merge_version(download)}


def appended(state: Payload, change: Mapping[str, Factors], uploads: Iterable[Upload]) -> Payload:
    """Returns the merges of a state with one more version.

    Args:
        state: The state before.
        change: Module -> factors, the scale folded in; without ranks (R = 0) or modules there is no new version.
        uploads: The uploads that contributed to the change. A late client trained on an older version than the state's,
            and does not hold the state's.
    """
    before = part_of(state)
    version = int(before.scalars[VERSION])
    holders = sorted(upload.client.index for upload in uploads if upload.payload.scalars.get(VERSION) == version)
    tensors, scalars = dict(before.tensors), {**before.scalars, HELD: version}
    factors = named({module: pair for module, pair in change.items() if pair.rank})
    if factors:
        kept = by_version(merges(before))
        if _outweighs(kept):
            dense = folded(kept.values())
            tensors = {HOLDERS: tensors[HOLDERS], **with_part(f"{MERGE}/{version}", dense)}
            scalars |= {FOLDED: version, DIGEST: digest("", _content(dense))}
        scalars |= {VERSION: version + 1, DIGEST: digest(str(scalars[DIGEST]), _content(factors))}
        tensors |= with_part(f"{MERGE}/{version + 1}", factors)
    return Payload({**tensors, HOLDERS: torch.tensor(holders, dtype=torch.int64)}, scalars)


def _outweighs(kept: Mapping[int, Mapping[str, Tensor]]) -> bool:
    """Whether the factors of the versions hold more values than the dense change of their modules."""
    factors = sum(
        value.numel() for version in kept.values() for name, value in version.items() if not name.endswith(CHANGE)
    )
    return factors > max(FLOOR, sum(dense_sizes(kept.values()).values()))


def _content(factors: Mapping[str, Tensor]) -> bytes:
    """Returns a version as bytes, or only its names if tensors have shapes but no values, as in a profile."""
    if any(value.is_meta for value in factors.values()):
        return "".join(sorted(factors)).encode()
    return pack(factors, {})
