"""Files, presets, `extends` and overrides become one config, or an error that names the culprit."""

from pathlib import Path

import pytest

from fedguild.config import load_config
from fedguild.core.errors import ConfigError
from tests.config.test_composing import RECORDED


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def message(*arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("preset", [name for name in RECORDED["presets"] if "tiny" in name or "llama" in name])
def test_every_preset_loads_and_resolves_to_itself(preset: str, tmp_path: Path) -> None:
    config = load_config(preset)
    again = load_config(write(tmp_path, "resolved.yaml", config.resolved_yaml()))
    assert again == config
    assert config.name == preset.replace("/", "-")
    assert config.method.name == preset.split("/")[0]


def test_a_file_is_named_after_itself_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "my run.yaml", "method: flame")).name == "my-run"
    assert load_config(write(tmp_path, "other.yaml", "{name: mine, method: flame}")).name == "mine"
    assert load_config("flame/tiny-tasks", ["name=x", "seed=3"]).run_folder == Path("runs/x")
    assert load_config("flame/tiny-tasks", ["output=/data/run"]).run_folder == Path("/data/run")


def test_overrides_are_yaml_and_the_later_wins() -> None:
    config = load_config(
        "flame/tiny-tasks",
        [
            "training.learning_rate=1e-4",
            "federation.clients=3",
            "federation.clients=5",
            "federation.budgets=[{name: only, rank: 2}]",
            "training.max_grad_norm=null",
            "data.test=a=b.csv",
            "method.temperature=4",
        ],
    )
    assert config.training.learning_rate == 1e-4
    assert config.federation.clients == 5
    assert [tier.name for tier in config.federation.budgets] == ["only"]
    assert config.training.max_grad_norm is None
    assert config.data.test == "a=b.csv"
    assert config.method.options["temperature"] == 4


def test_another_method_drops_the_options_of_the_first(tmp_path: Path) -> None:
    parent = write(tmp_path, "parent.yaml", "method: {name: flame, temperature: 2, rank: 4}")
    assert load_config(parent, ["method=fedit"]).method.options == {}
    assert load_config(parent, ["method.name=fedit", "method.rank=3"]).method.options == {"rank": 3}
    assert load_config(parent, ["method=flame", "method.rank=3"]).method.options == {"temperature": 2, "rank": 3}


def test_another_corpus_drops_the_options_of_the_first_and_keeps_other_settings(tmp_path: Path) -> None:
    data = "{dataset: natural_instructions, train: x, max_samples: 9, options: {max_tasks: 3}}"
    parent = write(tmp_path, "parent.yaml", f"{{method: flame, data: {data}}}")
    assert load_config(parent, ["data.dataset=natural_instructions"]).data.options == {"max_tasks": 3}
    other = load_config(parent, ["data.dataset=instructions", "data.options.instruction_column=Frage"]).data
    assert (other.options, other.train, other.max_samples) == ({"instruction_column": "Frage"}, "x", 9)


def test_extends_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base.yaml",
        "extends: flame/tiny-tasks\ntraining: {batch_size: 3}\nfederation: {budgets: [{name: a}, {name: b}]}",
    )
    child = write(tmp_path, "child.yaml", "extends: base.yaml\nfederation: {budgets: [{name: c, active_experts: 2}]}")
    config = load_config(child)
    assert config.name == "child"
    assert config.training.batch_size == 3
    assert config.training.steps == load_config("flame/tiny-tasks").training.steps
    assert [(tier.name, tier.active_experts) for tier in config.federation.budgets] == [("c", 2)]


def test_extends_in_a_circle_or_of_nonsense(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml")
    write(tmp_path, "b.yaml", "extends: a.yaml")
    assert "extends itself" in message(str(tmp_path / "a.yaml"))
    assert "must name one preset or file, got 3" in message(write(tmp_path, "c.yaml", "extends: 3"))
    assert "missing.yaml" in message(write(tmp_path, "d.yaml", "extends: missing.yaml"))


def test_unknown_names_list_what_there_is() -> None:
    text = message("flame/tiny-task")
    assert "neither a preset nor a config file" in text
    assert "Did you mean 'flame/tiny-tasks'?" in text
    method = message("flame")
    assert "see `fedguild presets flame`" in method
    assert "Did you mean" not in method
    assert "There is no config file nowhere.yaml" in message("nowhere.yaml")
    assert "neither a preset nor a config file" in message("x" * 300)


def test_a_table_is_told_from_a_config() -> None:
    text = message("flame/table-2")
    assert "'flame/table-2' is a table of several runs, not the config of one." in text
    assert "`fedguild compare flame/table-2` runs it." in text


def test_what_is_no_yaml_or_no_mapping(tmp_path: Path) -> None:
    assert "broken.yaml, line 3" in message(write(tmp_path, "broken.yaml", "seed: 1\nmethod: [\n"))
    assert "a config is a mapping" in message(write(tmp_path, "list.yaml", "- 1"))
    twice = message(write(tmp_path, "twice.yaml", "method: flame\ntraining:\n  steps: 1\n  steps: 2\n"))
    assert "twice.yaml, line 4: the key 'steps' appears twice." in twice
    assert "dated.yaml: not readable as YAML: day" in message(write(tmp_path, "dated.yaml", "name: 2024-02-31"))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    assert "latin.yaml: line 1: the byte 0xe9 is not UTF-8." in message(str(tmp_path / "latin.yaml"))


def test_overrides_may_be_mappings_nested_or_with_dotted_keys_and_the_later_wins() -> None:
    text = ["training.steps=3", "method.name=fedit", "method.rank=2", "seed=4", "federation.rounds=9"]
    nested = {"training": {"steps": 7}, "method": {"name": "fedit", "rank": 2}, "federation": {"rounds": 9}}
    dotted = {"training.steps": 5, "training": {"steps": 3}, "method.rank": 2, "method.name": "fedit", "seed": 4}
    wanted = load_config("flame/tiny-tasks", text)
    assert load_config("flame/tiny-tasks", [nested, "training.steps=3", {"seed": 4}]) == wanted
    assert load_config("flame/tiny-tasks", [dotted, {"federation": {"rounds": 9}}]) == wanted
    assert message("flame/tiny-tasks", [{"training.stepz": 3}]).startswith(
        "the overrides: unknown key 'training.stepz'"
    )


def test_overrides_in_a_list_and_options_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['seed=1'\] is not an override") as caught:
        load_config("flame/tiny-tasks", [["seed=1"]])  # type: ignore[list-item]
    assert "an argument of its own" in caught.value.hint
    assert "method: its options are a mapping of names to values, not 3" in message(
        "flame/tiny-tasks", ["method.options=3"]
    )


@pytest.mark.parametrize(("written", "number"), [("010", 10), ("8", 8), ("0", 0), ("1_000", 1000), ("0x10", 16)])
def test_a_whole_number_is_decimal_whatever_it_begins_with(written: str, number: int) -> None:
    assert load_config("flame/tiny-tasks", [f"seed={written}"]).seed == number


def test_an_engine_may_be_its_name_alone_and_keeps_its_other_settings() -> None:
    overrides = ["federation.engine.timeout_seconds=9", "federation.engine=ray", "federation.engine.ray.actors=2"]
    engine = load_config("flame/tiny-tasks", overrides).federation.engine
    assert (engine.name, engine.timeout_seconds, engine.ray.actors) == ("ray", 9, 2)
    assert "federation.engine.name" in message("flame/tiny-tasks", ["federation.engine=slurm"])


@pytest.mark.parametrize("override", ["seed", "=3", "training..steps=3", "a b=3"])
def test_what_is_no_override(override: str) -> None:
    assert f"'{override}' is not an override." in message("flame/tiny-tasks", [override])


BOMB = "x0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"x{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
TOO_MUCH = {
    "aliases of aliases": (
        f"{BOMB}method: fedit\nseed: *a11\n",
        "more values than a config has .*, aliases written out",
    ),
    "60,000 keys": ("".join(f"k{number}: 1\n" for number in range(60_000)), "more lines or values than a config has"),
    "an alias inside of itself": (
        "method: &a {name: fedit, options: [*a]}\n",
        "an alias stands inside of what it names",
    ),
    "a thousand keys": ("".join(f"k{number}: 1\n" for number in range(1000)), "and 951 more such settings"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_file_that_says_too_much_is_answered_at_once(case: str, tmp_path: Path) -> None:
    text, reason = TOO_MUCH[case]
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(str(tmp_path / "config.yaml"))
    assert len(str(caught.value)) < 20_000


def test_an_alias_of_plain_values_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: fedit\nseed: &n 3\ntraining: {steps: *n}\nevaluation: {every: *n}\n")
    assert load_config(str(tmp_path / "config.yaml")).training.steps == 3
