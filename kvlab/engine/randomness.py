"""Random numbers as a function of (seed, stream, position): no state, so nothing that happens to other requests can shift them.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed, counter = (position, stream).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_MIX: list[Words] = [np.array(number, dtype=np.uint64)  # as arrays: a third quicker than numpy's scalars
                     for number in (0x9E3779B97F4A7C15, 1, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)]  # fmt: skip


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays of 32-bit words (held as uint64)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: npt.ArrayLike, streams: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, stream, position): float64, 53 random bits. They broadcast, each modulo 2^64."""
    seed, stream, position = np.broadcast_arrays(_words(seeds), _words(streams), _words(positions))
    counter = (position & _LOW, position >> _32, stream & _LOW, stream >> _32)
    high, low, _, _ = philox4x32(counter, (seed & _LOW, seed >> _32))
    bits: npt.NDArray[np.float64] = ((high << _32 | low) >> np.uint64(11)).astype(np.float64)
    return bits * 2.0**-53


def _words(values: npt.ArrayLike) -> Words:
    if isinstance(values, np.ndarray):
        return values.astype(np.uint64)
    # Through Python's integers: a seed may be negative or longer than 64 bits.
    whole = np.asarray(values, dtype=object)
    return np.array([int(value) & (2**64 - 1) for value in whole.ravel()], dtype=np.uint64).reshape(whole.shape)


def request_seed(seed: int, request_id: str) -> int:
    """Seed of a request that has none of its own: 64 bits from the run's seed and the request's id.

    Not its number: in a run with follow-ups the order of submission depends on who finished first, so on the policies."""
    return mixed(seed, int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little"))


def mixed(seed: int, number: int) -> int:
    """64 bits that look random, from two numbers."""
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + number + 1) * 0xBF58476D1CE4E5B9 & mask  # splitmix64's finaliser
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def mixed_each(seeds: Words, numbers: Words | None = None) -> Words:
    """`mixed` of arrays of 64-bit words. numbers: None for zeros."""
    x: Words = seeds * _MIX[0]
    if numbers is not None:
        x = x + numbers  # which may have more dimensions
    x += _MIX[1]
    x *= _MIX[2]
    x ^= x >> _MIX[3]
    x *= _MIX[4]
    x ^= x >> _MIX[5]
    return x
