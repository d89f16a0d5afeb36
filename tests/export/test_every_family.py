"""Every described family's exports, loaded back by plain transformers and peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fedguild.core.errors import ModelError
from fedguild.export.adapter import PREFIX, write_adapter
from fedguild.export.merged import write_merged
from fedguild.export.per_expert import write_per_expert
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.families import FAMILIES
from fedguild.model.plan import AdapterPlan
from tests.export.conftest import assert_same_logits, backbone_of, deployment_of, plain_logits, slot_logits
from tests.export.test_adapter import loaded_by_peft
from tests.families import DESCRIBED, STACKED, tiny_model

ORDINARY = ("gpt_oss", "nemotron_h", "hunyuan_v1_moe")
BOTH = ("router", "experts")

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
every_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.long) for name in DESCRIBED]
)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def saved(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            tiny_model(family).save_pretrained(folders[family])
        return folders[family]

    return saved


@every_family
def test_the_merged_checkpoint_gives_our_logits(family: str, base_of: Callable[[str], Path], tmp_path: Path) -> None:
    """With all active experts, with one fewer, and unchanged."""
    base = base_of(family)
    backbone = backbone_of(base)
    top_k = backbone.info.top_k
    for active in sorted({top_k, max(1, top_k - 1)}):
        deployment = deployment_of(backbone, AdapterPlan((Lora(2, 0.7, BOTH), OutputScale("per_layer")), active))
        folder = tmp_path / str(active)
        folder.mkdir()
        if active < top_k and not FAMILIES.load(family).active:
            with pytest.raises(ModelError, match=f"No config makes '{family}' models run 1 of their 2"):
                write_merged(folder, backbone, deployment)
            continue
        write_merged(folder, backbone, deployment)
        assert_same_logits(
            plain_logits(AutoModelForCausalLM.from_pretrained(folder)), slot_logits(backbone, deployment)
        )
    (tmp_path / "plain").mkdir()
    write_merged(tmp_path / "plain", backbone, deployment_of(backbone, AdapterPlan(())))
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "plain", base))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@every_family
def test_the_adapter_of_peft_gives_our_logits(family: str, base_of: Callable[[str], Path], tmp_path: Path) -> None:
    base = base_of(family)
    backbone = backbone_of(base)
    deployment = deployment_of(backbone, AdapterPlan((Lora(2, 0.7, BOTH),)))
    write_adapter(tmp_path, backbone.info, deployment, base=str(base))
    assert_same_logits(plain_logits(loaded_by_peft(base, tmp_path)), slot_logits(backbone, deployment))


@every_family
def test_the_form_by_expert_has_the_names_of_the_checkpoint(
    family: str, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where the hub's repository has a linear layer for each expert, its weight plus B A is that of the merge."""
    base = base_of(family)
    backbone = backbone_of(base)
    deployment = deployment_of(backbone, AdapterPlan((Lora(2, 0.7, BOTH),)))
    if family in STACKED:
        with pytest.raises(ModelError, match="is not stored as linear layers, one for each expert"):
            write_per_expert(tmp_path, backbone, deployment, base=str(base))
        return
    write_per_expert(tmp_path, backbone, deployment, base=str(base))
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "merged", backbone, deployment)
    factors = load_file(tmp_path / "adapter_model.safetensors")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    modules = {name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in factors if "lora_A" in name}
    assert len(modules) >= 8 * 2
    for module in modules:
        down, up = (factors[f"{PREFIX}{module}.lora_{leaf}.weight"] for leaf in "AB")
        expected = before[f"{module}.weight"] + 0.7 * up @ down
        torch.testing.assert_close(after[f"{module}.weight"], expected, rtol=1e-5, atol=1e-5)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {f"{module}.weight" for module in modules}
