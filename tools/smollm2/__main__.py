"""Command line: `python -m tools.smollm2 STEP`; README.md says what the steps are."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.smollm2 import dense, heal, mixture, states, texts
from tools.smollm2.experts import Sizes

MODELS = Path("models")
MADE = Path(__file__).parent / "mixture.safetensors"
"""The mixture that this repository keeps; it stopped after the stage `together`."""
SIZES = Sizes(experts=32, active=8, rank=4)
LAYERS = range(15, 23)
"""The layers that are split. Layers 2 and 9 carry massive activations, and splitting those below 15 costs far more."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one step."""
    parser = argparse.ArgumentParser(prog="python -m tools.smollm2", description=__doc__)
    parser.add_argument("step", choices=["dense", "states", "train", "curve", "assemble"])
    parser.add_argument("--models", type=Path, default=MODELS, help="where models and intermediate files are written")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="english, dolly, natural_instructions"
    )
    parser.add_argument("--rows", type=int, default=1536, help="rows of 256 tokens to train on")
    parser.add_argument("--layers", type=layers, default=LAYERS, metavar="FIRST-LAST", help="layers to split")
    given = parser.parse_args(arguments)
    given.models.mkdir(parents=True, exist_ok=True)
    STEPS[given.step](given)


def layers(text: str) -> range:
    """Returns the layers that `15-22` means."""
    first, last = text.split("-")
    return range(int(first), int(last) + 1)


def _folder(given: argparse.Namespace) -> Path:
    return Path(given.models) / "smollm2-135m"


def _run(given: argparse.Namespace) -> Path:
    return Path(given.models) / "smollm2-moe-run"


def _dense(given: argparse.Namespace) -> None:
    if not (_folder(given) / "model.safetensors").exists():
        dense.build(dense.download(given.models), _folder(given))


def _states(given: argparse.Namespace) -> None:
    model = LlamaForCausalLM.from_pretrained(_folder(given)).eval()
    tokenizer = AutoTokenizer.from_pretrained(_folder(given))
    for name, passages, rows in (
        ("held-out", texts.held_out(given.data), None),
        ("training", texts.training(given.data), given.rows),
    ):
        states.write(model, texts.rows(tokenizer, passages, rows), given.layers, _run(given) / name)


def _student(given: argparse.Namespace) -> heal.Student:
    model = LlamaForCausalLM.from_pretrained(_folder(given)).eval()
    stored = _run(given) / "mixture.safetensors"
    if stored.exists():
        return mixture.load(model, stored, SIZES.active)
    return heal.split_layers(model, given.layers, SIZES, _run(given) / "training")


def _train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)
    student = _student(given)
    run = _run(given)
    if not (run / "mixture.safetensors").exists():
        mixture.save(student, run / "mixture.safetensors")
    heal.heal(student, run / "training", run)
    mixture.save(student, run / "mixture.safetensors")


def _curve(given: argparse.Namespace) -> None:
    print(json.dumps(heal.curve(_student(given), _run(given) / "held-out")))


def _assemble(given: argparse.Namespace) -> None:
    own = _run(given) / "mixture.safetensors"
    mixture.assemble(_folder(given), own if own.exists() else MADE, Path(given.models) / "smollm2-moe", SIZES.active)


STEPS = {"dense": _dense, "states": _states, "train": _train, "curve": _curve, "assemble": _assemble}

if __name__ == "__main__":
    main()
