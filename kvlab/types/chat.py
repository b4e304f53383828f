"""Messages of a conversation, checked: what chat templates are given."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from kvlab.types.errors import UserError

CHAT_DATE = "2024-07-26"
"""Today, as chat templates that write the date (`strftime_now`) see it, unless a run says otherwise: a prompt must not depend on the day
it is made. It is the date that Llama 3.1's own template writes where it is told none."""


class Message(TypedDict):
    """One turn of a chat. `role`: "system", "user", "assistant" or "tool"; `content`: a text, or a list of text parts. Further fields
    (`tool_calls`, `name` ...) are the template's."""

    role: str
    content: str | Sequence[Mapping[str, str]]
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]


def as_messages(messages: object, where: str = "") -> list[dict[str, Any]]:
    """Messages with each content as one text: parts of `{"type": "text", "text": ...}` are joined as they are, for a template would write a
    list out as Python does. `content` may be null beside `tool_calls` only. `where` begins every error.

    Raises:
        UserError: no messages, a message without a role or content, content of another kind, parts that are no text.
    """
    begin = f"{where}: " if where else ""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UserError(f'{begin}messages must be a list like [{{"role": "user", "content": "Hello"}}], not {type(messages).__name__}.')
    if not messages:
        raise UserError(f"{begin}the conversation is empty: at least one message is needed.")
    return [_as_message(message, f"{begin}message {number}") for number, message in enumerate(messages)]


def _as_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise UserError(f"{where} is {message!r}: a dict with role and content is needed.")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise UserError(f"{where}: role = {role!r} is not allowed: a text such as user, assistant, system or tool.")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if isinstance(content, (list, tuple)):
        return {**message, "content": "".join(_part(part, f"{where}, part {number}") for number, part in enumerate(content))}
    raise UserError(f'{where}: content = {content!r} is not allowed: a text, or a list of parts like {{"type": "text", "text": "Hello"}}.')


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise UserError(f'{where} is {part!r}: only text is supported, as {{"type": "text", "text": "Hello"}}.')


def chat_date(value: object) -> datetime.date:
    """A date written YYYY-MM-DD; UserError for anything else."""
    try:
        return datetime.date.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        raise UserError(f"chat_date = {value!r} is not allowed: a date as YYYY-MM-DD, for chat templates that write today's.") from None
