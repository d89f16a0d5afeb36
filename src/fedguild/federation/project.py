"""Creation of a federation on disk: the server's folder, one for each client, and an example authority."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from fedguild.config import Config, load_config
from fedguild.config.trust import code_of_model, trust
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.files import make_folder, write_text
from fedguild.core.layout import client_name
from fedguild.federation import templates
from fedguild.federation.commands import write_app
from fedguild.federation.exposure import counted_optimizer, rank_of
from fedguild.federation.keys import write_key
from fedguild.federation.serving import check_remote
from fedguild.federation.site import SERVER_FILE, SITE_FILE, ServerSettings
from fedguild.federation.site_files import at_home, require_model, site_settings, with_own_data
from fedguild.methods import require_registered
from fedguild.model.plan import trainable_shapes
from fedguild.runs.experiment import callbacks_of
from fedguild.runs.setup import aggregator_of, budgets_of, check_config, fitted, method_of, model_of
from fedguild.runs.tracking import check_trackers
from fedguild.server.sampling import quorum_count

FIRST_NODE_PORT = 9094
CONTROL_PORT = 9444
"""Where the port next to the clients' is not free for everybody to use."""
PEERS = "peers"
MAX_LORA_RANK = 256
"""Above this a tensor is trained in full, and has seldom as many tokens behind it as directions."""
MAX_DECAY, MAX_RANK, MIN_LENGTH, MAX_DROPOUT = 0.1, 64, 64, 0.3
"""A new site's limits on what an upload can reveal."""
MAX_STEPS, REQUESTS_PER_RUN, REQUESTS_PER_ROUND = 10_000, 3000, 8
"""A new site's limits on what a run may ask for; a run that asks for more from the start gets it."""


def write_project(
    folder: Path,
    clients: int,
    config_name: str,
    overrides: Sequence[str] = (),
    *,
    address: str = "127.0.0.1:9443",
    shared_data: bool = False,
) -> Config:
    """Writes a federation whose folders can be handed to organisations, or all run on this machine.

    Every client reads its own data, from a file in its folder, and the server has none.

    Args:
        folder: A new or empty folder.
        config_name: A preset or a config file.
        overrides: Settings that override it, `key.sub=value`.
        address: Where the clients find the server, `host:port`.
        shared_data: Whether the clients share the config's data instead, each with the share that `fedguild run` would
            give it, and the server scores on it.

    Raises:
        ConfigError: the config or the address is wrong, or such a run could not begin: the method does not suit the
            model or the number of clients, or settings exclude each other.
        FedGuildError: the folder is not empty, or openssl is missing.
    """
    host, port = _host_and_port(address)
    required = [f"federation.clients={clients}", "federation.engine.name=flower", "evaluation.pooled=false"]
    config = load_config(config_name, [*required, *overrides])
    require_registered(config.method.name)
    _require_own(config, clients)
    if not any(override.startswith("federation.quorum=") for override in overrides):
        config = _never_alone(config)
    config = config if shared_data else with_own_data(config, overrides)
    require_model(config)
    check_config(config)
    check_trackers(config.tracking.trackers)
    check_remote(config, ServerSettings(server_evaluation=shared_data))
    callbacks_of(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FedGuildError(f"{folder} already exists.", "Choose a folder that is new or empty.")
    _require_openssl()
    server = folder / "server"
    data = templates.SHARED_DATA if shared_data else templates.OWN_DATA.format(file=config.data.train)
    write_text(folder / "README.md", templates.README.format(clients=clients, address=address, data=data))
    at_server = at_home(config, shared_data=shared_data)
    trust(server / "run.yaml", at_server.code)
    aggregator = aggregator_of(config, method_of(config), real=True) or "none"
    write_text(server / "run.yaml", at_server.resolved_yaml(aggregator=aggregator))
    server_evaluation = str(shared_data).lower()
    control_port = port + 1 if 1024 <= port < 65534 else CONTROL_PORT
    write_text(
        server / SERVER_FILE,
        templates.SERVER.format(port=port, control_port=control_port, server_evaluation=server_evaluation),
    )
    write_app(server)
    write_text(server / "nginx.conf", templates.NGINX.format(host=host, port=port, behind=control_port + 1))
    write_text(server / "certificates" / "make.sh", templates.CERTIFICATES.replace("@HOST@", host))
    _make_certificates(server / "certificates")
    for index in range(clients):
        _write_client(folder, config, index, address, own=not shared_data)
    if config.federation.secure:
        _write_peers(folder, clients)
    return config


def _never_alone(config: Config) -> Config:
    """Returns a config whose quorum is two uploads at least, where a round wants as many."""
    rules = config.federation
    if quorum_count(rules.wanted_uploads, rules.quorum) > 1 or rules.wanted_uploads < 2:
        return config
    return config.model_copy(update={"federation": rules.model_copy(update={"quorum": 2 / rules.wanted_uploads})})


def _write_peers(folder: Path, clients: int) -> None:
    """Gives every client the others' public keys, which authenticate them in a secure aggregation."""
    for index in range(clients):
        peers = folder / client_name(index) / PEERS
        make_folder(peers)
        for public in (folder / "server" / "nodes").glob("client-*.pub"):
            shutil.copyfile(public, peers / public.name)


def _write_client(folder: Path, config: Config, index: int, address: str, *, own: bool) -> None:
    name = client_name(index)
    site = folder / name
    make_folder(site)
    public = write_key(site / "node.key")
    write_text(folder / "server" / "nodes" / f"{name}.pub", public.read_text("utf-8"))
    shutil.copyfile(folder / "server" / "certificates" / "ca.pem", site / "ca.pem")
    model, data = site_settings(config, site, own=own)
    shares = {"shares": 1, "share": 0} if own else {"shares": config.federation.clients, "share": index}
    data |= {"seed": config.seed, **shares}
    if own:
        data["partition"] = {"scheme": "iid"}
    if config.model.trust_remote_code:
        trust(site / SITE_FILE, [code_of_model(str(model["path"]), config.model.revision, start=site)])
    write_text(
        site / SITE_FILE,
        templates.SITE.format(
            client=index,
            address=address,
            port=FIRST_NODE_PORT + index,
            model=_indented({"model": model}),
            data=_indented({"data": data}),
            method=config.method.name,
            min_steps=config.training.steps or 1,
            max_steps=max(MAX_STEPS, config.training.steps or 0),
            min_batch=config.training.batch_size * config.training.gradient_accumulation_steps,
            **_profile(config),
            min_scored=min(5, config.evaluation.max_examples or 5) if own else 1,
            requests_per_run=max(REQUESTS_PER_RUN, REQUESTS_PER_ROUND * config.federation.rounds),
            min_clients=min(2, quorum_count(config.federation.wanted_uploads, config.federation.quorum)),
            secure=_accepted(config),
        ),
    )


def _profile(config: Config) -> dict[str, object]:
    """Returns the recommended limits on what an upload can reveal, wide enough for the run as it is set up."""
    training, rank = config.training, _rank(config)
    optimizers = dict.fromkeys(["adamw", "adam", counted_optimizer(training)])
    told = rank is not None and rank <= MAX_LORA_RANK and config.privacy.unit == "none"
    return {
        "optimizers": ", ".join(optimizers),
        "max_decay": max(MAX_DECAY, training.learning_rate * training.weight_decay),
        "max_rank": "null" if rank is None else max(MAX_RANK, rank),
        "min_tokens_per_rank": 1 if told else "null",
        "min_length": min(MIN_LENGTH, config.data.max_length),
        "max_dropout": max(MAX_DROPOUT, getattr(method_of(config).settings, "dropout", 0.0)),
    }


def _rank(config: Config) -> int | None:
    """Returns the largest rank of a tensor that a run trains; None if the model cannot be described here."""
    try:
        info = model_of(config)
        method = fitted(method_of(config), config, info)
        plans = [method.plan(info, budget) for budget in budgets_of(config, info).values()]
    except FedGuildError:
        return None
    return rank_of(shape for plan in plans for shape in trainable_shapes(info, plan).values())


def _require_own(config: Config, clients: int) -> None:
    """Raises ConfigError if an override changed a setting that a federation controls."""
    if config.federation.clients != clients:
        raise ConfigError(
            f"federation.clients is {config.federation.clients}, but folders are to be written for {clients} clients.",
            f"Give --clients {config.federation.clients} instead.",
        )
    if config.federation.engine.name != "flower":
        raise ConfigError(
            f"The engine of real clients is flower, not {config.federation.engine.name}.",
            "Leave federation.engine out: the federation sets it.",
        )


def _accepted(config: Config) -> str:
    """Returns the lines that make a site accept secure runs only; empty for a plain run."""
    rules = config.federation
    return f"\n  secure: true\n  disclose: [{', '.join(rules.secure_disclose)}]" if rules.secure else ""


def _indented(section: dict[str, object]) -> str:
    return yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=100).rstrip()


def _make_certificates(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SERVER_NAME"}
    process = subprocess.run(
        ["sh", "make.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise FedGuildError(f"openssl could not make the example certificates: {process.stderr.strip()[-500:]}")


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"'{address}' is not an address.", "An address is host:port, for example guild.example.org:9443."
        )
    return host, int(port)


def _require_openssl() -> None:
    if shutil.which("openssl") is None:
        raise FedGuildError(
            "openssl is not installed; it makes the example certificates.", "Install the package openssl."
        )
