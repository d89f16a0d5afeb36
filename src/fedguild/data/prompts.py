"""Prompt templates by name: the text before a response, worded as in the papers.

An instruction, with or without an input, becomes a prompt that ends exactly where the response begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedguild.core.errors import DataError, nearest

_ALPACA_INSTRUCTION = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt's wording, with the fields `{instruction}` and `{input}`.

    Attributes:
        help: Origin of the wording, in one line.
        without_input: Used if the input is empty; has `{instruction}` only.
    """

    help: str
    with_input: str
    without_input: str


TEMPLATES: dict[str, Template] = {
    "alpaca": Template(
        help="Stanford Alpaca (FLAME, Table 6).",
        with_input=(
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
        ),
        without_input=_ALPACA_INSTRUCTION,
    ),
    "commonsense": Template(
        help="Commonsense-15K: Alpaca without an input, which joins the instruction (UB-SMoE, Table 12).",
        with_input=_ALPACA_INSTRUCTION.replace("{instruction}", "{instruction}\n\n{input}"),
        without_input=_ALPACA_INSTRUCTION,
    ),
    "telequad": Template(
        help="TeleQuAD: Alpaca with a context (UB-SMoE, Table 12).",
        with_input=(
            "Below is an instruction that describes a task, paired with context that provides further information. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Context:\n{input}\n\n### Response:"
        ),
        without_input=_ALPACA_INSTRUCTION,
    ),
    "snli": Template(
        help="SNLI: the instruction is the premise, the input the hypothesis (FedAMoLE, appendix D.1.2).",
        with_input='Suppose {instruction} Can we infer that "{input}"? Yes, No, or Maybe?\n',
        without_input="{instruction}\n",
    ),
    "chat": Template(
        help="The model's chat template: instruction and input are the user's turn.",
        with_input="{instruction}\n\n{input}",
        without_input="{instruction}",
    ),
    "plain": Template(
        help="Instruction, input and 'Answer:' on separate lines; the shortest.",
        with_input="{instruction}\n{input}\nAnswer:",
        without_input="{instruction}\nAnswer:",
    ),
}


def check_template(name: str) -> None:
    """Raises DataError with the known names if `name` is not a template."""
    if name not in TEMPLATES:
        raise DataError(f"There is no prompt template '{name}'.", nearest(name, TEMPLATES))


def render(template: str, instruction: str, input: str = "") -> str:
    """Returns the prompt for an instruction, ending where the response begins.

    Args:
        template: A name in `TEMPLATES`.
        input: Empty if the instruction needs none.

    Raises:
        DataError: `template` is unknown.
    """
    check_template(template)
    wording = TEMPLATES[template]
    if input:
        return wording.with_input.format(instruction=instruction, input=input)
    return wording.without_input.format(instruction=instruction)
