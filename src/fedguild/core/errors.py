"""The one error that FedGuild raises for anything its user can fix, and the exit statuses of its commands.

Every message names the file or the setting, what was found, and what would be accepted. The command line prints it
without a traceback; library users catch `FedGuildError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

USER_ERROR, INTERRUPTED = 2, 130
"""Exit statuses of a command that ends in a `FedGuildError`, and of one that Ctrl-C ends."""


class FedGuildError(Exception):
    """Bad input, or a state of the machine, that the user can fix.

    Args:
        message: What is wrong, naming the file, key or client.
        hint: The remedy, as one sentence; printed on a line of its own.

    Examples:
        >>> import fedguild
        >>> try:
        ...     fedguild.run("nowhere.yaml")
        ... except fedguild.FedGuildError as error:
        ...     print(error.message)
        ...     print(error.hint)
        There is no config file nowhere.yaml.
        `fedguild presets` lists the configs that ship.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


class ConfigError(FedGuildError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(FedGuildError):
    """A dataset is missing, has the wrong columns, or leaves a client without examples."""


class ModelError(FedGuildError):
    """A model cannot be loaded, or lacks what the method needs (experts, a layer)."""


class UploadError(FedGuildError):
    """A client's upload has the wrong names, shapes, dtypes or values."""


class NotFiniteError(UploadError):
    """A client's upload has NaN or infinity."""


class CheckpointError(FedGuildError):
    """A checkpoint is damaged, missing, or belongs to another run."""


class QuorumError(FedGuildError):
    """Fewer clients than the quorum delivered a valid upload in a round."""


class DivergedError(QuorumError):
    """The training of a round diverged: its losses or uploads are not finite, or worse than guessing."""


class StoppedError(FedGuildError):
    """The operator stopped the run."""


ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("bs", "per_device_train_batch_size", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("fit", "fine-tune", "finetune", "simulate", "start", "train"), "run"),
    **dict.fromkeys(("fraction_fit", "fraction_train"), "client_fraction"),
    **dict.fromkeys(("local_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("local_steps", "max_steps"), "steps"),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), "rank"),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "seq_len"), "max_length"),
    **dict.fromkeys(("model_name_or_path", "name_or_path"), "path"),
    **dict.fromkeys(("n_clients", "num_clients", "num_supernodes"), "clients"),
    **dict.fromkeys(("num_rounds", "num_server_rounds", "n_rounds"), "rounds"),
    "continue": "resume",
    "eval": "evaluate",
    "grad_accum": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lr": "learning_rate",
    "optim": "optimizer",
    "target_modules": "targets",
    "wd": "weight_decay",
}
"""A word of transformers, peft, TRL or Flower -> ours for the same."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint with the known word nearest to `name`, or ours for the same, and the list of choices."""
    choices = sorted(known)
    section, dot, last = name.rpartition(".")
    ours = f"{section}{dot}{ELSEWHERE.get(last, last)}"
    close = [ours] if ours in choices else difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    meant = f"Did you mean '{close[0]}'? " if close else ""
    return f"{meant}Known: {', '.join(choices)}."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had, this process's or a device's."""
    allocators = ("DefaultCPUAllocator", "not enough memory")  # torch raises a plain RuntimeError on a CPU
    of_torch = type(error).__name__ == "OutOfMemoryError" or any(word in str(error) for word in allocators)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def in_one_line(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message."""
    kind, line = type(error).__name__, first_line(error)
    return line if line == kind else f"{kind}: {line}"
