"""One text for a sequence: what is decoded at the end, the streamed pieces joined, and what stop strings are looked for in.

The tokenizers are small, and have the rules (decoder, kinds of added tokens) of published ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvlab.engine.detokenizer import Detokenizer
from kvlab.engine.stopping import StopChecker
from kvlab.model.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

WORDS = ["Hi", "▁Hi", "▁a", "a", "▁", "▁▁", "▁▁▁", "▁▁▁▁", "return", "x", "▁x", "\n", "é", "▁€", ".", "n't", "\ufffd", "▁\ufffd"]


def byte_level_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def sentencepiece(decoder: Callable[[Any], Any]) -> Any:
    """Bytes where no token fits; the decoder differs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder(decoders)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("▁<x>", lstrip=True, rstrip=True)])
    return tokenizer


def byte_level(added: Sequence[tuple[str, bool]]) -> Any:
    """GPT-2's bytes; added tokens (content, special) behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = byte_level_alphabet()
    pieces = [*letters, "Ġa", "Ġthe", "âĤ¬", "ðŁ", "ĺĢ", "ĠĠĠ", "ï¿½"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for content, special in added:
        tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)])
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "llama2": lambda: sentencepiece(lambda d: d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])),
    "gemma": lambda: sentencepiece(lambda d: d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])),
    "tinyllama_metaspace": lambda: sentencepiece(lambda d: d.Sequence([d.ByteFallback(), d.Metaspace(prepend_scheme="first")])),
    "metaspace_alone": lambda: sentencepiece(lambda d: d.Metaspace(prepend_scheme="always")),
    "strip_two": lambda: sentencepiece(lambda d: d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 2, 0)])),
    "llama3": lambda: byte_level([("<|begin_of_text|>", True), ("<|eot_id|>", True), ("<|reserved|>", True)]),
    # Thirteen tokens that are not special and read as byte letters: their text is the bytes, not the letters.
    "deepseek_coder": lambda: byte_level([*((letter, False) for letter in "õ÷ÁýÀÿøúþüùöû"), ("<|EOT|>", False), ("<|end|>", True)]),
    "not_byte_letters": lambda: byte_level([("<think>", False), ("日本", False), ("\u2581x", False), ("é è", False)]),
}


def made(kind: str, folder: Path, config: str = '{"tokenizer_class": "PreTrainedTokenizerFast"}') -> HFTokenizer:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return HFTokenizer(folder)


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*map(stream.append, ids), stream.flush()]


def check(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Streamed, with a stop string that never comes, and decoded: the same."""
    text = tokenizer.decode(ids)
    assert "".join(pieces_of(tokenizer, ids)) == text, ids
    checker = StopChecker(Detokenizer(tokenizer), ("\0never\0",))
    taken = ""
    for token in ids:
        assert not checker.append(token)
        taken += checker.take()
    checker.finish()
    assert checker.text == taken + checker.take_rest() == text, ids


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_at_every_place(kind: str, tmp_path: Path) -> None:
    tokenizer = made(kind, tmp_path)
    anchor = tokenizer.vocab_size // 2
    for token in range(tokenizer.vocab_size):
        for ids in ([token], [token, token], [token, anchor], [anchor, token], [anchor, token, anchor]):
            check(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_random_sequences_cut_anywhere(kind: str, tmp_path: Path) -> None:
    """Each prefix is a text of its own, whose end is the end of a stream."""
    tokenizer, rng = made(kind, tmp_path), random.Random(kind)
    odd = range(max(0, tokenizer.vocab_size - 30), tokenizer.vocab_size)
    for _ in range(150):
        ids = [rng.choice(odd) if rng.random() < 0.6 else rng.randrange(tokenizer.vocab_size + 9) for _ in range(rng.randrange(1, 14))]
        check(tokenizer, ids)
        stream, told = Detokenizer(tokenizer), ""
        for end, token in enumerate(ids, start=1):
            told += stream.append(token)
            assert tokenizer.decode(ids[:end]).startswith(told)
        for end in range(1, len(ids)):
            check(tokenizer, ids[:end])


def test_valid_text_is_streamed_without_replacement_characters(tmp_path: Path) -> None:
    """Each character is cut into its bytes; each of 20 texts comes whole."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = made("llama3", tmp_path)
    rng = random.Random(2)
    for _ in range(20):
        text = "".join(rng.choice("aé€😀 \n日") for _ in range(12))
        ((pieces, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        ids = [byte_level_alphabet().index(letter) for letter in pieces]
        parts = pieces_of(tokenizer, ids)
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_several_spaces_at_the_beginning_lose_one(tmp_path: Path) -> None:
    """Llama 2's decoder drops one space of the text; it was kept where the first token is all spaces."""
    tokenizer = made("llama2", tmp_path)
    ids = [259 + WORDS.index(word) for word in ("▁▁▁▁", "return", "▁x")]
    assert tokenizer.decode(ids) == "   return x"
    assert pieces_of(tokenizer, ids) == ["   ", "return", " x", ""]


def test_added_tokens_that_are_byte_letters_are_bytes(tmp_path: Path) -> None:
    tokenizer = made("deepseek_coder", tmp_path)
    for letter in "õ÷ÁýÀÿøúþüùöû":
        token = tokenizer._fast.backend_tokenizer.token_to_id(letter)
        assert tokenizer.decode([token, 0]) != letter + "!"
        check(tokenizer, [token, 0])


def test_a_wrong_byte_spoils_its_run_in_the_stream_as_in_the_text(tmp_path: Path) -> None:
    """ByteFallback replaces é too when a wrong byte stands beside it: é must not have been sent."""
    tokenizer = made("llama2", tmp_path)
    hi, run = 259 + WORDS.index("Hi"), [3 + byte for byte in (*"é".encode(), 0xFF)]
    assert tokenizer.decode([hi, *run, hi]) == "Hi\ufffd\ufffd\ufffdHi"
    assert pieces_of(tokenizer, [hi, *run, hi]) == ["Hi", "", "", "", "\ufffd\ufffd\ufffdHi", ""]


def test_tokens_special_in_the_file_alone_have_no_text(tmp_path: Path) -> None:
    """tokenizer.json says what is special, not the few roles (bos, eos ...) of tokenizer_config.json."""
    tokenizer = made("llama3", tmp_path, '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot_id|>"}')
    reserved = tokenizer._fast.backend_tokenizer.token_to_id("<|reserved|>")
    assert reserved not in tokenizer._fast.all_special_ids
    assert tokenizer.decode([64, reserved, 65]) == tokenizer.decode([64, 65])
    check(tokenizer, [64, reserved, 65])


def test_bytes_as_tokens() -> None:
    rng = random.Random(3)
    for _ in range(200):
        check(ByteTokenizer(), [rng.choice((0xE2, 0x82, 0xAC, 97, 0xFF, 0xF0, 0x9F, 257, 300, 10)) for _ in range(8)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_cuts_the_stream_where_it_cuts_the_text(kind: str, tmp_path: Path) -> None:
    """Stop strings out of the text itself: what was streamed is the text before the first of them."""
    tokenizer, rng = made(kind, tmp_path), random.Random(kind)
    num_met = 0
    for _ in range(150):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(10)]
        text = tokenizer.decode(ids)
        if not text:
            continue
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randrange(1, 4)]
        checker, taken, stopped = StopChecker(Detokenizer(tokenizer), (stop,)), "", False
        for token in ids:
            stopped = checker.append(token)
            taken += checker.take()
            if stopped:
                break
        if not stopped:
            stopped = checker.finish()
        taken += checker.take_rest()
        assert stopped
        assert taken == checker.text == text[: text.index(stop)]
        num_met += 1
    assert num_met > 100
