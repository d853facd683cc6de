"""Compute the two tail functions of the cascade from ``math.lgamma``, to about 1e-12.

``chance`` is a binomial tail, ``log_wealth`` a likelihood ratio under a mixture; both are incomplete beta
functions, which are computed by a continued fraction. Sources: NIST's Digital Library of Mathematical Functions,
8.17.22, evaluated by Lentz's method; and the saddle-point form of binomial probabilities (Loader, "Fast and accurate
computation of binomial probabilities", 2000), because a difference of two values of ``lgamma`` loses half of its
digits at a billion rows.
"""

import math

_TINY = 1e-300
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_STIRLING_FROM = 30.0
"""From here on four terms of Stirling's series are exact to a double's last digit."""


def chance(differing: int, misses: int, sample_share: float) -> float:
    """Return P(at most ``differing`` of ``differing + misses`` rows are sampled), where a coin samples each one.

    ``sample_share`` is the coin's probability, between 0 and 1.
    """
    if misses <= 0:
        return 1.0
    return _incomplete_beta(misses, differing + 1, 1 - sample_share)


def log_wealth(differing: int, misses: int, sample_share: float, prior_rows: float) -> float:
    """Return the log of a martingale with mean 1: the evidence that rows that differ are sampled too seldom.

    It is log ∫ (p/q)^differing · ((1−p)/(1−q))^misses π(p) dp with q = ``sample_share`` and π a Beta distribution of
    mean q and weight ``prior_rows``, cut off at q (Robbins' mixture; Ville's inequality bounds how often it is large).
    """
    a, b = prior_rows * sample_share, prior_rows * (1 - sample_share)
    return _log_scaled(a + differing, b + misses, sample_share) - _log_scaled(a, b, sample_share)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    if x < (a + 1) / (a + b + 2):
        return _density(a, b, x) * _fraction(a, b, x) / a
    return 1 - _density(b, a, 1 - x) * _fraction(b, a, 1 - x) / b


def _log_scaled(a: float, b: float, x: float) -> float:
    """Return log(I_x(a, b) · B(a, b) / (x^a · (1−x)^b)), which neither overflows nor underflows."""
    if x < (a + 1) / (a + b + 2):
        return math.log(_fraction(a, b, x) / a)
    log_density = _log_density(a, b, x)
    # 1/density − fraction/b, with the larger factor outside of the logarithm
    return math.log1p(-math.exp(log_density) * _fraction(b, a, 1 - x) / b) - log_density


def _density(a: float, b: float, x: float) -> float:
    return math.exp(_log_density(a, b, x))


def _log_density(a: float, b: float, x: float) -> float:
    """Return log(x^a · (1−x)^b / B(a, b))."""
    n = a + b
    return (
        (_stirling_error(n) - _stirling_error(a) - _stirling_error(b))
        - (_deviance(a, n * x) + _deviance(b, n * (1 - x)))
        + 0.5 * (math.log(a) + math.log(b) - math.log(n))
        - _LOG_SQRT_2PI
    )


def _stirling_error(n: float) -> float:
    """Return log Γ(n + 1) − log(√(2πn)·(n/e)^n)."""
    if n < _STIRLING_FROM:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - _LOG_SQRT_2PI
    square = n * n
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / n


def _deviance(observed: float, expected: float) -> float:
    """Return observed·log(observed/expected) + expected − observed, exact where the two are close."""
    gap = (observed - expected) / (observed + expected)
    if abs(gap) > 0.1:
        return observed * math.log(observed / expected) + expected - observed
    total, term = (observed - expected) * gap, 2 * observed * gap
    for odd in range(3, 1000, 2):
        term *= gap * gap
        if total + term / odd == total:
            break
        total += term / odd
    return total


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of I_x(a, b) by Lentz's method; it converges in about √max(a, b) steps."""
    upper, lower = 1.0, _reciprocal(1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, 1_000_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            lower = _reciprocal(1 + coefficient * lower)
            upper = 1 + coefficient / (upper if upper != 0 else _TINY)
            value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            return value
    raise AssertionError(f"the continued fraction of I_{x}({a}, {b}) does not converge")


def _reciprocal(value: float) -> float:
    return 1 / value if value != 0 else 1 / _TINY
