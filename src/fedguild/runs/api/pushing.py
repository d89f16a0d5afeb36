"""Pushing a run's model to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedguild.config.renamed import answers_old_arguments
from fedguild.core.errors import ConfigError, FedGuildError, first_line
from fedguild.core.layout import CONFIG
from fedguild.model.packaged import is_on_hub
from fedguild.runs.api.models import folder_of, subject_of
from fedguild.runs.results import RunResult

if TYPE_CHECKING:
    from fedguild.export.manifest import Form


@answers_old_arguments
def push(
    run: str | Path | RunResult,
    to: str,
    *,
    budget: str | None = None,
    client: str | None = None,
    format: Form = "peft",
    round: int | None = None,
    public: bool = False,
) -> str:
    """Exports a run's model with its card to a repository on the Hugging Face hub; private unless `public`.

    The model replaces the files that the repository has. The token is that of `hf auth login`, or `HF_TOKEN`.

    Args:
        run: A run's folder, or its result; or a folder that was exported or that a site took home.
        to: The repository, `user/name`; created if it does not exist.
        budget: Name of the budget whose active experts the global model runs; by default the largest.
        client: Name of the client whose own model to push, instead of the global model.
        format: As in `fedguild export`. An adapter whose base model is not on the hub is pushed merged.
        round: The round to take it from; the last by default.
        public: Whether the repository is public.

    Returns:
        The repository's address.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: both a budget and a client are named, one of them is unknown, or the method has no global model and
            no client is named; or the repository is public and `public` is false.
        FedGuildError: the hub cannot be reached, or refuses.

    Examples:
        >>> import fedguild
        >>> fedguild.push("runs/first", "me/flame-tiny", budget="b4")
        'https://huggingface.co/me/flame-tiny'
    """
    owner, _, name = to.partition("/")
    if not owner or not name or "/" in name:
        raise ConfigError(f"'{to}' is not a repository of the hub.", "Give it as user/name.")
    subject = subject_of(budget, client)
    api = _hub()
    _require_as_private(api, to, public)

    from fedguild.export.card import FILE
    from fedguild.runs.exporting import export

    folder = folder_of(run)
    with tempfile.TemporaryDirectory() as temporary:
        exported = export(folder, subject, Path(temporary) / "model", _pushable(folder, format), round=round)
        card = exported.folder / FILE
        here = "`folder` is the path of this folder."
        card.write_text(card.read_text("utf-8").replace(here, f'`folder` is `"{to}"`, this repository.'), "utf-8")
        return str(_asked(to, _upload, api, to, exported.folder, public))


def _pushable(folder: Path, format: Form) -> Form:
    """Returns the form, or `merged` for an adapter whose base model is on this machine only."""
    from fedguild.config import load_saved
    from fedguild.export.manifest import BASE, MANIFEST, read_manifest

    written = folder / CONFIG
    if (folder / MANIFEST).is_file():  # an exported folder, or one that a site took home
        on_disk = read_manifest(folder).base.model == BASE
    else:
        on_disk = written.is_file() and not is_on_hub(load_saved(written).model.path)
    return "merged" if format in ("peft", "per-expert") and on_disk else format


def _upload(api: Any, to: str, folder: Path, public: bool) -> Any:
    api.create_repo(to, private=not public, exist_ok=True)
    message = "Model of a FedGuild run"
    api.upload_folder(repo_id=to, folder_path=str(folder), commit_message=message, delete_patterns="*")
    return f"{api.endpoint}/{to}"


def _require_as_private(api: Any, to: str, public: bool) -> None:
    """Raises ConfigError if the repository exists and is public, but `public` is false."""
    exists: Literal[True, False] = _asked(to, api.repo_exists, to)
    if exists and not public and not _asked(to, api.repo_info, to).private:
        raise ConfigError(f"{to} is public: everybody could read the model.", "Say --public, or name another.")


def _asked(to: str, call: Any, *arguments: Any) -> Any:
    """Calls the hub.

    Raises:
        FedGuildError: it cannot be reached, or refuses.
    """
    try:
        return call(*arguments)
    except FedGuildError:
        raise
    except Exception as error:  # the hub's client raises those of its transport, too
        raise FedGuildError(
            f"The hub did not take {to}: {first_line(error)}",
            "Check the network, `hf auth login`, and the right to write there.",
        ) from error


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
