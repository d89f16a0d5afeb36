"""The English checkpoint: its recipe runs on any text and resumes to the same weights; transformers runs the result."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeForCausalLM
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from fedguild.core.errors import FedGuildError, ModelError
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.model import packaged
from fedguild.model.backbone import describe_config, load_backbone
from fedguild.server.utilisation import gini
from tools.english.architecture import Sizes, new_model
from tools.english.build import STATE, Session, build
from tools.english.card import _CARD, read_sources
from tools.english.corpus import DOCUMENT_CHARACTERS, Corpus, load_corpus, read_documents
from tools.english.experts import _experts_forward, use_trainable_experts
from tools.english.measure import measure
from tools.english.pretrain import Pretraining, Recipe, balance_loss
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


# The text.


def test_documents_are_the_sections_and_no_longer_than_the_limit(tmp_path: Path) -> None:
    long = [f"{number} " + "word " * 500 for number in range(8)]
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "book.txt").write_text("first\nsecond\n\n\n\n" + "\n".join(long) + "\n\nlast\n")
    (tmp_path / "SOURCE.md").write_text("not text")
    documents = read_documents(tmp_path)
    assert (documents[0], documents[-1]) == ("first\nsecond", "last")
    assert "\n".join(documents[1:-1]) == "\n".join(long)
    assert len(documents) > 3
    assert max(map(len, documents)) <= DOCUMENT_CHARACTERS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.md", b"", "holds 0 documents"),
        ("one.txt", b"a line\nand another\n", "holds 1 document"),
        ("latin.txt", "Grüße".encode("latin-1"), "latin.txt"),
        ("cut.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:-20], "cut.txt.gz"),
        ("none.txt.gz", b"plain", "none.txt.gz"),
    ],
    ids=["no document", "one document", "not UTF-8", "cut short", "not compressed"],
)
def test_what_is_no_corpus_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FedGuildError, match=said):
        read_documents(tmp_path)


def test_one_document_in_200_is_held_out_and_never_trained_on(corpus: Corpus, folder: Path) -> None:
    documents, end = read_documents(folder), corpus.tokenizer.eos_token
    assert corpus.tokenizer.decode(corpus.held_out) == "".join(documents[number] + end for number in (0, 200))
    assert len(corpus.starts) - 1 == 238
    for number in (0, 1, 237):
        text = corpus.tokenizer.decode(corpus.train[corpus.starts[number] : corpus.starts[number + 1]])
        assert text == [*documents[1:200], *documents[201:]][number] + end
    assert corpus.held_out_characters == len(documents[0] + documents[200])


def test_a_pass_has_every_row_once_and_the_next_has_other_ones(corpus: Corpus) -> None:
    length = 24
    per_pass = (len(corpus.train) - 1) // length
    rows = corpus.rows(0, per_pass, length, seed=1)
    assert rows.shape == (per_pass, length + 1)
    left_out = len(corpus.train) - per_pass * length
    counts = np.bincount(corpus.train, minlength=SIZES.vocabulary)
    missing = counts - np.bincount(rows[:, :-1].flatten(), minlength=SIZES.vocabulary)
    assert missing.min() >= 0
    assert missing.sum() == left_out < length + 1
    follows = {row[0] for row in rows} >= {row[-1] for row in rows[:5]}
    assert follows, "The last token of a row is the first of another."
    again = corpus.rows(per_pass - 2, 4, length, seed=1)
    assert np.array_equal(again[:2], rows[-2:])
    assert not np.array_equal(again[2:], rows[:2])
    assert not np.array_equal(corpus.rows(0, 4, length, seed=2), rows[:4])


def test_a_corpus_shorter_than_a_row_is_refused(corpus: Corpus) -> None:
    with pytest.raises(FedGuildError, match="fewer than a row"):
        corpus.rows(0, 1, len(corpus.train), seed=0)


@pytest.mark.parametrize(
    "text", ["Grüße, 世界! 🙂🙃", "  two  spaces\n\n\tand a tab\r\n", "x² − 1 ≥ 0", "\x00\x7f", ""]
)
def test_the_tokenizer_round_trips_any_text(corpus: Corpus, text: str) -> None:
    assert len(corpus.tokenizer) == SIZES.vocabulary
    assert corpus.tokenizer.decode(corpus.tokenizer.encode(text)) == text


# The model and its steps.


def test_the_default_sizes_give_an_olmoe_of_16_million_parameters() -> None:
    class Words:
        pad_token_id, bos_token_id, eos_token_id = 0, 1, 1

        def __len__(self) -> int:
            return Sizes.vocabulary

    model = new_model(Words(), Sizes(), seed=0)
    config = model.config
    assert sum(parameter.numel() for parameter in model.parameters()) == 15_798_528
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (64, 8, False)
    assert config.num_attention_heads == config.num_key_value_heads


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


def test_an_expert_without_a_token_gets_no_gradient(training: Pretraining) -> None:
    experts = training.model.model.layers[0].mlp.experts
    hidden, index = torch.ones(2, SIZES.hidden), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 5]])
    _experts_forward(experts, hidden, index, torch.full((2, 4), 0.25)).sum().backward()
    norms = experts.down_proj.grad.flatten(1).norm(dim=1)
    assert norms.nonzero().flatten().tolist() == [0, 1, 2, 3, 5]


def test_the_balancing_loss_is_olmoes(training: Pretraining) -> None:
    logits = torch.randn(50, 8, generator=torch_rng(0, "logits"))
    expected = load_balancing_loss_func((logits,), 8, 4) / 4  # transformers leaves out the division by k
    torch.testing.assert_close(balance_loss(logits, 4), expected)
    even = torch.eye(8).repeat(2, 1)
    torch.testing.assert_close(balance_loss(even, 1), torch.tensor(1.0))


def test_the_loss_falls(corpus: Corpus) -> None:
    training = Pretraining(corpus, replace(RECIPE, learning_rate=1e-2))
    nats = [losses.nats for losses in training.run(30)]
    assert nats[0] == pytest.approx(math.log(SIZES.vocabulary), abs=0.3)
    assert nats[-1] < nats[0] - 1


def test_workers_share_the_gradient_of_the_whole_batch(corpus: Corpus) -> None:
    one, three = (Pretraining(corpus, replace(RECIPE, workers=count, balance=0.0)) for count in (1, 3))
    rows = torch.from_numpy(corpus.rows(0, 4, 24, seed=0))
    whole, _ = one._gradients(one._replicas[0], rows)
    parts = [three._gradients(three._replicas[0], part)[0] for part in rows.chunk(3)]
    for expected, *gradients in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(gradients), expected, rtol=0.1, atol=1e-3)


def test_each_worker_has_one_thread_whatever_the_processs(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the number of threads of a machine, or of a session that goes on, is not in the weights."""
    found, threads, before = {}, list[int](), torch.get_num_threads()
    gradients = Pretraining._gradients

    def counted(self: Pretraining, model: OlmoeForCausalLM, rows: torch.Tensor) -> Any:
        threads.append(torch.get_num_threads())
        return gradients(self, model, rows)

    monkeypatch.setattr(Pretraining, "_gradients", counted)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            training = Pretraining(corpus, RECIPE)
            assert len(list(training.run(3))) == 3
            assert torch.get_num_threads() == count
            found[count] = training.model.state_dict()
    finally:
        torch.set_num_threads(before)
    assert threads == [1] * 2 * 3 * RECIPE.workers
    assert all(torch.equal(value, found[2][name]) for name, value in found[1].items())


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


def test_the_learning_rate_warms_up_stays_and_decays_to_zero(training: Pretraining) -> None:
    rates = []
    for _ in training.run(5):
        rates.append(training._optimizer.param_groups[0]["lr"])
    training.decay_from = training.step
    for _ in training.run(4, decay_to=9):
        rates.append(training._optimizer.param_groups[0]["lr"])
    shares = [1 / 3, 2 / 3, 1, 1, 1, 1, 3 / 4, 1 / 2, 1 / 4]
    assert rates == pytest.approx([RECIPE.learning_rate * share for share in shares])


# The command.


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


def test_a_stopped_build_saves_its_last_step_and_is_finished_or_goes_on(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipe": RECIPE, "tokens": 8 * STEP, "decay_tokens": 2 * STEP}
    lines: list[str] = []
    stopped = build(folder, tmp_path, **options, session=Session(say=lines.append, stopping=lambda: True))
    assert stopped is None
    assert lines[-1].startswith("stopped; ")
    early = weights(build(folder, tmp_path, **options, finish=True, session=quiet()))
    state = load_file(tmp_path / STATE)
    again = weights(build(folder, tmp_path, **options, session=quiet()))
    assert not same(early, again)
    assert not same(state, load_file(tmp_path / STATE))
    fresh = weights(build(folder, tmp_path / "fresh", **options, session=quiet()))
    assert same(again, fresh), "Finishing early changes nothing of what comes later."


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


def test_another_recipe_or_other_text_is_refused(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens": 2 * STEP, "decay_tokens": STEP, "session": quiet()}
    build(folder, tmp_path / "out", recipe=RECIPE, **options)
    with pytest.raises(FedGuildError, match="another recipe"):
        build(folder, tmp_path / "out", recipe=replace(RECIPE, seed=1), **options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("one\n\ntwo\n")
    with pytest.raises(FedGuildError, match="other text"):
        build(tmp_path / "other", tmp_path / "out", recipe=RECIPE, **options)


def test_what_is_measured_is_transformers_own_loss_and_routing(training: Pretraining, corpus: Corpus) -> None:
    for _ in training.run(3):
        pass
    model = training.model.eval()
    measured = measure(model, corpus, (4, 1), row_tokens=24)
    model.set_experts_implementation("eager")
    stream = torch.from_numpy(corpus.held_out.astype(np.int64))
    nats, counts = 0.0, torch.zeros(SIZES.experts)
    for start in range(0, len(stream) - 1, 24):
        row = stream[None, start : start + 25]
        with torch.no_grad():
            output = model(input_ids=row[:, :-1], output_router_logits=True)
        nats += float(torch.nn.functional.cross_entropy(output.logits[0], row[0, 1:], reduction="sum"))
        counts += torch.bincount(output.router_logits[1].topk(4).indices.flatten(), minlength=SIZES.experts)
    assert measured.tokens == len(stream) - 1
    assert measured.nats[4] == pytest.approx(nats / measured.tokens, rel=1e-4)
    assert measured.nats[1] != measured.nats[4]
    assert measured.routing[1].gini == pytest.approx(float(gini(counts)), abs=0.02)
    shares = counts / counts.sum()
    entropy = float(torch.special.entr(shares).sum()) / math.log(SIZES.experts)
    assert measured.routing[1].use_entropy == pytest.approx(entropy, abs=0.01)
    assert [layer.mlp.gate.top_k for layer in model.model.layers] == [4, 4]


# The name in the box.


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("english", "python -m tools.english.build --corpus DIR"),
        ("embedded", "python -m tools.tiny.build --out DIR"),
    ],
)
def test_a_packaged_name_needs_the_packaged_weights(
    name: str, build: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(packaged.PACKAGED, name, tmp_path)
    for load in (load_backbone, describe_config):
        with pytest.raises(ModelError, match=f"no weights of the model '{name}'") as raised:
            load(name)
        assert build in raised.value.hint


def test_the_name_english_finds_the_packaged_weights(
    monkeypatch: pytest.MonkeyPatch, training: Pretraining, corpus: Corpus, tmp_path: Path
) -> None:
    training.exported().save_pretrained(tmp_path)
    corpus.tokenizer.save_pretrained(tmp_path)
    monkeypatch.setitem(packaged.PACKAGED, "english", tmp_path)
    assert describe_config("english").moe[0].num_experts == SIZES.experts
    backbone = load_backbone("english")
    assert (backbone.info.name, len(backbone.tokenizer)) == ("english", SIZES.vocabulary)


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
