"""What kvlab needs of a tokenizer, a wrapper of Hugging Face's fast ones, and a byte-level one for the tiny model.

`decode` is the ground of all texts: what is streamed, searched for stop strings and told at the end is what it makes of the ids.
"""

from __future__ import annotations

import copy
import datetime
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvlab.types import UserError, refuse_lfs_pointer
from kvlab.types.chat import CHAT_DATE, Message, as_messages, chat_date
from kvlab.types.text import as_text


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if there is one."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with `add_special_tokens` as the model wants a prompt to begin (bos, where it has one)."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD."""

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is a single byte that `decode` reads with the byte tokens beside it (SentencePiece's <0x..>): the text of
        a run of them is certain only once another token follows."""

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, ending where the assistant is to answer.

        Raises:
            UserError: messages that are none (see `kvlab.types.chat`), a model without a chat template, or one that refuses them.
        """


class ByteTokenizer:
    """Ids 0-255 are bytes, then bos, eos and pad. Its chat template is `role: content` lines. For the tiny model and tests.

    Args:
        vocab_size: ids of the model; those above 258 have no text.
    """

    def __init__(self, vocab_size: int = 320) -> None:
        self.vocab_size = vocab_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = 256, 257, 258
        self.eos_token_ids = (self.eos_token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """UTF-8 bytes, after bos."""
        return ([self.bos_token_id] if add_special_tokens else []) + list(as_text(text).encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes as UTF-8; special tokens, unless skipped, as <bos>, <eos>, <pad>."""
        names = {} if skip_special_tokens else {256: b"<bos>", 257: b"<eos>", 258: b"<pad>"}
        return b"".join(bytes([i]) if 0 <= i < 256 else names.get(i, b"") for i in ids).decode(errors="replace")

    def is_byte(self, token_id: int) -> bool:
        """No: what follows a byte changes nothing but a character that is incomplete."""
        return False

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """bos, one line a message, then "assistant: "."""
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in as_messages(messages))
        return self.encode(lines + "assistant: ")


class HFTokenizer:
    """A Hugging Face fast tokenizer from a folder with tokenizer.json.

    Args:
        folder: holds tokenizer.json, and tokenizer_config.json or chat_template.jinja where there is a chat template.

    Attributes:
        chat_date: today, as a chat template sees it.

    Raises:
        UserError: tokenizer.json is missing or can't be read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast  # slow to import, and only needed for text

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder} has no tokenizer.json (fast tokenizers only). Save one with transformers' save_pretrained.")
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
            refuse_lfs_pointer(folder / name)
        try:
            self._fast: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
        except Exception as error:  # tokenizers raises plain Exception for a broken file
            raise UserError(f"{file} can't be read as a tokenizer: {error}") from error
        self.chat_date = chat_date(CHAT_DATE)
        self._byte_ids = _byte_ids(json.loads(file.read_text(encoding="utf-8")), self._fast)
        self.vocab_size = len(self._fast)
        self.bos_token_id: int | None = self._fast.bos_token_id
        self.eos_token_ids: tuple[int, ...] = () if self._fast.eos_token_id is None else (self._fast.eos_token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        return list(self._fast.encode(as_text(text), add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, spaces as the tokens have them."""
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def is_byte(self, token_id: int) -> bool:
        """Whether it is one of <0x00> to <0xFF>, under a decoder that takes them for bytes."""
        return token_id in self._byte_ids

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the answer. A template that asks for today's date is told
        `chat_date`."""
        checked = as_text(as_messages(messages))
        templates = self._fast.chat_template
        if not templates:
            raise UserError("This model has no chat template: pass plain text instead of messages, or take an instruct model.")
        if isinstance(templates, dict) and "default" not in templates:
            raise UserError(f"This model has several chat templates ({', '.join(sorted(templates))}) and none called default: save the one"
                            " to use as chat_template.jinja in its folder.")  # fmt: skip
        template = templates["default"] if isinstance(templates, dict) else templates
        try:
            if _takes_parts_only(template):
                checked = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in checked]
            text = self._fast.apply_chat_template(
                checked, chat_template=_with_date(template, self.chat_date), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's makers: it raises what it likes
            raise UserError(f"The model's chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)  # the template writes the special tokens itself

    def dated(self, date: str) -> HFTokenizer:
        """The same tokenizer with another `chat_date` (YYYY-MM-DD)."""
        other = copy.copy(self)
        other.chat_date = chat_date(date)
        return other


def _takes_parts_only(template: str) -> bool:
    """Whether a chat template goes through the parts of a content and never asks whether it is a text: it would go through its letters."""
    import jinja2
    from jinja2 import nodes

    def is_content(node: nodes.Node) -> bool:
        names = (nodes.Getattr, "attr"), (nodes.Name, "name")
        if any(isinstance(node, kind) and getattr(node, name) == "content" for kind, name in names):
            return True
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    if "content" not in template:
        return False
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:  # tags of transformers' own, or a fault that rendering will say
        return False
    goes_through = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    return goes_through and not any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test))


def _with_date(template: str, date: datetime.date) -> str:
    """A chat template whose `strftime_now` is a macro of one day's: transformers' own asks the clock, and takes no other."""
    if "strftime_now" not in template:
        return template
    midnight = datetime.datetime(date.year, date.month, date.day)
    written = "format | replace('%%', '\x00')"
    for letter in string.ascii_letters:
        for directive in (f"%-{letter}", f"%{letter}"):
            if (value := midnight.strftime(directive)) != directive:
                written += f" | replace({directive!r}, {value!r})"
    macro = "{%- macro strftime_now(format) -%}{{ " + written + " | replace('\x00', '%') }}{%- endmacro -%}"
    return macro + "{{ '' }}" + template  # (an expression, so that the template's own first blanks stay)


def _byte_ids(tokenizer_json: dict[str, Any], fast: Any) -> frozenset[int]:
    """Ids of the byte tokens of a tokenizer whose decoder falls back on bytes (Llama 2, TinyLlama); none under another decoder."""
    if '"ByteFallback"' not in json.dumps(tokenizer_json.get("decoder")):
        return frozenset()
    found = (fast.backend_tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in found if token_id is not None)


def dated(tokenizer: Tokenizer | None, date: str) -> Tokenizer | None:
    """A tokenizer for conversations of that day (YYYY-MM-DD); others than Hugging Face's know no date."""
    return tokenizer.dated(date) if isinstance(tokenizer, HFTokenizer) else tokenizer
