"""FedPrompt: where the prompt starts, its mean, FedPrompt-FT, and what travels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from fedguild.config import load_config, presets
from fedguild.core.accounting import bytes_by_part
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.data.batches import encode_prompt
from fedguild.methods import build_method
from fedguild.methods.fedprompt import FedPrompt, FedPromptSettings
from fedguild.model.backbone import Backbone
from fedguild.model.packaged import PACKAGED
from fedguild.model.slots import SlotModel
from fedguild.server.validation import check_upload
from tests.backbones import END, PAD
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, upload
from tests.methods.llama import llama_1b
from tests.oracles.aggregation import seeded, weighted_mean

NAME = "soft_prompt"
TEXT_IDS = [1, 7, 9, 4]


def fedprompt(**options: object) -> FedPrompt:
    return FedPrompt(FedPromptSettings(**{"tokens": 4, "text": "Answer.", **options}))


@pytest.fixture
def backbone(olmoe_backbone: Backbone) -> Backbone:
    """The small OLMoE with a tokenizer that knows one text."""
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END, encode=lambda *_, **__: list(TEXT_IDS))
    return replace(olmoe_backbone, tokenizer=tokenizer)


def test_two_clients_by_hand() -> None:
    """P_1 = 2 with 10 examples, P_2 = 6 with 30: (2 + 6) / 2 = 4, in the first round as in a later one."""
    sent = [
        upload(client(i, LARGE, n), adapter={NAME: torch.tensor([[p]])}) for i, n, p in ((0, 10, 2.0), (1, 30, 6.0))
    ]
    for state in (Payload(), Payload({NAME: torch.tensor([[9.0]])})):
        assert fedprompt(tokens=1).aggregate(state, iter(sent)).part("adapter")[NAME].item() == 4.0


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_aggregation(clients: int) -> None:
    before = seeded(4, 16, seed=99)
    values = [seeded(4, 16, seed=index) for index in range(clients)]
    sent = [upload(client(i, LARGE, 2 + 3 * i), adapter={NAME: value}) for i, value in enumerate(values)]
    found = fedprompt().aggregate(Payload.of({"adapter": {NAME: before}}), iter(sent)).part("adapter")[NAME]
    torch.testing.assert_close(found, weighted_mean(values, [torch.tensor(1.0)] * clients, before))


def test_without_an_upload_the_state_stays() -> None:
    assert not fedprompt().aggregate(Payload(), iter([])).part("adapter")
    before = seeded(4, 16, seed=0)
    assert torch.equal(
        fedprompt().aggregate(Payload.of({"adapter": {NAME: before}}), iter([])).part("adapter")[NAME], before
    )


def test_the_start_is_the_texts_embeddings_and_never_travels(backbone: Backbone, tmp_path: Path) -> None:
    """Without learning, every client sends the rows that it has read itself; the first download is empty."""
    federation = Federation(backbone, fedprompt(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    state, method = federation.start(), federation.method
    assert not state.part("adapter")
    assert not method.download(state, federation.model, federation.clients[0]).tensors
    rows = backbone.model.get_input_embeddings().weight[TEXT_IDS]
    sent = federation.train(state, learning_rate=0.0)
    for part in sent:
        assert torch.equal(part.payload.tensors[f"adapter/{NAME}"], rows)
    deployment = method.deploy(state, federation.model, LARGE)
    with SlotModel(backbone, [deployment.plan]) as model:
        model.load(0, deployment.tensors)
        assert torch.equal(model.read(0)[NAME], rows)
    later = method.aggregate(state, sent)
    assert torch.equal(method.download(later, federation.model, federation.clients[0]).part("adapter")[NAME], rows)


def test_a_round(backbone: Backbone, tmp_path: Path) -> None:
    clients = [client(0, LARGE, 4), client(1, SMALL, 3), client(2, MIDDLE, 5)]
    federation = Federation(backbone, fedprompt(), clients, tmp_path)
    before, method = backbone.fingerprint(), federation.method
    state = method.aggregate(federation.start(), federation.train(federation.start()))
    sent = federation.train(state, 2)
    for part in sent:
        check_upload(part.payload, method.expected_upload(federation.model, part.client, Payload()), client="c")
        assert not torch.equal(part.payload.tensors[f"adapter/{NAME}"], state.part("adapter")[NAME])
        assert method.plan(federation.model, part.client.budget).active_experts is None
    assert backbone.fingerprint() == before
    assert not list(tmp_path.rglob("*.memory"))
    alone = federation.train(state, 2, who=(1,))[0].payload.tensors[f"adapter/{NAME}"]
    torch.testing.assert_close(alone, sent[1].payload.tensors[f"adapter/{NAME}"], rtol=1e-4, atol=1e-5)


def test_a_clients_own_prompt(backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(backbone, fedprompt(personal=True), [client(0, LARGE), client(1, SMALL)], tmp_path)
    method, state = federation.method, federation.start()
    sent = federation.train(state, who=(0,))
    state = method.aggregate(state, sent)
    first, second = federation.clients
    own = method.personalize(state, federation.model, first, federation.memory.load(first.name, 2))
    assert torch.equal(own.tensors[NAME], sent[0].payload.tensors[f"adapter/{NAME}"])
    newcomer = method.personalize(state, federation.model, second, federation.memory.load(second.name, 2))
    assert torch.equal(newcomer.tensors[NAME], state.part("adapter")[NAME])


def test_the_traffic_of_a_round_on_llama() -> None:
    """FedAMoLE, Table 4: 0.29 MB, which is 37 tokens of 2048 values in fp32."""
    method, model = fedprompt(tokens=37), llama_1b()
    shapes = method.expected_upload(model, client(0, LARGE), Payload())
    sent = Payload({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    assert bytes_by_part(sent)["adapter"] == 37 * 2048 * 4
    assert round(bytes_by_part(sent)["adapter"] / 2**20, 2) == 0.29


def test_the_presets_count_their_texts_tokens() -> None:
    tokenizers = {
        name: AutoTokenizer.from_pretrained(str(folder))
        for name, folder in PACKAGED.items()
        if (folder / "tokenizer.json").exists()
    }
    counted = 0
    for preset in presets():
        if preset.method.name != "fedprompt":
            continue
        config = load_config(preset.name)
        if config.model.path in tokenizers:
            settings = FedPromptSettings(**config.method.options)
            assert settings.tokens == len(encode_prompt(settings.text, tokenizers[config.model.path])), preset.name
            counted += 1
    assert counted


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("tokens", 0, r"method\.tokens: .*greater than or equal to 1, got 0"),
        ("text", "", r"method\.text: .*at least 1 character.*got ''"),
    ],
)
def test_options_out_of_range(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method("fedprompt", {option: value})
