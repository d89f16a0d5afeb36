"""Looking before training: the costs of a config, and the clients' shares of its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedguild.api.inputs import gather
from fedguild.errors import ConfigError
from fedguild.results import Costs, Partition

if TYPE_CHECKING:
    from fedguild.api.inputs import Dataset
    from fedguild.api.inputs import Partition as GivenPartition
    from fedguild.config import Config
    from fedguild.config.loading import Given
    from fedguild.data.batches import Cut
    from fedguild.setup import PreparedData


def profile(
    config: Given,
    *overrides: str,
    model: str | Path | None = None,
    clients: int | None = None,
    examples: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    wire_dtype: Literal["fp32", "bf16"] = "fp32",
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
        examples: Training examples of a client; by default as the data deals them if it is generated or on this
            machine, else the config's cap, or 1000.
        tokens: Tokens of a forward pass; by default `training.batch_size` sequences.
        context: Tokens of a sequence; by default `data.max_tokens`.
        wire_dtype: Dtype that numbers on the wire are counted in, `fp32` or `bf16`.
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
    from fedguild.api.profiling import WIRE_DTYPES, known_examples, profile_config

    if wire_dtype not in WIRE_DTYPES:
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
    config: Given, *overrides: str, dataset: Dataset | None = None, partition: GivenPartition | None = None
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

    from fedguild.setup import dropped_of, prepare_data

    given = gather(dataset, partition)
    settings = given.config(config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        if given.data is not None:
            given.data.write(Path(folder))
        data = prepare_data(settings, Path(folder), given.data)
    budgets = [tier.name for tier in settings.federation.budget_per_client()]
    return Partition(data, budgets, dropped_of(data, settings), _cut(settings, data))


def _cut(config: Config, data: PreparedData) -> Cut | None:
    """Returns how many training texts are cut; None if the tokenizer is not on this machine."""
    from fedguild.model.packaged import PACKAGED
    from fedguild.model.pretrained import load_tokenizer
    from fedguild.setup import cut_of, encoded_texts

    model, longest = config.model, config.data.max_tokens
    if model.path not in PACKAGED and not Path(model.path).exists():
        return None
    tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return cut_of(data, encoded_texts(data, tokenizer, longest), tokenizer, longest)
