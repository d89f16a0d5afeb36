"""The known models: their parameters are the published ones, and presets need no download for a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from fedguild.config import axes
from fedguild.core.errors import ModelError
from fedguild.model.backbone import describe_architecture, describe_config
from fedguild.model.known import find_known, known_models
from fedguild.model.packaged import PACKAGED
from tests.backbones import is_released

PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "glm-4.5-air": 106_852_245_504,
    "gpt-oss-20b": 20_914_757_184,
    "granite-4.0-h-small": 32_207_337_984,
    "granite-4.0-h-tiny": 6_939_037_248,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-7b": 6_738_415_616,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-1b": 1_176_764_416,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "smollm2-135m": 134_515_008,
    "smollm2-moe": 134_806_464,
    "switch-base-16": 1_072_397_568,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a network nor the folders that `make smollm2` writes."""
    monkeypatch.chdir(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", [model.name for model in known_models()])
def test_a_known_model_has_its_published_size(name: str) -> None:
    known = find_known(name)
    assert known is not None
    if not is_released(known.config["model_type"]):
        pytest.skip(f"this transformers is too old for {known.config['model_type']}")
    info = describe_config(known.hub_id)
    assert info.parameters == PARAMETERS[name]
    assert info == describe_config(name)
    assert info.name == known.hub_id


def test_every_preset_names_a_known_model() -> None:
    paths = {model.content["model"]["path"] for model in axes().models.values()} - PACKAGED.keys()
    unknown = sorted(path for path in paths if find_known(path) is None and not path.startswith("models/"))
    assert not unknown, f"Add the sizes of {', '.join(unknown)} to model/known."


@pytest.mark.usefixtures("offline")
def test_an_unknown_hub_id_lists_what_is_there_offline() -> None:
    with pytest.raises(ModelError, match=r"'some/model'[\s\S]*config.json[\s\S]*olmoe-1b-7b"):
        describe_config("some/model")


@pytest.mark.usefixtures("offline")
def test_a_revision_asks_the_hub() -> None:
    with pytest.raises(ModelError, match="no network"):
        describe_config("allenai/OLMoE-1B-7B-0924", revision="main")


def test_a_config_file_a_folder_and_changed_keys(tmp_path: Path) -> None:
    known = find_known("qwen2.5-0.5b")
    assert known is not None
    (tmp_path / "config.json").write_text(json.dumps(known.config))
    by_folder, by_file = describe_config(str(tmp_path)), describe_config(str(tmp_path / "config.json"))
    assert by_folder.parameters == by_file.parameters == PARAMETERS["qwen2.5-0.5b"]
    halved = describe_architecture({**known.config, "num_hidden_layers": 12}, "half")
    assert (halved.layers, halved.name) == (12, "half")
