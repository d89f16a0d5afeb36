import pytest

from fedguild.data.prompts import TEMPLATES, render

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Response:"
)


def test_alpaca_without_input_to_the_letter():
    assert render("alpaca", "Add.") == ALPACA


def test_alpaca_with_input_to_the_letter():
    assert render("alpaca", "Add.", "1 and 2") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:"
    )


def test_commonsense_is_alpaca_and_joins_an_input():
    assert render("commonsense", "Add.") == ALPACA
    assert render("commonsense", "Add.", "1 and 2") == ALPACA.replace("Add.", "Add.\n\n1 and 2")


def test_telequad_to_the_letter():
    assert render("telequad", "What is X2?", "X2 is an interface.") == (
        "Below is an instruction that describes a task, paired with context that provides further information. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nWhat is X2?\n\n### Context:\nX2 is an interface.\n\n### Response:"
    )


def test_snli_to_the_letter():
    assert render("snli", "A dog runs.", "An animal moves.") == (
        'Suppose A dog runs. Can we infer that "An animal moves."? Yes, No, or Maybe?\n'
    )


def test_plain_to_the_letter():
    assert render("plain", "Add.", "1 and 2") == "Add.\n1 and 2\nAnswer:"
    assert render("plain", "Add.") == "Add.\nAnswer:"


@pytest.mark.parametrize("name", TEMPLATES)
def test_braces_in_the_data_stay_as_they_are(name: str):
    prompt = render(name, "Explain {instruction}", "{0} and {input}")
    assert "Explain {instruction}" in prompt
    assert "{0} and {input}" in prompt
