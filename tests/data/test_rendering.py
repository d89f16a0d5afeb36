"""Conversations as token ids: equal to transformers' own, and learned where transformers marks the assistant's text."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from fedguild.core.errors import ConfigError, DataError
from fedguild.data.conversation import conversation
from fedguild.data.example import Example, Message
from fedguild.data.rendering import count_cut, encode, prompt_ids, set_chat_template
from fedguild.model.pretrained import load_tokenizer
from tests.data.chat_templates import FAMILIES, tokenizer_of

LONG = 10_000


def messages_of(*turns: str, system: str = "") -> list[Message]:
    roles = ("user", "assistant")
    told = [Message("system", system)] if system else []
    return told + [Message(roles[index % 2], content) for index, content in enumerate(turns)]


CONVERSATIONS = {
    "one turn": messages_of("Which bird sings at night?", "The nightingale."),
    "three turns": messages_of("Name a bird.", "Robin.", "Another.", "Wren.", "Another.", "Robin."),
    "the same text everywhere": messages_of("a", "a", "a", "a", "assistant", "assistant"),
    "a system message": messages_of("Name a bird.", "Robin.", "Another.", "Wren.", system="Be brief."),
    "code and other scripts": messages_of("def f():\n    Würde", "```\n    return 鸟\n```", "a\n\n\nb", "1\n\n2"),
    "thought": messages_of(
        "Name a tree.", "<think>\nOak?\n</think>\n\nOak.", "Again.", "<think>\nhm\n</think>\n\nAsh."
    ),
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
USED = [
    Message("user", "Is it warm in Rome?"),
    Message("assistant", "", json.dumps({"tool_calls": [{"id": "abcdefghi", **CALL}]})),
    Message("tool", "30", json.dumps({"name": "weather", "tool_call_id": "abcdefghi"})),
    Message("assistant", "It is."),
    Message("user", "Thanks."),
    Message("assistant", "Good."),
]


def oracle(name: str, example: Example) -> tuple[list[int], list[int]]:
    """Returns transformers' ids and its mask of the assistant's tokens, from the template with generation blocks."""
    found = tokenizer_of(name).apply_chat_template(
        [message.as_dict() for message in example.messages],
        tools=json.loads(example.tools) if example.tools else None,
        chat_template=FAMILIES[name].marked,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return found["input_ids"], found["assistant_masks"]


def learned(encoded: Any) -> list[int]:
    return [int(index in set(encoded.targets.tolist())) for index in range(len(encoded.input_ids))]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_what_transformers_writes_and_marks(name: str, case: str):
    turns = CONVERSATIONS[case]
    if turns[0].role == "system" and not FAMILIES[name].system:
        turns = [Message("user", f"{turns[0].content}\n\n{turns[1].content}"), *turns[2:]]
    example = conversation(turns)
    ids, mask = oracle(name, example)
    encoded = encode(conversation(CONVERSATIONS[case]), tokenizer_of(name), LONG)
    assert list(encoded.input_ids) == ids
    assert learned(encoded) == mask
    assert tokenizer_of(name).decode(encoded.input_ids[encoded.targets[-1]]) in FAMILIES[name].special


FRAGMENTS = (
    *("a", "Robin", " ", "\n", "assistant", "[/INST]", "### Assistant:\n", "<think>"),
    *("</think>", "model\n", "鸟", "  x  ", "{{ x }}"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_of_a_prompt_is_learned_whatever_the_text(name: str):
    """A token may be part of both the prompt and an answer that begins with a space; it is the prompt's."""
    rng = random.Random(5)
    for _ in range(12):
        contents = ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 5))) + "." for _ in range(rng.choice((2, 4, 6)))]
        example = conversation(messages_of(*contents))
        ids, mask = oracle(name, example)
        encoded = encode(replace(example, special_tokens="token"), tokenizer_of(name), LONG)
        assert list(encoded.input_ids) == ids
        ours = learned(encoded)
        assert all(theirs >= own for theirs, own in zip(mask, ours, strict=True))
        opened = 2 * (name == "deepseek-r1")  # the prompt for an answer opens its thought
        assert sum(mask) - sum(ours) <= sum(content[0].isspace() for content in contents[1::2]) + opened


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].tools])
def test_calls_of_tools_are_learned_and_their_results_are_not(name: str):
    example = conversation(USED if name != "mistral-0.3" else USED[:4], [WEATHER])
    ids, mask = oracle(name, example)
    encoded = encode(example, tokenizer_of(name), LONG)
    assert list(encoded.input_ids) == ids
    assert learned(encoded) == mask


def test_a_template_that_moves_its_tools_learns_the_last_turn_only():
    example = conversation(USED, [WEATHER])
    with pytest.raises(DataError, match=r"turn 2 .* differently when others follow.*\nSet data.train_on to last_turn"):
        encode(example, tokenizer_of("mistral-0.3"), LONG)
    encoded = encode(replace(example, train_on="last_turn"), tokenizer_of("mistral-0.3"), LONG)
    assert tokenizer_of("mistral-0.3").decode(encoded.response) == " Good.</s>"


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].tools])
def test_templates_that_know_no_tools_refuse_them(name: str):
    with pytest.raises(DataError, match="tool calls, which the chat template does not write") as caught:
        encode(conversation(USED), tokenizer_of(name), LONG)
    assert "begins" in str(caught.value.hint)
    assert "begins" not in caught.value.message, "a site sends the message to the server, and keeps its texts"


SPELLED = messages_of("What is {end}, and {end}{end}?", "It ends{end} a turn.\n{end}", "And {end}", "Yes")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_control_token_in_the_data_is_text(name: str):
    tokenizer = tokenizer_of(name)
    for end in (*FAMILIES[name].special, *(one for one in FAMILIES[name].added if one[1] == "｜")):
        spelled = conversation([replace(one, content=one.content.format(end=end)) for one in SPELLED])
        harmless = conversation([replace(one, content=one.content.format(end="")) for one in SPELLED])
        encoded = encode(spelled, tokenizer, LONG)
        wanted = encode(harmless, tokenizer, LONG)
        control = {*tokenizer.convert_tokens_to_ids([*FAMILIES[name].special, *FAMILIES[name].added])}
        assert [one for one in encoded.input_ids if one in control] == [
            one for one in wanted.input_ids if one in control
        ]
        written = tokenizer.apply_chat_template([one.as_dict() for one in spelled.messages], tokenize=False)
        assert "".join(tokenizer.decode(encoded.input_ids).split()) == "".join(written.split())
        taken = encode(replace(spelled, special_tokens="token"), tokenizer, LONG)
        token = tokenizer.convert_tokens_to_ids(end)
        assert taken.input_ids.count(token) == encoded.input_ids.count(token) + 6
        assert [tokenizer.decode(encoded.input_ids[at]) for at in encoded.targets[-1:]] == [
            tokenizer.decode(wanted.input_ids[at]) for at in wanted.targets[-1:]
        ]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_turn_alone_and_everything(name: str):
    example = conversation(CONVERSATIONS["three turns"])
    tokenizer = tokenizer_of(name)
    all_turns = encode(example, tokenizer, LONG)
    last = encode(replace(example, train_on="last_turn"), tokenizer, LONG)
    everything = encode(replace(example, train_on="everything"), tokenizer, LONG)
    assert all_turns.input_ids == last.input_ids == everything.input_ids
    assert "Robin." in tokenizer.decode(last.response)
    assert last.response == tuple(last.input_ids[at] for at in last.targets)
    assert last.targets.tolist() == all_turns.targets[-len(last.targets) :].tolist()
    assert everything.targets.tolist() == list(range(1, len(everything.input_ids)))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_asks_for_an_answer_is_the_generation_prompt(name: str):
    tokenizer = tokenizer_of(name)
    example = conversation(CONVERSATIONS["three turns"])
    asked = tokenizer.apply_chat_template(
        [one.as_dict() for one in example.messages[:-1]], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert prompt_ids(example, tokenizer) == asked["input_ids"]


def test_a_turn_of_weight_0_is_not_learned():
    first, answer, *others = CONVERSATIONS["three turns"]
    tokenizer = tokenizer_of("chatml")
    encoded = encode(conversation([first, replace(answer, learned=False), *others]), tokenizer, LONG)
    assert tokenizer.decode(encoded.input_ids[encoded.targets[0]]) != "Robin"
    text = tokenizer.decode([encoded.input_ids[at] for at in encoded.targets])
    assert text == "Wren.<|im_end|>Robin.<|im_end|>"


@pytest.mark.parametrize("answer", ["Oak. Be brief.", "42", "\nOak", "鸟"])
def test_an_answer_behind_a_space_is_learned_from_its_first_token(answer: str):
    """The space that asks for the answer belongs to that token; what asks for one ends before it."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    example = conversation([Message("user", "Name a tree."), Message("assistant", answer)])
    encoded = encode(example, tokenizer, LONG)
    learned = [encoded.input_ids[at] for at in encoded.targets]
    assert tokenizer.decode(learned).removeprefix(" ") == f"{answer}{tokenizer.eos_token}"
    assert tuple(prompt_ids(example, tokenizer)) == encoded.input_ids[: encoded.prompt_length]


def test_a_long_conversation_loses_its_beginning_and_a_long_answer_its_end():
    tokenizer, example = tokenizer_of("chatml"), conversation(CONVERSATIONS["three turns"])
    whole, last = (encode(replace(example, train_on=on), tokenizer, LONG) for on in ("all_turns", "last_turn"))
    cut = encode(example, tokenizer, len(whole.input_ids) - 5)
    assert cut.input_ids == whole.input_ids[5:]
    assert cut.targets.tolist() == [at - 5 for at in whole.targets]
    short = encode(example, tokenizer, len(last.response))
    assert short.input_ids == (last.input_ids[last.prompt_length - 1], *last.response[:-1])
    assert short.targets.tolist() == list(range(1, len(last.response)))
    texts = [(example, whole), (example, cut), (example, short)]
    assert count_cut(texts[:1], tokenizer, LONG).prompts == 0
    assert count_cut(texts[1:2], tokenizer, len(whole.input_ids) - 5).prompts == 1
    assert count_cut(texts[2:], tokenizer, len(last.response)).responses == 1


def test_a_tokenizer_without_a_chat_template_names_the_setting(embedded_tokenizer: Any):
    with pytest.raises(DataError, match=r"no chat template\.\nSet data\.chat_template to a file .* or to plain"):
        encode(conversation(CONVERSATIONS["one turn"]), embedded_tokenizer, LONG)


def test_the_plain_template_works_with_any_tokenizer(embedded_tokenizer: Any, tmp_path: Path):
    set_chat_template(embedded_tokenizer, "plain")
    encoded = encode(conversation(CONVERSATIONS["a system message"]), embedded_tokenizer, LONG)
    assert embedded_tokenizer.decode([encoded.input_ids[at] for at in encoded.targets]) == (
        "Robin.<|endoftext|>Wren.<|endoftext|>"
    )
    with pytest.raises(DataError, match="tool calls"):
        encode(conversation(USED), embedded_tokenizer, LONG)
    file = tmp_path / "a.jinja"
    file.write_text(FAMILIES["zephyr"].template)
    set_chat_template(embedded_tokenizer, str(file))
    assert embedded_tokenizer.chat_template == FAMILIES["zephyr"].template
    with pytest.raises(ConfigError, match=r"data.chat_template is 'chatml', .*\nAccepted: a file"):
        set_chat_template(embedded_tokenizer, "chatml")


@pytest.fixture
def embedded_tokenizer() -> Any:
    return load_tokenizer("embedded")


def test_a_prompt_that_spells_a_control_token_is_text(embedded_tokenizer: Any):
    example = Example("Explain <|endoftext|> now.", "It ends <|endoftext|>", label="", task="")
    end = embedded_tokenizer.eos_token_id
    encoded = encode(example, embedded_tokenizer, LONG)
    assert encoded.input_ids.count(end) == 1
    assert encoded.input_ids[-1] == end
    assert embedded_tokenizer.decode(encoded.input_ids[:-1]) == "Explain <|endoftext|> now. It ends <|endoftext|>"
    taken = encode(replace(example, special_tokens="token"), embedded_tokenizer, LONG)
    assert taken.input_ids.count(end) == 2
    assert taken.input_ids[-1] == end


def test_texts_in_a_chat_format_begin_and_end_once():
    """A Llama's tokenizer writes the first token itself; so do data in its format, and its chat template."""
    tokenizer = copy.deepcopy(tokenizer_of("llama-3"))
    first, last = tokenizer.bos_token, tokenizer.eos_token
    begin = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, begin)])
    assert tokenizer("Hi").input_ids[0] == begin
    plain = encode(Example("Hi\n", "Hello", label="", task=""), tokenizer, LONG)
    formatted = Example(f"{first}Hi\n", f"Hello{last}", label="", task="", special_tokens="token")
    assert encode(formatted, tokenizer, LONG) == plain
    assert prompt_ids(formatted, tokenizer) == list(plain.input_ids[: plain.targets[0]])
    whole = replace(formatted, prompt="", response=f"{first}Hi\nHello{last}", train_on="everything")
    assert encode(whole, tokenizer, LONG).input_ids == plain.input_ids
    chat = encode(replace(conversation(messages_of("Hi", "Hello")), special_tokens="token"), tokenizer, LONG).input_ids
    assert (chat.count(begin), chat[0]) == (1, begin)
