"""Rendering: an example as token ids, and which of them the loss covers.

A prompt with a response is tokenized in two parts. A conversation is written by the model's chat template and tokenized
as a whole, as `tokenizer.apply_chat_template` does. What an assistant turn adds to the prompt that asks for it
(`add_generation_prompt`) is learned, up to the token that ends the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from fedguild.config.data import SpecialTokens
from fedguild.core.errors import ConfigError, DataError, first_line
from fedguild.data.batches import Cut, Encoded
from fedguild.data.example import Example, Message, shared_turns

CONVERSATIONS = "conversations by the chat template"
"""The beginning of what a federation's site says of its texts if they are conversations."""
PLAIN = "plain"
PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') or "
    "message.tool_calls %}{{ raise_exception('it knows no tools') }}{% endif %}{% if message.role == 'assistant' %}"
    "### Assistant:\n{{ message.content }}{{ eos_token }}\n\n{% else %}### {{ message.role | capitalize }}:\n"
    "{{ message.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
_PRIVATE = "\ue000"
_MARKS = ("\ue001x\ue002", "\ue003z\ue004")
"""Two texts without a common first or last letter, which no template changes and no data has."""

Dicts = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


def encode(example: Example, tokenizer: Any, max_tokens: int) -> Encoded:
    """Returns the example as token ids; a response is closed by one end-of-sequence token.

    A text longer than `max_tokens` loses its beginning, never that of its response (of a conversation: its last turn);
    a response that is too long on its own is cut at its end. Both texts of a preference pair lose as many tokens of
    their prompt, and the turns that they share are not learned.

    Raises:
        DataError: there is no chat template for a conversation, or it cannot write this one.
    """
    texts = [_written(one, tokenizer) for one in _texts_of(example)]
    ends = [start + min(len(ids) - start, max_tokens - 1) for ids, _, start in texts]
    first = max(0, max(ends) - max_tokens)
    chosen, *rejected = [
        _encoded(ids[first:end], learned[first:end]) for (ids, learned, _), end in zip(texts, ends, strict=True)
    ]
    return replace(chosen, rejected=rejected[0]) if rejected else chosen


def _texts_of(example: Example) -> list[Example]:
    """Returns an example, or both of a preference pair."""
    if example.rejected is None:
        return [example]
    pair = [
        replace(one, train_on=example.train_on, special_tokens=example.special_tokens, rejected=None)
        for one in (example, example.rejected)
    ]
    shared = shared_turns(*(one.messages for one in pair))
    return [
        replace(one, messages=(*(replace(turn, learned=False) for turn in turns[:shared]), *turns[shared:]))
        for one, turns in ((one, one.messages) for one in pair)
    ]


def _written(example: Example, tokenizer: Any) -> tuple[list[int], list[bool], int]:
    """Returns an example's token ids, which of them are learned, and where its response or last turn begins."""
    if example.messages:
        ids, learned, start = _conversation(example, tokenizer)
    else:
        prompt, response = _tokens(example, tokenizer)
        ids, start = prompt + response, len(prompt)
        learned = [False] * start + [True] * len(response)
    return ids, [True] * len(ids) if example.train_on == "everything" else learned, start


def encode_last(example: Example, tokenizer: Any, max_tokens: int) -> Encoded:
    """Returns the example with the loss on its response alone, as it is scored."""
    return encode(replace(example, train_on="last_turn"), tokenizer, max_tokens)


def count_cut(texts: Iterable[tuple[Example, Encoded]], tokenizer: Any, max_tokens: int) -> Cut:
    """Counts the texts that `encode` cut; those that fill `max_tokens` are tokenized again."""
    prompts = responses = number = 0
    for example, encoded in texts:
        number += len(encoded.rows)
        if max(len(row.input_ids) for row in encoded.rows) < max_tokens - 1:
            continue
        lengths = [_lengths(one, tokenizer) for one in _texts_of(example)]
        longest = max(prompt + min(response, max_tokens - 1) for prompt, response in lengths)
        prompts += len(lengths) * (longest > max_tokens)
        responses += sum(response > max_tokens - 1 for _, response in lengths)
    return Cut(number, prompts, responses, max_tokens)


def count_cut_prompts(examples: Iterable[Example], tokenizer: Any, room: int) -> int:
    """Counts the prompts longer than `room` tokens, whose beginning generation cuts."""
    return sum(len(prompt_ids(example, tokenizer)) > room for example in examples)


def prompt_ids(example: Example, tokenizer: Any) -> list[int]:
    """Returns the token ids that ask for an example's response; of a plain text, its first token if nothing does."""
    if not example.messages:
        ids = encode_prompt(example.prompt, tokenizer, example.special_tokens)
        return ids or (_tokens(example, tokenizer)[1][:1] if example.train_on == "everything" else [])
    chat = chat_of(tokenizer)
    messages, tools = chat.prepared(example)
    text = chat.render(messages[:-1], tools, generation=True).rstrip(" ")  # which is the answer's
    return chat.tokens(text, messages[:-1], tools, example.special_tokens, generation=True)[0]


def encode_prompt(prompt: str, tokenizer: Any, special_tokens: SpecialTokens = "text") -> list[int]:
    """Returns the prompt's token ids, preceded by the tokenizer's special tokens, unless it begins with its own."""
    ids = _text_ids(prompt, tokenizer, special_tokens, add_special_tokens=True)
    if special_tokens == "token" and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def response_text(prompt: str, response: str) -> str:
    """Returns the response as it continues the prompt: after a space, unless there is one already."""
    return response if not prompt or prompt[-1].isspace() or response[:1].isspace() else f" {response}"


def ends_of(tokenizer: Any) -> set[int]:
    """Returns the token ids that end an answer of the chat template."""
    ids, learned, _ = _conversation_of(chat_of(tokenizer), [_user("x"), _assistant("y")], None, "token", [1])
    last = [one for one, is_learned in zip(ids, learned, strict=True) if is_learned][-1]
    return {one for one in (last, tokenizer.eos_token_id) if one is not None}


def set_chat_template(tokenizer: Any, setting: str | None) -> None:
    """Makes a config's `data.chat_template` the tokenizer's, so that it is saved with exported models.

    Raises:
        ConfigError: the setting is neither Jinja text nor a file.
    """
    if setting is None:
        return
    if setting == PLAIN:
        tokenizer.chat_template = PLAIN_TEMPLATE
    elif "{{" in setting or "{%" in setting:
        tokenizer.chat_template = setting
    else:
        try:
            tokenizer.chat_template = Path(setting).expanduser().read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.chat_template is '{setting}', which cannot be read: {error}.",
                f"Accepted: a file with a Jinja template, the template itself, or {PLAIN}.",
            ) from error


def require_chat_template(example: Example, tokenizer: Any) -> None:
    """Raises DataError if an example is a conversation that the tokenizer's chat template cannot write."""
    for one in _texts_of(example):
        if one.messages:
            _conversation(one, tokenizer)


def _tokens(example: Example, tokenizer: Any) -> tuple[list[int], list[int]]:
    prompt = encode_prompt(example.prompt, tokenizer, example.special_tokens)
    text = response_text(example.prompt, example.response)
    response = _text_ids(text, tokenizer, example.special_tokens, add_special_tokens=False)
    if example.special_tokens == "token" and prompt == response[:1] == [tokenizer.bos_token_id]:
        response = response[1:]
    closed = tokenizer.eos_token_id is None or response[-1:] == [tokenizer.eos_token_id]
    return prompt, response if closed else [*response, tokenizer.eos_token_id]


def _lengths(example: Example, tokenizer: Any) -> tuple[int, int]:
    if not example.messages:
        prompt, response = _tokens(example, tokenizer)
        return len(prompt), len(response)
    ids, _, start = _conversation(example, tokenizer)
    return start, len(ids) - start


def _text_ids(text: str, tokenizer: Any, special_tokens: SpecialTokens, *, add_special_tokens: bool) -> list[int]:
    as_text = special_tokens == "text" and (found := _special(tokenizer)) is not None and found.search(text)
    split = {"split_special_tokens": True} if as_text else {}
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False, **split)
    return ids


def _special(tokenizer: Any) -> re.Pattern[str] | None:
    """Returns the pattern of the tokenizer's special tokens; None if it has none."""
    return _special_of(tokenizer) if hasattr(tokenizer, "added_tokens_decoder") else None


@lru_cache(maxsize=8)
def _special_of(tokenizer: Any) -> re.Pattern[str] | None:
    return _pattern(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def spells_special(text: str, tokenizer: Any) -> bool:
    """Whether a text spells one of the tokenizer's special tokens."""
    found = _special(tokenizer)
    return found is not None and found.search(text) is not None


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted({text for text in texts if text.strip()}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _encoded(ids: Sequence[int], learned: Sequence[bool]) -> Encoded:
    first = learned.index(True) if True in learned else len(ids)
    skipped, at = [], first
    for is_learned, run in groupby(learned[first:]):
        start, at = at, at + len(list(run))
        if not is_learned:
            skipped.append((start, at))
    return Encoded(tuple(ids), first, tuple(skipped))


def _conversation(example: Example, tokenizer: Any) -> tuple[list[int], list[bool], int]:
    """Returns a conversation's token ids, which of them are learned, and where the last turn begins."""
    chat = chat_of(tokenizer)
    messages, tools = chat.prepared(example)
    last = len(messages) - 1
    shift = last + 1 - len(example.messages)  # a system message that became part of the first user's
    turns = [index + shift for index, one in enumerate(example.messages) if one.role == "assistant" and one.learned]
    wanted = [last] if example.train_on == "last_turn" else [*(turn for turn in turns if turn != last), last]
    ids, learned, start = _conversation_of(chat, messages, tools, example.special_tokens, wanted)
    if not example.messages[-1].learned and example.train_on == "all_turns":
        learned[start:] = [False] * (len(ids) - start)
    return ids, learned, start


def _conversation_of(
    chat: Chat, messages: Dicts, tools: Any, special_tokens: SpecialTokens, turns: Sequence[int]
) -> tuple[list[int], list[bool], int]:
    """Returns what `_conversation` does for the given turns, of which the last ends the conversation."""
    text = chat.render(messages, tools)
    spans = [chat.turn(text, messages, tools, turn) for turn in turns]
    ids, offsets, written = chat.tokens(text, messages, tools, special_tokens)
    learned = [False] * len(ids)
    start, end = len(ids), False
    for first, last in spans:
        begin = len(text[:first].rstrip(" "))  # a token may begin with the space that asks for the answer
        inside = [index for index, (one, two) in enumerate(offsets) if begin <= one and two <= last]
        closing = [index for index in inside if written[index]]
        tail = [index for index in inside if closing and index > closing[-1]]
        end = bool(closing) and not text[offsets[closing[-1]][1] : last].strip()
        for index in inside:
            learned[index] = not (end and index in tail)
        start = inside[0] if inside else len(ids)
    if not end and chat.tokenizer.eos_token_id is not None:
        ids, learned = [*ids, chat.tokenizer.eos_token_id], [*learned, True]
    return ids, learned, start


@lru_cache(maxsize=8)
def _chat(tokenizer: Any, template: str) -> Chat:
    return Chat(tokenizer, template)


def chat_of(tokenizer: Any) -> Chat:
    """Returns a tokenizer's chat template.

    Raises:
        DataError: it has none, or cannot say which characters a token covers.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise DataError(
            "The data are conversations, but the model's tokenizer has no chat template.",
            f"Set data.chat_template to a file with a Jinja template, or to {PLAIN}.",
        )
    if not tokenizer.is_fast:
        raise DataError(
            "The data are conversations, but the model's tokenizer does not tell which text a token covers.",
            "Use a model with a fast tokenizer (tokenizer.json).",
        )
    return _chat(tokenizer, template)


class Chat:
    """A tokenizer's chat template, and what is known of it from probing it."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer, self.template = tokenizer, template

    def render(self, messages: Dicts, tools: Any = None, *, generation: bool = False) -> str:
        """Returns messages as the template writes them.

        Raises:
            DataError: the template refuses them.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"The chat template cannot write a conversation of {roles}: {first_line(error)}",
                "Change the conversation, or give another template as data.chat_template.",
            ) from error
        return text

    def prepared(self, example: Example) -> tuple[list[dict[str, Any]], Any]:
        """Returns an example's messages and tools as the template takes them.

        A system message goes to the head of the first user message if the template has no place for it.

        Raises:
            DataError: the template has no place for tools that are called, or for their results.
        """
        messages = [message.as_dict() for message in example.messages]
        tools = json.loads(example.tools) if example.tools else None
        for what, used, known in (
            ("tool calls", any("tool_calls" in one for one in messages), "_writes_calls"),
            ("results of tools", any(one["role"] == "tool" for one in messages), "_writes_results"),
            ("descriptions of tools", tools, "_writes_tools"),
        ):
            if used and not getattr(self, known):
                raise DataError(
                    f"A conversation has {what}, which the chat template does not write.",
                    "Use a model whose template knows tools, give one as data.chat_template, or leave such "
                    f"conversations out. This one begins {example.messages[0].content[:40]!r}.",  # a hint is not sent
                )
        if messages[0]["role"] == "system" and len(messages) > 1 and not self._writes_system:
            system, first, *others = messages
            messages = [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]
        return messages, tools

    def rewritten(self, example: Example) -> list[str]:
        """Returns what the template does not write as the data has it, a phrase each that counts conversations."""
        system = example.messages[0].role == "system"
        thinks = any(_thoughts(one) for one in example.messages)
        found = (
            (system and not self._writes_system, "a system message, which the template has in the user's turn"),
            (thinks and not self._writes_thoughts, "thoughts (reasoning_content), which the template leaves out"),
        )
        return [f"conversations have {what}" for is_so, what in found if is_so]

    def tokens(
        self, text: str, messages: Dicts, tools: Any, special_tokens: SpecialTokens, *, generation: bool = False
    ) -> tuple[list[int], list[Span], list[bool]]:
        """Returns token ids, the characters that each covers, and whether it is a control token of the template.

        Args:
            text: The messages as rendered.
        """
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        data = self._spelled(text, messages, tools, generation) if special_tokens == "text" else set()
        ids: list[int] = []
        offsets: list[Span] = []
        written: list[bool] = []
        for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
            control = token in self._control_ids
            parts = self._as_text(text[start:end]) if control and not data.isdisjoint(range(start, end)) else [token]
            ids += parts
            offsets += [(start, end)] * len(parts)
            written += [control and parts == [token]] * len(parts)
        return ids, offsets, written

    def turn(self, text: str, messages: Dicts, tools: Any, index: int) -> Span:
        """Returns the characters of a rendered conversation that an assistant's turn adds to its prompt.

        Raises:
            DataError: the template writes the turn differently when others follow, and not at a recognisable place.
        """
        before, turn = messages[:index], messages[index]
        prompt = self.render(before, tools, generation=True)
        alone = self.render([*before, turn], tools)
        if alone.startswith(prompt) and text.startswith(alone):
            return len(prompt), len(alone)
        asked, head, tail = self._scaffold(prompt, alone, messages[: index + 1], tools)
        if text.startswith(alone):
            return asked, len(alone)
        found = self._content(text, messages, tools, index) if turn["content"].strip() else None
        if found is not None:
            start, end = found
            written = _shared(head[::-1], text[:start][::-1])
            start = len(prompt) if text[:start].startswith(prompt) else start - written
            return start, end + _shared(text[end:], tail)
        if text.startswith(prompt):  # the turn alone, without what is written only into the last one
            start, added = len(prompt), alone[len(prompt) :]
            for at in range(len(added)):
                if text.startswith(added[at:], start):
                    return start, start + len(added) - at
        raise _unclear(index)

    def _scaffold(self, prompt: str, alone: str, messages: Dicts, tools: Any) -> tuple[int, str, str]:
        """Returns where the last message's turn begins in `alone`, and what is written before and after its content."""
        *before, turn = messages
        marked = self.render([*before, {**turn, "content": _MARKS[0]}], tools)
        mark = marked.find(_MARKS[0])
        if alone.startswith(prompt):
            asked = len(prompt)
        elif mark < 0:
            raise _unclear(len(before))
        else:  # the prompt may ask with more than is written before an answer, such as an opened thought
            asked, last = _shared(prompt, marked), before[-1]["content"].strip()
            if marked.rfind(last, 0, mark) + len(last) > asked:
                asked = len(marked[:mark].rstrip(" "))
        return asked, marked[asked : max(asked, mark)], marked[mark + len(_MARKS[0]) :]

    def _content(self, text: str, messages: Dicts, tools: Any, index: int) -> Span | None:
        """Returns the characters of a message's content, found by writing two others in its place."""
        one, two = (
            self.render([*messages[:index], {**messages[index], "content": mark}, *messages[index + 1 :]], tools)
            for mark in _MARKS
        )
        start = _shared(one, two)
        after = _shared(one[::-1], two[::-1])
        end = len(text) - after
        same = text[:start] == one[:start] and text[end:] == one[len(one) - after :]
        return (start, end) if same and start <= end else None

    def _spelled(self, text: str, messages: Dicts, tools: Any, generation: bool) -> set[int]:
        """Returns the characters of a rendered conversation that spell control tokens within its data."""
        control = self._control
        if control is None or control.search(json.dumps([*messages, tools], ensure_ascii=False)) is None:
            return set()

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return control.sub(lambda match: _PRIVATE * len(match[0]), value)
            if isinstance(value, Mapping):
                return {key: hide(each) for key, each in value.items()}
            return [hide(each) for each in value] if isinstance(value, list) else value

        hidden = self.render([hide(message) for message in messages], hide(tools), generation=generation)
        if len(hidden) != len(text):
            raise DataError(
                "A conversation spells control tokens that the chat template changes, so they cannot be written as "
                "text.",
                "Remove them, or set data.special_tokens to token.",
            )
        return {index for index, letter in enumerate(hidden) if letter == _PRIVATE != text[index]}

    def _as_text(self, text: str) -> list[int]:
        """Returns the ids of a text inside another, without control tokens."""
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        for before in ("\n", " ", ""):  # a tokenizer may write the beginning of a text differently
            own: list[int] = self.tokenizer.encode(before, **plain)
            ids: list[int] = self.tokenizer.encode(before + text, **plain)
            if ids[: len(own)] == own:
                ids = ids[len(own) :]
                break
        return (
            ids
            if len(text) == 1 or not self._control_ids & set(ids)
            else [one for letter in text for one in self._as_text(letter)]
        )

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        """The pattern of special tokens, and of added tokens that separate turns."""
        added = self.tokenizer.added_tokens_decoder.values()
        turns = self._probe(_user("x"), _assistant("y"), _user("z"))
        return _pattern(token.content for token in added if token.special or token.content in turns)

    @cached_property
    def _control_ids(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        control = self._control
        return {index for index, token in added if control is not None and control.fullmatch(token.content)}

    @cached_property
    def _writes_system(self) -> bool:
        system = {"role": "system", "content": _MARKS[0]}
        return _MARKS[0] in self._probe(system, _user("x"), _assistant("y"))

    @cached_property
    def _writes_thoughts(self) -> bool:
        answer = {**_assistant("y"), "reasoning_content": _MARKS[0], "thinking": _MARKS[0]}
        return _MARKS[0] in self._probe(_user("x"), answer)

    @cached_property
    def _writes_calls(self) -> bool:
        return _MARKS[0] in self._probe(_user("x"), _call(_MARKS[0])) or _MARKS[0] in self._probe(*_used(_MARKS[0], ""))

    @cached_property
    def _writes_results(self) -> bool:
        return _MARKS[1] in self._probe(*_used("x", _MARKS[1]))

    @cached_property
    def _writes_tools(self) -> bool:
        parameters = {"type": "object", "properties": {}}
        function = {"name": _MARKS[0], "description": "d", "parameters": parameters}
        return _MARKS[0] in self._probe(_user("x"), tools=[{"type": "function", "function": function}])

    def _probe(self, *messages: dict[str, Any], tools: Any = None) -> str:
        try:
            return self.render(messages, tools)
        except DataError:
            return ""


def _thoughts(message: Message) -> bool:
    return bool(message.more) and not {"reasoning_content", "thinking"}.isdisjoint(json.loads(message.more))


def _unclear(index: int) -> DataError:
    return DataError(
        f"The chat template writes turn {index + 1} of a conversation differently when others follow, so it is not "
        "certain which of its tokens are learned.",
        "Set data.train_on to last_turn, or give a template for training as data.chat_template.",
    )


def _shared(one: str, two: str) -> int:
    """Returns the length of two texts' common beginning."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(two)))


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


def _used(name: str, result: str) -> Iterator[dict[str, Any]]:
    """Yields a conversation that uses a tool."""
    yield _user("x")
    yield _call(name)
    yield {"role": "tool", "name": name, "tool_call_id": "abcdefghi", "content": result}
    yield _assistant("y")
