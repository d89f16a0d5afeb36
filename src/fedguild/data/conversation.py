"""Conversations: the rows of one's own data, whatever their layout, in one form for all of them.

A row becomes a conversation (`Example.messages`), a prompt with a response, a plain text, or a preference pair of two
conversations or two responses (`Example.rejected`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.cells import Number, Table, plain, verbatim, without_fill
from fedguild.data.example import Example, Message, shared_turns
from fedguild.data.layouts import (
    ANSWERS,
    CHAT_PREFERENCES,
    COLUMNS,
    INSTRUCTIONS,
    PAIRS,
    PREFERENCES,
    ROLE_OF,
    SHARED_PROMPTS,
    TEXT,
    TURNS,
    Layout,
    is_messages,
    unlisted,
)

_NESTED = ("messages", "history", "tools", "choices", "instruction", "response", "chosen", "rejected")
CALLS = ("function_call", "tool_call")
"""Roles of ShareGPT's messages in which the assistant calls tools; the text is JSON."""
_MORE = ("tool_calls", "name", "tool_call_id", "reasoning_content", "thinking")
_A_MESSAGE = "a message with role and content, or from and value"
_HUMAN_AND_ASSISTANT = "\n\nAssistant:"
"""What asks for the answer in Anthropic's HH-RLHF."""


@dataclass
class Tally:
    """What reading a split found: its layout, and counts of rows that are left out or changed, by the reason."""

    layout: str = ""
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)


def examples_of(table: Table, layout: Layout, tally: Tally, render: Callable[[str, str], str]) -> Iterator[Example]:
    """Yields a table's examples; counts in `tally` the rows that are left out or changed.

    Args:
        render: Returns the prompt of an instruction and its input.

    Raises:
        DataError: a cell is not what its column must hold; names the row, the column and what was found.
    """
    for number, found in table.select({key: (name,) for key, name in layout.columns.items()}, nested=_NESTED):
        row = _Row(table, layout, number, {key: found.get(key) for key in COLUMNS}, tally)
        about = _about(row)
        if layout.name == TEXT:
            yield Example(prompt="", response=row.cell("text"), **about, train_on="everything")
        elif layout.name == INSTRUCTIONS:
            prompt = _instruction(row, render)
            if not prompt:
                tally.dropped["rows without an instruction"] += 1
                continue
            response = row.cell("response")
            choices, answer = _choices(row, response)
            yield Example(prompt, response, **about, choices=choices, answer=answer)
        elif layout.name in (PREFERENCES, SHARED_PROMPTS, CHAT_PREFERENCES):
            pair = _pair(row, render, about)
            if pair is not None:
                yield replace(pair[0], rejected=pair[1])
        else:
            messages = tidied(list(_MESSAGES_OF.get(layout.name, _of_messages)(row)), tally)
            if messages:
                yield conversation(messages, _tools(row), **about)


def _instruction(row: _Row, render: Callable[[str, str], str]) -> str:
    """Returns the prompt of an instruction and its input; empty where a row has neither."""
    instruction, given = row.cell("instruction"), row.cell("input")
    if not (instruction.strip() or given.strip()):
        return ""
    return render(instruction, given if given.strip() else "")


def _pair(row: _Row, render: Callable[[str, str], str], about: Mapping[str, Any]) -> tuple[Example, Example] | None:
    """Returns the examples of the chosen and the rejected answer; None for a pair of which nothing can be learned."""
    if not (row.cells["chosen"] and row.cells["rejected"]):
        row.tally.dropped["pairs that lack an answer"] += 1
        return None
    of_chat = row.layout.name == CHAT_PREFERENCES
    pair = _pair_of_conversations(row, about) if of_chat else _pair_of_texts(row, render, about)
    if pair is not None and (pair[0].messages, pair[0].response) == (pair[1].messages, pair[1].response):
        row.tally.dropped["pairs of the same answer twice"] += 1
        return None
    return pair


def _pair_of_texts(
    row: _Row, render: Callable[[str, str], str], about: Mapping[str, Any]
) -> tuple[Example, Example] | None:
    chosen, rejected = map(row.cell, ANSWERS)
    if row.layout.name == SHARED_PROMPTS:
        cut = _end_of_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    else:
        prompt = _instruction(row, render)
    if not prompt.strip():
        row.tally.dropped["pairs without a prompt"] += 1
        return None
    if not (chosen.strip() and rejected.strip()):
        row.tally.dropped["pairs that lack an answer"] += 1
        return None
    return Example(prompt, chosen, **about), Example(prompt, rejected, **about)


def _end_of_prompt(one: str, other: str) -> int:
    """Returns where two texts' common prompt ends: before the last answer, or before a word that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    shared = next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
    asked = one.rfind(_HUMAN_AND_ASSISTANT, 0, shared)
    if asked >= 0:
        return asked + len(_HUMAN_AND_ASSISTANT)
    while shared and not one[shared - 1].isspace():
        shared -= 1
    return len(one[:shared].rstrip())


def _pair_of_conversations(row: _Row, about: Mapping[str, Any]) -> tuple[Example, Example] | None:
    asked, whole = [*_of_prompt(row)], []
    for key in ANSWERS:
        value = unlisted(row.cells[key])
        turns = [*_messages(key, value, row)] if is_messages(value) else [Message("assistant", row.text(key, value))]
        whole.append(tidied([*asked, *turns], row.tally if key == "chosen" else Tally()))
    if not all(whole):
        row.tally.dropped["pairs that lack an answer"] += bool(whole[0])
        return None
    if not any(turn.role == "user" for turn in whole[0][: shared_turns(*whole)]):
        row.tally.dropped["pairs without a prompt"] += 1
        return None
    chosen, rejected = (conversation(turns, _tools(row), **about) for turns in whole)
    return chosen, rejected


def _of_prompt(row: _Row) -> Iterator[Message]:
    yield from _of_system(row)
    if is_messages(row.cells["instruction"]):
        yield from _messages("instruction", row.cells["instruction"], row)
    elif row.cells["messages"]:
        yield from _messages("messages", row.cells["messages"], row)
    elif any(row.cells[key] for key in ("instruction", "input", "history")):
        yield from [*_of_turns(replace(row, cells={**row.cells, "system": None, "response": None}))][:-1]


def conversation(
    messages: Sequence[Message], tools: Any = None, *, label: str = "", task: str = "", **about: Any
) -> Example:
    """Returns the example of a conversation that ends with the assistant."""
    *before, last = messages
    called = json.loads(last.more).get("tool_calls") if last.more else None
    return Example(
        prompt="\n\n".join(f"{one.role}: {one.content}" for one in before),
        response=last.content or json.dumps(called, ensure_ascii=False),
        label=label,
        task=task,
        messages=tuple(messages),
        tools=json.dumps(_as_functions(tools), ensure_ascii=False) if tools else "",
        **about,
    )


def tidied(messages: Sequence[Message], tally: Tally) -> list[Message]:
    """Returns a conversation by the rules for turns; empty if nothing in it can be learned.

    Empty turns are left out; neighbouring turns of one role become one, a blank line between them; a conversation
    begins with the user's turn (or a system message) and ends with the last answer that is to be learned.
    """
    kept = [one for one in messages if one.content.strip() or one.more or one.role == "tool"]
    if len(kept) < len(messages):
        tally.changed["conversations have empty turns, which are left out"] += 1
    joined: list[Message] = []
    merged = False
    for one in kept:
        beside = joined and joined[-1].role == one.role != "tool" and not (joined[-1].more or one.more)
        if beside and one.role == "assistant" and joined[-1].learned != one.learned:
            tally.changed["conversations have an answer of weight 0 beside another one, which alone is kept"] += 1
            joined[-1] = one if one.learned else joined[-1]
        elif beside:
            joined[-1] = replace(one, content=f"{joined[-1].content}\n\n{one.content}")
            merged = True
        else:
            joined.append(one)
    if merged:
        tally.changed["conversations have neighbouring turns of one role, which become one turn"] += 1
    first = next((index for index, one in enumerate(joined) if one.role == "user"), len(joined))
    early = [one for one in joined[:first] if one.role != "system"]
    last = max((index for index, one in enumerate(joined) if one.role == "assistant" and one.learned), default=-1)
    if first > last:
        tally.dropped["conversations without an assistant turn that answers"] += 1
        return []
    if early:
        tally.changed["conversations begin before the first user turn, which is where they now begin"] += 1
    if any(one.role == "assistant" for one in joined[last + 1 :]):
        tally.changed["conversations end with an answer of weight 0, before which they now end"] += 1
    elif last < len(joined) - 1:
        tally.changed["conversations end after the last assistant turn, which is where they now end"] += 1
    return [*(one for one in joined[:first] if one.role == "system"), *joined[first : last + 1]]


@dataclass(frozen=True)
class _Row:
    """A row of a table: its cells by their content, and what counts what becomes of it."""

    table: Table
    layout: Layout
    number: int
    cells: Mapping[str, Any]
    tally: Tally

    def cell(self, key: str) -> str:
        return self.text(key, self.cells[key])

    def error(self, key: str, found: str, accepted: str) -> DataError:
        return self.table.bad_cell(self.number, self.layout.columns.get(key, key), found, accepted)

    def text(self, key: str, value: Any) -> str:
        try:
            return verbatim(value)
        except TypeError:
            raise self.error(key, _kind(value), "text") from None

    def parsed(self, key: str, value: Any) -> Any:
        """Returns a nested cell, which a table of texts holds as JSON."""
        if not isinstance(value, str):
            return plain(without_fill(value) if self.table.typed else value)
        try:
            return json.loads(value)
        except ValueError:
            raise self.error(key, f"the text {value!r:.60}", "a list, or a list as JSON") from None


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} ({str(value)[:60]})"


def _about(row: _Row) -> dict[str, Any]:
    task = row.cell("task").strip() or "instructions"
    label = row.cell("label").strip()
    if label and isinstance(row.cells["label"], Number):
        number = Decimal(label)  # a float would give neighbours beyond 2^53 one name
        if number != int(number):
            raise row.error("label", f"the number {label}", "an integer or a name")
        label = str(int(number))
    return {"label": label or task, "task": task, "document": row.cell("document").strip()}


def _tools(row: _Row) -> Any:
    return row.parsed("tools", row.cells["tools"]) if row.cells["tools"] else None


def _choices(row: _Row, response: str) -> tuple[tuple[str, ...], int | None]:
    value = row.cells["choices"]
    if not value:
        return (), None
    listed = row.parsed("choices", value)
    choices = tuple(row.text("choices", one).strip() for one in listed) if isinstance(listed, list) else ()
    if response.strip() not in choices:
        accepted = f"a list that holds the response {response!r}"
        raise row.error("choices", f"{value!r}", accepted)
    return choices, choices.index(response.strip())


def _of_system(row: _Row) -> Iterator[Message]:
    system = row.cell("system")
    if system.strip():
        yield Message("system", system)


def _of_messages(row: _Row) -> Iterator[Message]:
    yield from _of_system(row)
    yield from _messages("messages", row.cells["messages"], row)


def _messages(key: str, value: Any, row: _Row) -> Iterator[Message]:
    listed = row.parsed(key, value) if value else []
    if not isinstance(listed, list):
        raise row.error(key, _kind(value), "a list of messages")
    for one in listed:
        yield _message(key, one, row)


def _message(key: str, raw: Any, row: _Row) -> Message:
    if not isinstance(raw, Mapping):
        raise row.error(key, _kind(raw), _A_MESSAGE)
    said = raw.get("role", raw.get("from"))
    name = str(said).strip().lower()
    if name not in ROLE_OF and name not in CALLS:
        raise row.error(key, f"a message of the role {said!r}", ", ".join(ROLE_OF))
    if not raw.keys() & {"content", "value", "function_call", *_MORE}:
        raise row.error(key, f"a message that says nothing ({str(dict(raw))[:60]})", _A_MESSAGE)
    content = _content(key, raw.get("content", raw.get("value")), row)
    more = {field: raw[field] for field in _MORE if raw.get(field)}
    if raw.get("function_call"):
        more["tool_calls"] = [raw["function_call"]]
    if name in CALLS:
        calls = row.parsed(key, content)
        more, content = {"tool_calls": calls if isinstance(calls, list) else [calls]}, ""
    if "tool_calls" in more:
        more["tool_calls"] = [_call(key, one, row) for one in more["tool_calls"]]
    return Message(
        ROLE_OF.get(name, "assistant"),
        content,
        json.dumps(more, ensure_ascii=False) if more else "",
        learned=raw.get("weight") not in (0, False) and raw.get("train") is not False,
    )


def _content(key: str, value: Any, row: _Row) -> str:
    """Returns a message's text, which may be a list of parts."""
    if not isinstance(value, list):
        return row.text(key, value)
    for part in value:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise row.error(key, f"a part of a message that is no text ({str(part)[:60]})", "parts with a text")
    return "".join(part["text"] for part in value)


def _call(key: str, raw: Any, row: _Row) -> dict[str, Any]:
    """Returns a tool call in the form of chat templates, the arguments as a mapping."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise row.error(key, f"the tool call {str(raw)[:60]}", "a call with the name of a function and its arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = row.parsed(key, arguments)
    name = {"id": raw["id"]} if isinstance(raw.get("id"), str) else {}
    return {**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _as_functions(tools: Any) -> list[Any]:
    """Returns the schemas of tools in the form of chat templates."""
    listed = tools if isinstance(tools, list) else [tools]
    return [
        one if not isinstance(one, Mapping) or "function" in one else {"type": "function", "function": one}
        for one in listed
    ]


def _of_pairs(row: _Row) -> Iterator[Message]:
    yield from _of_system(row)
    yield from _of_history(row)
    for key, role in (("instruction", "user"), ("response", "assistant")):
        value = row.cells[key]
        if isinstance(value, list) or is_messages(value):
            yield from _messages(key, value, row)
        else:
            yield Message(role, row.text(key, value))


def _of_turns(row: _Row) -> Iterator[Message]:
    yield from _of_system(row)
    yield from _of_history(row)
    asked = [row.cell(key) for key in ("instruction", "input")]
    yield Message("user", "\n\n".join(one for one in asked if one.strip()))
    yield Message("assistant", row.cell("response"))


def _of_history(row: _Row) -> Iterator[Message]:
    history = row.parsed("history", row.cells["history"]) if row.cells["history"] else []
    for pair in _pairs(history, row):
        yield from (
            Message(role, row.text("history", one)) for role, one in zip(("user", "assistant"), pair, strict=True)
        )


def _pairs(history: Any, row: _Row) -> Iterable[Sequence[Any]]:
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise row.error("history", _kind(history), "a list of pairs of a question and its answer")
    return history


_MESSAGES_OF = {PAIRS: _of_pairs, TURNS: _of_turns}


def as_conversation(example: Example) -> Example:
    """Returns a prompt with a response as a conversation of two messages, for the chat template."""
    if example.messages or not example.prompt:
        return example
    return replace(
        example,
        messages=(Message("user", example.prompt), Message("assistant", example.response)),
        rejected=None if example.rejected is None else as_conversation(example.rejected),
    )
