"""A site's secret: the server cannot reproduce the noise that protects a client's embeddings."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.client.budget import ClientInfo
from fedguild.config import Config
from fedguild.core.codec import encode
from fedguild.core.errors import FedGuildError
from fedguild.core.payload import Payload
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.federation.trainer_service import TrainerService, run_metadata
from fedguild.methods import build_method
from fedguild.methods.fedamole.embedding_privacy import privatised
from fedguild.methods.fedamole.pool import EXPERT, TOKEN
from fedguild.privacy.dp.secret import SECRET_BYTES, private_seed, run_secret
from fedguild.runs.setup import budgets_of, fitted, load_model
from fedguild.server.method import Roster
from tests.engines.equality import case_config
from tests.federation.flower.loopback_federation import trainers_of

RUN = "ab" * 16
ETA = 1e-3
"""So much noise that what is uploaded is its direction, and nothing of the clean embedding."""


@pytest.fixture(scope="module")
def config(llama_folder: Path) -> Config:
    return case_config("fedamole", {"llama": llama_folder})


def noisy(config: Config, eta: float | None = ETA) -> Config:
    """The same run with noise; with none where eta is None."""
    options = {**config.method.options, "privacy_eta": eta}
    return config.model_copy(update={"method": type(config.method)(name="fedamole", options=options)})


def train_request(config: Config, client: int = 1, factor: float = 1.0) -> Message:
    """Returns the server's request of the first round; the model may be another multiple of the start."""
    backbone = load_model(config)
    method = fitted(build_method("fedamole", config.method.options), config, backbone.info)
    (budget, *_) = budgets = list(budgets_of(config, backbone.info).values())
    clients = [ClientInfo(index, budget, 10) for index in range(config.federation.clients)]
    state = method.start(backbone.info, Roster(budgets, clients), torch_rng(config.seed, "start", "fedamole"))
    sent = method.download(state, backbone.info, clients[client])
    body = encode(Payload({name: factor * value for name, value in sent.tensors.items()}, sent.scalars))
    return Message("train", RUN, 1, client, metadata=run_metadata(config), body=body)


def embeddings(trainer: TrainerService, request: Message) -> dict[str, torch.Tensor]:
    reply = trainer.handle(request)
    assert not reply.failure
    sent = read_payload(reply.body, "test").tensors
    return {name: value for name, value in sent.items() if name.split("/")[0] in (TOKEN, EXPERT)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_servers_seed_does_not_give_the_noise(config: Config, tmp_path: Path) -> None:
    """The attack: the clean embeddings are known, the noise is drawn from the run's seed, and it does not fit."""
    clean = embeddings(trainers_of(config, tmp_path / "clean")[1], train_request(config))
    trainer = trainers_of(noisy(config), tmp_path / "noisy")[1]
    uploaded = embeddings(trainer, train_request(noisy(config)))

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        rng = numpy_rng(seed, "embedding noise", 1, 1)
        return {name: privatised(value, ETA, None, rng) for name, value in sorted(clean.items())}

    guessed = drawn(config.seed)
    assert not any(torch.allclose(uploaded[name], guessed[name]) for name in uploaded)
    secret = run_secret(trainer.work / "runs" / RUN)
    site = trainer._config(train_request(noisy(config)))
    assert same(uploaded, drawn(private_seed(secret, site.fingerprint(), train_request(noisy(config)).body)))


def test_a_desk_that_restarts_gives_the_same_bits(config: Config, tmp_path: Path) -> None:
    request = train_request(noisy(config))
    first, again = (embeddings(trainers_of(noisy(config), tmp_path)[1], request) for _ in range(2))
    elsewhere = embeddings(trainers_of(noisy(config), tmp_path / "elsewhere")[1], request)
    assert same(first, again)
    assert not same(first, elsewhere)


def test_no_noise_is_used_twice(config: Config, tmp_path: Path) -> None:
    """Another model or another eta in one and the same round: a server could subtract the replies."""
    secret, site = run_secret(tmp_path), noisy(config)
    first, second = train_request(site), train_request(site, factor=2.0)
    seeds = [
        private_seed(secret, site.fingerprint(), first.body),
        private_seed(secret, site.fingerprint(), second.body),
        private_seed(secret, noisy(config, 2 * ETA).fingerprint(), first.body),
    ]
    assert len(set(seeds)) == 3
    assert private_seed(secret, site.fingerprint(), train_request(site).body) == seeds[0]


def test_the_secret_stays_with_its_owner(config: Config, tmp_path: Path) -> None:
    trainers = trainers_of(noisy(config), tmp_path)
    secrets = set()
    for index, trainer in enumerate(trainers):
        request = train_request(noisy(config), index)
        replies = [trainer.handle(request), trainer.handle(replace(request, kind="hello", body=b""))]
        path = trainer.work / "runs" / RUN / "secret"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_bytes()
        seed = private_seed(secret, trainer._config(request).fingerprint(), request.body)
        for reply in replies:
            sent = reply.to_bytes()
            assert not any(hidden in sent for hidden in (secret, secret.hex().encode(), str(seed).encode()))
        secrets.add(secret)
    assert len(secrets) == len(trainers)
    assert all(len(secret) == SECRET_BYTES for secret in secrets)


def test_a_damaged_secret_is_said(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(FedGuildError, match="holds 5 bytes"):
        run_secret(tmp_path)


@pytest.mark.parametrize("run", ["", "../../elsewhere", "/tmp/elsewhere", RUN + "/.."])
def test_a_run_has_no_folder_outside_the_sites(run: str, config: Config, tmp_path: Path) -> None:
    reply = trainers_of(config, tmp_path)[1].handle(replace(train_request(config), run=run))
    assert "names an invalid run" in reply.failure
    assert not list(tmp_path.rglob("secret"))
