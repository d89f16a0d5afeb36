"""The config of a run, as one frozen tree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_serializer, model_validator

from fedguild.config.base import NAME, Section
from fedguild.config.data import DataSettings
from fedguild.config.federation import FederationSettings
from fedguild.config.privacy import PrivacySettings
from fedguild.config.renamed import with_old_names
from fedguild.config.training import TrainingSettings
from fedguild.config.trust import Code, code_of_cluster, code_of_method, code_of_metric, code_of_model
from fedguild.core.plugins import is_target

NOT_IN_FINGERPRINT = (
    ("name",),
    ("output",),
    ("tracking",),
    ("callbacks",),
    ("model", "device"),
    ("model", "gradient_checkpointing"),
    ("federation", "cohort_size"),
    ("federation", "engine"),
    ("federation", "save_total_limit"),
    ("evaluation", "batch_tokens"),
    ("evaluation", "diagnostics"),
    ("evaluation", "eval_on_start"),
    ("evaluation", "samples"),
)
LEFT_OUT_BY_DEFAULT = (
    *(("data", key) for key in ("chat_template", "train_on", "special_tokens")),
    ("federation", "norm_factor"),
    ("federation", "aggregator"),
    ("federation", "trim"),
    ("federation", "secure"),
    ("federation", "secure_share"),
    ("federation", "secure_clients"),
    ("federation", "secure_unheld"),
    ("federation", "secure_disclose"),
    ("federation", "server_step"),
    ("federation", "server_momentum"),
    ("federation", "byte_limit"),
    ("training", "objective"),
    ("training", "dpo_beta"),
    ("training", "round_schedule"),
    ("training", "round_warmup"),
    ("training", "round_final"),
    ("training", "round_horizon"),
    ("training", "loss_limit"),
)
"""Settings that came after runs had been written: at their default they are not in the fingerprint, so that such runs
go on. The same holds for the whole section `privacy`."""


class NamedSettings(Section):
    """The name of a plug-in, and its options, which the plug-in itself validates.

    In YAML the options stand next to the name: `method: {name: flame, temperature: 2}`. Without options the name is
    enough: `method: flame`.
    """

    name: str = Field(min_length=1, description="Its name.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its options.")

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if isinstance(given, Mapping):
            beside = {key: value for key, value in given.items() if key not in ("name", "options")}
            named = {"name": given["name"]} if "name" in given else {}
            options = given.get("options") or {}
            if not isinstance(options, Mapping):
                raise ValueError(f"its options are a mapping of names to values, not {options!r}")
            return {**named, "options": {**options, **beside}}
        return given

    @model_serializer
    def _beside_the_name(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}


def _as_yaml(settings: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100)


class MethodSettings(NamedSettings):
    """The method, which validates its options itself."""

    name: str = Field(
        min_length=1,
        description="Name of a method, as `fedguild methods` lists them, or `module:Class` of one in the working "
        "folder or an installed package, which in a file counts after `fedguild trust` of that file.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the method, as `fedguild methods NAME` lists them."
    )


class CallbackSettings(NamedSettings):
    """A callback, which validates its options itself."""

    name: str = Field(
        min_length=1, description="Name of a callback: `early-stopping`, or one that an installed package adds."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the callback; in YAML they follow the name."
    )


class ModelSettings(Section):
    """The frozen backbone and how it is loaded."""

    path: str = Field(
        default="embedded",
        min_length=1,
        description="Hugging Face hub id, folder, GGUF file, or one of the small models that ship with FedGuild: "
        "`embedded`, `english`.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub; null: the newest.")

    @field_validator("path")
    @classmethod
    def _in_the_home_folder(cls, path: str) -> str:
        return str(Path(path).expanduser()) if path.startswith("~") else path

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="The backbone's dtype; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="auto, cpu, cuda, cuda:N or mps (Apple); auto: a CUDA GPU if there is one, else the CPU.",
    )
    load_in_4bit: bool = Field(
        default=False, description="Load the backbone in 4 bits; needs bitsandbytes, and a CUDA GPU or a CPU."
    )
    attention: Literal["sdpa", "eager"] = Field(default="sdpa", description="Attention implementation.")
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. In a file it counts after `fedguild trust` of that "
        "file; an override counts as it is.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    packing: bool = Field(
        default=True,
        description="Pack rows of unequal length without their padding, if the model's attention allows it "
        "(sdpa, causal, no sliding window).",
    )


class EvaluationSettings(Section):
    """Scope, frequency and score of the evaluation."""

    every: int = Field(
        default=1, ge=1, description="Rounds from one evaluation to the next; the last is always evaluated."
    )
    eval_on_start: bool = Field(
        default=True,
        description="Also score the initial state, before training, as round 0. Without it reports have nothing to "
        "compare the last round with, and a run is shorter by one evaluation.",
    )
    split: Literal["test", "validation"] = Field(default="test", description="Which held-out examples are scored.")
    clients: bool = Field(
        default=False,
        description="Also score every client's own model, the one it uses after a round, on its own held-out examples.",
    )
    trained: bool = Field(
        default=False,
        description="Also score, on every client's own held-out examples, the model as its own training left it, "
        "before any average. The clients then keep it on their disks.",
    )
    received: bool = Field(
        default=False,
        description="Also score, on every client's own held-out examples, the model with which it would begin its next "
        "round: what it gets after the aggregation, with what it kept for that.",
    )
    pooled: bool = Field(
        default=False,
        description="Also score the models with which the clients would begin their next round on all clients' "
        "held-out examples together.",
    )
    answer_mode: Literal["likelihood", "generation"] = Field(
        default="likelihood",
        description="How an example with choices is answered; likelihood: by the likeliest choice; generation: by "
        "generating a text that names one. Other responses are always generated.",
    )
    length_normalization: Literal["mean", "sum"] = Field(
        default="mean", description="Log-likelihood of a choice: the mean or the sum over its tokens."
    )
    metrics: tuple[str, ...] = Field(
        default=("exact_match", "rouge_l"),
        description="Metrics of generated answers to record in addition to the corpus's own, which is the "
        "score: `exact_match`, `token_f1` (SQuAD's), `rouge_l`, one of an installed package, or `module:function`, "
        "your own Python function of the answer and the reference.",
    )
    active_experts: Literal["budget", "method"] = Field(
        default="budget",
        description="budget: each budget is scored with its own number of active experts, so that methods are compared "
        "at equal inference FLOPs; method: with as many as the method trained with.",
    )
    max_examples: int | None = Field(
        default=None, ge=1, description="Maximum number of examples scored per evaluation; null: all."
    )
    max_new_tokens: int = Field(default=128, ge=1, description="Maximum length of a generated response, in tokens.")
    batch_tokens: Literal["auto"] | Annotated[int, Field(ge=64)] = Field(
        default="auto",
        description="Tokens in one forward pass of the evaluation, and in a batch of generated texts; auto: as many as "
        "a GPU's free memory holds, 8192 on a CPU.",
    )
    samples: int = Field(
        default=3,
        ge=0,
        description="Number of held-out examples whose answers before and after training the report shows, at every "
        "budget: the likeliest choice, and a generated text of at most 64 tokens. Only examples that the global model "
        "is scored on, and none of the simulated clients' under differential privacy.",
    )
    perplexity: bool = Field(
        default=False, description="Also record the perplexity of the reference responses, and its logarithm in nats."
    )
    diagnostics: bool = Field(
        default=False,
        description="Also report every round how much averaging shrinks the clients' changes, how far averaging A "
        "and B apart is from averaging their products, and which experts are idle; and with every evaluation, how far "
        "the layers at a budget's active experts are from those at all of the model's. The server then holds a "
        "round's uploads.",
    )


class TrackingSettings(Section):
    """Experiment trackers that get a run's records besides metrics.jsonl.

    In YAML a list is enough: `tracking: [tensorboard, wandb]`.
    """

    trackers: tuple[str, ...] = Field(
        default=(),
        description="Trackers that also get the run's records: `tensorboard`, `wandb`, `mlflow`, `trackio`, each an "
        "extra of that name, or one that an installed package adds. `tracking: [wandb]` is the same.",
    )
    project: str = Field(
        default="fedguild",
        pattern=NAME,
        description="The project (in MLflow the experiment) that the run belongs to: letters, digits, dot, dash and "
        "underscore.",
    )
    name: str | None = Field(
        default=None, min_length=1, description="The run's name in the trackers; null: `NAME-seed-SEED` of the config."
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        description="A group of runs; null: none, and for the runs of a comparison the name of its folder.",
    )
    tags: tuple[str, ...] = Field(default=(), description="Tags of the run.")
    clients: bool = Field(
        default=True,
        description="Send the values of single clients too; without them, means and sums over the clients remain.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_a_list(cls, given: Any) -> Any:
        """Reads a bare list or name, and the switch that configs before 0.3 had for TensorBoard."""
        if isinstance(given, str):
            return {"trackers": [given]}
        if isinstance(given, (list, tuple)):
            return {"trackers": given}
        if isinstance(given, Mapping) and isinstance(given.get("tensorboard"), bool):
            rest = {key: value for key, value in given.items() if key != "tensorboard"}
            return {"trackers": ["tensorboard"] * given["tensorboard"], **rest}
        return given

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names))


class Config(Section):
    """The complete config of a run."""

    name: str = Field(
        default="run",
        pattern=NAME,
        description="The run's name in tables and folders: letters, digits, dot, dash and underscore; "
        "by default that of the file or preset.",
    )
    seed: int = Field(default=0, ge=0, description="Seed from which all randomness derives.")
    output: str | None = Field(default=None, description="Folder that the run is written to; null: runs/<name>.")
    method: MethodSettings = Field(description="The federated method and its options.")
    model: ModelSettings = Field(default_factory=ModelSettings, description="The frozen backbone.")
    data: DataSettings = Field(default_factory=DataSettings, description="The corpus and its partition.")
    federation: FederationSettings = Field(default_factory=FederationSettings, description="Clients and rounds.")
    training: TrainingSettings = Field(default_factory=TrainingSettings, description="Local training.")
    privacy: PrivacySettings = Field(default_factory=PrivacySettings, description="Differential privacy.")
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, description="Scoring.")
    tracking: TrackingSettings = Field(default_factory=TrackingSettings, description="Experiment trackers.")
    callbacks: tuple[CallbackSettings, ...] = Field(
        default=(),
        description="Callbacks, which receive the run's events and may stop it: names, or mappings of a name "
        "and options, for example `{name: early-stopping, patience: 2}`.",
    )

    @property
    def run_folder(self) -> Path:
        return Path(self.output).expanduser() if self.output else Path("runs") / self.name

    @property
    def code(self) -> list[Code]:
        """The Python code that it asks to run, which is neither FedGuild's nor a plug-in's."""
        model = self.model
        models = [code_of_model(model.path, model.revision)] if model.trust_remote_code else []
        methods = [code_of_method(self.method.name)] if is_target(self.method.name) else []
        metrics = [code_of_metric(name) for name in self.evaluation.metrics if is_target(name)]
        engine = self.federation.engine
        remote = engine.name == "ray" and engine.ray.address not in (None, "auto", "local")
        clusters = [code_of_cluster(str(engine.ray.address))] if remote else []
        return [*models, *methods, *metrics, *clusters]

    @property
    def local_training(self) -> TrainingSettings:
        """The settings of local training with the learning rate's horizon as a number of rounds."""
        horizon = self.training.round_horizon or self.federation.rounds
        return self.training.model_copy(update={"round_horizon": horizon})

    def resolved_yaml(self, method_options: Mapping[str, Any] = MappingProxyType({}), aggregator: str = "") -> str:
        """Returns every setting, defaults included, as YAML that loads to an equal config.

        Args:
            method_options: The method's options as it runs. Those that the config leaves to the method are comments: it
                may choose them anew where the config is used for another model or federation.
            aggregator: What `federation.aggregator: auto` is in this run, for a comment; empty for none.
        """
        text = ""
        for key, section in self.model_dump(mode="json").items():
            text += _as_yaml({key: section})
            if key == "method":
                chosen = {name: value for name, value in method_options.items() if name not in self.method.options}
                text += "".join(f"  # {line}\n" for line in _as_yaml(chosen).splitlines()) if chosen else ""
            if key == "federation" and aggregator and self.federation.aggregator == "auto":
                text += f"  # aggregator: {aggregator}\n"
        return text

    def changes_since(self, before: Config) -> list[str]:
        """Returns the settings outside of the fingerprint that another config has differently, as `section.key`."""

        def value(config: Config, path: tuple[str, ...]) -> Any:
            return reduce(getattr, path, config)

        return [".".join(path) for path in NOT_IN_FINGERPRINT if value(self, path) != value(before, path)]

    def fingerprint(self) -> str:
        """Returns the SHA-256 of every setting that determines results, 64 hexadecimal digits.

        Excluded are names and folders, the device, settings that change results by floating-point rounding only, and
        settings that add observations without changing any (`NOT_IN_FINGERPRINT`). Settings are hashed under their
        names of 0.3, so that runs of 0.3 can be resumed.
        """
        settings = self.model_dump(mode="json")
        for *sections, key in NOT_IN_FINGERPRINT:
            holder = settings
            for section in sections:
                holder = holder[section]
            del holder[key]
        for section, key in LEFT_OUT_BY_DEFAULT:
            if getattr(getattr(self, section), key) == type(getattr(self, section)).model_fields[key].default:
                del settings[section][key]
        if self.federation.aggregator == "none":  # the default of 0.3
            del settings["federation"]["aggregator"]
        if self.privacy == PrivacySettings():
            del settings["privacy"]
        canonical = json.dumps(with_old_names(settings), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
