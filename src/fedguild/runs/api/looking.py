"""Looking before training: a config's costs, the clients' shares of its data, and a model's loss by active experts."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedguild.core.errors import ConfigError, DataError, ModelError
from fedguild.runs.api.inputs import gather
from fedguild.runs.results import Costs, Partition

if TYPE_CHECKING:
    from fedguild.config import Config
    from fedguild.config.loading import Given, Override
    from fedguild.core.progress import Progress
    from fedguild.data.batches import Cut
    from fedguild.data.view import DataView
    from fedguild.measuring.scores.premise import Premise
    from fedguild.runs.api.inputs import Dataset
    from fedguild.runs.api.inputs import Partition as GivenPartition
    from fedguild.runs.setup import PreparedData


def profile(
    config: Given,
    *overrides: Override,
    model: str | Path | None = None,
    clients: int | None = None,
    examples: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    wire_dtype: Literal["fp32", "bf16"] | None = None,
    checkpointing: bool | None = None,
    tell: Callable[[str], None] | None = None,
) -> Costs:
    """Returns what a config costs its clients and its server, from the model's config and the number of examples.

    No weight is loaded and nothing is downloaded. Data that is generated or on this machine is read to count a client's
    examples, unless `examples` gives their number.

    Args:
        config: As in `run`.
        overrides: As in `run`.
        model: Another backbone: a hub id (known ones need no download), a folder, or a config.json.
        clients: Number of clients.
        examples: Training examples of a client; by default counted if the data is generated or on this machine, else
            the config's cap, or 1000.
        tokens: Tokens of a forward pass; by default `training.batch_size` sequences.
        context: Tokens of a sequence; by default `data.max_length`.
        wire_dtype: Dtype as which all numbers on the wire are counted, `fp32` or `bf16`; by default their bytes are
            those that `federation.wire_dtype` sends.
        checkpointing: Whether activations are recomputed; by default as the config says.
        tell: Receives a line for every option whose value differs from the config or the default.

    Raises:
        FedGuildError: the config is wrong, there is no such model, or the two do not fit.

    Examples:
        >>> import fedguild
        >>> costs = fedguild.profile("flame/olmoe-dolly", examples=1000)
        >>> frame = costs.frame()
        >>> frame.loc["b1", "active_experts"].item(), frame.loc["b4", "active_experts"].item()
        (8, 1)
        >>> bool(frame.loc["b4", "flops_round"] < frame.loc["b1", "flops_round"])
        True
    """
    from fedguild.runs.api.profiling import WIRE_DTYPES, known_examples, profile_config

    if wire_dtype is not None and wire_dtype not in WIRE_DTYPES:
        raise ConfigError(f"The dtype on the wire is '{wire_dtype}'.", f"Known: {', '.join(WIRE_DTYPES)}.")
    more = [f"model.path={model}"] if model else []
    more += [f"federation.clients={clients}"] if clients else []
    settings = gather().config(config, [*overrides, *more])
    for name, count in (("examples", examples), ("tokens", tokens), ("context", context)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} is at least 1, got {count}.")
    known = known_examples(settings) if examples is None else examples
    counted = profile_config(
        settings,
        examples=known,
        tokens=tokens,
        context=context,
        wire_dtype=wire_dtype,
        checkpointing=checkpointing,
        tell=tell,
    )
    return Costs(counted, assumed_examples=known is None and settings.training.steps is None)


def partition(
    config: Given, *overrides: Override, dataset: Dataset | None = None, partition: GivenPartition | None = None
) -> Partition:
    """Returns how many examples of each label every client would get, without training.

    Args:
        config: As in `run`.
        overrides: As in `run`.
        dataset: As in `run`.
        partition: As in `run`.

    Raises:
        FedGuildError: the config is wrong, the data cannot be read, or the partition leaves a client empty.

    Examples:
        >>> import fedguild
        >>> shares = fedguild.partition("flame/tiny-tasks", "federation.clients=4", "data.partition.scheme=iid")
        >>> frame = shares.frame()
        >>> len(frame), list(frame.columns[:4])
        (4, ['budget', 'train', 'validation', 'test'])
    """
    import tempfile

    from fedguild.runs.setup import dropped_of, prepare_data

    given = gather(dataset, partition)
    settings = given.config(config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        if given.data is not None:
            given.data.write(Path(folder))
        data = prepare_data(settings, Path(folder), given.data)
    budgets = [tier.name for tier in settings.federation.budget_per_client()]
    return Partition(data, budgets, dropped_of(data, settings), _cut(settings, data))


def inspect_data(
    config: Given | None, *overrides: Override, dataset: Dataset | None = None, examples: int = 3
) -> DataView:
    """Returns what a config makes of its data, before any model is loaded: only its tokenizer is.

    Args:
        config: As in `run`; None to look at `dataset` without a config, as it is and not partitioned.
        overrides: As in `run`.
        dataset: As in `run`.
        examples: How many training texts to show token by token.

    Raises:
        FedGuildError: the config is wrong, the data cannot be read, or the chat template cannot write it.

    Examples:
        >>> import fedguild
        >>> messages = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi."}]
        >>> view = fedguild.inspect_data(None, "data.chat_template=plain", dataset=[{"messages": messages}])
        >>> "".join(piece.text for piece in view.shown[0] if piece.learned)
        'Hi.<|endoftext|>'
    """
    import tempfile

    from fedguild.config import load_config
    from fedguild.data.rendering import PLAIN
    from fedguild.data.view import view_of
    from fedguild.model.packaged import PACKAGED
    from fedguild.runs.setup import dropped_of, prepare_corpus, prepare_data, tokenizer_of

    given = gather(dataset)
    settings = given.config("fedit/tiny-tasks" if config is None else config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        if given.data is not None:
            given.data.write(Path(folder))
        if config is None:
            corpus, clients, dropped = prepare_corpus(settings, Path(folder)), [], None
        else:
            data = prepare_data(settings, Path(folder), given.data)
            corpus, clients, dropped = data.corpus, data.clients, dropped_of(data, settings)
    if config is None and settings.model.path in PACKAGED and settings.data.chat_template is None:
        settings = load_config(settings, [f"data.chat_template={PLAIN}"])
    try:
        tokenizer = tokenizer_of(settings)
    except ModelError:
        if Path(settings.model.path).exists():
            raise
        tokenizer = None
    longest = settings.data.max_length
    return view_of(corpus, clients, corpus.dropped if dropped is None else dropped, tokenizer, longest, examples)


def premise(
    model: str | Path,
    text: Sequence[str | Path],
    *,
    context: int = 256,
    tokens: int = 8192,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Premise:
    """Returns what a mixture of experts loses with fewer active experts, before it is fine-tuned.

    Measures the loss on plain text at the model's own top-k, half of it, and so on down to one active expert, with and
    without scaling the active experts' weights to sum to one; and how evenly each layer's experts are used. If the loss
    is the same with one active expert, budgets by active experts have nothing to repair.

    Args:
        model: A hub id, a folder, `embedded` or `english`.
        text: Text (`str`), or text files (`Path`), plain or `.gz`.
        context: Tokens of a row.
        tokens: The most tokens to read.
        dtype: `auto` (bf16 on a GPU, fp32 on a CPU), `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether the hub's own model code may run.
        progress: Receives the progress.

    Raises:
        FedGuildError: there is no such model, it is dense, a file cannot be read, or there is too little text.

    Examples:
        >>> import fedguild
        >>> sums = [f"The sum of {a} and {b} is {a + b}." for a in range(20) for b in range(20)]
        >>> found = fedguild.premise("embedded", sums, context=64, tokens=512)
        >>> [level.active_experts for level in found.levels if level.renormalised == found.renormalises]
        [8, 4, 2, 1]
    """
    from fedguild.core.progress import Silent
    from fedguild.measuring.scores.premise import measure, require_choice
    from fedguild.model.backbone import inspect_model, load_backbone

    told = progress or Silent()
    require_choice(inspect_model(str(model), revision=revision, trust_remote_code=trust_remote_code))
    texts = [one if isinstance(one, str) else _read(one) for one in text]
    if not any(texts):
        raise DataError("There is no text to measure the model on.", "Give text, or files that hold it.")
    told.stage(f"loading {model}")
    backbone = load_backbone(
        str(model), revision=revision, trust_remote_code=trust_remote_code, dtype=dtype, device=device
    )
    return measure(backbone, texts, context=context, tokens=tokens, step=partial(told.step, loss=math.nan))


def _read(file: Path) -> str:
    try:
        raw = file.read_bytes()
        return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"Cannot read the text of {file}: {error}", "Give a UTF-8 file, plain or as .gz.") from error


def _cut(config: Config, data: PreparedData) -> Cut | None:
    """Returns how many training texts are cut; None if the tokenizer is not on this machine."""
    from fedguild.model.packaged import is_on_hub
    from fedguild.runs.setup import cut_of, encoded_texts, tokenizer_of

    if is_on_hub(config.model.path):
        return None
    longest = config.data.max_length
    tokenizer = tokenizer_of(config)
    return cut_of(data, encoded_texts(data, tokenizer, longest), tokenizer, longest)
