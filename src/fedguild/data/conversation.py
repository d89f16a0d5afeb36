"""Conversations: the layouts of one's own data, recognised by their columns, and one form for all of them.

A row becomes a conversation (`Example.messages`), a prompt with a response, a plain text, or a preference pair of two
conversations or two responses (`Example.rejected`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.cells import Number, Table, plain, verbatim
from fedguild.data.example import Example, Message, shared_turns

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat"),
    "instruction": ("instruction", "prompt", "question", "query"),
    "response": ("response", "output", "completion", "answer"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "text": ("text",),
    "tools": ("tools", "functions"),
    "label": ("label", "category"),
    "task": ("task",),
    "document": ("document",),
    "choices": ("choices",),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
}
"""Content of a column -> the names that it may have, in order of preference and in any case."""
_NESTED = ("messages", "history", "tools", "choices", "instruction", "response", "chosen", "rejected")
_ROLES = {
    "system": ("developer",),
    "user": ("human",),
    "assistant": ("gpt", "chatgpt", "bot", "model", "bing", "bard"),
    "tool": ("function", "observation", "function_response", "tool_response", "ipython"),
}
ROLE_OF = {name: role for role, others in _ROLES.items() for name in (role, *others)}
CALLS = ("function_call", "tool_call")
"""Roles of ShareGPT's messages in which the assistant calls tools; the text is JSON."""
_MORE = ("tool_calls", "name", "tool_call_id", "reasoning_content", "thinking")
ACCEPTED = (
    "messages (a list of role and content), conversations (from and value), instruction and response (also prompt, "
    "question; output, completion, answer), chosen and rejected with or without a prompt, or text"
)

CHAT, SHAREGPT = "chat messages", "ShareGPT conversations"
PAIRS = "conversational prompts and completions"
TURNS = "instructions with a system message or a history"
INSTRUCTIONS, TEXT = "instructions and responses", "plain text"
PREFERENCES, SHARED_PROMPTS = "preference pairs", "preference pairs with the prompt in both texts"
CHAT_PREFERENCES = "conversational preference pairs"
_ANSWERS = ("chosen", "rejected")
_HUMAN_AND_ASSISTANT = "\n\nAssistant:"
"""What asks for the answer in Anthropic's HH-RLHF."""


@dataclass(frozen=True)
class Layout:
    """What a table was recognised as.

    Attributes:
        name: One of the names above.
        columns: Content of a column -> its name in the table; columns that are not used are left out.
    """

    name: str
    columns: Mapping[str, str]

    @property
    def is_chat(self) -> bool:
        return self.name not in (INSTRUCTIONS, TEXT, PREFERENCES, SHARED_PROMPTS)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(dict.fromkeys(self.columns.values()))})"


@dataclass
class Tally:
    """What reading a split found: its layout, and counts of rows that are left out or changed, by the reason."""

    layout: str = ""
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)


def recognise(table: Table, named: Mapping[str, str] | None = None) -> Layout:
    """Returns the layout of a table.

    Args:
        named: Content of a column -> its name in this table; empty for a column that is not to be used.

    Raises:
        DataError: a named column is missing, or the columns fit no layout; lists those found and accepted.
    """
    named = named or {}
    found = {key: table.find((named[key],) if named.get(key) else names) for key, names in COLUMNS.items()}
    columns = {key: name for key, name in found.items() if name is not None and named.get(key) != ""}
    missing = [name for key, name in named.items() if name and key not in columns]
    if missing:
        raise DataError(f"{table.where} has no column {' or '.join(missing)}.", f"Found: {', '.join(table.columns)}.")
    asked = {"instruction", "response"} <= {key for key, name in named.items() if name}
    beside = ("label", "task", "document")
    if {"chosen", "rejected"} <= columns.keys() and not (named.get("response") or named.get("messages")):
        return _preferences(table, columns, *beside)
    first = table.first({key: columns[key] for key in ("messages", "instruction", "response") if key in columns})
    if "messages" in columns and not asked and _is_messages(first["messages"]):
        sharegpt = any("from" in one for one in _listed(first["messages"]))
        return _layout(SHAREGPT if sharegpt else CHAT, columns, "messages", "system", "tools", *beside)
    if {"instruction", "response"} <= columns.keys():
        if any(_is_messages(first[key]) for key in ("instruction", "response")):
            return _layout(PAIRS, columns, "instruction", "response", "tools", *beside)
        used = ("instruction", "input", "response", "choices", *beside)
        if any(table.first({key: columns[key]})[key] for key in ("system", "history") if key in columns):
            return _layout(TURNS, columns, "system", "history", *used)
        return _layout(INSTRUCTIONS, columns, *used)
    if "text" in columns and not {"instruction", "response"} & named.keys():
        return _layout(TEXT, columns, "text", *beside)
    lacking = [key for key in ("instruction", "response") if key not in columns]
    raise DataError(
        f"{table.where} lacks a column for the {' and the '.join(lacking)}.",
        f"Found: {', '.join(table.columns) or 'no columns'}. Accepted: {ACCEPTED}. Other names are given in "
        "data.options, for example data.options.instruction_column=Frage.",
    )


def _preferences(table: Table, columns: Mapping[str, str], *beside: str) -> Layout:
    """Returns the layout of a table of preference pairs, whose prompt has a column or is what both answers share."""
    if "instruction" not in columns and "input" in columns:
        columns = {**{key: name for key, name in columns.items() if key != "input"}, "instruction": columns["input"]}
    used = ("instruction", "input", "system", "history", "messages", *_ANSWERS)
    first = table.first({key: columns[key] for key in used if key in columns})
    asks = [key for key in ("instruction", "input") if key in columns]
    if any(_is_messages(_unlisted(first.get(key))) for key in ("instruction", *_ANSWERS)):
        apart = _begins_with_an_answer(first["chosen"])
        given = [*asks, "history", *(["messages"] if not asks else [])] if apart else []
        return _layout(CHAT_PREFERENCES, columns, "system", *given, *_ANSWERS, "tools", *beside)
    if not asks:
        return _layout(SHARED_PROMPTS, columns, *_ANSWERS, *beside)
    if any(first.get(key) for key in ("system", "history")):
        return _layout(CHAT_PREFERENCES, columns, "system", "history", *asks, *_ANSWERS, *beside)
    return _layout(PREFERENCES, columns, *asks, *_ANSWERS, *beside)


def _unlisted(value: Any) -> Any:
    """Returns a single message as a list of one."""
    return [value] if isinstance(value, Mapping) else value


def _begins_with_an_answer(value: Any) -> bool:
    listed = _listed(_unlisted(value))
    first = listed[0] if listed else None
    said = first.get("role", first.get("from")) if isinstance(first, Mapping) else "assistant"
    return ROLE_OF.get(str(said).strip().lower()) != "user" and str(said).strip().lower() != "system"


def _layout(name: str, columns: Mapping[str, str], *used: str) -> Layout:
    return Layout(name, {key: columns[key] for key in used if key in columns})


def examples_of(table: Table, layout: Layout, tally: Tally, render: Callable[[str, str], str]) -> Iterator[Example]:
    """Yields a table's examples; counts in `tally` the rows that are left out or changed.

    Args:
        render: Returns the prompt of an instruction and its input.

    Raises:
        DataError: a cell is not what its column must hold; names the row, the column and what was found.
    """
    for number, row in table.select({key: (name,) for key, name in layout.columns.items()}, nested=_NESTED):
        cells = {key: row.get(key) for key in COLUMNS}
        at = _At(table, layout, number)
        about = _about(cells, at)
        if layout.name == TEXT:
            yield Example(prompt="", response=at.text("text", cells["text"]), **about, train_on="everything")
        elif layout.name == INSTRUCTIONS:
            instruction, given = (at.text(key, cells[key]) for key in ("instruction", "input"))
            if not (instruction.strip() or given.strip()):
                tally.dropped["rows without an instruction"] += 1
                continue
            response = at.text("response", cells["response"])
            choices, answer = _choices(cells["choices"], response, at)
            prompt = render(instruction, given if given.strip() else "")
            yield Example(prompt, response, **about, choices=choices, answer=answer)
        elif layout.name in (PREFERENCES, SHARED_PROMPTS, CHAT_PREFERENCES):
            pair = _pair(layout, cells, at, tally, render, about)
            if pair is not None:
                yield replace(pair[0], rejected=pair[1])
        else:
            messages = tidied(list(_MESSAGES_OF.get(layout.name, _of_messages)(cells, at)), tally)
            if messages:
                tools = at.parsed("tools", cells["tools"]) if cells["tools"] else None
                yield conversation(messages, tools, **about)


def _pair(
    layout: Layout,
    cells: Mapping[str, Any],
    at: _At,
    tally: Tally,
    render: Callable[[str, str], str],
    about: Mapping[str, Any],
) -> tuple[Example, Example] | None:
    """Returns the examples of the chosen and the rejected answer; None for a pair of which nothing can be learned."""
    if not (cells["chosen"] and cells["rejected"]):
        tally.dropped["pairs that lack an answer"] += 1
        return None
    if layout.name == CHAT_PREFERENCES:
        pair = _pair_of_conversations(cells, at, tally, about)
    else:
        pair = _pair_of_texts(layout, cells, at, tally, render, about)
    if pair is not None and (pair[0].messages, pair[0].response) == (pair[1].messages, pair[1].response):
        tally.dropped["pairs of the same answer twice"] += 1
        return None
    return pair


def _pair_of_texts(
    layout: Layout,
    cells: Mapping[str, Any],
    at: _At,
    tally: Tally,
    render: Callable[[str, str], str],
    about: Mapping[str, Any],
) -> tuple[Example, Example] | None:
    chosen, rejected = (at.text(key, cells[key]) for key in _ANSWERS)
    if layout.name == SHARED_PROMPTS:
        cut = _end_of_prompt(chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    else:
        instruction, given = (at.text(key, cells[key]) for key in ("instruction", "input"))
        asked = bool(instruction.strip() or given.strip())
        prompt = render(instruction, given if given.strip() else "") if asked else ""
    if not prompt.strip():
        tally.dropped["pairs without a prompt"] += 1
        return None
    if not (chosen.strip() and rejected.strip()):
        tally.dropped["pairs that lack an answer"] += 1
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


def _pair_of_conversations(
    cells: Mapping[str, Any], at: _At, tally: Tally, about: Mapping[str, Any]
) -> tuple[Example, Example] | None:
    asked, whole = [*_of_prompt(cells, at)], []
    for key in _ANSWERS:
        value = _unlisted(cells[key])
        turns = [*_messages(key, value, at)] if _is_messages(value) else [Message("assistant", at.text(key, value))]
        whole.append(tidied([*asked, *turns], tally if key == "chosen" else Tally()))
    if not all(whole):
        tally.dropped["pairs that lack an answer"] += bool(whole[0])
        return None
    if not any(turn.role == "user" for turn in whole[0][: shared_turns(*whole)]):
        tally.dropped["pairs without a prompt"] += 1
        return None
    tools = at.parsed("tools", cells["tools"]) if cells["tools"] else None
    chosen, rejected = (conversation(turns, tools, **about) for turns in whole)
    return chosen, rejected


def _of_prompt(cells: Mapping[str, Any], at: _At) -> Iterator[Message]:
    yield from _of_system(cells, at)
    if _is_messages(cells["instruction"]):
        yield from _messages("instruction", cells["instruction"], at)
    elif cells["messages"]:
        yield from _messages("messages", cells["messages"], at)
    elif any(cells[key] for key in ("instruction", "input", "history")):
        yield from [*_of_turns({**cells, "system": None, "response": None}, at)][:-1]


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
    begins with the user's turn (or a system message) and ends with the assistant's.
    """
    kept = [one for one in messages if one.content.strip() or one.more or one.role == "tool"]
    if len(kept) < len(messages):
        tally.changed["conversations have empty turns, which are left out"] += 1
    joined: list[Message] = []
    for one in kept:
        if joined and joined[-1].role == one.role != "tool" and not (joined[-1].more or one.more):
            joined[-1] = replace(one, content=f"{joined[-1].content}\n\n{one.content}")
        else:
            joined.append(one)
    if len(joined) < len(kept):
        tally.changed["conversations have neighbouring turns of one role, which become one turn"] += 1
    first = next((index for index, one in enumerate(joined) if one.role == "user"), len(joined))
    early = [one for one in joined[:first] if one.role != "system"]
    last = max((index for index, one in enumerate(joined) if one.role == "assistant"), default=-1)
    if first > last or not any(one.role == "assistant" and one.learned for one in joined[first:]):
        tally.dropped["conversations without an assistant turn that answers"] += 1
        return []
    if early:
        tally.changed["conversations begin before the first user turn, which is where they now begin"] += 1
    if last < len(joined) - 1:
        tally.changed["conversations end after the last assistant turn, which is where they now end"] += 1
    return [*(one for one in joined[:first] if one.role == "system"), *joined[first : last + 1]]


@dataclass(frozen=True)
class _At:
    """A row, for messages."""

    table: Table
    layout: Layout
    number: int

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
            return plain(value)
        try:
            return json.loads(value)
        except ValueError:
            raise self.error(key, f"the text {value!r:.60}", "a list, or a list as JSON") from None


def _kind(value: Any) -> str:
    return f"a {type(value).__name__} ({str(value)[:60]})"


def _about(cells: Mapping[str, Any], at: _At) -> dict[str, Any]:
    task = at.text("task", cells["task"]).strip() or "instructions"
    label = at.text("label", cells["label"]).strip()
    if label and isinstance(cells["label"], Number):
        if not float(label).is_integer():
            raise at.error("label", f"the number {label}", "an integer or a name")
        label = str(int(float(label)))
    return {"label": label or task, "task": task, "document": at.text("document", cells["document"]).strip()}


def _choices(value: Any, response: str, at: _At) -> tuple[tuple[str, ...], int | None]:
    if not value:
        return (), None
    listed = at.parsed("choices", value)
    choices = tuple(at.text("choices", one).strip() for one in listed) if isinstance(listed, list) else ()
    if response.strip() not in choices:
        accepted = f"a list that holds the response {response!r}"
        raise at.error("choices", f"{value!r}", accepted)
    return choices, choices.index(response.strip())


def _is_messages(value: Any) -> bool:
    listed = _listed(value)
    return bool(listed) and all(
        isinstance(one, Mapping)
        and (
            {"role", "content"} <= one.keys() or {"from", "value"} <= one.keys() or {"role", "tool_calls"} <= one.keys()
        )
        for one in listed
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return list(value) if isinstance(value, (list, tuple)) else []


def _of_system(cells: Mapping[str, Any], at: _At) -> Iterator[Message]:
    system = at.text("system", cells["system"])
    if system.strip():
        yield Message("system", system)


def _of_messages(cells: Mapping[str, Any], at: _At) -> Iterator[Message]:
    yield from _of_system(cells, at)
    yield from _messages("messages", cells["messages"], at)


def _messages(key: str, value: Any, at: _At) -> Iterator[Message]:
    listed = at.parsed(key, value) if value else []
    if not isinstance(listed, list):
        raise at.error(key, _kind(value), "a list of messages")
    for one in listed:
        yield _message(key, one, at)


def _message(key: str, raw: Any, at: _At) -> Message:
    if not isinstance(raw, Mapping):
        raise at.error(key, _kind(raw), "a message with role and content, or from and value")
    said = raw.get("role", raw.get("from"))
    name = str(said).strip().lower()
    if name not in ROLE_OF and name not in CALLS:
        raise at.error(key, f"a message of the role {said!r}", ", ".join(ROLE_OF))
    content = _content(key, raw.get("content", raw.get("value")), at)
    more = {field: raw[field] for field in _MORE if raw.get(field)}
    if name in CALLS:
        calls = at.parsed(key, content)
        more, content = {"tool_calls": calls if isinstance(calls, list) else [calls]}, ""
    if "tool_calls" in more:
        more["tool_calls"] = [_call(key, one, at) for one in more["tool_calls"]]
    return Message(
        ROLE_OF.get(name, "assistant"),
        content,
        json.dumps(more, ensure_ascii=False) if more else "",
        learned=raw.get("weight") not in (0, False) and raw.get("train") is not False,
    )


def _content(key: str, value: Any, at: _At) -> str:
    """Returns a message's text, which may be a list of parts."""
    if not isinstance(value, list):
        return at.text(key, value)
    for part in value:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise at.error(key, f"a part of a message that is no text ({str(part)[:60]})", "parts with a text")
    return "".join(part["text"] for part in value)


def _call(key: str, raw: Any, at: _At) -> dict[str, Any]:
    """Returns a tool call in the form of chat templates, the arguments as a mapping."""
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise at.error(key, f"the tool call {str(raw)[:60]}", "a call with the name of a function and its arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = at.parsed(key, arguments)
    name = {"id": raw["id"]} if isinstance(raw.get("id"), str) else {}
    return {**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _as_functions(tools: Any) -> list[Any]:
    """Returns the schemas of tools in the form of chat templates."""
    listed = tools if isinstance(tools, list) else [tools]
    return [
        one if not isinstance(one, Mapping) or "function" in one else {"type": "function", "function": one}
        for one in listed
    ]


def _of_pairs(cells: Mapping[str, Any], at: _At) -> Iterator[Message]:
    for key, role in (("instruction", "user"), ("response", "assistant")):
        value = cells[key]
        if _is_messages(value):
            yield from _messages(key, value, at)
        else:
            yield Message(role, at.text(key, value))


def _of_turns(cells: Mapping[str, Any], at: _At) -> Iterator[Message]:
    if cells["system"]:
        yield Message("system", at.text("system", cells["system"]))
    history = at.parsed("history", cells["history"]) if cells["history"] else []
    for pair in _pairs(history, at):
        yield from (
            Message(role, at.text("history", one)) for role, one in zip(("user", "assistant"), pair, strict=True)
        )
    asked = [at.text(key, cells[key]) for key in ("instruction", "input")]
    yield Message("user", "\n\n".join(one for one in asked if one.strip()))
    yield Message("assistant", at.text("response", cells["response"]))


def _pairs(history: Any, at: _At) -> Iterable[Sequence[Any]]:
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise at.error("history", _kind(history), "a list of pairs of a question and its answer")
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
