"""What kvlab needs of a tokenizer, a wrapper of Hugging Face's fast ones, and a byte-level one for the tiny model.

Token bytes are the ground of streaming: a text is the UTF-8 decoding of its tokens' bytes, whatever characters they cut.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypedDict

from kvlab.types import UserError, refuse_lfs_pointer


class Message(TypedDict):
    """One turn of a chat. `role`: "system", "user" or "assistant"."""

    role: str
    content: str


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

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text; b"" for special tokens and for ids without text."""

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, ending where the assistant is to answer.

        Raises:
            UserError: the model has no chat template.
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
        return ([self.bos_token_id] if add_special_tokens else []) + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes as UTF-8; special tokens, unless skipped, as <bos>, <eos>, <pad>."""
        names = {} if skip_special_tokens else {256: b"<bos>", 257: b"<eos>", 258: b"<pad>"}
        return b"".join(names.get(i, b"") or self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or b""."""
        return bytes([token_id]) if 0 <= token_id < 256 else b""

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """bos, one line a message, then "assistant: "."""
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(lines + "assistant: ")


class HFTokenizer:
    """A Hugging Face fast tokenizer from a folder with tokenizer.json.

    Args:
        folder: holds tokenizer.json, and tokenizer_config.json or chat_template.jinja where there is a chat template.

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
        self._decode_bytes = _byte_decoder(json.loads(file.read_text()))
        self._special = frozenset(i for i, token in self._fast.added_tokens_decoder.items() if token.special)
        self._added = {i: token.content for i, token in self._fast.added_tokens_decoder.items()}
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = len(self._fast)
        self.bos_token_id: int | None = self._fast.bos_token_id
        self.eos_token_ids: tuple[int, ...] = () if self._fast.eos_token_id is None else (self._fast.eos_token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, spaces as the tokens have them."""
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds; b"" for special tokens and unused ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._special or not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._fast.convert_ids_to_tokens(token_id)
        return b"" if token is None else self._decode_bytes(token)

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the answer."""
        if not self._fast.chat_template:
            raise UserError("This model has no chat template: pass plain text instead of messages, or take an instruct model.")
        text = self._fast.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text, add_special_tokens=False)  # the template writes the special tokens itself


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's reversible map of bytes to printable characters, turned around."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decode_byte_level(token: str) -> bytes:
    table = _byte_of_character()
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


def _decode_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_decoder(tokenizer_json: dict[str, Any]) -> Any:
    """How this tokenizer writes bytes in its tokens: byte-level BPE (Llama 3, SmolLM2) or SentencePiece (Llama 2, TinyLlama)."""
    decoder = json.dumps(tokenizer_json.get("decoder"))
    return _decode_byte_level if '"ByteLevel"' in decoder else _decode_sentencepiece
