"""Counter-based random numbers: (seed, position id, ordinal of the draw) → uniform in [0, 1).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): the seed is the key, position and ordinal
are the counter. There is no state, so a draw does not depend on earlier draws or on the rest of the batch.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import ArrayLike

from headway.base.checks import check_integer

WORD = 0xFFFFFFFF
LIMIT = 1 << 64  # seeds, positions and ordinals are below it
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(seed: int, position: int, ordinal: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, a function of the three integers."""
    seed = check_integer(seed, "seed", high=LIMIT - 1)
    position = check_integer(position, "position", high=LIMIT - 1)
    ordinal = check_integer(ordinal, "ordinal", high=LIMIT - 1)
    counter = (position & WORD, position >> 32, ordinal & WORD, ordinal >> 32)
    high, low, _, _ = philox(counter, (seed & WORD, seed >> 32))
    return ((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53)


def uniforms(seed: ArrayLike, position: ArrayLike, ordinal: ArrayLike = 0) -> np.ndarray:
    """`uniform` over broadcast arrays: bit-identical, as float64."""
    parts = [_words(values, name) for values, name in ((seed, "seed"), (position, "position"), (ordinal, "ordinal"))]
    key, at, nth = np.broadcast_arrays(*parts)
    mask, half = np.uint64(WORD), np.uint64(32)
    counter = [at & mask, at >> half, nth & mask, nth >> half]
    keys = [key & mask, key >> half]
    for _ in range(ROUNDS):
        first, second = counter[0] * np.uint64(MULTIPLIERS[0]), counter[2] * np.uint64(MULTIPLIERS[1])
        counter = [
            (second >> half) ^ counter[1] ^ keys[0],
            second & mask,
            (first >> half) ^ counter[3] ^ keys[1],
            first & mask,
        ]
        keys = [(word + np.uint64(step)) & mask for word, step in zip(keys, WEYL)]
    bits = ((counter[0] >> np.uint64(5)) << np.uint64(26)) + (counter[1] >> np.uint64(6))
    return bits.astype(np.float64) / float(1 << 53)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words of a 128-bit counter under a 64-bit key."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (second >> 32) ^ b ^ low, second & WORD, (first >> 32) ^ d ^ high, first & WORD
        low, high = (low + WEYL[0]) & WORD, (high + WEYL[1]) & WORD
    return a, b, c, d


def fresh_seed() -> int:
    """A new seed from the operating system's entropy."""
    return int.from_bytes(os.urandom(8), "little")


def _words(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype == np.uint64:
        return array
    checked = [check_integer(value, name, high=LIMIT - 1) for value in array.ravel().tolist()]
    return np.array(checked, np.uint64).reshape(array.shape)
