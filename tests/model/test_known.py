"""The known models: their parameters are the published ones, and presets need no download for a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from fedguild.config import axes
from fedguild.core.errors import ModelError
from fedguild.model import backbone
from fedguild.model.backbone import describe_architecture, describe_config
from fedguild.model.families import FAMILIES
from fedguild.model.known import find_known, known_models
from fedguild.model.packaged import PACKAGED
from tests.backbones import is_released

PARAMETERS = {
    "a.x-k1": 518_983_052_288,
    "aria": 24_869_091_840,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "dots.llm1": 142_774_373_888,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "flexolmo-7x7b-1t": 33_270_665_216,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.7-flash": 29_943_390_976,
    "glm-5": 743_911_199_232,
    "gpt-oss-20b": 20_914_757_184,
    "granite-3.1-3b-a800m": 3_298_793_472,
    "granite-4.0-h-small": 32_207_337_984,
    "granite-4.0-h-tiny": 6_939_037_248,
    "hunyuan-a13b": 80_393_183_232,
    "hy3-preview": 295_033_528_320,
    "jamba-v0.1": 51_570_323_328,
    "k-exaone-236b-a23b": 236_571_150_336,
    "kimi-linear-48b-a3b": 49_133_074_464,
    "lfm2-8b-a1b": 8_339_929_856,
    "ling-3.0-flash": 124_414_191_072,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-4-scout-17b-16e": 107_769_861_120,
    "llama-7b": 6_738_415_616,
    "mellum2-12b-a2.5b": 12_149_923_072,
    "mimo-v2-flash": 308_778_768_832,
    "minimax-m2": 228_689_748_992,
    "minimax-text-01": 456_089_655_296,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "olmo-1b": 1_176_764_416,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3.5-moe": 41_872_793_600,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "smollm2-135m": 134_515_008,
    "smollm2-moe": 134_806_464,
    "solar-open-100b": 102_651_793_408,
    "switch-base-16": 1_072_397_568,
    "trinity-mini": 26_123_974_400,
}
WITHOUT = {"dots3_note_text", "granitemoe_swa", "granitemoeshared", "hy_v4", "minimax_m3_vl_text"}
"""Families of which no model is known."""


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


def test_every_described_family_has_a_known_model() -> None:
    """The table of memory on real-models.md has a row for each."""
    shipped = {family.name for family in FAMILIES.found() if family.origin == "fedguild"}
    assert shipped - {model.config["model_type"] for model in known_models()} == WITHOUT


@pytest.mark.usefixtures("offline")
def test_a_known_model_of_an_architecture_that_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone._described_known.cache_clear()
    monkeypatch.setattr(backbone, "CONFIG_MAPPING", {})
    with pytest.raises(ModelError, match=r"has no architecture 'olmo'.*allenai/OLMo-1B-hf[\s\S]*Update transformers"):
        describe_config("olmo-1b")


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
