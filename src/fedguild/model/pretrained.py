"""Models of transformers on disk or on the hub: their config and tokenizer, and readable error messages."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from fedguild.core.errors import ModelError
from fedguild.core.hub import reach_hub
from fedguild.model.packaged import packaged

_TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Of these, every tokenizer that loads has one."""
UNREADABLE = (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError)
"""What transformers raises for a model that it cannot read."""
_PATHS = (
    "model.path takes a hub id, a folder with config.json, a tokenizer and safetensors weights, a GGUF file, or "
    "'embedded'."
)
_GGUF, _TRUST = ".gguf", "trust_remote_code=True"


def source_of(path: str) -> str:
    """Returns the path for transformers of a `model.path`: the folder, or the hub id once the hub has been reached."""
    place = packaged(path) or Path(path)
    if place.exists() or not is_hub_id(path):
        return str(place)
    reach_hub()
    return path


def is_hub_id(path: str) -> bool:
    """Whether a `model.path` can name a repository of the hub, as `./name` and `a/b/c` cannot."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def is_gguf(path: str) -> bool:
    return Path(path).suffix == _GGUF


def arguments_of(path: str) -> dict[str, str]:
    """Returns the arguments by which transformers' `from_pretrained` finds a `model.path`.

    Raises:
        ModelError: it is a GGUF file, and the package gguf is not installed.
    """
    place = source_of(path)
    if not is_gguf(place):
        return {"pretrained_model_name_or_path": place}
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"'{path}' is a GGUF file, which needs the package gguf.", "Install it: pip install 'fedguild[gguf]'."
        )
    return {"pretrained_model_name_or_path": str(Path(place).parent), "gguf_file": Path(place).name}


def read_config(path: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """Returns the config of a model to be loaded.

    Raises:
        ModelError: there is no such model, its config cannot be read, or there is an adapter beside it.
    """
    place = Path(source_of(path))
    if place.is_file() and not is_gguf(path):
        raise ModelError(f"Cannot load the model '{path}': it is a file, not a model's folder.", _PATHS)
    if not place.exists() and not is_hub_id(path):
        raise ModelError(f"Cannot load the model '{path}': there is no such folder.", _PATHS)
    where = arguments_of(path)
    with loading(path):
        adapter = find_adapter_config_file(where["pretrained_model_name_or_path"], revision=revision)
    if adapter is not None:  # transformers would apply it, if peft is installed
        raise ModelError(
            f"Cannot load the model '{path}': there is an adapter beside it (adapter_config.json).",
            "Merge it first, by `PeftModel.from_pretrained(model, adapter).merge_and_unload()` of peft, or by "
            "`fedguild export ADAPTER --format merged` if FedGuild exported it, and give the merged folder. Remove "
            "adapter_config.json if the adapter is not to be used.",
        )
    if place.is_dir() and not (place / "config.json").is_file():
        raise ModelError(f"Cannot load the model '{path}': the folder has no config.json.", _PATHS)
    with loading(path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            **where, revision=revision, trust_remote_code=trust_remote_code
        )
    return config


@contextmanager
def loading(path: str, what: str = "") -> Iterator[None]:
    """Keeps transformers quiet inside the block, and turns its errors into a ModelError."""
    try:
        with _quiet():
            yield
    except UNREADABLE as error:
        told = f"Cannot load {what or 'the model '}'{path}': {reason_of(error)}"
        hint = "Its code runs with model.trust_remote_code=true: read it first." if _TRUST in str(error) else _PATHS
        raise ModelError(told, hint) from error


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error's message, and the second if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Returns a model's tokenizer, with an end token and a padding token.

    An end token that the tokenizer lacks is the config's; padding, which is masked, is the end token then.

    Raises:
        ModelError: the model has none, or no end token.
    """
    folder = Path(source_of(path))
    try:
        with loading(path, "the tokenizer of "):
            tokenizer = AutoTokenizer.from_pretrained(
                **arguments_of(path), revision=revision, trust_remote_code=trust_remote_code
            )
    except ModelError as error:
        _require_one_of(_TOKENIZER_FILES, folder, error)
        raise
    # transformers creates an empty one for a folder without its files
    _require_one_of(set(tokenizer.vocab_files_names.values()), folder)
    if tokenizer.eos_token_id is None:
        config = read_config(path, revision=revision, trust_remote_code=trust_remote_code).get_text_config()
        end = getattr(config, "eos_token_id", None)
        end = end[0] if isinstance(end, list) else end
        tokenizer.eos_token = None if end is None else tokenizer.convert_ids_to_tokens(end)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer of '{path}' has no end token, with which a response ends, and neither has its config.",
            "Name one of its tokens as eos_token in tokenizer_config.json.",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_rows(tokenizer: Any, rows: int, path: str) -> None:
    """Raises ModelError if a tokenizer uses tokens for which the model's embedding has no row.

    Added tokens without a row are left alone, as some published models have them: texts without them are read. A
    padding token without a row becomes the end token.
    """
    if tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = tokenizer.eos_token
    added = {"its end token": tokenizer.eos_token_id, "its start token": tokenizer.bos_token_id}
    beyond = [f"{what} is {token}" for what, token in added.items() if token is not None and token >= rows]
    if tokenizer.vocab_size > rows:
        beyond.append(f"{tokenizer.vocab_size} are its own")
    if beyond:
        raise ModelError(
            f"The tokenizer of '{path}' has {len(tokenizer)} tokens, but the model's embedding has {rows} rows: "
            f"{', '.join(beyond)}.",
            "Take the model's own tokenizer, or resize the model with `model.resize_token_embeddings(len(tokenizer))` "
            "and save it.",
        )


def _require_one_of(files: Collection[str], folder: Path, cause: Exception | None = None) -> None:
    """Raises ModelError if a model's folder has none of a tokenizer's files."""
    if folder.is_dir() and files and not any((folder / file).is_file() for file in files):
        raise ModelError(
            f"{folder} has no tokenizer: none of {', '.join(sorted(files))} is there.",
            "Put the tokenizer's files beside config.json: `tokenizer.save_pretrained` writes them.",
        ) from cause


def auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' messages and progress bars out of FedGuild's output during the block."""
    level, shows_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shows_bars:
            transformers_logging.enable_progress_bar()
