"""Keys of the prefix cache: a page's key says everything its contents depend on, chained from the first page on.

Two pages with one key hold the same keys and values: the hash covers the salt, and for every slot up to the page's end
its token, its position id, what it attended to and the adapters it was computed under, by their weights and scales.
The model's weights do not enter: a cache belongs to one engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from headway.base.arrays import numbers
from headway.base.specs.adapters import Mixes
from headway.base.specs.brle import Brle

PLAIN = bytes(32)  # in place of the key of a mix, for a slot without adapters


def root(salt: str) -> bytes:
    """The key before the first page."""
    return blake2b(salt.encode(), digest_size=32, person=b"headway-salt").digest()


def page_key(
    before: bytes,
    tokens: Sequence[int],
    positions: Sequence[int],
    masks: Sequence[Brle | None],
    adapters: Mixes = (),
) -> bytes:
    """The key of a page whose predecessor has the key `before`."""
    digest = blake2b(before, digest_size=32, person=b"headway-page")
    digest.update(array("q", tokens).tobytes())
    digest.update(array("q", positions).tobytes())
    if any(mask is not None for mask in masks):
        for mask in masks:  # an explicit causal mask was turned into None before it came here
            runs = () if mask is None else mask.runs
            digest.update(array("q", (-1 if mask is None else len(runs), *runs)).tobytes())
    if any(mix is not None for mix in adapters):
        digest.update(b"adapters")
        for mix in adapters:
            digest.update(PLAIN if mix is None else mix.key)
    return digest.digest()


def chain(
    before: bytes,
    tokens: Sequence[int],
    positions: Sequence[int],
    masks: Sequence[Brle | None] | None,
    size: int,
    *,
    adapters: Mixes | None = None,
) -> list[bytes]:
    """The keys of all whole pages of a run of slots that starts at a page's border."""
    keys = []
    if masks is None and adapters is None:  # most prompts: converted at once
        ids, at, wide = numbers(tokens).tobytes(), numbers(positions).tobytes(), 8 * size
        for start in range(0, len(ids) - wide + 1, wide):
            page = slice(start, start + wide)
            before = blake2b(before + ids[page] + at[page], digest_size=32, person=b"headway-page").digest()
            keys.append(before)
        return keys
    for start in range(0, len(tokens) - size + 1, size):
        part = slice(start, start + size)
        masked, mixes = () if masks is None else masks[part], () if adapters is None else adapters[part]
        before = page_key(before, tokens[part], positions[part], masked, mixes)
        keys.append(before)
    return keys
