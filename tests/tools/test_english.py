"""The English checkpoint: its recipe runs on any text and resumes to the same weights; transformers runs the result."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeForCausalLM

from fedguild.core.errors import ModelError
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.model import packaged
from fedguild.model.backbone import describe_config, load_backbone
from tools.english.architecture import Sizes
from tools.english.build import STATE, Session, build
from tools.english.card import _CARD, read_sources
from tools.english.corpus import Corpus, load_corpus, read_documents
from tools.english.experts import use_trainable_experts
from tools.english.pretrain import Pretraining, Recipe
from tools.tiny.prose import paragraph

SIZES = Sizes(vocabulary=320, layers=2, hidden=16, heads=2, experts=8, active=4, expert_width=8)
RECIPE = Recipe(sizes=SIZES, row_tokens=24, batch_rows=4, warm_up_steps=3)
CHECKPOINT = packaged.PACKAGED[packaged.ENGLISH]
STEP = RECIPE.step_tokens
SOURCES = """# Where it is from

Not for the card.

- `prose`: sentences by **nobody**,
  under CC0.

| file | characters |
| --- | ---: |
| prose | 9 |

Nor this.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two files with 240 documents in all."""
    path = tmp_path_factory.mktemp("corpus")
    rng = numpy_rng(0, "text")
    texts = ["\n".join(paragraph(rng, 2) for _ in range(3)) for _ in range(240)]
    (path / "plain.txt").write_text("\n\n".join(texts[:100]))
    (path / "packed.txt.gz").write_bytes(gzip.compress("\n\n\n".join(texts[100:]).encode()))
    (path / "SOURCE.md").write_text(SOURCES)
    return path


@pytest.fixture(scope="module")
def corpus(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(folder, tmp_path_factory.mktemp("tokens"), SIZES.vocabulary)


@pytest.fixture
def training(corpus: Corpus) -> Pretraining:
    return Pretraining(corpus, RECIPE)


def weights(checkpoint: Path | None) -> dict[str, torch.Tensor]:
    assert checkpoint is not None
    return load_file(checkpoint / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_document_in_200_is_held_out_and_never_trained_on(corpus: Corpus, folder: Path) -> None:
    documents, end = read_documents(folder), corpus.tokenizer.eos_token
    assert corpus.tokenizer.decode(corpus.held_out) == "".join(documents[number] + end for number in (0, 200))
    assert len(corpus.starts) - 1 == 238
    for number in (0, 1, 237):
        text = corpus.tokenizer.decode(corpus.train[corpus.starts[number] : corpus.starts[number + 1]])
        assert text == [*documents[1:200], *documents[201:]][number] + end
    assert corpus.held_out_characters == len(documents[0] + documents[200])


@pytest.mark.parametrize("rows", [1, 3])
def test_the_experts_are_transformers_own_to_rounding(training: Pretraining, corpus: Corpus, rows: int) -> None:
    ids = torch.from_numpy(corpus.rows(0, rows, 23, seed=3))
    results = []
    for implementation in ("eager", "fedguild_pretraining"):
        training.model.set_experts_implementation(implementation)
        training.model.zero_grad()
        output = training.model(input_ids=ids, labels=ids)
        output.loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in training.model.named_parameters()}
        results.append((output.logits.detach(), gradients))
    (logits, gradients), (ours, our_gradients) = results
    torch.testing.assert_close(ours, logits)
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_shipped_card_says_what_the_build_writes() -> None:
    """Every line of the template in which nothing is filled in stands in it, in this order, and nothing was added."""
    shipped = (CHECKPOINT / "README.md").read_text("utf-8")
    lines = iter(shipped.splitlines())
    for line in _CARD.partition("{sources}")[0].splitlines():
        assert "{" in line or line in lines, line
    made = shipped.partition("## How it was made")[2].partition("| step |")[0]
    template = _CARD.partition("## How it was made")[2].partition("| step |")[0]
    assert len(made.splitlines()) == len(template.splitlines())


def test_the_shipped_card_attributes_every_kind_of_text() -> None:
    sources = (CHECKPOINT / "README.md").read_text("utf-8").partition("## Text and attribution")[2]
    assert 'Attribution: "OpenStax, <title>, CC BY 4.0, openstax.org"' in sources
    assert "The World Factbook, United States government, **public domain**" in sources
    for line in ("- `openstax-*.txt.gz`", "- `factbook.txt.gz`", "- `gutenberg-*.txt.gz`"):
        assert line in sources
    rows = re.findall(r"^\| (openstax|gutenberg)-\S+ \| \S.* \| \S.* \| [\d,]+ \|$", sources, re.MULTILINE)
    assert rows.count("openstax") > 25
    assert rows.count("gutenberg") > 10


class KilledError(Exception):
    pass


def killed_after(steps: int) -> Callable[[], bool]:
    """Returns a session's `stopping` that raises at a step, as a kill would."""
    seen = iter(range(steps - 1))

    def stopping() -> bool:
        if next(seen, None) is None:
            raise KilledError
        return False

    return stopping


def quiet(**options: Any) -> Session:
    return Session(say=lambda _: None, **options)


def test_a_killed_build_resumes_to_the_same_weights(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipe": RECIPE, "tokens": 9 * STEP, "decay_tokens": 4 * STEP}
    whole = weights(build(folder, tmp_path / "whole", **options, session=quiet()))
    output = tmp_path / "killed"
    for steps in (3, 6):  # before the decay and in it, a step after the last save
        with pytest.raises(KilledError):
            build(folder, output, **options, session=quiet(save_seconds=0, stopping=killed_after(steps)))
    assert (output / "decaying-5-9.safetensors").exists()
    assert same(weights(build(folder, output, **options, session=quiet())), whole)
    assert sorted(file.name for file in output.iterdir()) == ["checkpoint", "corpus.safetensors", STATE, "tokenizer"]


def test_the_checkpoint_loads_as_any_other_and_its_card_says_how_it_was_made(folder: Path, tmp_path: Path) -> None:
    path = build(folder, tmp_path, recipe=RECIPE, tokens=4 * STEP, decay_tokens=STEP, session=quiet())
    assert path is not None
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == model.config.vocab_size == SIZES.vocabulary
    assert load_backbone(str(path)).info.moe[0].num_experts == SIZES.experts
    card = (path / "README.md").read_text()
    assert f"python -m tools.english.build --corpus DIR --tokens {4 * STEP} --decay-tokens {STEP} --seed 0" in card
    assert "- `prose`: sentences by **nobody**,\n  under CC0.\n\n| file |" in card
    assert "Not for the card" not in card
    assert "Nor this" not in card
    assert all(len(line) <= 120 for line in card.splitlines())
    assert read_sources(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "build"),
    [("english", "python -m tools.english.build --corpus DIR"), ("embedded", "python -m tools.tiny.build --out DIR")],
)
def test_a_packaged_name_needs_the_packaged_weights(name, build, monkeypatch, tmp_path):
    monkeypatch.setitem(packaged.PACKAGED, name, tmp_path)
    for load in (load_backbone, describe_config):
        with pytest.raises(ModelError, match=f"no weights of the model '{name}'") as raised:
            load(name)
        assert build in raised.value.hint


def test_the_packaged_weights_are_an_english_olmoe_of_at_most_36_megabytes() -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert isinstance(model, OlmoeForCausalLM)
    assert (model.config.num_experts, model.config.num_experts_per_tok, len(tokenizer)) == (64, 8, 8192)
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 36_000_000
    use_trainable_experts(model)
    ids = tokenizer(
        "The capital of the country is the largest city, and the president lives there.", return_tensors="pt"
    )
    scrambled = ids["input_ids"][:, torch.randperm(ids["input_ids"].shape[1], generator=torch_rng(0, "order"))]
    with torch.no_grad():
        english_nats, other_nats = (float(model(input_ids=x, labels=x).loss) for x in (ids["input_ids"], scrambled))
    assert english_nats < other_nats - 1
