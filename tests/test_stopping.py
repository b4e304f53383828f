"""Incremental text and stop strings: characters and stop strings cut across tokens, min_tokens, streaming."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine.detokenizer import Detokenizer
from kvlab.engine.stopping import StopChecker, end_token_ids
from kvlab.types import SamplingParams


class PieceTokenizer:
    """Token i has the bytes `pieces[i]`; b"" is a special token <i>. `strips`: as SentencePiece, decode drops the first space."""

    def __init__(self, *pieces: bytes, strips: bool = False) -> None:
        self.pieces = pieces
        self.strips = strips
        self.vocab_size = len(pieces)
        self.bos_token_id = None
        self.eos_token_ids: tuple[int, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError("not needed here")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        names = [self.pieces[i] or (b"" if skip_special_tokens else f"<{i}>".encode()) for i in ids]
        text = b"".join(names).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text

    def is_byte(self, token_id: int) -> bool:
        return False

    def apply_chat(self, messages: object) -> list[int]:
        raise NotImplementedError("not needed here")


def checker(pieces: Sequence[str | bytes], *stop: str, include: bool = False, min_tokens: int = 0) -> StopChecker:
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return StopChecker(Detokenizer(PieceTokenizer(*raw)), stop, include, min_tokens)


def run(found: StopChecker, num_tokens: int) -> tuple[int | None, str, str | None]:
    """Feed tokens 0, 1, ...: (index of the token that stopped it, text, stop string)."""
    for token in range(num_tokens):
        if found.append(token):
            return token, found.text, found.stopped_by
    found.finish()
    return None, found.text, found.stopped_by


# ---------------------------------------------------------------------------------------------------------- detokenizer


def test_a_character_cut_across_tokens_waits_for_its_last_byte() -> None:
    euro = "€".encode()
    text = Detokenizer(PieceTokenizer(b"a" + euro[:1], euro[1:2], euro[2:] + b"b"))
    assert [text.append(i) for i in range(3)] == ["a", "", "€b"]
    assert text.flush() == ""


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    text = Detokenizer(PieceTokenizer(b"a", b"\xff", b"\xe2\x82", b"b", b"\xf0\x9f"))
    assert [text.append(i) for i in range(5)] == ["a", "", "", "\ufffd\ufffdb", ""]  # (a replacement may be an incomplete character)
    assert text.flush() == "\ufffd"


def test_special_tokens_have_no_text_unless_wanted() -> None:
    tokenizer = PieceTokenizer(b"a", b"", b"b", b"\xe2")
    assert [Detokenizer(tokenizer).append(i) for i in range(3)] == ["a", "", "b"]
    shown = Detokenizer(tokenizer, skip_special_tokens=False)
    assert [shown.append(i) for i in (0, 1, 3, 1)] == ["a", "<1>", "", "\ufffd<1>"]


def test_sentencepieces_first_space_is_dropped_once_and_other_spaces_stay() -> None:
    pieces = (b"", b" Hello", b" world", b" ")
    sentencepiece = Detokenizer(PieceTokenizer(*pieces, strips=True))
    assert [sentencepiece.append(i) for i in (0, 1, 2, 3)] == ["", "Hello", " world", " "]
    assert [Detokenizer(PieceTokenizer(*pieces)).append(i) for i in (1,)] == [" Hello"]


@given(st.text(alphabet="aé€😀 \n", max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_joined_are_the_text_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    tokenizer = PieceTokenizer(*pieces)
    incremental = Detokenizer(tokenizer)
    parts = [incremental.append(i) for i in range(len(pieces))]
    assert "".join(parts) + incremental.flush() == tokenizer.decode(range(len(pieces))) == text
    assert not any("\ufffd" in part for part in parts)


# --------------------------------------------------------------------------------------------------------- stop strings


def test_stop_string_spanning_two_tokens() -> None:
    assert run(checker(["Hello wo", "rld again"], "world"), 2) == (1, "Hello ", "world")
    assert run(checker(["Hello wo", "rld again"], "world", include=True), 2) == (1, "Hello world", "world")
    assert run(checker(["a", "S", "T", "O", "P", "b"], "STOP"), 6) == (4, "a", "STOP")


def test_stop_string_inside_one_token() -> None:
    assert run(checker(["one", " two\n\nthree"], "\n\n"), 2) == (1, "one two", "\n\n")
    assert run(checker(["one", " two\n\nthree"], "\n\n", include=True), 2) == (1, "one two\n\n", "\n\n")


def test_stop_string_equal_to_the_whole_output() -> None:
    assert run(checker(["en", "d"], "end"), 2) == (1, "", "end")
    assert run(checker(["end"], "end", include=True), 1) == (0, "end", "end")


def test_a_character_of_the_stop_string_cut_across_tokens() -> None:
    euro = "€".encode()
    assert run(checker([b"5 " + euro[:2], euro[2:] + b"!"], "€"), 2) == (1, "5 ", "€")
    assert run(checker([b"5 " + euro[:2], euro[2:] + b"!"], "€!", include=True), 2) == (1, "5 €!", "€!")


def test_no_match_leaves_everything_and_an_open_character_is_finished() -> None:
    assert run(checker(["worl", "wor", b"\xe2"], "world"), 3) == (None, "worlwor\ufffd", None)
    assert run(checker([b"a\xe2"], "\ufffd"), 1) == (None, "a", "\ufffd")  # found by finish


def test_only_the_first_complete_match_counts() -> None:
    assert run(checker(["x--y--z"], "--"), 1) == (0, "x", "--")
    assert run(checker(["abcd"], "abcd", "bc"), 1) == (0, "a", "bc")  # "bc" is complete one character earlier
    assert run(checker(list("abcd"), "abcd", "bc"), 4) == (2, "a", "bc")  # however the text is cut
    assert run(checker(["xabc"], "bc", "abc", "c"), 1) == (0, "x", "abc")  # ending together: the longest
    overlapping = checker(["aab"], "aab", "ab")
    assert overlapping.append(0)
    assert overlapping.text == ""


def test_repeated_beginnings_do_not_hide_a_match() -> None:
    assert run(checker(["aa", "a", "ab"], "aaab"), 3) == (2, "a", "aaab")
    assert run(checker(["aa", "aa", "ab"], "aaab"), 3) == (2, "aa", "aaab")


def test_min_tokens() -> None:
    pieces = ["a", "!", "b", "!", "c"]
    assert run(checker(pieces, "!"), 5) == (1, "a", "!")
    assert run(checker(pieces, "!", min_tokens=1), 5) == (1, "a", "!")
    assert run(checker(pieces, "!", min_tokens=2), 5) == (3, "a!b", "!")  # complete within the first two tokens: never counts
    assert run(checker(pieces, "!", min_tokens=4), 5) == (None, "a!b!c", None)
    assert run(checker(["x", "S", "T", "c"], "ST", min_tokens=2), 4) == (2, "x", "ST")  # begun early, complete in time


def test_after_the_end_nothing_is_added() -> None:
    found = checker(["ab", "cd"], "b")
    assert found.append(0)
    assert found.append(1)
    assert found.finish()
    assert found.text == "a"


# ------------------------------------------------------------------------------------------------------------- streaming


def stream(found: StopChecker, num_tokens: int) -> list[str]:
    sent = []
    for token in range(num_tokens):
        stopped = found.append(token)
        sent.append(found.take())
        if stopped:
            break
    found.finish()
    return [*sent, found.take_rest()]


def test_a_stop_string_that_came_too_early_is_not_held_back() -> None:
    """Complete before min_tokens, "ab" never counts; nothing can become of it, though it is a stop string."""
    found = checker(["ab", "c"], "ab", "wxyz", min_tokens=5)
    assert not found.append(0)
    assert found.take() == "ab"
    assert not found.append(1)
    assert (found.take(), found.text) == ("c", "abc")


def test_a_stream_holds_back_what_may_become_a_stop_string() -> None:
    assert stream(checker(["ab", "ST", "x", "S", "TOP", "z"], "STOP"), 6) == ["ab", "", "STx", "", "", ""]
    assert stream(checker(["ab", "ST"], "STOP"), 2) == ["ab", "", "ST"]
    assert stream(checker(["ab", "ST", "OP"], "STOP", include=True), 3) == ["ab", "ST", "OP", ""]
    assert stream(checker(["ab", "cd"]), 2) == ["ab", "cd", ""]


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_streams_and_cuts_agree_with_a_search_of_the_whole_text(pieces: list[str], stop: list[str], include: bool,
                                                                min_tokens: int) -> None:  # fmt: skip
    found = checker(pieces, *stop, include=include, min_tokens=min_tokens)
    sent = stream(found, len(pieces))
    text = "".join(pieces)
    exempt = len("".join(pieces[:min_tokens]))
    ends = [(i + len(s), i) for s in stop for i in range(len(text)) if text.startswith(s, i) and i + len(s) > exempt]
    expected = text if not ends else text[: min(ends)[0] if include else min(ends)[1]]
    assert found.text == expected
    assert (found.stopped_by is not None) == bool(ends)
    assert "".join(sent) == expected


def test_end_token_ids() -> None:
    assert end_token_ids(SamplingParams(stop_token_ids=(7, 3)), (9, 3)) == (3, 7, 9)
    assert end_token_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (9,)) == (7,)
    assert end_token_ids(SamplingParams(), ()) == ()


@pytest.mark.parametrize("text", ["naïve café €5 😀 日本語", " leading", "a\u0301", ""])
def test_the_byte_tokenizer_streams_to_its_own_decoding(text: str) -> None:
    from kvlab.model.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode(text), 257]
    incremental = Detokenizer(tokenizer)
    assert "".join(incremental.append(i) for i in ids) + incremental.flush() == tokenizer.decode(ids) == text
