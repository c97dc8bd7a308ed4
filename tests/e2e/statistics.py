"""The two-sample Kolmogorov–Smirnov test, for the timing audit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence


def ks_probability(left: Sequence[float], right: Sequence[float]) -> float:
    """How likely two samples of one distribution differ at least so much. Asymptotic (Smirnov 1948), as in Numerical
    Recipes; good from some twenty values on."""
    ordered = sorted(left), sorted(right)
    distance = max(
        abs(bisect_right(ordered[0], value) / len(left) - bisect_right(ordered[1], value) / len(right))
        for value in (*left, *right)
    )
    root = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    reach = (root + 0.12 + 0.11 / root) * distance
    if reach < 0.2:
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * reach) ** 2) for k in range(1, 101))
    return min(max(sum(terms), 0.0), 1.0)
