"""A run in which corpus, metric and architecture come from another package."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, FlexOlmoConfig

from fedguild.config import load_config
from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.runs import experiment
from tests.plugins import install
from tests.runs.runs import small_settings
from tools.tiny.tokenizer import train_tokenizer

SOURCE = '''
    """Verses: the last word of a line."""
    from fedguild.data.corpora import CorpusSpec
    from fedguild.data.example import Corpus, Example
    from fedguild.model.moe.family import Family

    WORDS = ("moon", "June", "rose", "dew")


    def write(*, lines=40, seed=0):
        examples = [Example(f"Line {n} ends on", WORDS[n % 4], label=WORDS[n % 4], task="verses") for n in range(lines)]
        return Corpus("verses", tuple(examples[8:]), tuple(examples[:8]))


    SPEC = CorpusSpec(kind="generate", metric="length", generate=write, options={"lines": "how many lines (40)"})
    FAMILY = Family()


    def length(prediction, reference):
        """How near the answer's length is to the reference's."""
        return 1 / (1 + abs(len(prediction) - len(reference)))
'''
ENTRIES = """
    [fedguild.corpora]
    verses = verses
    [fedguild.metrics]
    length = verses:length
    [fedguild.model_families]
    flex_olmo = verses
"""


def test_a_run_with_a_corpus_a_metric_and_a_family_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path / "verses", "verses", entry_points=ENTRIES, modules={"verses.py": SOURCE})
    tokenizer = train_tokenizer(["The quick brown fox."])
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = FlexOlmoConfig(**sizes, **tokens, vocab_size=len(tokenizer), num_experts=8, num_experts_per_tok=4)
    AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path / "model")
    settings = [one for one in small_settings(tmp_path / "model") if not one.startswith("data.options")]
    settings += ["data.dataset=verses", "data.options.lines=48", "evaluation.metrics=[exact_match]"]
    config = load_config("flame/tiny-tasks", [*settings, "federation.rounds=1"])
    experiment.run(config, tmp_path / "run")
    records = [record for record in RunLog(tmp_path / "run").read() if isinstance(record, EvaluationRecord)]
    scored = [record for record in records if record.scope == "budget"]
    assert len(scored) == 4
    for record in scored:
        assert list(record.metrics) == ["exact_match", "length"]
        assert 0 < record.metrics["length"] == record.score
        assert record.by_task == {"verses": record.score}
