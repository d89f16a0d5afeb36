"""Presets: `METHOD/MODEL-DATA` and its variants, composed of a part for each axis.

`presets/` has a folder for each axis: the usual options of a method, a model, a data set, and a setup, which is the
clients, rounds, training and evaluation of a paper or a leaderboard. A method or a data set names its setup. Besides
settings, a part may have

- `where`: settings for some cells, by words that such a cell has: the names of its model, data set and setup, and what
  these are (`is`). A cell must have all words of a key; a comma separates alternatives. `small text:` holds for data
  sets of texts on small models;
- `variants`: settings that a name asks for by its end, as `fedit/tiny-tasks-ranks` does (methods and setups);
- `needs`: words that the model must have (methods);
- `active_experts`: the number that the model activates, which caps those of the budgets (models).

The parts are laid over each other in the order data set, model, setup, method, variant, and last
`cells/METHOD/MODEL-DATA.yaml`, for what a paper publishes for one cell.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedguild.config.explaining import Layer
from fedguild.config.yaml_reading import parse
from fedguild.core.errors import ConfigError
from fedguild.core.plugins import installed_plugins

PRESETS_FOLDER = Path(__file__).parent / "presets"
METHODS_GROUP = "fedguild.methods"
NOT_SETTINGS = ("is", "needs", "active_experts", "where", "variants", "setup")


@dataclass(frozen=True)
class Part:
    """A value of an axis, or the file of a single cell.

    Attributes:
        name: Its part of a preset's name.
        source: The file, for messages.
        description: First sentence of the comment at the top of the file.
    """

    name: str
    source: str
    description: str
    content: Mapping[str, Any]

    @property
    def words(self) -> frozenset[str]:
        """The words by which `where` refers to a cell with this part."""
        return frozenset((self.name, *self.content.get("is", ())))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.content.get("needs", ()))

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.content.get("variants", ()))

    def of_cell(self, words: frozenset[str], variant: str = "") -> Iterator[Mapping[str, Any]]:
        """Yields the part's settings for a cell with these words; later ones override earlier ones."""
        yield self.content
        for key, said in self.content.get("where", {}).items():
            if any(words.issuperset(alternative.split()) for alternative in key.split(",")):
                yield said
        if variant in self.variants:
            yield self.content["variants"][variant]


@dataclass(frozen=True)
class Axes:
    """The parts of each axis by name, and the cells that have a file."""

    methods: Mapping[str, Part]
    models: Mapping[str, Part]
    data: Mapping[str, Part]
    setups: Mapping[str, Part]
    cells: Mapping[str, Part]


@dataclass(frozen=True)
class Preset:
    """A method on a model and a data set.

    Attributes:
        variant: The variant; empty for none.
        own: The cell's own file; None if it has none.
    """

    method: Part
    model: Part
    data: Part
    setup: Part
    variant: str = ""
    own: Part | None = None

    @property
    def name(self) -> str:
        return f"{self.method.name}/{self.model.name}-{self.data.name}{self.variant and '-'}{self.variant}"

    @property
    def description(self) -> str:
        parts = (self.own,) if self.own else (self.method, self.model, self.data)
        return " ".join(part.description for part in parts)

    @property
    def variants(self) -> tuple[str, ...]:
        return (*self.method.variants, *self.setup.variants)

    def layers(self) -> Iterator[Layer]:
        """Yields its settings; later ones override earlier ones."""
        words = self.data.words | self.model.words | self.setup.words
        most = self.model.content.get("active_experts", 0)
        own = (self.own,) if self.own else ()
        for part in (self.data, self.model, self.setup, self.method, *own):
            for said in part.of_cell(words, self.variant):
                settings = {key: value for key, value in said.items() if key not in NOT_SETTINGS}
                yield Layer(part.source, _with_budgets_that_fit(settings, most))


def _with_budgets_that_fit(settings: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    """Caps the active experts of all budgets at those of the model."""
    federation = settings.get("federation", {})
    budgets = [
        {**budget, "active_experts": min(budget["active_experts"], most)} if "active_experts" in budget else budget
        for budget in federation.get("budgets", ())
    ]
    return {**settings, "federation": {**federation, "budgets": budgets}} if budgets else settings


def axes() -> Axes:
    """Returns the built-in parts, and for each method of another package a part with its name and FLAME's setup."""
    installed = {
        found.name: Part(found.name, found.origin, found.title, {"setup": "flame", "method": {"name": found.name}})
        for found in installed_plugins(METHODS_GROUP)
        if not found.fault
    }
    shipped = {axis: _parts(axis) for axis in Axes.__annotations__}
    return Axes(**{**shipped, "methods": {**installed, **shipped["methods"]}})


def presets() -> Iterator[Preset]:
    """Yields every method on every model and data set that it fits, without variants."""
    known = axes()
    for method in known.methods.values():
        for model in known.models.values():
            if method.needs <= model.words:
                for data in known.data.values():
                    yield _preset(known, method, model, data)


def find_preset(name: str) -> Preset | None:
    """Returns the preset of a name; None if there is none.

    Raises:
        ConfigError: the method does not fit the model.
    """
    known = axes()
    method, _, rest = name.partition("/")
    model, rest = _split(rest, known.models)
    data, variant = _split(rest, known.data)
    if method not in known.methods or not model or not data:
        return None
    found = _preset(known, known.methods[method], known.models[model], known.data[data], variant)
    if missing := found.method.needs - found.model.words:
        fitting = [part.name for part in known.models.values() if found.method.needs <= part.words]
        raise ConfigError(
            f"There is no preset '{name}': {method} needs {' and '.join(map(_NEEDS.__getitem__, sorted(missing)))}, "
            f"which {model} is not ({found.model.description.rstrip('.')}).",
            f"{method} runs on {', '.join(fitting)}.",
        )
    return found if variant in ("", *found.variants) else None


_NEEDS = {
    "moe": "a mixture-of-experts model",
    "softmax": "a model that routes by softmax",
    "unbiased": "a model whose experts have no biases",
    "causal": "a causal language model",
}


def unknown_preset(name: str) -> ConfigError:
    """Returns the error for an unknown preset, with the nearest names and the values of the axis."""
    known = axes()
    method, _, rest = name.partition("/")
    model, after = _split(rest, known.models)
    data, _ = _split(after, known.data)
    if method not in known.methods:
        listed = f"Methods: {', '.join(known.methods)}."
    elif not model:
        listed = f"Models: {', '.join(known.models)}."
    elif not data:
        listed = f"Data sets: {', '.join(known.data)}."
    else:
        cell = _preset(known, known.methods[method], known.models[model], known.data[data])
        listed = f"Variants of {cell.name}: {', '.join(cell.variants) or 'none'}."
    likely = difflib.get_close_matches(method, known.methods, n=1, cutoff=0.4)
    names = [
        f"{preset.name}{end}"
        for preset in presets()
        if preset.method.name in likely
        for end in ("", *(f"-{variant}" for variant in preset.variants))
    ]
    close = [] if name in known.methods else difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    meant = f"Did you mean '{close[0]}'? " if close else ""
    where = f"fedguild presets {method}" if method in known.methods else "fedguild presets"
    return ConfigError(
        f"'{name}' is neither a preset nor a config file.",
        f"{meant}{listed} A preset is METHOD/MODEL-DATA; see `{where}`.",
    )


def _preset(known: Axes, method: Part, model: Part, data: Part, variant: str = "") -> Preset:
    words, own = model.words | data.words, known.cells.get(f"{method.name}/{model.name}-{data.name}")
    said = (block for part in (method, data, own) if part for block in part.of_cell(words))
    setup = [block["setup"] for block in said if "setup" in block][-1]
    return Preset(method, model, data, known.setups[setup], variant, own)


def _split(name: str, known: Mapping[str, Part]) -> tuple[str, str]:
    """Returns the longest known part that a name begins with, empty for none, and the rest after the dash."""
    found = max((part for part in known if f"{name}-".startswith(f"{part}-")), key=len, default="")
    return found, name[len(found) :].removeprefix("-") if found else name


@cache
def _parts(axis: str) -> Mapping[str, Part]:
    folder = PRESETS_FOLDER / axis
    return {
        path.relative_to(folder).with_suffix("").as_posix(): _part(path, path.relative_to(folder))
        for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.with_suffix(""))
    }


def _part(path: Path, name: Path) -> Part:
    text = path.read_text("utf-8")
    return Part(name.with_suffix("").as_posix(), str(path), first_sentence(text), parse(text, str(path)))


def first_sentence(yaml: str) -> str:
    """Returns the first sentence of the comment at the top of a YAML file."""
    comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), yaml.splitlines()))
    return re.split(r"(?<=\.)\s|;\s", comment, maxsplit=1)[0]
