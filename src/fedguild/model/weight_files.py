"""Checks of a model folder's weight files against its config, from the files' headers without reading a weight.

transformers refuses weights of wrong shapes only after reading them, and initialises missing weights at random. Here
its own loading code runs first on meta tensors, which have shapes but no values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedguild.core.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The file that transformers loads if there are no safetensors; it has no header to check."""
_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
_NUMBER = re.compile(r"\b\d+\b")
_SHOWN = 3


def check_weights(folder: Path, model: Any) -> None:
    """Checks the weight files of a folder against the model that its config describes.

    Args:
        model: The model of transformers that its config describes, on the meta device; its weights are replaced.

    Raises:
        ModelError: there are no weights, a file is missing or truncated, or names or shapes do not match the config.
    """
    source = source_of_weights(folder)
    if source is None and not getattr(model.config, "transformers_weights", None):
        raise ModelError(
            f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there.",
            "Put the weights beside config.json, or download the model again.",
        )
    if source is None or source.name in PICKLED:
        return
    shapes = {name: shape for file in files_of(source) for name, shape in read_shapes(file).items()}
    is_quantised = getattr(model.config, "quantization_config", None) is not None  # its names are the quantiser's
    report = None if is_quantised else _loaded_without_values(model, shapes)
    if report is not None:
        report.require_agreement(str(source))


def source_of_weights(folder: Path) -> Path | None:
    """Returns the file of weights, or their index, that transformers loads from a folder; None if it has none."""
    return next((folder / name for name in (WEIGHTS, INDEX, *PICKLED) if (folder / name).is_file()), None)


def files_of(source: Path) -> list[Path]:
    """Returns the weight files of a source: itself, or those that an index names.

    Raises:
        ModelError: the index cannot be read, or a file is missing.
    """
    return _shards(source) if source.suffix == ".json" else [source]


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor of a safetensors file, from its header.

    Raises:
        ModelError: the file is truncated, or not of this format.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header = opened.read(length) if length <= min(_LONGEST_HEADER_BYTES, size) else b""
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{file} has {size:,} bytes, and its header cannot be read: it is truncated, or not a safetensors file.",
            "Copy or download it again.",
        ) from error
    whole = _LENGTH_BYTES + length + end
    if size != whole:
        raise ModelError(
            f"{file} has {size:,} bytes, but its header says {whole:,}: it is "
            f"{'truncated' if size < whole else 'damaged'}.",
            "Copy or download it again.",
        )
    return shapes


@dataclass(frozen=True)
class LoadingReport:
    """The differences between a checkpoint's weights and the model of its config, in the model's names.

    Attributes:
        missing: Names that the config requires and the checkpoint lacks.
        unexpected: Names that the checkpoint has and the config does not require.
        mismatched: Name, shape in the checkpoint, and shape by the config.
        expected: All names that the config requires.
    """

    missing: Collection[str]
    unexpected: Collection[str]
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]
    expected: Collection[str]

    def require_agreement(self, source: str) -> None:
        """Raises if they differ.

        Weights of a kind that the config does not have, for example of another head, are ignored, as by transformers;
        weights of a layer or an expert beyond the config's number are not.

        Args:
            source: The name of the weights' source for the message.

        Raises:
            ModelError: they differ; the message names the first few.
        """
        kinds = {_NUMBER.sub("N", name) for name in self.expected}
        differing = [f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in self.mismatched]
        beyond = [name for name in self.unexpected if _NUMBER.sub("N", name) in kinds]
        complaints = [
            f"{len(items)} {what}: {_first(items)}"
            for what, items in (
                ("of another shape", differing),
                ("missing", self.missing),
                ("beyond the config's layers or experts", beyond),
            )
            if items
        ]
        if complaints:
            whose, hint = (
                "its config.json describes",
                "Put back the config.json that belongs to these weights, or download",
            )
            if source.endswith(".gguf"):
                whose = "transformers expects in a GGUF file of this architecture"
                hint = (
                    "It reads some architectures in part, experts above all: take the model's safetensors, or download"
                )
            raise ModelError(
                f"The weights in {source} are not those that {whose}; {'; '.join(complaints)}.",
                f"{hint} the model again.",
            )


def _shards(index: Path) -> list[Path]:
    folder = index.parent
    try:
        names = sorted({str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{index} is not an index of weight files: it has no readable weight_map.", "Download it again."
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} weight files that {index.name} names: "
            f"{_first(missing)}.",
            "Copy or download them too.",
        )
    return [folder / name for name in names]


def _loaded_without_values(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> LoadingReport | None:
    """Returns what transformers reports after loading tensors of these shapes on the meta device.

    transformers maps a checkpoint's names to the model's: fused experts, prefixes, tied weights. This part of its API
    is not public, so the result is None if another version changed it. `load_backbone` checks the report of the real
    loading.
    """
    meta, expected = torch.device("meta"), list(model.state_dict())
    tensors = {name: torch.empty(shape, device=meta) for name, shape in shapes.items()}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        mapping: Any = get_model_conversion_mapping(model)
        how = LoadStateDictConfig(device_map={"": meta}, weight_mapping=mapping, ignore_mismatched_sizes=True)
        report, _ = convert_and_load_state_dict_in_model(model, tensors, how, None)
        model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(report)
    except (ImportError, AttributeError, TypeError):
        return None
    return LoadingReport(report.missing_keys, report.unexpected_keys, report.mismatched_keys, expected)


def _first(items: Iterable[str]) -> str:
    ordered = sorted(items)
    return ", ".join(ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "")
