"""Records of the English checkpoint's fine-tuning on tasks, and the model card's section on them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from fedguild.core.errors import ModelError
from fedguild.core.files import write_text
from fedguild.measuring.scores.statistics import CONFIDENCE, half_width, spread

PRETRAINED, RANDOM = "pretrained", "random"
"""The two models: the checkpoint, and the same architecture with random weights."""
BASELINES = {"words": "bag of words", "hypothesis": "hypothesis alone", "majority": "majority"}
"""Baselines without a language model: name in the records -> column of the table."""
MEASURES = {"accuracy": "accuracy", "rouge_l": "ROUGE-L", "perplexity": "perplexity"}
START, END = "<!-- tasks -->\n", "<!-- end -->\n"
HEADING = "## What fine-tuning reaches\n\n"
NOT_MEASURED = "Not measured for these weights; `python -m tools.english.finetune` does it.\n"
_BEFORE = "## Text and attribution\n"
"""The card's section that follows, where a card without the section gets it."""


@dataclass(frozen=True)
class TaskRecord:
    """The test scores of one model, fine-tuned with one seed, or of a baseline.

    Attributes:
        task: Name of the set, as in the script.
        title: The set's name in the table.
        model: `pretrained`, `random` or a key of `BASELINES`.
        seed: Seed of the training; None for a baseline.
        weights: SHA-256 of the checkpoint that is compared, hexadecimal.
        scores: Measure -> value over all test questions.
        questions: Per test question, in the same order in all records of a set: `accuracy` (0 or 1), or
            `rouge_l`, `nats` (of the whole reference response) and `tokens` (of that response). A baseline has
            none.
        settings: The settings chosen, and what was chosen from.
        facts: Further facts of the run: date, seconds, versions.
    """

    task: str
    title: str
    model: str
    seed: int | None
    weights: str
    scores: dict[str, float]
    questions: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the record as JSON, whole or not at all."""
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(self).items()]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Gain:
    """The gain of pre-trained over random weights in one measure; positive where pre-training helps.

    Attributes:
        mean: Mean over seeds; for perplexity the fall of the cross-entropy in nats per token.
        over_questions: Paired over the test questions, each question's difference averaged over the seeds.
        over_seeds: Paired over the seeds, by Student's t; None for one seed.
        seeds: The seeds that both models have.
    """

    mean: float
    over_questions: Interval
    over_seeds: Interval | None
    seeds: tuple[int, ...]

    @property
    def is_certain(self) -> bool:
        """Whether every interval lies above zero."""
        return self.over_questions.low > 0 and (self.over_seeds is None or self.over_seeds.low > 0)


def read_records(folder: Path, weights: str | None = None) -> list[TaskRecord]:
    """Returns a folder's records, those of other weights left out if `weights` is given.

    Raises:
        ModelError: a file is not a record.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(TaskRecord(**json.loads(path.read_text("utf-8"))))
        except (ValueError, TypeError) as error:
            raise ModelError(f"{path} is not a record of fine-tuning: {error}.") from error
    return [record for record in records if weights in (None, record.weights)]


def interval_over_seeds(differences: Sequence[float]) -> Interval:
    """Returns the mean of one difference per seed with its interval by Student's t.

    Raises:
        ValueError: there are fewer than two seeds.
    """
    mean, half = fmean(differences), half_width(spread(differences))
    return Interval(mean, mean - half, mean + half)


def interval_over_questions(differences: Sequence[float], weights: Sequence[float] | None = None) -> Interval:
    """Returns Σ difference / Σ weight over questions with its normal interval.

    Args:
        differences: One per question: of two answers right (1) or wrong (0), of two ROUGE-L, or of two
            responses' nats.
        weights: One per question, for example the tokens of the response; None for 1 each. The ratio's deviation is
            by linearisation (Cochran, Sampling Techniques, 1977, Eq. 6.13).

    Raises:
        ValueError: there are fewer than two questions.
    """
    weights = weights or [1.0] * len(differences)
    count, total = len(differences), math.fsum(weights)
    mean = math.fsum(differences) / total
    residuals = [difference - mean * weight for difference, weight in zip(differences, weights, strict=True)]
    deviation = math.sqrt(math.fsum(residual**2 for residual in residuals) / (count - 1))
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation * math.sqrt(count) / total
    return Interval(mean, mean - half, mean + half)


def gain(records: Sequence[TaskRecord], measure: str) -> Gain | None:
    """Returns the gain of pre-trained over random weights in one set; None where they share no seed."""
    by_model: dict[str, dict[int, TaskRecord]] = {PRETRAINED: {}, RANDOM: {}}
    for record in records:
        if record.model in by_model and record.seed is not None:
            by_model[record.model][record.seed] = record
    seeds = sorted(by_model[PRETRAINED].keys() & by_model[RANDOM].keys())
    if not seeds:
        return None
    pairs = [(by_model[PRETRAINED][seed], by_model[RANDOM][seed]) for seed in seeds]
    per_seed = [_differences(*pair, measure) for pair in pairs]
    weights = pairs[0][0].questions["tokens"] if measure == "perplexity" else None
    mean_of_question = [fmean(each) for each in zip(*per_seed, strict=True)]
    over_questions = interval_over_questions(mean_of_question, weights)
    total = math.fsum(weights) if weights else len(mean_of_question)
    means = [math.fsum(differences) / total for differences in per_seed]
    return Gain(fmean(means), over_questions, interval_over_seeds(means) if len(seeds) > 1 else None, tuple(seeds))


def _differences(pretrained: TaskRecord, random: TaskRecord, measure: str) -> list[float]:
    """Returns the gain on each question."""
    name, sign = ("nats", -1.0) if measure == "perplexity" else (measure, 1.0)
    pairs = zip(pretrained.questions[name], random.questions[name], strict=True)
    return [sign * (ours - theirs) for ours, theirs in pairs]


def task_section(records: Sequence[TaskRecord]) -> str:
    """Returns the section's text as Markdown: the scores, the comparison with random weights, the effort.

    Args:
        records: Records of one checkpoint; sets appear in the order of their first record.
    """
    if not records:
        return NOT_MEASURED
    sets: dict[str, list[TaskRecord]] = {}
    for record in records:
        sets.setdefault(record.task, []).append(record)
    scores, gains = [], []
    for members in sets.values():
        for measure in MEASURES:
            if any(measure in record.scores for record in members):
                scores.append(_score_row(members, measure))
                gains.append(_gain_row(members, measure))
    return _SECTION.format(scores="\n".join(scores), gains="\n".join(gains), effort=_effort(sets)).rstrip() + "\n"


def with_tasks(card: str, records: Sequence[TaskRecord]) -> str:
    """Returns a model card with the section on these records in place of the one that it has, if any."""
    section = START + task_section(records) + END
    if START in card:
        before, _, rest = card.partition(START)
        return before + section + rest.partition(END)[2]
    before, following, rest = card.partition(_BEFORE)
    return f"{before.rstrip()}\n\n{HEADING}{section}" + (f"\n{following}{rest}" if following else "")


def _score_row(records: Sequence[TaskRecord], measure: str) -> str:
    digits = 1 if measure == "perplexity" else 3
    cells = []
    for model in (PRETRAINED, RANDOM, *BASELINES):
        values = [record.scores[measure] for record in records if record.model == model and measure in record.scores]
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        cells.append(f"{fmean(values):,.{digits}f}{spread}" if values else "–")
    return f"| {records[0].title} | {MEASURES[measure]} | {' | '.join(cells)} |"


def _gain_row(records: Sequence[TaskRecord], measure: str) -> str:
    found = gain(records, measure)
    name = "nats per token" if measure == "perplexity" else MEASURES[measure]
    if found is None:
        return f"| {records[0].title} | {name} | – | 0 | – | – | not measured |"
    over_seeds = str(found.over_seeds) if found.over_seeds else "–"
    verdict = "yes" if found.is_certain else "**no**"
    return (
        f"| {records[0].title} | {name} | {found.mean:+.3f} | {len(found.seeds)} | {found.over_questions} | "
        f"{over_seeds} | {verdict} |"
    )


def _effort(sets: Mapping[str, Sequence[TaskRecord]]) -> str:
    """Returns a line for each set: the questions, the settings that were tried, and those that were chosen."""
    lines = []
    for members in sets.values():
        runs = [record for record in members if record.model in (PRETRAINED, RANDOM)]
        if not runs:
            continue
        settings = runs[0].settings
        chosen = {
            model: next((record.settings for record in runs if record.model == model), None)
            for model in (PRETRAINED, RANDOM)
        }
        picked = "; ".join(
            f"{model} {picks['learning_rate']:g} × {picks['epochs']}" for model, picks in chosen.items() if picks
        )
        lines.append(
            f"- {runs[0].title}: {settings['train_examples']:,} training examples, "
            f"{settings['validation_examples']:,} for validation, {settings['test_examples']:,} test questions.\n"
            f"  Chosen (learning rate × epochs): {picked}; from {_tried(settings)}."
        )
    return "\n".join(lines)


def _tried(settings: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{rate:g}" for rate in settings["learning_rates"])
    return f"{rates} × 1 to {settings['most_epochs']}"


_SECTION = """\
One client with the training examples of a set, as many as stand below, LoRA of rank 20 (alpha 16) on attention, routers
and experts, Adam, 8 active experts; mean and standard deviation over the seeds. *Random* is the same training of the
same architecture with random weights, drawn anew for every seed. Learning rate and epochs are chosen for each model on
the same validation examples, with seed 0 alone. Without a language model, on the same training examples: *bag of
words* is a logistic regression on the words (in generated sets the response to the most similar training prompt, by
TF-IDF), *hypothesis alone* the same without the premise, *majority* the most frequent answer (for ROUGE-L that of the
task; for perplexity the token frequencies of the training responses, which are the stronger comparison where random
weights do worse than these).

| set | measure | pre-trained | random | {columns} |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
{{scores}}

The gain of pre-trained over random weights, positive where pre-training helps, with 95 % intervals: paired over the
test questions (normal approximation), and paired over the seeds (Student's t) where there are at least two. A set that
is not measured, or where an interval is not above zero, is not used for claims. With one seed the interval says nothing
about how much another seed would change.

| set | measure | gain | seeds | over questions | over seeds | beats random |
| --- | --- | ---: | ---: | --- | --- | --- |
{{gains}}

{{effort}}
""".format(columns=" | ".join(BASELINES.values()))
