"""Counter-based random numbers: a draw is a function of (seed, sample index, position) and of nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), over numpy
columns. Invariant: no state, so a draw is the same whatever shares the batch and whoever continues the stream. Called
by the sampler alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_LOW: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)
_ROUNDS: Final = 10

UintArray = NDArray[np.uint64]


def philox(counter: UintArray, key: UintArray) -> UintArray:
    """Four 32-bit words for each column, uint64 [4, N]. `counter` is uint64 [4, N], `key` uint64 [2, N], all < 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + np.uint64(_WEYL_0)) & _LOW
        k1 = (k1 + np.uint64(_WEYL_1)) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: list[int], samples: list[int], positions: list[int]) -> NDArray[np.float64]:
    """float64 [N] in [0, 1) with 53 random bits: one draw for each (seed < 2^64, sample < 2^32, position < 2^32)."""
    seed = np.array(seeds, np.uint64)
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0] = np.array(positions, np.uint64)
    counter[1] = np.array(samples, np.uint64)
    words = philox(counter, np.stack((seed & _LOW, seed >> _SHIFT)))
    bits = (words[0] << _SHIFT | words[1]) >> np.uint64(11)
    result: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result
