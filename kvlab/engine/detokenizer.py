"""Text of a growing sequence, token by token. Made only for requests with stop strings or with streaming: others don't pay."""

from __future__ import annotations

import codecs

from kvlab.model.tokenizer import Tokenizer


class Detokenizer:
    """Incremental text of one sequence's output tokens; O(1) a token.

    The pieces joined equal `tokenizer.decode(ids)` (byte-level BPE and SentencePiece). A character whose bytes are cut across
    tokens is held back until its last byte has come; bytes that are no UTF-8 become U+FFFD.

    Deviation: where a SentencePiece decoder turns a whole run of byte tokens into U+FFFD because one of them is bad, only the bad
    ones are replaced here, for the good ones have been sent already.

    Args:
        tokenizer: gives the bytes of a token (and the names of special tokens).
        skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def append(self, token_id: int) -> str:
        """Text that is now certain, "" while a character is incomplete."""
        token_bytes = self._tokenizer.token_bytes(token_id)
        if not token_bytes:
            return "" if self._skip_special_tokens else self._special(token_id)
        if self._at_start:
            self._at_start = False
            # SentencePiece writes a word as " word" and its decoder drops the text's first space; byte-level BPE keeps it.
            if token_bytes.startswith(b" ") and not self._tokenizer.decode([token_id]).startswith(" "):
                token_bytes = token_bytes[1:]
        return self._decoder.decode(token_bytes)

    def flush(self) -> str:
        """What an incomplete character leaves at the end (U+FFFD), or "". The text is finished then."""
        return self._decoder.decode(b"", final=True)

    def _special(self, token_id: int) -> str:
        """A special token's name; a character that it cuts short is finished first."""
        name = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if not name:
            return ""
        self._at_start = False
        return self._decoder.decode(b"", final=True) + name
