"""Settings of a federation with real clients: those of a client's site, and those of the server.

`site.yaml` belongs to one organisation and stays with it. It names the data and the model that the client trains on,
and limits what the server may ask for; requests beyond the limits are refused with a reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from fedguild.config import Config
from fedguild.config.base import Section
from fedguild.config.data import DataSettings
from fedguild.config.explaining import Layer, explained
from fedguild.config.renamed import SERVER, SITE, refuse_old_names
from fedguild.config.schema import ModelSettings
from fedguild.config.trust import code_of_model, require_trusted
from fedguild.config.yaml_reading import parse_file
from fedguild.core.errors import ConfigError

SITE_FILE = "site.yaml"
SERVER_FILE = "server.yaml"
_Settings = TypeVar("_Settings", bound=Section)


class SiteDataSettings(DataSettings):
    """The site's own examples. All of them are the client's, unless several clients share one source."""

    seed: int = Field(default=0, ge=0, description="Seed for reading, partitioning and splitting the data.")
    shares: int = Field(
        default=1,
        ge=1,
        description="Number of shares that `partition` divides the source into; 1: all of it is this site's.",
    )
    share: int = Field(default=0, ge=0, description="Number of this site's share, from 0.")


class AcceptSettings(Section):
    """Limits on what the server may ask of this site; other requests are refused with a reason."""

    requests: tuple[Literal["train", "score", "deliver"], ...] = Field(
        default=("train", "score", "deliver"),
        description="What the server may ask for: training; scores on this site's examples; to take a model home.",
    )
    methods: tuple[str, ...] | None = Field(
        default=None, description="Names of the methods that may run here; null: any."
    )
    min_steps: int = Field(default=1, ge=1, description="Minimum optimizer steps per round.")
    max_steps: int | None = Field(default=None, ge=1, description="Maximum optimizer steps per round; null: no limit.")
    min_batch: int = Field(
        default=1, ge=1, description="Minimum examples of an optimizer step, over all accumulated batches."
    )
    min_examples: int = Field(
        default=2, ge=1, description="Minimum number of this site's examples that a round trains on."
    )
    optimizers: tuple[Literal["adamw", "adam", "sgd"], ...] | None = Field(
        default=None,
        description="Optimizers that may train here; null: any. With sgd an upload is a sum of gradients, whose span "
        "can tell the tokens of a step. An adam with an eps above 1e-4 counts as sgd.",
    )
    max_decay: float | None = Field(
        default=None,
        gt=0,
        description="Largest training.learning_rate × training.weight_decay; at 1 an upload has the last step alone in "
        "it. null: no limit.",
    )
    max_rank: int | None = Field(
        default=None,
        ge=1,
        description="Largest rank that a trained tensor may have: LoRA's r, or the shorter side of a weight that is "
        "trained in full; null: no limit.",
    )
    min_tokens_per_rank: float | None = Field(
        default=None,
        gt=0,
        description="Fewest distinct tokens of this site's text behind an upload, as a multiple of that rank; below 1 "
        "the tokens can be read from an upload that sgd has trained. null: no limit. `fedguild federation check` shows "
        "it.",
    )
    min_length: int | None = Field(
        default=None, ge=1, description="Smallest data.max_length, in tokens, to which texts are cut; null: no limit."
    )
    max_dropout: float | None = Field(
        default=None, ge=0, lt=1, description="Largest dropout of the method (method.dropout); null: no limit."
    )
    frozen_factors: bool = Field(
        default=True,
        description="Whether a method may keep a factor of LoRA frozen, as FFA-LoRA its A, which the server knows.",
    )
    min_scored: int = Field(
        default=5, ge=1, description="Minimum number of this site's held-out examples that a score is a mean over."
    )
    requests_per_round: int | None = Field(
        default=3,
        ge=1,
        description="Maximum number of different requests of one kind in a round of a run; one that is repeated word "
        "for word, as after an interruption, counts once. null: no limit. In a secure run one training a round.",
    )
    requests_per_run: int | None = Field(
        default=3000,
        ge=1,
        description="Maximum number of different requests of one kind in all rounds of a run; null: no limit.",
    )
    deliveries_per_run: int | None = Field(
        default=5,
        ge=1,
        description="Maximum number of different models of a run that are written to this site's disk to take home; "
        "null: no limit.",
    )
    runs_per_day: int | None = Field(
        default=50,
        ge=1,
        description="Maximum number of runs that may begin at this site within a day; null: no limit.",
    )
    hellos_per_hour: int | None = Field(
        default=600,
        ge=1,
        description="How often within an hour the server may ask who this site is, for whatever run; null: no limit. A "
        "server asks twice a minute at most.",
    )
    max_clients: int | None = Field(
        default=10_000, ge=1, description="Maximum `federation.clients` of a run; null: no limit."
    )
    leave: tuple[str, ...] = Field(
        default=("*",),
        description="Name patterns of the tensors that may leave the site, `part/name`, for example `adapter/*`.",
    )
    min_clients: int = Field(
        default=2,
        ge=1,
        description="Minimum number of uploads that the run's quorum must require before it aggregates.",
    )
    max_upload_bytes: int | None = Field(
        default=None, ge=1, description="Maximum size of an encoded upload; null: no limit."
    )
    secure: bool = Field(
        default=False,
        description="Whether only runs with secure aggregation (federation.secure) are accepted, so that no upload of "
        "this site can be seen by itself.",
    )
    disclose: tuple[str, ...] = Field(
        default=(),
        description="Parts that a run with secure aggregation may ask for in the clear (federation.secure_disclose); "
        "`scores`: the scores of this site's own model, one by one, which are otherwise summed.",
    )
    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="Largest epsilon that all runs together may spend of this site's privacy; runs whose clients do "
        "not add the noise are then refused whatever they ask for. null: no limit.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta of max_epsilon.")
    public: tuple[Literal["sizes", "scores"], ...] = Field(
        default=(),
        description="What a run may declare public (privacy.public) where max_epsilon is set; sizes: this site's "
        "numbers of examples; scores: those of its own model.",
    )
    secure_clients: int = Field(
        default=3,
        ge=3,
        description="Smallest `federation.secure_clients` of a run with secure aggregation, the clients behind a mean.",
    )
    secure_share: float = Field(
        default=0.5,
        ge=0.5,
        le=1,
        description="Smallest `federation.secure_share` of such a run, the share of the clients that have to be left.",
    )
    secure_difference: int = Field(
        default=3,
        ge=1,
        description="Fewest clients that secure sums of one training may tell apart from the others, over all runs; a "
        "run that begins again without one client, from the same first adapter, is refused.",
    )
    repeat_sessions: bool = Field(
        default=False,
        description="Whether the same training may go into secure sums over any clients, as after `resume --round`; "
        "who sees two such sums may know the upload of a client that is in one of them only.",
    )


class MonitorSettings(Section):
    """Health and figures for a monitoring system."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for `/healthz` and `/metrics` (Prometheus), over plain HTTP; null: none. It needs the extra "
        "`metrics`.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen at; anyone who reaches it reads the figures, so keep it to a private network.",
    )


class SiteSettings(Section):
    """One client of a federation, on its own machine."""

    client: int = Field(ge=0, description="The client's number in the federation, from 0.")
    server: str = Field(pattern=r"^[^\s/:]+:\d+$", description="Address of the server, `host:port`, without a scheme.")
    ca_certificate: str = Field(
        default="ca.pem", description="Certificate of the authority that signed the server's, a PEM file."
    )
    key: str = Field(default="node.key", description="This site's private key, as `fedguild federation key` writes it.")
    peers: str = Field(
        default="peers",
        description="Folder with the public keys of the other clients, `client-000.pub` and so on, for secure "
        "aggregation; from their operators, not from the server.",
    )
    port: int = Field(
        default=9094,
        ge=1,
        le=65535,
        description="Port on 127.0.0.1 through which the site's own processes communicate.",
    )
    work: str = Field(
        default="work",
        description="Folder for the client's memory, its logs and the models that it receives. Keep it from run to "
        "run: `privacy.jsonl` and `sums.jsonl` in it record what this site has released in all runs.",
    )
    monitor: MonitorSettings = Field(default_factory=MonitorSettings, description="`/healthz` and `/metrics`.")
    budget: str | None = Field(
        default=None,
        description="Name of the run's budget that this site can afford; null: the one that the run assigns.",
    )
    model_format: Literal["peft", "per-expert", "merged", "gguf"] = Field(
        default="peft",
        description="Form in which this site takes its model home: peft: an adapter for peft and transformers; "
        "per-expert: one for vLLM and SGLang; merged: a whole checkpoint; gguf: one file for llama.cpp, which needs "
        "its converter. `fedguild export` makes the others from it.",
    )
    model: ModelSettings = Field(
        default_factory=ModelSettings, description="The frozen backbone, as stored at this site."
    )
    data: SiteDataSettings = Field(default_factory=SiteDataSettings, description="The site's own examples.")
    accept: AcceptSettings = Field(default_factory=AcceptSettings, description="What the server may ask for.")


class ServerSettings(Section):
    """The server of a federation."""

    run: str = Field(default="run.yaml", description="The run's config.")
    host: str = Field(
        default="127.0.0.1",
        description="Address at which clients reach this machine; one that is not its own, such as 0.0.0.0 for all, "
        "needs `opens`.",
    )
    port: int = Field(default=9443, ge=1, le=65535, description="Port for the clients.")
    opens: Literal["fleet"] | None = Field(
        default=None,
        description="What other machines may reach at `host`. fleet: the interface for clients, which needs a "
        "registered key; null: nothing.",
    )
    control_port: int = Field(
        default=9444,
        ge=1,
        le=65535,
        description="Port of 127.0.0.1, always, for Flower's control and runtime interfaces, which need no key.",
    )
    ca_certificate: str = Field(default="certificates/ca.pem", description="Certificate of the authority, a PEM file.")
    certificate: str = Field(default="certificates/server.pem", description="The server's certificate, a PEM file.")
    key: str = Field(default="certificates/server.key", description="The server's private key, a PEM file.")
    nodes: str = Field(
        default="nodes", description="Folder with the public keys of the clients, `client-000.pub` and so on."
    )
    state: str = Field(default="state", description="Folder for Flower's database and logs, and for the run.")
    monitor: MonitorSettings = Field(default_factory=MonitorSettings, description="`/healthz` and `/metrics`.")
    wait_seconds: float = Field(
        default=600.0, gt=0, description="How long a run waits for the clients that it cannot start without."
    )
    grace_seconds: float = Field(
        default=60.0,
        ge=0,
        description="How long a run that could start with the clients that have joined waits for the others.",
    )
    reconnect_seconds: float = Field(
        default=120.0,
        ge=0,
        description="How long a round waits for a client that is not connected. After a kill, Flower accepts a "
        "client again only after about a minute.",
    )
    score_seconds: float = Field(
        default=3600.0, gt=0, description="How long a round waits for the scores that clients compute themselves."
    )
    secure_seconds: float = Field(
        default=600.0,
        gt=0,
        description="How long each of the eight steps of a secure aggregation waits for clients.",
    )
    server_evaluation: bool = Field(
        default=False,
        description="Whether the server has the run's data, and scores the global model on its held-out examples; "
        "otherwise the clients score their own models on theirs.",
    )
    patience: float | None = Field(
        default=10.0,
        gt=0,
        description="How long a round waits for its slowest clients once a quorum and more than half of them have "
        "delivered, as a multiple of the time that these took; null: as long as federation.deadline_seconds says.",
    )
    patience_seconds: float = Field(
        default=600.0, ge=0, description="The shortest such wait, also where `patience` would end it earlier."
    )
    sizes: dict[int, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Client -> the number of training examples by which it weighs, whatever it claims.",
    )
    max_examples: int | None = Field(
        default=None, ge=1, description="Most examples by which a client weighs; null: no such limit."
    )
    examples_factor: float | None = Field(
        default=10.0,
        gt=0,
        description="Most examples by which a client weighs, as a multiple of the clients' median, or of the smaller "
        "size where there are two; null: no such limit.",
    )
    client_bytes: int | None = Field(
        default=16 * 2**30,
        ge=1,
        description="Most bytes that one client's key may send at once, and again in every `client_seconds`; beyond, "
        "its requests are refused. null: no limit.",
    )
    client_seconds: float = Field(default=600.0, gt=0, description="The time of `client_bytes`.")
    client_bytes_per_second: float = Field(
        default=8192.0,
        gt=0,
        description="Least rate, in bytes a second, at which a request's body has to come after its first 30 seconds.",
    )
    connections_per_address: int | None = Field(
        default=256,
        ge=1,
        description="Most connections at the same time from one address, beyond which new ones are closed; null: no "
        "limit, as behind a proxy with limits of its own. From all addresses there are at most 1024.",
    )
    header_seconds: float = Field(
        default=10.0,
        gt=0,
        description="How long a connection may take for its TLS handshake, and then for the header of a request.",
    )
    deliver: bool = Field(
        default=True, description="Whether every client receives its own model, to keep, after the last round."
    )


def load_site(folder: Path) -> SiteSettings:
    """Returns the settings of a client's folder.

    Raises:
        ConfigError: there is no `site.yaml`, it is not YAML, a setting is unknown or out of range, or it asks to run a
            model's code, which this user has not allowed.
    """
    site = read_settings(folder / SITE_FILE, SiteSettings)
    if site.model.trust_remote_code:
        require_trusted(folder / SITE_FILE, code_of_model(site.model.path, site.model.revision, start=folder))
    if site.data.share >= site.data.shares:
        raise ConfigError(
            f"{folder / SITE_FILE}: data.share is {site.data.share}, but data.shares is {site.data.shares}.",
            f"Choose a share from 0 to {site.data.shares - 1}.",
        )
    return site


def data_config(site: SiteSettings) -> Config:
    """Returns a config that locates the site's data and model, and belongs to no run."""
    return Config.model_validate(
        {
            "method": "fedit",
            "model": site.model.model_dump(),
            "data": site.data.model_dump(exclude={"seed", "shares", "share"}),
            "federation": {"clients": site.data.shares},
            "seed": site.data.seed,
        }
    )


def load_server(folder: Path) -> ServerSettings:
    """Returns the settings of a server's folder.

    Raises:
        ConfigError: there is no `server.yaml`, it is not YAML, or a setting is unknown or out of range.
    """
    return read_settings(folder / SERVER_FILE, ServerSettings)


def server_state(folder: Path) -> Path | None:
    """Returns the state folder if this is a server's folder, else None.

    Raises:
        ConfigError: as `load_server`.
    """
    return folder / load_server(folder).state if (folder / SERVER_FILE).is_file() else None


def read_settings(path: Path, schema: type[_Settings]) -> _Settings:
    """Returns the settings of a file.

    Raises:
        ConfigError: there is no such file, it is not YAML, or a setting is unknown or out of range.
    """
    try:
        settings = parse_file(path)
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path}: {error.strerror or error}.",
            "Give a folder that `fedguild federation init` wrote, for example union/server or union/client-000.",
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, but this is {settings!r:.60}.")
    refuse_old_names(settings, str(path), SITE if schema is SiteSettings else SERVER)
    try:
        return schema.model_validate(settings)
    except ValidationError as error:
        raise explained(error, [Layer(str(path), settings)], schema) from error
