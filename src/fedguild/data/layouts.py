"""Layouts of one's own data, recognised by their columns: chats, instructions, plain texts and preference pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedguild.core.errors import DataError
from fedguild.data.cells import Table

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
_ROLES = {
    "system": ("developer",),
    "user": ("human",),
    "assistant": ("gpt", "chatgpt", "bot", "model", "bing", "bard"),
    "tool": ("function", "observation", "function_response", "tool_response", "ipython"),
}
ROLE_OF = {name: role for role, others in _ROLES.items() for name in (role, *others)}
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
ANSWERS = ("chosen", "rejected")


_MESSAGE_KEYS = ({"role", "content"}, {"from", "value"}, {"role", "tool_calls"}, {"role", "function_call"})


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
    if "messages" in columns and not asked and is_messages(first["messages"]):
        sharegpt = any("from" in one for one in _listed(first["messages"]))
        return _layout(SHAREGPT if sharegpt else CHAT, columns, "messages", "system", "tools", *beside)
    if {"instruction", "response"} <= columns.keys():
        if any(is_messages(first[key]) for key in ("instruction", "response")):
            return _layout(PAIRS, columns, "system", "history", "instruction", "response", "tools", *beside)
        used = ("instruction", "input", "response", "choices", *beside)
        if (
            {columns["instruction"], columns["response"]} == {"prompt", "completion"}
            and "label" in columns
            and not named.get("label")
        ):
            _require_no_judgement(table, columns["label"])
        if any(table.first({key: columns[key]})[key] for key in ("system", "history") if key in columns):
            return _layout(TURNS, columns, "system", "history", *used)
        return _layout(INSTRUCTIONS, columns, *used)
    if "text" in columns and not {"instruction", "response"} & named.keys():
        return _layout(TEXT, columns, "text", *beside)
    lacking = [key for key in ("instruction", "response") if key not in columns]
    cells = table.first({name: name for name in table.columns})
    chats = [f"messages_column={name}" for name, cell in cells.items() if is_messages(cell)]
    raise DataError(
        f"{table.where} lacks a column for the {' and the '.join(lacking)}.",
        f"Found: {', '.join(table.columns) or 'no columns'}. Accepted: {ACCEPTED}. Other names are given in "
        f"data.options, for example data.options.{next(iter(chats), 'instruction_column=Frage')}.",
    )


def _preferences(table: Table, columns: Mapping[str, str], *beside: str) -> Layout:
    """Returns the layout of a table of preference pairs, whose prompt has a column or is what both answers share."""
    if "instruction" not in columns and "input" in columns:
        columns = {**{key: name for key, name in columns.items() if key != "input"}, "instruction": columns["input"]}
    used = ("instruction", "input", "system", "history", "messages", *ANSWERS)
    first = table.first({key: columns[key] for key in used if key in columns})
    asks = [key for key in ("instruction", "input") if key in columns]
    if any(is_messages(unlisted(first.get(key))) for key in ("instruction", *ANSWERS)):
        apart = _begins_with_an_answer(first["chosen"])
        given = [*asks, "history", *(["messages"] if not asks else [])] if apart else []
        return _layout(CHAT_PREFERENCES, columns, "system", *given, *ANSWERS, "tools", *beside)
    if not asks:
        return _layout(SHARED_PROMPTS, columns, *ANSWERS, *beside)
    if any(first.get(key) for key in ("system", "history")):
        return _layout(CHAT_PREFERENCES, columns, "system", "history", *asks, *ANSWERS, *beside)
    return _layout(PREFERENCES, columns, *asks, *ANSWERS, *beside)


def _require_no_judgement(table: Table, label: str) -> None:
    """Raises DataError if a table's label says of each completion whether it is good, as TRL's for KTO does."""
    if isinstance(table.first({"label": label})["label"], bool):
        raise DataError(
            f"{table.where} has unpaired preferences: its column {label} says whether a completion is good.",
            f"Keep the rows whose {label} is true. If it is a class, say so: data.options.label_column={label}.",
        )


def _begins_with_an_answer(value: Any) -> bool:
    listed = _listed(unlisted(value))
    first = listed[0] if listed else None
    said = first.get("role", first.get("from")) if isinstance(first, Mapping) else "assistant"
    return ROLE_OF.get(str(said).strip().lower()) != "user" and str(said).strip().lower() != "system"


def _layout(name: str, columns: Mapping[str, str], *used: str) -> Layout:
    return Layout(name, {key: columns[key] for key in used if key in columns})


def unlisted(value: Any) -> Any:
    """Returns a single message as a list of one."""
    return [value] if isinstance(value, Mapping) else value


def is_messages(value: Any) -> bool:
    listed = _listed(value)
    return bool(listed) and all(
        isinstance(one, Mapping) and any(keys <= one.keys() for keys in _MESSAGE_KEYS) for one in listed
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return list(value) if isinstance(value, (list, tuple)) else []
