"""A profile as one flat object for each tier, as `fedguild profile --json` prints it; sizes in bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fedguild.core.codec import Codec
from fedguild.measuring.costs.profile import Profile
from fedguild.measuring.costs.tiers import TierProfile

WIRE: dict[Codec, str] = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
VARIES = {"at most": "at most", "mean": "mean over the clients"}


def as_rows(profile: Profile) -> list[dict[str, Any]]:
    return [_row(profile, tier) for tier in profile.tiers]


def _row(profile: Profile, tier: TierProfile) -> dict[str, Any]:
    workload, entry = profile.workload, profile.server.entry
    counted = workload.wire_dtype
    return {
        "tier": tier.budget.name,
        "method": profile.method,
        "model": profile.model.name,
        "clients": tier.clients,
        "active_experts": tier.plan.active_experts or profile.model.top_k,
        "rank": tier.plan.rank,
        "parameters_total": tier.cost.parameters,
        "parameters_active": tier.cost.active_parameters,
        "trainable_total": tier.cost.trainable,
        "trainable_active": tier.cost.active_trainable,
        "examples": workload.examples,
        "steps_per_round": tier.steps,
        "tokens_per_pass": workload.tokens,
        "context_tokens": workload.context_tokens,
        "flops_forward": tier.flops_forward,
        "flops_training_step": tier.flops_training_step,
        "flops_round_forward": tier.flops_round_forward,
        "flops_round_backward": tier.flops_round - tier.flops_round_forward,
        "flops_round": tier.flops_round,
        "wire_dtype": WIRE[workload.codec] if counted is None else str(counted).removeprefix("torch."),
        "bytes_are": {"no": "exact" if counted is None else "as papers count", **VARIES}[entry.varies],
        "upload_bytes": tier.upload.bytes,
        "upload_least_bytes": tier.upload.least_bytes,
        "upload_parts": tier.upload.parts,
        "download_bytes": tier.download.bytes,
        "download_parts": tier.download.parts,
        "absent_download_bytes": tier.absent_download.bytes if tier.absent_download else None,
        "absent_download_parts": tier.absent_download.parts if tier.absent_download else None,
        "first_round": {
            "upload_bytes": tier.first_upload.bytes,
            "upload_parts": tier.first_upload.parts,
            "download_bytes": tier.first_download.bytes,
            "download_parts": tier.first_download.parts,
        },
        "session": None
        if profile.session is None
        else dict(zip(("down_bytes", "up_bytes"), profile.session, strict=True)),
        "counted_in_round": entry.rounds,
        "peak_memory_bytes": tier.peak_memory.total_bytes,
        "memory": [
            {
                "weights": row.weights,
                "checkpointing": row.checkpointing,
                **asdict(row.estimate),
                "total_bytes": row.estimate.total_bytes,
            }
            for row in tier.memory
        ],
        "server": {
            "participants": profile.server.participants,
            "memory_order": entry.memory,
            "time_order": entry.time,
            "state_bytes": profile.server.state_bytes,
            "memory_bytes": profile.server.memory_bytes,
            "received_bytes": profile.server.received_bytes,
            "running_sum_seconds": profile.server.running_sum_seconds,
        },
        "note": entry.note,
    }
