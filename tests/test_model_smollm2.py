"""The real bundled model: it knows Paris, and its logits stand beside transformers'. Made in the user's cache at the first run."""

from __future__ import annotations

import pytest
import torch
from model_support import PagedRun, hf_llama

from kvlab.engine.detokenizer import Detokenizer
from kvlab.model import LoadedModel, load_model, smollm2
from kvlab.model.bundled import bundled_folder

pytestmark = pytest.mark.slow

TEXT = (
    "The KV cache holds the keys and values of all earlier tokens, so that each step computes one token only. "
    "def mean(xs):\n    return sum(xs) / len(xs)\n In 1889 the tower was opened; 300 m of iron, wasn't it?"
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(smollm2(), "float32", "cpu")


def test_the_capital_of_france(loaded: LoadedModel) -> None:
    """Greedy, through our own model, cache and tokenizer; blocks in odd places."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    run = PagedRun(loaded.model, num_blocks=16, block_size=7)
    run.tables = {0: [11, 3, 14, 0, 7, 5, 9, 1]}
    new = tokenizer.apply_chat([{"role": "user", "content": "What is the capital of France?"}])
    stream, text = Detokenizer(tokenizer), ""
    for _ in range(12):
        new = [int(run.step({0: new})[0][-1].argmax())]
        if new[0] in loaded.eos_token_ids:
            break
        text += stream.append(new[0])
    assert text == "The capital of France is Paris."


def test_tokenizer(loaded: LoadedModel) -> None:
    """Ids as the original SmolLM2 tokenizer gives them: each digit by itself, bytes where no token fits."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    assert (tokenizer.vocab_size, loaded.eos_token_ids, tokenizer.bos_token_id) == (49152, (2,), 1)
    assert tokenizer.encode("What is the capital of France? 123") == [1780, 314, 260, 3575, 282, 4649, 47, 216, 33, 34, 35]
    for text in (TEXT, "naïve café 日本語 🙂 ½ Ⅷ\t\r\n  x"):
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer)
        assert "".join(stream.append(i) for i in ids) + stream.flush() == text == tokenizer.decode(ids)


def test_logits_beside_transformers(loaded: LoadedModel) -> None:
    """Largest error in float32 at most twice transformers' own: prefill, chunks, decode, decode on another's cached blocks."""
    from safetensors.torch import load_file

    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(TEXT)
    assert len(ids) > 60
    weights = load_file(bundled_folder() / "model.safetensors")
    with torch.inference_mode():
        truth = hf_llama(loaded.config, weights, torch.float64)(torch.tensor([ids])).logits[0]
        theirs = hf_llama(loaded.config, weights, torch.float32)(torch.tensor([ids])).logits[0]
    their_error = float((theirs.double() - truth).abs().max())

    run = PagedRun(loaded.model, num_blocks=24, block_size=16)
    run.tables = {0: [0, 1, 2, 3, 4, 5], 1: [11, 10, 9, 8, 7, 6], 2: [11, 10, 12, 13, 14]}
    found = {"prefill": (run.step({0: ids})[0], 0)}
    found["chunked prefill"] = (torch.cat([run.step({1: ids[i : i + 23]})[1] for i in range(0, len(ids), 23)]), 0)
    run.lengths[2] = 32  # two blocks that sequence 1 computed
    chunks = [run.step({2: ids[32:50]})[2]] + [run.step({2: [token], 0: [5]})[2] for token in ids[50:60]]
    found["decode on cached blocks"] = (torch.cat(chunks), 32)
    for way, (logits, start) in found.items():
        error = float((logits.double() - truth[start : start + len(logits)]).abs().max())
        assert error <= 2 * their_error, f"{way}: {error:.2e} against {their_error:.2e}"
        assert logits.argmax(-1).equal(truth[start : start + len(logits)].argmax(-1)), way
