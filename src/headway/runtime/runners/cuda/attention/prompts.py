"""Whole causal prompts by cuDNN's attention, on an H200 twice as fast there as ours, which takes all other rows.

cuDNN builds a plan for every shape, in a tenth of a second. So there are few: rows are padded to a multiple of ROWS,
and the keys before them are cut into blocks of powers of two. What is left of these keys goes before the rows' own, and
as many empty rows before the rows, so that the causal mask of a square is the right one.

    slots    0 ├── block ──┼ block ┼─ left ─┼─── rows ───┤ padding
                 each attended to    └─ one square, causal ───────┘
                 by all rows

Results of the square and of the blocks are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.triton.attention import PagedKV
from headway.kernels.triton.attention_parts import gather, merge
from headway.runtime.batch import Batch, Segment

LEAST = 1024  # rows of a prompt from which on cuDNN pays
ROWS = 512
BLOCK = 2048  # keys, or a power of two times as many
LARGEST = 16384
GAIN = 1.6  # how many query-key pairs cuDNN may take for each that is needed; it is about twice as fast

Results = tuple[Tensor, Tensor]  # of rows [T, H, D], and their log-sum-exps [H, T]
DenseAttention = Callable[[Tensor, Tensor, Tensor, bool, float], Results]  # q, k, v, causal, scale


@dataclass(frozen=True)
class CausalPrompt:
    """`rows` rows of a step from `row` on, at the slots from `slot` on, each attending to all slots up to its own."""

    row: int
    rows: int
    slot: int

    @property
    def left(self) -> int:
        """Earlier slots that are no whole block."""
        return self.slot % BLOCK

    @property
    def size(self) -> int:
        """Rows, and keys, of the square."""
        return -(-(self.left + self.rows) // ROWS) * ROWS

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Where blocks of earlier keys begin, and how long they are."""
        found, at, length = [], 0, LARGEST
        while at < self.slot - self.left:
            while length > self.slot - self.left - at:
                length //= 2
            found.append((at, length))
            at += length
        return found

    @property
    def pays(self) -> bool:
        """Whether padding leaves enough of what cuDNN is faster."""
        computed = self.size * (self.slot - self.left) + self.size**2 // 2
        return computed <= GAIN * (self.rows * self.slot + self.rows**2 // 2)


def can_take_prompts(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN has a kernel for these and is known to be faster."""
    fits = dtype in {torch.bfloat16, torch.float16} and head_dim % 8 == 0 and head_dim <= 128
    return fits and _is_hopper(device) and torch.backends.cudnn.is_available()


def find_prompts(batch: Batch) -> list[CausalPrompt]:
    """The segments that are such prompts and long enough. All of their keys are in their pages."""
    if len(batch.write_rows) < len(batch.tokens):
        return []
    first = batch.decode_count
    found = [CausalPrompt(first + s.rows.start, len(s.rows), int(s.slots[0])) for s in batch.segments if _is_plain(s)]
    return [prompt for prompt in found if prompt.pays]


def attend_prompt(q: Tensor, out: Tensor, paged: PagedKV, prompt: CausalPrompt, dense: DenseAttention) -> None:
    """q [T, H, D] → out [T, H, D] for the rows of a prompt."""
    n, left, size = prompt.rows, prompt.left, prompt.size
    queries, results = q[prompt.row : prompt.row + n], out[prompt.row : prompt.row + n]
    here = slice(left, left + n)
    if size > n:
        padded = q.new_zeros(size, *q.shape[1:])
        padded[here] = queries
        queries = padded
    keys, values = q.new_empty(2, max([size, *(length for _, length in prompt.blocks)]), *paged.keys.shape[2:])
    gather(paged, prompt.row, prompt.slot - left, left + n, keys[:size], values[:size])
    result, sums = dense(queries, keys[:size], values[:size], True, paged.scale)
    result, sums = result[here], sums[:, here]
    for begin, length in prompt.blocks:
        gather(paged, prompt.row, begin, length, keys[:length], values[:length])
        more, more_sums = dense(queries, keys[:length], values[:length], False, paged.scale)
        is_last = begin + length == prompt.slot - left
        into = results if is_last else torch.empty_like(result, dtype=torch.float32)
        merge(result, sums, more[here], more_sums[:, here], into, sums)
        result = into
    if not prompt.blocks:
        results.copy_(result)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Results:
    """q [T, H, D] with k and v [S, Hkv, D]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, sums, *_ = operation(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out[0].transpose(0, 1), sums.view(q.shape[1], -1)


def _is_plain(segment: Segment) -> bool:
    """Whether it is long, nothing is masked, and no page before it is missing."""
    numbers = segment.numbers
    whole = len(numbers) > 0 and int(numbers[-1]) == len(numbers) - 1
    return len(segment.rows) >= LEAST and whole and segment.masks.count(None) == len(segment.masks)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
