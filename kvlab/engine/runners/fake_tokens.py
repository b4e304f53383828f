"""The fake model: the next token is a hash of all tokens before it. Shared by the simulated runner and by tests.

The hash of a prefix is a sum of position-weighted tokens modulo 2^64, so that it can be kept as tokens come, or be made anew from the
slots of a paged cache; a mix of its bits picks the token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlab.engine.beam import num_beam_candidates
from kvlab.engine.randomness import mixed, mixed_each
from kvlab.engine.stopping import end_token_ids
from kvlab.types import Candidate, SamplingParams

_MASK = 2**64 - 1
_WEIGHTS = np.zeros(0, dtype=np.uint64)
_WEIGHT_LIST: list[int] = []  # the same as Python's integers: one token is quicker without numpy


def position_weights(end: int) -> npt.NDArray[np.uint64]:
    """Odd 64-bit weights of positions 0 .. end-1."""
    global _WEIGHTS, _WEIGHT_LIST
    if end > len(_WEIGHTS):
        x = np.arange(1, 2 * end + 1025, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        _WEIGHTS = (x ^ (x >> np.uint64(31))) | np.uint64(1)
        _WEIGHT_LIST = _WEIGHTS.tolist()
    return _WEIGHTS[:end]


def hash_tokens(tokens: npt.ArrayLike, first: int) -> int:
    """Contribution of `tokens` at positions first, first + 1, ...; prefixes add up modulo 2^64."""
    ids = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
    return int((ids * position_weights(first + len(ids))[first:]).sum(dtype=np.uint64))


def hash_token(token: int, position: int) -> int:
    """`hash_tokens` of a single token, not yet taken modulo 2^64."""
    if position >= len(_WEIGHT_LIST):
        position_weights(position + 1)
    return (token + 1) * _WEIGHT_LIST[position]


class FakeModel:
    """Tokens, forks and beam candidates from a prefix's hash.

    Args:
        vocab_size: ids are in [0, vocab_size). eos_token_ids: masked below min_tokens like stop ids.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self._size = np.array(vocab_size, dtype=np.uint64)
        self.eos_token_ids = eos_token_ids

    def next_token(self, prefix_hash: int, position: int, num_prompt: int, sampling: SamplingParams, seed: int, stream: int) -> int:
        """The token at `position`: greedy from the prefix alone, sampled from (seed, stream, position) too."""
        salt = mixed(self.salt(seed, stream), position) if sampling.temperature > 0 else 0
        masked = end_token_ids(sampling, self.eos_token_ids) if position - num_prompt < sampling.min_tokens else ()
        for draw in range(64):
            token = mixed(prefix_hash ^ salt, draw) % self.vocab_size
            if token not in masked:
                return token
        return next(t for t in range(self.vocab_size) if t not in masked)

    @staticmethod
    def salt(seed: int, stream: int) -> int:
        """What a sampled sequence's tokens depend on beside its prefix and the position."""
        return mixed(seed & _MASK, stream)

    @staticmethod
    def hash_each(ids: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """`hash_tokens` of single tokens of many sequences."""
        weights: npt.NDArray[np.uint64] = position_weights(int(positions.max()) + 1)[positions]
        return (ids + np.uint64(1)) * weights

    def next_tokens(self, hashes: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], salts: npt.NDArray[np.uint64],
                    is_sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:  # fmt: skip
        """`next_token` of many sequences of which nothing is masked. salts: as `salt` gives them."""
        if is_sampled.any():
            hashes = hashes ^ self.noise(positions, salts, is_sampled)
        return self.pick(hashes)

    @staticmethod
    def noise(positions: npt.NDArray[np.int64], salts: npt.NDArray[np.uint64],
              is_sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:  # fmt: skip
        """What a prefix's hash is mixed with before the token at `positions` is picked: 0 where it is greedy."""
        return mixed_each(salts, positions.astype(np.uint64)) * is_sampled

    def pick(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Tokens of which nothing is masked."""
        bits = mixed_each(hashes)
        whole = bits // self._size  # numpy's remainder takes three times as long
        whole *= self._size
        bits -= whole
        return bits.view(np.int64)

    def candidates(self, prefix_hash: int, sampling: SamplingParams) -> tuple[Candidate, ...]:
        """Distinct continuations with falling made-up log-probabilities."""
        wanted = min(num_beam_candidates(sampling.beam_width, len(end_token_ids(sampling, self.eos_token_ids))), self.vocab_size)
        found: dict[int, float] = {}
        logprob, draw = 0.0, 0
        while len(found) < wanted:
            bits = mixed(prefix_hash, draw)
            draw += 1
            token = bits % self.vocab_size
            if token not in found:
                logprob -= 0.05 + (bits >> 40) / 2**24
                found[token] = logprob
        return tuple(Candidate(token, value) for token, value in found.items())
