"""A predictor of output lengths whose rank quality is chosen: the truth with as much noise as makes Kendall's tau what it should be."""

from __future__ import annotations

import math
from hashlib import blake2b
from statistics import NormalDist

from kvlab.policies.base import is_number, is_whole, require

_NORMAL = NormalDist()


class LengthPredictor:
    """Predicts from the truth, by a Gaussian copula.

    Assumption: output lengths are lognormal with the given mean and coefficient of variation. Then z = (ln length - mu) / sigma is
    standard normal, and rho * z + sqrt(1 - rho^2) * noise with rho = sin(pi * tau / 2) has rank correlation tau with it (Kendall's, as
    for any bivariate normal). The prediction is that number taken back to tokens, so predictions are distributed as the lengths are.
    Lengths of another distribution give another tau, of the same sign: 1 is always the truth itself, -1 its reverse.
    The noise depends on (seed, request id) alone.
    """

    def __init__(self, tau: float, mean: float, cv: float, seed: int) -> None:
        self._sigma = math.sqrt(math.log1p(cv * cv))
        self._mu = math.log(mean) - self._sigma**2 / 2
        self._rho = math.sin(math.pi * tau / 2)
        self._noise_share = math.sqrt(max(0.0, 1 - self._rho**2))
        self._seed = seed

    def predict(self, request_id: str, output_len: int) -> float:
        """Predicted output tokens of a request that will have `output_len`."""
        z = (math.log(output_len) - self._mu) / self._sigma
        z = self._rho * z + self._noise_share * _noise(self._seed, request_id)
        return math.exp(self._mu + self._sigma * z)


def check_predictor(policy: object, tau: float, mean: float, cv: float, seed: int) -> None:
    """UserError for a parameter out of range."""

    require(is_number(tau) and -1 <= tau <= 1, policy, "tau", tau, "a rank correlation in [-1, 1]")
    require(is_number(mean) and mean > 0, policy, "mean", mean, "tokens, more than 0")
    require(is_number(cv) and 1e-6 <= cv <= 1e6, policy, "cv", cv, "standard deviation / mean, from 1e-6 to 1e6")
    require(is_whole(seed), policy, "seed", seed, "an integer")


def _noise(seed: int, request_id: str) -> float:
    """A standard normal draw: 52 bits of a digest, through the inverse of the distribution function."""
    digest = blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return _NORMAL.inv_cdf(((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52)
