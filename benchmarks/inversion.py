"""Tokens that a server reads from one upload by its span, against rank, steps and batch, with and without noise.

Run: python benchmarks/inversion.py [--vocabulary 512] [--width 256] [--repeats 3]
The attack: the gradient of the first layer's query projection is a sum over tokens of outer products, so that B of
FFA-LoRA (A is frozen, and the server knows it) spans the inputs A x of the tokens in it while these are fewer than its
rank. The server tries every token of the vocabulary, as its input follows from its embedding. `found` is the share of
the last step's tokens that lie in the span (of each text all but the first and the last, which are in no query's
gradient), closer than 99 % of all other tokens. `noise` is that of one value, relative to the norm of the upload, which
differential privacy clips: its noise multiplier, or more. With a weight decay of 1 and a rate of 1 SGD leaves the last
step alone in the upload. The last column is what `fedguild federation check` says beforehand.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from models import SMALL, our_backbone
from timing import add_device, machine
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.client.schedule import plan_steps
from fedguild.config.training import TrainingSettings
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.data.batches import Encoded
from fedguild.engines.local import LocalEngine
from fedguild.federation.exposure import exposure
from fedguild.methods import build_method
from fedguild.methods.ffa_lora import SEED, shared_factors
from fedguild.model.backbone import Backbone
from fedguild.server.engine import Task
from fedguild.server.method import Roster, starting_rng

LENGTH, EXAMPLES = 12, 64
FALSE = 0.01
"""Share of the other tokens that may lie as close to the span as those that count as found."""
SIGNAL, ROUNDING = 1e-4, 1e-3
"""Smallest singular value of a span's directions, relative to the largest; largest share outside that is rounding."""
CLIENT = ClientInfo(0, Budget("all", 2, None), EXAMPLES)
MODULE = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    rank: int
    optimizer: str = "sgd"
    decay: float = 1.0
    steps: int = 5
    batch: int = 4
    noise: float = 0.0


SETTINGS = (
    *(Setting(rank) for rank in (8, 32, 64, 128)),
    *(Setting(128, decay=decay) for decay in (0.1, 0.0)),
    *(Setting(128, steps=steps) for steps in (1, 20)),
    *(Setting(128, batch=batch) for batch in (1, 8, 16)),
    *(Setting(128, optimizer="adamw", decay=decay) for decay in (1.0, 0.0)),
    *(Setting(128, noise=noise) for noise in (1e-4, 1e-3, 1e-2, 1e-1)),
)


def upload_of(backbone: Backbone, setting: Setting, seed: int) -> tuple[Tensor, Tensor, list[Encoded], list[int]]:
    """Returns the change of B [out, r], A [r, in], the client's examples, and those of the last step."""
    rng = numpy_rng(seed, "text")
    size = int(backbone.model.config.vocab_size)
    texts = [Encoded(tuple(int(token) for token in rng.integers(3, size, LENGTH)), 1) for _ in range(EXAMPLES)]
    method = build_method("ffa-lora", {"rank": setting.rank, "targets": ["attention"]})
    state = method.start(backbone.info, Roster([CLIENT.budget]), starting_rng(method, seed))
    training = TrainingSettings(
        optimizer=setting.optimizer,  # type: ignore[arg-type]
        learning_rate=1.0 if setting.optimizer == "sgd" else 1e-2,
        weight_decay=setting.decay if setting.optimizer == "sgd" else 100 * setting.decay,
        batch_size=setting.batch,
        steps=setting.steps,
        max_grad_norm=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(backbone, {0: texts}, training, ClientMemory(Path(folder)), cohort_size=1, seed=seed)
        (delivery,) = engine.train(method, backbone.info, [Task(1, CLIENT, state)])
    assert delivery.upload is not None, delivery.failure
    change = delivery.upload.part("adapter")[f"{MODULE}.lora_B"].double()
    change /= change.norm()
    change += setting.noise * torch.randn(change.shape, generator=torch_rng(seed, "noise"))
    shared = shared_factors(backbone.info, method.plan(backbone.info, CLIENT.budget), int(state.scalars[SEED]))
    last = [index for batch in plan_steps(EXAMPLES, training, numpy_rng(seed, "batches", 1, 0))[-1] for index in batch]
    return change, shared[f"{MODULE}.lora_A"].double(), texts, last


def outside(backbone: Backbone, change: Tensor, factor: Tensor, noise: float) -> Tensor:
    """Returns [vocabulary], the share of every token's input that lies outside of an upload's span.

    Args:
        noise: Standard deviation of the noise in the upload, which the server knows.
    """
    _, values, directions = torch.linalg.svd(change, full_matrices=False)
    floor = noise * sum(math.sqrt(side) for side in change.shape)  # the largest singular value of noise alone
    span = directions[values > max(SIGNAL * float(values[0]), floor)]
    base = backbone.model.model
    inputs = base.layers[0].input_layernorm(base.embed_tokens.weight).detach().cpu().double() @ factor.T
    return ((inputs - inputs @ span.T @ span).norm(dim=1) / inputs.norm(dim=1)).nan_to_num(1.0)  # the padding's is 0


def rows(backbone: Backbone, repeats: int) -> Iterator[tuple[Setting, float, float]]:
    """Yields every setting with the share found, and the tokens for a direction."""
    for setting in SETTINGS:
        found = 0.0
        for seed in range(repeats):
            change, factor, texts, last = upload_of(backbone, setting, seed)
            true = {token for index in last for token in texts[index].input_ids[1:-1]}  # the ends reach no query
            shares = outside(backbone, change, factor, setting.noise)
            is_true = torch.zeros(len(shares), dtype=torch.bool)
            is_true[list(true)] = True
            limit = float(shares[~is_true].quantile(FALSE))  # 0 but for rounding where the span is everything
            found += float((shares[is_true] < limit).double().mean()) / repeats if limit > ROUNDING else 0.0
        settings = TrainingSettings(
            optimizer=setting.optimizer,  # type: ignore[arg-type]
            learning_rate=1.0,
            weight_decay=setting.decay,
            batch_size=setting.batch,
            steps=setting.steps,
        )
        told = exposure(settings, setting.steps, (text.input_ids for text in texts), [tuple(change.shape)])
        yield setting, found, told.tokens_per_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    add_device(parser)
    options = parser.parse_args()
    print(machine(options.device, options.dtype))
    size = replace(SMALL, hidden=options.width, layers=2, vocabulary=options.vocabulary)
    backbone = our_backbone(size, options.dtype, options.device)
    print(f"{'optimizer':9} {'decay':>6} {'rank':>5} {'steps':>6} {'batch':>6} {'noise':>6}   found  tokens/rank")
    for setting, found, tokens in rows(backbone, options.repeats):
        print(
            f"{setting.optimizer:9} {setting.decay:6g} {setting.rank:5} {setting.steps:6} {setting.batch:6} "
            f"{setting.noise:6g}   {found:5.2f}  {tokens:8.3g}"
        )


if __name__ == "__main__":
    main()
