"""Text of a growing sequence, token by token. Made only for requests with stop strings or with streaming: others don't pay."""

from __future__ import annotations

from kvlab.model.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no UTF-8, and for a character whose last bytes are missing yet."""


class Detokenizer:
    """Incremental text of one sequence's output tokens.

    The pieces joined equal `tokenizer.decode(ids)`, for they are differences of what it decodes: of a short window of the latest tokens
    with and without the new ones, so that a token costs O(1). Text that further tokens may change is held back: a character whose last
    byte has not come, and a run of SentencePiece's byte tokens (its decoder replaces all of a run in which one byte is wrong).

    Deviation: decoders that take back text once others follow (WordPiece's clean-up of spaces) can't be streamed; their pieces may differ
    from `decode`. No Llama has one.

    Args:
        tokenizer: decodes. skip_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # of the window; its first tokens are those whose text was told last
        self._read = 0  # where the text that has been told ends, at the border of a character
        self._shown = ""  # of the window's text, what has been told
        self._pieces: list[str] = []
        self._is_in_bytes = False

    def append(self, token_id: int) -> str:
        """Text that is now certain, "" while a character is incomplete."""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            self._is_in_bytes = True
        elif self._is_in_bytes:  # (a token without text does not end a run; twice, for a decoder may drop a text's first space)
            self._is_in_bytes = not self._tokenizer.decode([token_id] * 2, self._skip_special_tokens)
        if self._is_in_bytes:
            return ""
        text = self._decode(self._start)
        certain = text.rstrip(REPLACEMENT)
        if not certain.startswith(self._shown) and not text.startswith(self._shown):
            return ""
        piece = certain[len(self._shown) :]
        self._pieces.append(piece)
        self._shown = certain if piece else self._shown
        if certain == text and piece:
            self._move_window(text)
        return piece

    def flush(self) -> str:
        """What is held back at the end of the text, which is finished then."""
        text, told = self._decode(0), "".join(self._pieces)
        rest = text[len(told) :] if text.startswith(told) else self._decode(self._start)[len(self._shown) :]
        self._pieces.append(rest)
        return rest

    def _move_window(self, text: str) -> None:
        """Let it begin with the tokens told last, if they show what a decoder does at the beginning of a text only (a space dropped)."""
        latest = self._decode(self._read)
        if latest and not latest.startswith(" "):
            self._start, self._shown = self._read, latest
        else:
            self._shown = text
        self._read = len(self._ids)

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], self._skip_special_tokens)
