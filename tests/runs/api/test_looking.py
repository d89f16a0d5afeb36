"""`fedguild.profile` and `fedguild.partition`: looking before training."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedguild
from fedguild.core.errors import ConfigError
from tests.runs.api.conftest import BASE, ROWS


def test_a_profile_has_a_row_for_each_tier() -> None:
    costs = fedguild.profile(BASE, "training.steps=null", clients=8)
    frame = costs.frame()
    assert list(frame.index) == ["b1", "b2", "b3", "b4"]
    assert frame.loc["b4", "active_experts"] == 1
    assert frame.clients.sum() == 8
    assert (frame.flops_round.diff().dropna() < 0).all()
    assert "b4" in costs._repr_html_()
    assert not costs.assumed_examples  # the data is generated, so that its shares are known
    on_the_hub = ("training.steps=null", "data.dataset=dolly", "data.options={}")
    assert fedguild.profile(BASE, *on_the_hub).assumed_examples
    assert not fedguild.profile(BASE, *on_the_hub, examples=5).assumed_examples
    with pytest.raises(ConfigError, match="dtype on the wire is 'fp8'"):
        fedguild.profile(BASE, wire_dtype="fp8")  # type: ignore[arg-type]


def test_a_profile_prices_the_sample_rate_of_dp_sgd() -> None:
    """A batch of 4 of 20 examples is a rate of 0.2, and `privacy.sample_rate` is the rate itself."""
    settings = ("method=fedit", "method.rank=1", "training.batch_size=4", "training.gradient_accumulation_steps=1")
    private = (*settings, "privacy.unit=example", "privacy.noise_multiplier=1", "privacy.public=[sizes]")
    plain, batch, half = (
        fedguild.profile(BASE, *given, examples=20).frame().flops_round
        for given in (settings, private, (*private, "privacy.sample_rate=0.5"))
    )
    assert list(batch) == list(plain)
    assert list(half) == [round(2.5 * each) for each in plain]
    few = fedguild.profile(BASE, *private, examples=1).frame().flops_round
    assert list(few) == [round(each / 4) for each in plain]


def test_a_profile_counts_the_memory_of_the_attention_that_the_config_names() -> None:
    fused, eager = (fedguild.profile(BASE, f"model.attention={kind}").profile.tiers[0] for kind in ("sdpa", "eager"))
    assert eager.peak_memory.activations_bytes > fused.peak_memory.activations_bytes


def test_a_partition_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shares = fedguild.partition(BASE, "federation.clients=2", dataset=ROWS, partition=[0] * 40 + [1] * 8)
    frame = shares.frame()
    assert frame[["kind 0", "kind 1"]].to_numpy().tolist() == [[20, 20], [4, 4]]
    assert list(frame.train + frame.validation + frame.test) == [40, 8]
    assert frame.budget.tolist() == ["b1", "b2"]
    figure = shares.figures()["partition"]
    assert figure.save("shares.svg").read_text().startswith("<svg")
    for suffix, begins in {"pdf": b"%PDF", "PNG": b"\x89PNG"}.items():
        assert figure.save(f"shares.{suffix}").name == f"shares.{suffix}"
        (written,) = tmp_path.glob(f"shares.{suffix.lower()}")
        assert written.read_bytes().startswith(begins)
        written.unlink()
    with pytest.raises(ConfigError, match=r"as \.svg, \.pdf, \.png, but not as"):
        figure.save("shares.jpg")
    assert shares._repr_html_().count("<svg") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["shares.svg"]


@pytest.mark.parametrize("count", ["examples", "tokens", "context"])
def test_a_profile_of_nothing_is_refused(count: str) -> None:
    with pytest.raises(ConfigError, match=f"{count} is at least 1, got -3"):
        fedguild.profile(BASE, **{count: -3})  # type: ignore[arg-type]
