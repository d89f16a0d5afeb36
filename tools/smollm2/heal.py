"""Training of the split layers: each on its own inputs, then all together, then on the dense model's predictions.

Every stage writes a checkpoint as it goes and continues from it. Its batches depend on the step alone.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tools.smollm2 import states
from tools.smollm2.experts import Experts, Sizes, split

BALANCE, MEDIAN_SHARE, SAVE_EVERY, WARM_UP = 0.02, 0.3, 20, 10


class Student(nn.Module):
    """The layers from the first split one on, with experts in place of the FFNs of `layers`."""

    def __init__(self, dense: LlamaForCausalLM, layers: range) -> None:
        super().__init__()
        self.dense: Any = dense
        self.layers = layers
        self.experts = nn.ModuleDict()

    @property
    def split(self) -> dict[int, Experts]:
        """The experts of each split layer."""
        return {int(layer): cast(Experts, experts) for layer, experts in self.experts.items()}

    def attended(self, layer: int, hidden: Tensor) -> Tensor:
        """Returns the residual stream between a layer's attention and its FFN."""
        block = self.dense.model.layers[layer]
        places = torch.arange(hidden.shape[1]).unsqueeze(0)
        turned = self.dense.model.rotary_emb(hidden, places)
        normed = block.input_layernorm(hidden)
        attended: Tensor = block.self_attn(normed, position_embeddings=turned, attention_mask=None)[0]
        return hidden + attended

    def received(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream after attention and what the FFN is given."""
        middle = self.attended(layer, hidden)
        return middle, self.dense.model.layers[layer].post_attention_layernorm(middle)

    def step(self, layer: int, hidden: Tensor, sparse: bool = True) -> Tensor:
        """Runs one layer, a split one with its experts unless `sparse` is false."""
        middle, x = self.received(layer, hidden)
        if sparse and layer in self.layers:
            added: Tensor = self.split[layer](x.flatten(0, 1)).view_as(x)
        else:
            added = self.dense.model.layers[layer].mlp(x)
        return middle + added

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the last layer's output."""
        logits: Tensor = self.dense.lm_head(self.dense.model.norm(hidden))
        return logits

    def after(self, hidden: Tensor, sparse: bool = True) -> Tensor:
        """Runs the layers above the split ones."""
        for layer in range(self.layers.stop, len(self.dense.model.layers)):
            hidden = self.step(layer, hidden, sparse)
        return hidden

    def imbalance(self) -> Tensor:
        """Returns the mean imbalance of the layers' routing in the last pass; 1 is even."""
        return torch.stack([experts.balance for experts in self.split.values()]).mean()

    def set_active(self, active: int) -> None:
        """Sets the active experts of every split layer."""
        for experts in self.split.values():
            experts.sizes = experts.sizes._replace(active=active)


def relative(given: Tensor, wanted: Tensor, update: Tensor) -> Tensor:
    """Returns the mean over tokens of the squared error relative to the squared norm of what the layers add."""
    norm = update.float().pow(2).sum(-1)
    return ((given.float() - wanted.float()).pow(2).sum(-1) / (norm + MEDIAN_SHARE * norm.median())).mean()


def batches(folder: Path, rows: int, start: int, steps: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (step, hidden states) for the steps from `start` on, shard after shard, over and over."""
    files = states.shards(folder)
    for step in range(start, steps):
        shard, part = divmod(step, states.SHARD_ROWS // rows)
        _, hidden = states.load(files[shard % len(files)])
        yield step, hidden[:, part * rows : (part + 1) * rows]


def train(
    module: nn.Module,
    loss: Callable[[Tensor], Tensor],
    folder: Path,
    checkpoint: Path,
    *,
    steps: int,
    lr: float,
    rows: int = 8,
    name: str = "",
) -> None:
    """Trains what `module` holds by Adam with warm-up and linear decay; continues from `checkpoint` where there is one.

    Args:
        module: The experts.
        loss: From a batch's hidden states to a scalar.
        folder: The dense model's states.
        checkpoint: Written every few steps and at the end.
        steps: How many steps in all.
        lr: The highest learning rate.
        rows: Rows of a batch.
        name: What the log calls the stage.
    """
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / WARM_UP) * (1 - i / steps))
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        start = saved["step"]
    total = 0.0
    for step, hidden in batches(folder, rows, start, steps):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(hidden)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += value.item()
        done = step + 1
        if done % SAVE_EVERY == 0 or done == steps:
            saved = {
                "module": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": done,
            }
            torch.save(saved, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").rename(checkpoint)
            since = done % SAVE_EVERY or SAVE_EVERY
            print(f"{name}: step {done} of {steps}, loss {total / min(since, done - start):.4f}", flush=True)
            total = 0.0


def split_layers(dense: LlamaForCausalLM, layers: range, sizes: Sizes, folder: Path, shards: int = 4) -> Student:
    """Returns the student whose layers are split on the inputs in the first shards, not trained yet."""
    dense.requires_grad_(False)
    student = Student(dense, layers)
    hidden = torch.cat([states.load(path)[1] for path in states.shards(folder)[:shards]], 1)
    for place, layer in enumerate(layers):
        with torch.no_grad():
            _, x = student.received(layer, hidden[place])
        student.experts[str(layer)] = split(dense.model.layers[layer].mlp, x.flatten(0, 1), sizes)
        print(f"split layer {layer}", flush=True)
    return student


def on_own_inputs(student: Student, hidden: Tensor) -> Tensor:
    """Returns the loss of each split layer where the layers below it are the dense model's."""
    losses = []
    for place, layer in enumerate(student.layers):
        with torch.no_grad():
            _, x = student.received(layer, hidden[place])
            wanted = student.dense.model.layers[layer].mlp(x)
        losses.append(relative(student.split[layer](x.flatten(0, 1)), wanted.flatten(0, 1), wanted.flatten(0, 1)))
    return torch.stack(losses).mean() + BALANCE * student.imbalance()


def together(student: Student, hidden: Tensor) -> Tensor:
    """Returns the loss of the split layers run one after another, on the stream after each of them."""
    losses, stream = [], hidden[0]
    for place, layer in enumerate(student.layers, 1):
        stream = student.step(layer, stream)
        losses.append(relative(stream, hidden[place], hidden[place] - hidden[0]))
    return torch.stack(losses).mean() + BALANCE * student.imbalance()


def on_predictions(student: Student, hidden: Tensor, every: int = 2) -> Tensor:
    """Returns the Kullback-Leibler divergence from the dense model's predictions, on every `every`-th token."""
    with torch.no_grad():
        wanted = student.logits(student.after(hidden[-1], sparse=False)[:, ::every]).float().log_softmax(-1)
    stream = hidden[0]
    for layer in student.layers:
        stream = student.step(layer, stream)
    given = student.logits(student.after(stream)[:, ::every]).float().log_softmax(-1)
    divergence = nn.functional.kl_div(given, wanted, log_target=True, reduction="none").sum(-1).mean()
    return divergence + BALANCE * student.imbalance()


@torch.no_grad()
def nats(student: Student, folder: Path, sparse: bool = True) -> float:
    """Returns the loss of the tokens in a folder of states, a row's first token apart."""
    total, count = 0.0, 0
    for path in states.shards(folder):
        tokens, hidden = states.load(path)
        for part in range(0, len(tokens), 4):
            stream = hidden[0, part : part + 4] if sparse else hidden[-1, part : part + 4]
            for layer in student.layers if sparse else ():
                stream = student.step(layer, stream)
            logits = student.logits(student.after(stream)[:, :-1]).float()
            labels = tokens[part : part + 4, 1:]
            total += nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
            count += labels.numel()
    return total / count


class Stage(NamedTuple):
    """A stage of the training: its loss, and its effort."""

    loss: Callable[[Student, Tensor], Tensor]
    steps: int
    lr: float
    rows: int


STAGES = {
    "own": Stage(on_own_inputs, steps=220, lr=3e-3, rows=4),
    "together": Stage(together, steps=300, lr=2e-3, rows=8),
    "predictions": Stage(on_predictions, steps=200, lr=1e-3, rows=8),
}


def heal(student: Student, folder: Path, run: Path) -> None:
    """Runs the stages one after another; those that are done are read from `run`."""
    for name, stage in STAGES.items():
        loss = partial(stage.loss, student)
        checkpoint = run / f"{name}.pt"
        train(student.experts, loss, folder, checkpoint, steps=stage.steps, lr=stage.lr, rows=stage.rows, name=name)


def curve(student: Student, folder: Path, actives: Sequence[int] = ()) -> dict[str, float]:
    """Returns the loss on held-out text in nats: the dense model's, and the mixture's at each number of active experts.

    Args:
        student: The mixture.
        folder: The dense model's states of that text.
        actives: Numbers of active experts; by default the mixture's own, half of it, and so on to one.
    """
    found = {"dense": nats(student, folder, sparse=False)}
    own = next(iter(student.split.values())).sizes.active
    for active in actives or [own >> shift for shift in range(own.bit_length())]:
        student.set_active(active)
        found[str(active)] = nats(student, folder)
    student.set_active(own)
    return found
