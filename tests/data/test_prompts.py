import pytest

from fedguild.data.prompts import TEMPLATES, render

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:"
)
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with {} that provides further {}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### {}:\n{}\n\n### Response:"
)
TO_THE_LETTER = [
    ("alpaca", ["Add."], ALPACA),
    ("alpaca", ["Add.", "1 and 2"], WITH_INPUT.format("an input", "context", "Add.", "Input", "1 and 2")),
    ("commonsense", ["Add."], ALPACA),
    ("commonsense", ["Add.", "1 and 2"], ALPACA.replace("Add.", "Add.\n\n1 and 2")),
    (
        "telequad",
        ["What is X2?", "A wire."],
        WITH_INPUT.format("context", "information", "What is X2?", "Context", "A wire."),
    ),
    ("snli", ["A dog runs.", "It moves."], 'Suppose A dog runs. Can we infer that "It moves."? Yes, No, or Maybe?\n'),
    ("plain", ["Add.", "1 and 2"], "Add.\n1 and 2\nAnswer:"),
    ("plain", ["Add."], "Add.\nAnswer:"),
]


@pytest.mark.parametrize(("template", "texts", "prompt"), TO_THE_LETTER)
def test_a_template_to_the_letter(template, texts, prompt):
    assert render(template, *texts) == prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_braces_in_the_data_stay_as_they_are(name: str):
    prompt = render(name, "Explain {instruction}", "{0} and {input}")
    assert "Explain {instruction}" in prompt
    assert "{0} and {input}" in prompt
