"""The published figures of UB-SMoE, FLAME and FedAMoLE, as data. See `measuring/costs/published.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedguild.measuring.costs.published import MB, MIB, Claim, Quantity, Setup

UB_SMOE, FLAME, FEDAMOLE = "UB-SMoE", "FLAME", "FedAMoLE"
OLMOE, OLMO, LLAMA, SWITCH = "olmoe-1b-7b", "olmo-1b", "llama-3.2-1b", "switch-base-16"
WITHOUT_ROUTER, WITH_ROUTER = ("attention", "experts"), ("attention", "router", "experts")
BY_RANK = ((8, 20), (8, 12), (8, 8), (8, 6)) * 2  # UB-SMoE's eight clients under a rank-based method
BY_EXPERTS = ((8, 20), (4, 20), (2, 20), (1, 20)) * 2
ROUNDED = (
    "the paper takes P_a rounded to 0.1 billion, as in Table 2, and adds 2.1 to 2.4 GFLOP beyond LoRA's own that it "
    "does not explain"
)
TWO_FIGURES = (
    "the paper gives the same client (K = 8, r = 20) 8.25e11 FLOPs in these rows and 7.56e11 in those by rank; no "
    "number of tokens fits both"
)
NOT_LINEAR = "LoRA's count is linear in the rank and in K: the paper's own rows at lower budgets give ours"


def _lora(
    model: str,
    active: int,
    rank: int,
    targets: tuple[str, ...] = WITHOUT_ROUTER,
    changes: tuple[tuple[str, Any], ...] = (),
) -> Setup:
    """LoRA with some active experts; FLAME, UB-SMoE and FedIT have the same cost in it."""
    options = (("rank", rank), ("targets", targets), ("active_experts", "budget" if active else "model"))
    return Setup(model, "fedit", options, ((active, rank),), changes)


def _table_13() -> list[Claim]:
    """UB-SMoE, Table 13: active trainable parameters."""
    rows: list[tuple[str, float, float, Setup, str]] = [
        (f"OLMoE, K = {active}, r = 20", published, digit, _lora(OLMOE, active, 20), why)
        for active, published, digit, why in (
            (1, 8.19e6, 1e4, ""),
            (2, 1.11e7, 1e5, ""),
            (4, 1.70e7, 1e5, ""),
            (8, 2.57e7, 1e5, NOT_LINEAR),
        )
    ]
    rows += [
        (f"OLMoE, K = 8, r = {rank}", published, digit, _lora(OLMOE, 8, rank), why)
        for rank, published, digit, why in ((6, 8.65e6, 1e4, ""), (8, 1.15e7, 1e5, ""), (12, 1.63e7, 1e5, NOT_LINEAR))
    ]
    rows += [
        (f"OLMo-1B, r = {rank}", published, digit, _lora(OLMO, 0, rank, ("attention", "mlp")), "")
        for rank, published, digit in ((12, 9.04e6, 1e4), (16, 1.21e7, 1e5), (24, 1.81e7, 1e5), (40, 3.01e7, 1e5))
    ]
    claims = [
        Claim(UB_SMOE, "Table 13", what, "active trainable", published, digit, setup, "no LoRA on routers", why=why)
        for what, published, digit, setup, why in rows
    ]
    share: Quantity = "forward FLOPs, % of those with all experts active"
    claims += [
        Claim(
            UB_SMOE,
            "Table 13",
            f"OLMoE, K = {active}, r = 20",
            share,
            round(100 * published / 8.25e11, 1),
            0.1,
            _lora(OLMOE, active, 20),
            "no LoRA on routers",
            why=TWO_FIGURES,
        )
        for active, published in ((4, 5.95e11), (2, 4.72e11), (1, 4.02e11))
    ]
    router, wide = _lora(OLMOE, 1, 20, WITH_ROUTER), _lora(OLMOE, 1, 20, changes=(("intermediate_size", 2048),))
    return [
        *claims,
        replace(claims[0], setup=router, settings="LoRA on routers (the text names `gate` as a target)"),
        replace(claims[0], setup=wide, settings="experts 2048 wide (the text; the config class's default)"),
    ]


def _table_15() -> list[Claim]:
    """UB-SMoE, Table 15: mean traffic of a client and round."""

    def claim(what: str, quantity: Quantity, published: float, digit: float, setup: Setup, **other: Any) -> Claim:
        settings = other.pop("settings", "MiB in bf16, no LoRA on routers")
        unit = other.pop("unit", MIB)
        return Claim(UB_SMOE, "Table 15", what, quantity, published, digit, setup, settings, unit, **other)

    targets = ("targets", WITHOUT_ROUTER)
    ours = Setup(OLMOE, "ub-smoe", (("rank", 20), targets, ("send_pseudo_gradient", "always")), BY_EXPERTS, rounds=2)
    saving = replace(ours, options=(("rank", 20), targets))
    fp32 = replace(ours, wire=torch.float32)
    routers = replace(ours, options=(("rank", 20), ("targets", WITH_ROUTER), ("send_pseudo_gradient", "always")))
    a3smoe = Setup(OLMOE, "a3smoe", (("rank", 20), targets), BY_EXPERTS)
    hetlora = Setup(OLMOE, "hetlora", (("rank", 20), targets), BY_RANK)
    flexlora = replace(hetlora, method="flexlora")
    flora = Setup(OLMOE, "flora", (targets,), BY_RANK, rounds=2)
    florist = Setup(OLMOE, "florist", (targets, ("threshold", 1.0)), BY_RANK, rounds=2)
    return [
        claim("UB-SMoE", "upload", 370, 1, ours),
        claim("UB-SMoE", "upload", 370, 1, ours, unit=MB, settings="MB of 10^6 bytes in bf16"),
        claim("UB-SMoE", "upload", 370, 1, fp32, settings="MiB in fp32, as the wire carries them"),
        claim("UB-SMoE", "upload", 370, 1, routers, settings="MiB in bf16, LoRA on routers"),
        claim("UB-SMoE", "download", 730, 1, ours, settings="MiB in bf16, pseudo-gradient to everybody, experts only"),
        claim(
            "UB-SMoE",
            "download",
            730,
            1,
            saving,
            settings="MiB in bf16, pseudo-gradient derived by the client (our default)",
            why="not the paper's protocol: what our default saves",
        ),
        claim("A3SMoE", "upload", 370, 1, a3smoe),
        claim("A3SMoE", "download", 370, 1, a3smoe),
        claim("HetLoRA", "upload", 212.75, 0.01, hetlora, settings="MiB in bf16, before any pruning"),
        claim("HetLoRA", "download", 212.75, 0.01, hetlora, settings="MiB in bf16, before any pruning"),
        claim("FlexLoRA", "upload", 212.75, 0.01, flexlora),
        claim("FlexLoRA", "download", 212.75, 0.01, flexlora),
        claim("FLoRA", "upload", 212.75, 0.01, flora),
        claim(
            "FLoRA",
            "download",
            212.75,
            0.01,
            flora,
            why="clients get the stack of all factors, of rank 2 (20 + 12 + 8 + 6) = 92; the paper counts one upload",
        ),
        claim("FLoRIST", "upload", 212.75, 0.01, florist),
        claim(
            "FLoRIST",
            "download",
            370,
            1,
            florist,
            settings="MiB in bf16, threshold 1: nothing is cut",
            why="the pair's rank follows the threshold and the data, up to 92; 370 MiB is a pair of rank 20",
        ),
    ]


def _flame() -> list[Claim]:
    """FLAME, Tables 1 and 2: parameters and FLOPs of 128 tokens."""
    claims = []
    for active, parameters, trained, table_1, share, table_2 in (
        (8, 1.3e9, 30e6, 342.8, 100.0, 332.8),
        (4, 0.9e9, 18e6, 237.2, 69.2, 230.4),
        (2, 0.7e9, 12e6, 184.4, 53.8, 179.2),
        (1, 0.6e9, 9e6, 158.0, 46.1, 153.6),
    ):
        what, setup = f"OLMoE, k = {active}, r = 20", _lora(OLMOE, active, 20, WITH_ROUTER)
        rows: list[tuple[str, Quantity, float, float, float, str]] = [
            ("Table 1", "active parameters", parameters, 1e8, 1, ""),
            ("Table 1", "active trainable", trained, 1e6, 1, ""),
            ("Table 1", "forward FLOPs, % of those with all experts active", share, 0.1, 1, ""),
            ("Table 1", "forward FLOPs", table_1, 0.1, 1e9, ROUNDED),
            ("Table 2", "forward FLOPs of P_a rounded", table_2, 0.1, 1e9, ""),
        ]
        claims += [
            Claim(FLAME, where, what, quantity, published, digit, setup, "LoRA on routers", unit, why)
            for where, quantity, published, digit, unit, why in rows
        ]
    without = _lora(OLMOE, 1, 20)
    claims.append(
        Claim(FLAME, "Table 1", "OLMoE, k = 1, r = 20", "active trainable", 9e6, 1e6, without, "no LoRA on routers")
    )
    for rank, published in ((6, 58e6), (8, 78e6), (12, 118e6), (20, 198e6)):
        why = NOT_LINEAR.replace(" and in K", "") if rank > 8 else ""
        setup = _lora(OLMOE, 8, rank, WITH_ROUTER)
        what = f"OLMoE, k = 8, r = {rank}"
        claims.append(Claim(FLAME, "Table 1", what, "trainable", published, 1e6, setup, "LoRA on routers", why=why))
    for rank, published in ((12, 9e6), (16, 12e6), (24, 18e6), (40, 30e6)):
        setup = _lora(OLMO, 0, rank, ("attention", "mlp"))
        claims.append(
            Claim(FLAME, "Table 1", f"OLMo-1B, r = {rank}", "trainable", published, 1e6, setup, "attention and MLP")
        )
    untied = _lora(OLMO, 0, 12, ("attention", "mlp"), (("tie_word_embeddings", False),))
    tied = replace(untied, changes=())
    embeddings = (
        (untied, "input and output embedding counted apart", ""),
        (tied, "as published: one embedding for both", "the model has one embedding, which the paper counts twice"),
    )
    return [
        *claims,
        *(
            Claim(FLAME, "Table 1", "OLMo-1B", "parameters", 1.3e9, 1e8, setup, settings, why=why)
            for setup, settings, why in embeddings
        ),
    ]


def _fedamole() -> list[Claim]:
    """FedAMoLE, Tables 2 and 4: traffic of a client and round."""
    lora = (("rank", 8), ("targets", ("q_proj", "v_proj")))
    ten = ((0, 8),) * 10
    rows: list[tuple[str, float, float, Setup, str, str]] = [
        (f"FedAMoLE, {experts} experts", up, down, Setup(LLAMA, "fedamole", (("experts", experts),), ten), "", "")
        for experts, up, down in ((15, 7.59, 7.59), (20, 9.24, 9.23), (25, 10.88, 10.87), (30, 12.52, 12.51))
    ]
    prompt = Setup(LLAMA, "fedprompt", (("tokens", 37),), rounds=2, wire=torch.float32)
    encoder = Setup(LLAMA, "fedptuning", (("tokens", 20), ("width", 1024)), wire=torch.float32)
    quirk = "the released code sends the encoder's output in place of the encoder; FedPTuning sends the encoder"
    output = replace(prompt, options=(("tokens", 20),))
    rows += [
        ("FedIT", 1.64, 1.64, Setup(LLAMA, "fedit", lora), "", ""),
        ("FDLoRA", 1.64, 1.64, Setup(LLAMA, "fdlora", lora), "", ""),
        ("FedPrompt", 0.29, 0.29, prompt, "MiB in fp32, a prompt of 37 tokens", ""),
        ("FedPTuning", 0.16, 0.16, output, "MiB in fp32, a bare prompt of 20 tokens", ""),
        ("FedPTuning", 0.16, 0.16, encoder, "MiB in fp32, the prompt's encoder", quirk),
    ]
    switch = Setup(SWITCH, "fedamole", (("experts", 30), ("targets", ("q", "v"))), ten, wire=torch.float32)
    reading = "MiB in fp32, switch-base-16 and Table 1's settings (not stated in the paper; bf16 gives half)"
    claims = _both_ways("Table 2", "FedAMoLE on Switch, 30 experts", 25.66, 25.63, switch, reading)
    for what, up, down, setup, settings, why in rows:
        claims += _both_ways("Table 4", what, up, down, setup, settings or "MiB in bf16", why)
    return claims


def _both_ways(
    where: str, what: str, up: float, down: float, setup: Setup, settings: str, why: str = ""
) -> list[Claim]:
    """Returns FedAMoLE's traffic up and down, in MiB."""
    directions: tuple[tuple[Quantity, float], ...] = (("upload", up), ("download", down))
    return [
        Claim(FEDAMOLE, where, what, quantity, published, 0.01, setup, settings, MIB, why)
        for quantity, published in directions
    ]


CLAIMS: tuple[Claim, ...] = (*_table_13(), *_table_15(), *_flame(), *_fedamole())
"""Every claim, by paper and table."""
