"""Randomness of workloads: child generators by purpose, and a counter-based source for values looked up in any order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Purposes: each quantity has a stream of its own, so that changing one parameter leaves the other draws as they were.
ARRIVALS, PROMPT_LEN, OUTPUT_LEN, PREFIX_PATH, PREFIX_TOKENS, TOKENS = range(6)
TURNS, THINK, TURN_LEN, TURN_OUTPUT_LEN, PRIORITY, TENANT, ABORT, ABORT_DELAY, BLOCK_TOKENS = range(6, 15)

U64 = npt.NDArray[np.uint64]


def generator(seed: int, purpose: int, *path: int) -> np.random.Generator:
    """A PCG64 generator for one purpose (and, where needed, one conversation) of a run."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, *path))))


def mix(value: U64) -> U64:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters neighbours. Wraps by intent."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class CounterRandom:
    """64-bit words that are a function of (seed, purpose, stream, position): any of them in any order, without keeping state."""

    def __init__(self, seed: int, purpose: int) -> None:
        self._key = np.random.SeedSequence(seed, spawn_key=(purpose,)).generate_state(1, np.uint64)

    def words(self, streams: Sequence[int] | npt.NDArray[np.int64], count: int) -> U64:
        """Shape (len(streams), count): `count` words of each stream."""
        starts = mix(mix(np.asarray(streams, dtype=np.int64).astype(np.uint64) + self._key) ^ self._key)
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return mix(starts[:, None] + steps[None, :])

    def uniform(self, stream: int) -> float:
        """A number in [0, 1) for a stream."""
        return float(self.words([stream], 1)[0, 0] >> np.uint64(11)) / float(1 << 53)
