"""Profiles as plain tables, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from fedguild.model.targets import named_targets
from fedguild.report.units import byte_count, duration, flops, si

if TYPE_CHECKING:
    from fedguild.measuring.costs.profile import Profile
    from fedguild.measuring.costs.published import Comparison
    from fedguild.measuring.costs.tiers import Direction, TierProfile
    from fedguild.model.info import ModelInfo
    from fedguild.server.method import ServerCosts

VARIES = {
    "no": "exact",
    "at most": "upper bounds: the payloads depend on the data",
    "mean": "means over the clients: each client's payloads depend on the data",
}


def tables(profile: Profile) -> Iterator[RenderableType]:
    """Yields a profile's tables: tiers, traffic, memory, server, targets."""
    work = profile.workload
    yield (
        f"{profile.method} on {profile.model.name}: {work.examples} examples a client, {work.tokens} tokens a pass in "
        f"sequences of {work.context_tokens}\n"
    )
    yield _tiers(profile)
    yield ""
    yield _traffic(profile)
    yield ""
    yield _memory(profile)
    yield f"\n{_at_once(profile)}"
    yield ""
    yield _server(profile)
    if profile.server.entry.note:
        yield f"\n{profile.server.entry.note}"
    yield ""
    yield _targets(profile.model)


def _tiers(profile: Profile) -> Table:
    shown = _table("Each client, in one round")
    for name in ("tier", "clients", "experts", "rank", "parameters", "active", "trainable", "active trainable"):
        shown.add_column(name, justify="left" if name == "tier" else "right")
    for name in ("forward pass", "training step", "steps", "round forward", "round backward"):
        shown.add_column(name, justify="right")
    for tier in profile.tiers:
        counted = tier.cost
        shown.add_row(
            tier.budget.name,
            str(tier.clients),
            str(tier.plan.active_experts or profile.model.top_k or "–"),
            str(tier.plan.rank),
            si(counted.parameters),
            si(counted.active_parameters),
            si(counted.trainable),
            si(counted.active_trainable),
            flops(tier.flops_forward),
            flops(tier.flops_training_step),
            str(tier.steps),
            flops(tier.flops_round_forward),
            flops(tier.flops_round - tier.flops_round_forward),
        )
    return shown


def _traffic(profile: Profile) -> Table:
    """Returns the bytes by payload part, a column for each; tiers and rounds with the same bytes share a row."""
    rows: dict[tuple[str, Direction], list[str]] = {}
    for tier in profile.tiers:
        for what, direction in _directions(tier):
            rows.setdefault((what, direction), []).append(tier.budget.name)
    parts = sorted({part for _, direction in rows for part in direction.parts})
    shown = _table(f"Bytes by payload part, {_counted(profile)}")
    for name in ("tier", "payload", "in all", *parts):
        shown.add_column(name, justify="left" if name in ("tier", "payload") else "right", overflow="fold")
    for (what, direction), names in rows.items():
        who = "all" if len(names) == len(profile.tiers) else ", ".join(names)
        shown.add_row(who, what, byte_count(direction.bytes), *(_size(direction.parts, part) for part in parts))
    if profile.session is not None:
        down, up = profile.session
        for what, size in (("up in place of it, secure aggregation", up), ("down for it", down)):
            shown.add_row("whoever holds all", what, byte_count(size), *("·" for _ in parts))
    return shown


def _counted(profile: Profile) -> str:
    """Returns how the bytes on the wire are counted."""
    work, kind = profile.workload, VARIES[profile.server.entry.varies]
    if work.wire_dtype is None:
        return f"{'numbers in float32' if work.codec == 'fp32' else f'large tensors in {work.codec}'} ({kind})"
    convention = "as papers count, whatever is sent"
    dtype = str(work.wire_dtype).removeprefix("torch.")
    return f"numbers in {dtype} ({convention if kind == 'exact' else f'{kind}; {convention}'})"


def _directions(tier: TierProfile) -> Iterator[tuple[str, Direction]]:
    for what, first, later in (
        ("up", tier.first_upload, tier.upload),
        ("down", tier.first_download, tier.download),
    ):
        if first == later:
            yield what, later
        else:
            yield f"{what}, first round", first
            yield f"{what}, later", later
    if tier.absent_download and tier.absent_download != tier.download:
        yield "down, after an absence", tier.absent_download


def _size(parts: Mapping[str, int], name: str) -> str:
    return byte_count(parts[name]) if name in parts else "·"


def _memory(profile: Profile) -> Table:
    shown = _table("Peak memory of a client that trains alone (estimate)")
    for name in (
        "tier",
        "weights in",
        "checkpointing",
        "weights",
        "adapter",
        "gradients",
        "optimizer",
        "activations",
        "scratch",
    ):
        shown.add_column(name, justify="left" if name in ("tier", "weights in", "checkpointing") else "right")
    shown.add_column("in all", justify="right")
    for tier in profile.tiers:
        for row in tier.memory:
            estimate = row.estimate
            sizes = (
                estimate.weights_bytes,
                estimate.adapters_bytes,
                estimate.gradients_bytes,
                estimate.optimizer_bytes,
                estimate.activations_bytes,
                estimate.scratch_bytes,
            )
            shown.add_row(
                tier.budget.name,
                row.weights,
                "yes" if row.checkpointing else "no",
                *(byte_count(size) for size in (*sizes, estimate.total_bytes)),
            )
    return shown


def _at_once(profile: Profile) -> str:
    """Returns how many clients `federation.cohort_size: auto` trains at once, by what this machine has free now."""
    from fedguild.engines.cohorts import clients_at_once, free_bytes
    from fedguild.model.backbone import pick_device

    device, most = pick_device("auto"), max(profile.tiers, key=lambda tier: tier.peak_memory.cohort_bytes).peak_memory
    free, weights = free_bytes(device), most.weights_bytes
    if free <= weights:
        return (
            f"federation.cohort_size=auto: none on this machine, whose {byte_count(free)} free do not hold the "
            f"{byte_count(weights)} of weights"
        )
    fits = clients_at_once(most.cohort_bytes, profile.workload.tokens, free - weights, device)
    count = min(fits, profile.server.participants)
    return (
        f"federation.cohort_size=auto: {count} at once on this machine (estimate: {byte_count(most.cohort_bytes)} each "
        f"for {profile.workload.tokens} tokens, in half of the {byte_count(free - weights)} left)"
    )


def _targets(model: ModelInfo) -> Table:
    """Returns what each target names in the model; where routers and experts cannot be one, a row says so."""
    shown = _table(f"What method.targets can name in {model.name}")
    for name in ("target", "weights", "parameters", "names"):
        shown.add_column(name, justify="left" if name in ("target", "names") else "right", overflow="fold")
    for named in named_targets(model):
        names = "" if named.target == "router" else ", ".join(named.leaves)
        shown.add_row(named.target, str(named.weights), si(named.parameters), names)
    if model.undescribed:
        frozen = sum(moe.expert_parameters + moe.router_parameters for moe in model.undescribed)
        reason = f"frozen: the family '{model.family}' has no description"
        shown.add_row("router and experts", str(len(model.undescribed)), si(frozen), reason)
    return shown


def _server(profile: Profile) -> Table:
    server = profile.server
    shown = _table(f"Server, C = {server.participants} clients in a round, n = the size of an upload")
    shown.add_column("what")
    shown.add_column("figure")
    shown.add_row("memory", server.entry.memory)
    shown.add_row("time", server.entry.time)
    shown.add_row("state between rounds", byte_count(server.state_bytes))
    shown.add_row("memory while aggregating, about", byte_count(server.memory_bytes))
    shown.add_row("uploads of a round", byte_count(server.received_bytes))
    shown.add_row("running mean over them, on this machine", duration(server.running_sum_seconds))
    return shown


HEADINGS = ("where", "what", "settings", "published", "ours", "off", "verdict")


def published_tables(rows: Sequence[Comparison]) -> Iterator[RenderableType]:
    """Yields a table for every paper: its figures, our settings, our figures, the deviations and their reasons."""
    for paper, comparisons in _by_paper(rows):
        shown = _table(paper)
        for name in HEADINGS:
            shown.add_column(name, justify="right" if name in HEADINGS[3:6] else "left", overflow="fold")
        for row in comparisons:
            shown.add_row(*_cells(row))
        yield shown
        yield ""
        yield from _reasons(comparisons)
        yield ""


def published_markdown(rows: Sequence[Comparison]) -> str:
    """Returns the published figures in Markdown, as in docs/methods/costs.md."""
    lines = []
    for paper, comparisons in _by_paper(rows):
        lines += [f"## {paper}", "", _markdown_row(HEADINGS), _markdown_row(["---"] * len(HEADINGS))]
        lines += [_markdown_row(_cells(row)) for row in comparisons]
        reasons = list(_reasons(comparisons))
        lines += ["", *(f"- {reason}" for reason in reasons), *([""] if reasons else [])]
    return "\n".join(lines)


def _by_paper(rows: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    papers = dict.fromkeys(row.claim.paper for row in rows)
    return [(paper, [row for row in rows if row.claim.paper == paper]) for paper in papers]


def _reasons(rows: Sequence[Comparison]) -> Iterator[str]:
    """Yields the reasons why published figures cannot be reproduced, each once."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.claim.why:
            by_reason.setdefault((row.claim.where, row.claim.why), []).append(row.claim.what)
    for (where, why), what in by_reason.items():
        yield f"{where}, {'; '.join(dict.fromkeys(what))}: {why}."


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Comparison) -> tuple[str, ...]:
    claim = row.claim
    large = max(claim.published, row.ours) >= 1e5
    shown = [si(value) if large else f"{value:,.2f}" for value in (claim.published, row.ours)]
    return (
        claim.where,
        f"{claim.what}: {claim.quantity}",
        claim.settings,
        *shown,
        f"{row.deviation:+.1%}",
        row.verdict,
    )


def _table(title: str) -> Table:
    return Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left")


def server_markdown(servers: Mapping[str, ServerCosts]) -> str:
    """Returns every method's order of memory and time in Markdown, as in docs/methods/costs.md."""
    heading = ("method", "memory", "time", "bytes of a profile")
    rows = [
        (f"`{name}`", entry.memory, entry.time, VARIES[entry.varies].partition(":")[0])
        for name, entry in sorted(servers.items())
    ]
    return "\n".join(map(_markdown_row, (heading, ["---"] * len(heading), *rows)))
