"""A decoder's forward on a CUDA device, kernel by kernel: the same for eager steps, prompts and captured graphs.

Everything that varies lies in device memory (the step's numbers), every intermediate in a `Buffers`; a forward of so
many rows launches the same kernels whatever the batch. One row goes through Triton matvecs with the norms inside,
several through cuBLAS, or about 64 through our own tiles, with the small operations between these matmuls fused.

In deterministic mode a row's bits depend on the row alone: matmuls have fixed tiles, attention takes every row by
itself and cuts its keys at fixed slots, and nothing is chosen by how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.kernels.reference.sampling import RowSampler
from headway.kernels.triton import attention, fused, layout, lora, quantized
from headway.kernels.triton import deterministic as exact
from headway.kernels.triton import matmul as tiled
from headway.kernels.triton import quantized_tiles as byte_tiles
from headway.kernels.triton.attention import AttentionTile, PagedKV, Scratch, Splits
from headway.kernels.triton.fused import HeadConfig
from headway.kernels.triton.launch import can_go_ahead, shared_memory
from headway.kernels.triton.lora import LowRankTerm
from headway.kernels.triton.matvec import RmsNorm, matvec
from headway.kernels.triton.quantized import CudaQuantizedMatrix
from headway.kernels.triton.quantized_tiles import SplitSums
from headway.kv.tensor_pool import TensorPool
from headway.models.decoder import Decoder, on_attention, on_hidden
from headway.models.hooks import Hooks
from headway.models.layers import DecoderLayer, Linear
from headway.runtime.runners.cuda.adapters import CudaAdapters, StepTiles

Mark = Callable[[str], None]
Place = tuple[int, str]  # a matmul: its layer, and its name there
PROGRAMS = 264  # that keep the device busy: two a multiprocessor
MIXED = Splits(8, 256)  # of a few single rows in a step with longer segments
MANY_SINGLES = 32  # from here on they are divided as in a step of single rows alone
FIXED = Splits(16, 64, fixed=True)  # of every row in deterministic mode
SINGLES = 512  # single rows of a mixed step that attention takes in one call
AT_ONCE = 128  # rows that attention takes in one call in deterministic mode: each has scratch for FIXED.most parts


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """One forward of `count` rows. `ints` is laid out for `rows` of them; attention takes the rows of `singles` one by
    one (None: all of them) and those of `items` [n, 2] together. `needed` [r] are the rows whose residual somebody
    reads, where these are few (None: all of them); some may be there twice. With `hooks` it is launched by hand."""

    ints: Tensor
    rows: int
    count: int
    singles: Tensor | None = None
    items: Tensor | None = None
    needed: Tensor | None = None
    hooks: Hooks | None = None
    hooks_from: int = 0  # the row that hooks count from: decode rows have none
    adapters: StepTiles | None = None


class Buffers:
    """Buffers for the intermediates of `rows` rows. Kernels of one stream use it in turn."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        c, dtype, device = decoder.config, decoder.dtype, decoder.device

        def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=kind, device=device)

        self.rows = rows
        self.x, self.h, self.delta = (empty(c.hidden_size) for _ in range(3))
        self.qkv = empty((c.heads + 2 * c.kv_heads) * c.head_dim)
        self.q, self.mixed = empty(c.heads, c.head_dim), empty(c.heads, c.head_dim)
        self.gate_up, self.inner = empty(2 * c.intermediate_size), empty(c.intermediate_size)
        self.cs = empty(2, len(decoder.inv_freq), kind=torch.float32)
        self._halves: list[tuple[Tensor, Tensor, Tensor]] = []

    def halves(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room in float16 for rows, normed [R, E], between gate and down [R, F], and out of attention [R, H, D]."""
        if not self._halves or len(self._halves[-1][0]) < rows:  # what is given stays: graphs go on using it
            size = min(self.rows, max(rows, quantized.FEW))
            shapes = (self.h[:size], self.inner[:size], self.mixed[:size])
            h, inner, mixed = (torch.empty_like(t, dtype=torch.float16) for t in shapes)
            self._halves.append((h, inner, mixed))
        h, inner, mixed = self._halves[-1]
        return h[:rows], inner[:rows], mixed[:rows]


class CudaModel:
    """Weights and pages, bound together."""

    def __init__(self, decoder: Decoder, pool: TensorPool, *, deterministic: bool = False) -> None:
        self.decoder, self.config, self.pool = decoder, decoder.config, pool
        self.device, self.dtype = decoder.device, decoder.dtype
        self.windows = tuple(dict.fromkeys(decoder.config.sliding_windows))
        self._run_at = [layout.run_field(self.windows.index(w)) for w in decoder.config.sliding_windows]
        self._kv = [(pool.keys[l], pool.values[l]) for l in range(decoder.config.layers)]
        self._heads = [
            HeadConfig(layer.heads, layer.kv_heads, layer.head_dim, layer.q_norm, layer.k_norm, layer.eps)
            for layer in decoder.layers
        ]
        self._scratch: dict[Splits, list[Scratch]] = {}
        self.sampled = torch.zeros(1, dtype=torch.int32, device=self.device)  # tokens that decode rows refer to
        c = decoder.config
        self.chunk = attention.chunk_tokens(c.heads, c.kv_heads, c.head_dim, decoder.dtype)
        self.ahead = can_go_ahead(self.device)
        self._shared = shared_memory(self.device)
        self._beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.deterministic = deterministic
        self._wide: bool | None = None  # whether many rows take wider tiles in deterministic mode
        self.is_quantized = isinstance(decoder.output, CudaQuantizedMatrix)
        self._written: Tensor | None = None
        self._split_sums: SplitSums | None = None  # of matmuls that are chosen by the number of rows
        if self.is_quantized and not deterministic:
            self._split_sums = SplitSums.of(byte_tiles.SPLIT_OUTPUTS, quantized.FEW, self.device)
        self._numbers = torch.arange(512, dtype=torch.int32, device=self.device)
        self._given: list[Tensor] = []  # earlier ones, that graphs go on using
        self.adapters = CudaAdapters(c, decoder.dtype, self.device, half=self.is_quantized)

    def forward(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> Tensor:
        """Residual rows [T, E] before the final norm; keys and values are in their pages."""
        x = buffers.x[: step.count]
        self.embed(step, x)
        mark("embed")
        fused.angles(step.ints, step.rows, buffers.cs[: step.count], self.decoder.inv_freq, self.config.rope.scale)
        mark("rope")
        if self.is_quantized and (self.deterministic or step.count <= quantized.FEW):
            self._quantized_rows(step, buffers, mark)
        elif self.deterministic:
            self._rows(step, buffers, mark)
        elif step.count == 1 and step.adapters is None and not self.is_split:
            # Its norms are inside matvecs, and adapters take normed rows.
            self._one_row(step, buffers, mark)
        else:
            self._rows(step, buffers, mark)
        if step.hooks is not None:
            on_hidden(step.hooks, self.config.layers, x[step.hooks_from :])
        return x

    # A model that is split over ranks overrides these.

    is_split = False

    def embed(self, step: DeviceStep, x: Tensor) -> None:
        """The embeddings of a step's tokens into x [T, E]."""
        fused.embed(step.ints, step.rows, self.decoder.embedding, x, self.sampled)

    def sum_up(self, y: Tensor) -> None:
        """Make the whole of what a matmul gives, where others have some of its inputs."""

    def before_head(self, rows: Sequence[int] | None) -> None:
        """The head is about to be computed of these rows of the last step; None: of its only one."""

    def _one_row(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        x, inner, mixed = buffers.x[0], buffers.inner[0], buffers.mixed[0].flatten()
        for l, layer in enumerate(self.decoder.layers):
            norm = RmsNorm(layer.input_norm, layer.eps)
            self._matvec(x, layer.qkv, buffers.qkv[0], norm=norm)
            mark("qkv")
            self._attention(l, step, buffers, mark)
            self._matvec(mixed, layer.out, x, add=True)
            mark("output projection")
            self._matvec(x, layer.gate_up, inner, norm=RmsNorm(layer.mlp_norm, layer.eps), gated=True)
            self._matvec(inner, layer.down, x, add=True)
            mark("feed-forward")

    def _matvec(
        self,
        x: Tensor,
        w: Linear,
        y: Tensor,
        *,
        norm: RmsNorm | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        matvec(x, w.weight, y, bias=w.bias, norm=norm, gated=gated, add=add, ahead=self.ahead)

    def _quantized_rows(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        """The same for a few rows with quantized weights, whose matmuls take rows in float16."""
        n = step.count
        x, (h, inner, mixed) = buffers.x[:n], buffers.halves(n)
        for l, layer in enumerate(self.decoder.layers):
            fused.norm(x, layer.input_norm, layer.eps, h, ahead=self.ahead)
            self._quantized_matmul(h, layer.qkv, buffers.qkv[:n])
            self._low_rank((l, "qkv"), h, buffers.qkv[:n], step)
            mark("qkv")
            self._attention(l, step, buffers, mark, mixed)
            self._quantized_matmul(mixed.flatten(1), layer.out, x, add=True)
            self._low_rank((l, "out"), mixed.flatten(1), x, step)
            mark("output projection")
            fused.norm(x, layer.mlp_norm, layer.eps, h, ahead=self.ahead)
            self._quantized_matmul(h, layer.gate_up, inner, bias=self._gate_up_delta(l, h, step))
            self._quantized_matmul(inner, layer.down, x, factor=1 / quantized.INNER, add=True)
            self._low_rank((l, "down"), inner, x, step, factor=1 / quantized.INNER)
            mark("feed-forward")

    def _quantized_matmul(
        self, x: Tensor, w: object, y: Tensor, *, factor: float = 1.0, add: bool = False, bias: Tensor | None = None
    ) -> None:
        assert isinstance(w, CudaQuantizedMatrix)
        alone, tile = not self.deterministic, None
        if self._split_sums is not None and w.kind != "int4" and len(x) >= byte_tiles.LEAST:
            tile = byte_tiles.pick_byte_tile(len(x), w.shape[0], x.shape[1], self._shared)
        how: dict[str, Any] = {"ahead": self.ahead, "alone": alone, "tile": tile, "sums": self._split_sums}
        quantized.matmul(x, w, y, factor=factor, add=add, row_bias=bias, **how)

    def _low_rank(self, at: Place, x: Tensor, y: Tensor, step: DeviceStep, *, factor: float = 1.0) -> None:
        """Add to a matmul's outputs y what the adapters of its rows x make of them."""
        for one in self._low_ranks(at, step):
            lora.shrink(x, one, ahead=self.ahead)
            lora.expand(y, one, lora.splits(x.shape[1]), factor=factor, ahead=self.ahead)

    def _adapted(self, at: Place, x: Tensor, w: Linear, y: Tensor, step: DeviceStep) -> None:
        """A matmul with what the adapters of its rows add; where ours computes it, that takes one more kernel."""
        added = self._low_ranks(at, step)
        if len(added) == 1 and self._in_tiles(len(x)):
            self._shrinking(x, w, y, added[0])
            lora.expand(y, added[0], 1, ahead=self.ahead)
            return
        self._linear(x, w, y)
        self._low_rank(at, x, y, step)

    def _shrinking(self, x: Tensor, w: Linear, y: Tensor, term: LowRankTerm) -> None:
        tiled.matmul(x, w.weight, y, self._tile(y), bias=w.bias, shrinks=term, ahead=self.ahead)

    def _low_ranks(self, at: Place, step: DeviceStep) -> list[LowRankTerm]:
        """What adapters add to a matmul, round by round."""
        l, stack = at
        if step.adapters is None or stack not in step.adapters.shape.stacks:
            return []
        known, sums = self.adapters, step.adapters.sums
        first, outputs = known.first[stack], known.outputs[stack]
        return [LowRankTerm(known.table, l, first, outputs, tiles, sums) for tiles in step.adapters.rounds]

    def _gate_up_delta(self, l: int, h: Tensor, step: DeviceStep) -> Tensor | None:
        """What adapters add to gate and up, with their bias: a gated matmul multiplies them by itself."""
        if step.adapters is None or "gate_up" not in step.adapters.shape.stacks:
            return None
        bias = self.decoder.layers[l].gate_up.bias
        delta = torch.zeros(len(h), 2 * self.config.intermediate_size, dtype=torch.float32, device=self.device)
        if bias is not None:
            delta += bias
        self._low_rank((l, "gate_up"), h, delta, step)
        return delta

    def _dense(self, w: Linear | CudaQuantizedMatrix) -> Tensor:
        """The matrix [N, K] as floats. A quantized one is valid until the next: all are dequantized into one buffer."""
        if not isinstance(w, CudaQuantizedMatrix):
            return w.weight
        if self._written is None:
            size = max(prod(m.shape) for layer in self.decoder.layers for m in _matrices(layer))
            self._written = torch.empty(size, dtype=self.dtype, device=self.device)
        n, k = w.shape
        weights = self._written[: n * k].view(n, k)
        quantized.dequantize_into(w, weights)
        return weights

    def _rows(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        n, layers = step.count, self.decoder.layers
        many = self._padded_rows(n, buffers)
        x, h, delta = buffers.x[:n], buffers.h[:many], buffers.delta[:many]
        fused.norm(x, layers[0].input_norm, layers[0].eps, h[:n])
        mark("norm")
        for l, layer in enumerate(layers):
            self._adapted((l, "qkv"), h, layer.qkv, buffers.qkv[:many], step)
            mark("qkv")
            if step.needed is not None and l + 1 == len(layers):
                self._finish_needed(step.needed, step, buffers, mark)
                return
            self._attention(l, step, buffers, mark)
            mixed = buffers.mixed[:many].flatten(1)
            self._adapted((l, "out"), mixed, layer.out, delta, step)
            self.sum_up(delta)
            mark("output projection")
            fused.norm(x, layer.mlp_norm, layer.eps, h[:n], add=delta[:n], ahead=self.ahead)
            mark("norm")
            self._gate_times_up(l, h, buffers, step)
            self._adapted((l, "down"), buffers.inner[:many], layer.down, delta, step)
            self.sum_up(delta)
            mark("feed-forward")
            following: DecoderLayer | None = layers[l + 1] if l + 1 < len(layers) else None
            if following is None:
                fused.add(x, delta[:n])
            else:
                fused.norm(x, following.input_norm, following.eps, h[:n], add=delta[:n], ahead=self.ahead)
            mark("norm")

    def _finish_needed(self, needed: Tensor, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        """The last layer after its queries, keys and values: the pages need those of every row, but of most rows of a
        prefill nobody reads what comes after."""
        l, layer, n, r = len(self.decoder.layers) - 1, self.decoder.layers[-1], step.count, len(needed)
        assert step.adapters is None, "their tiles stand for all rows"
        self._attention(l, replace(step, singles=needed, items=None), buffers, mark)
        x, mixed = (t[:n].index_select(0, needed) for t in (buffers.x, buffers.mixed))
        h, delta = buffers.h[:r], buffers.delta[:r]
        self._linear(mixed.flatten(1), layer.out, delta)
        self.sum_up(delta)
        mark("output projection")
        fused.norm(x, layer.mlp_norm, layer.eps, h, add=delta, ahead=self.ahead)
        mark("norm")
        self._gate_times_up(l, h, buffers, step)
        self._linear(buffers.inner[:r], layer.down, delta)
        self.sum_up(delta)
        mark("feed-forward")
        fused.add(x, delta)
        buffers.x.index_copy_(0, needed.long(), x)

    def _padded_rows(self, rows: int, buffers: Buffers) -> int:
        """How many rows matmuls take: a whole tile where that is faster, the last rows for nothing."""
        if tiled.LEAST <= rows <= tiled.MOST <= buffers.rows and self._in_tiles(tiled.MOST):
            return tiled.MOST
        return rows

    def _attention(self, l: int, step: DeviceStep, buffers: Buffers, mark: Mark, out: Tensor | None = None) -> None:
        n, (keys, values) = step.count, self._kv[l]
        q, mixed = buffers.q[:n], buffers.mixed[:n] if out is None else out
        fused.rotate_and_write(
            buffers.qkv[:n], q, keys, values, step.ints, step.rows, buffers.cs[:n], self._heads[l], self.ahead
        )
        mark("rope")
        paged = PagedKV(keys, values, step.ints, step.rows, self._run_at[l], self.config.head_dim**-0.5)
        self._attend(q, mixed, paged, step)
        mark("attention")
        if step.hooks is not None:  # what a layer writes comes after its attention: x is still what entered it
            on_hidden(step.hooks, l, buffers.x[step.hooks_from : n])
            on_attention(step.hooks, l, q[step.hooks_from :], keys, paged.scale)

    def _attend(self, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep) -> None:
        n = step.count
        if self.deterministic:
            for start in range(0, n, AT_ONCE):
                which = self._first(n)[start : start + AT_ONCE]
                attention.attend_rows(
                    q, mixed, paged, FIXED, self._scratch_for(FIXED, AT_ONCE),
                    which=which, tile=fixed_tile(q.shape[2], q.dtype), ahead=self.ahead,
                )  # fmt: skip
            return
        if step.items is None or n <= tiled.MOST or self._beside is None:
            self._attend_singles(q, mixed, paged, step, ahead=self.ahead)
            if step.items is not None:
                attention.attend_chunks(q, mixed, paged, step.items, self.chunk)
            return
        # Single rows read memory and chunks compute: beside each other they take little longer than the longer one.
        main = torch.cuda.current_stream()
        self._beside.wait_stream(main)
        with torch.cuda.stream(self._beside):
            self._attend_singles(q, mixed, paged, step, ahead=False)
        attention.attend_chunks(q, mixed, paged, step.items, self.chunk)
        main.wait_stream(self._beside)

    def _attend_singles(self, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep, *, ahead: bool) -> None:
        row_bytes = q.shape[2] * q.element_size()
        for which in _in_calls(step.singles):
            count = step.count if which is None else len(which)
            few = which is not None and count < MANY_SINGLES
            splits = MIXED if few else pick_splits(count, self.config.kv_heads)
            attention.attend_rows(
                q, mixed, paged, splits, self._scratch_for(splits, count),
                which=which, tile=pick_tile(count, splits, row_bytes), ahead=ahead,
            )  # fmt: skip

    def _scratch_for(self, splits: Splits, rows: int) -> Scratch:
        """Room for the parts of so many rows. It is never given back, since graphs go on using it: so each is for the
        next power of two, and all of them have fewer than four times the rows of the largest step."""
        fitting = [scratch for scratch in self._scratch.get(splits, ()) if len(scratch.arrived) >= rows]
        if fitting:
            return fitting[0]
        c, wide = self.config, 1 << max(0, rows - 1).bit_length()
        scratch = attention.make_scratch(wide, c.heads, c.kv_heads, c.head_dim, splits, self.device)
        self._scratch.setdefault(splits, []).append(scratch)
        return scratch

    def _first(self, count: int) -> Tensor:
        """The numbers below count [count] int32."""
        if len(self._numbers) < count:
            self._given.append(self._numbers)
            self._numbers = torch.arange(2 * count, dtype=torch.int32, device=self.device)
        return self._numbers[:count]

    def _gate_times_up(self, l: int, h: Tensor, buffers: Buffers, step: DeviceStep) -> None:
        w, gate_up, inner = self.decoder.layers[l].gate_up, buffers.gate_up[: len(h)], buffers.inner[: len(h)]
        added = self._low_ranks((l, "gate_up"), step)
        if 1 < len(h) <= tiled.FEW <= buffers.rows and not added and self._in_tiles(tiled.MOST):
            h, inner = buffers.h[: tiled.FEW], buffers.inner[: tiled.FEW]  # the last rows for nothing
            tile = self._tile(inner, gated=True)
            tiled.matmul(h, w.weight, inner, tile, bias=w.bias, gated=True, ahead=self.ahead)
            return
        if self._in_tiles(len(h)) and len(added) == 1:
            self._shrinking(h, w, gate_up, added[0])
            lora.expand_gated(gate_up, inner, added[0], 1, ahead=self.ahead)
            return
        if self._in_tiles(len(h)) and not added:
            tiled.matmul(h, w.weight, inner, self._tile(inner, gated=True), bias=w.bias, gated=True, ahead=self.ahead)
            return
        self._linear(h, w, gate_up)
        self._low_rank((l, "gate_up"), h, gate_up, step)
        fused.gated(gate_up, inner, ahead=self.ahead)

    def _in_tiles(self, rows: int) -> bool:
        """Whether matmuls of this many rows use our kernel; cuBLAS is faster with others, and in float32."""
        own_ways = self.is_quantized or self.deterministic
        return rows == tiled.MOST and not own_ways and self.dtype != torch.float32

    def _tile(self, y: Tensor, *, gated: bool = False) -> tiled.MatmulTile:
        return tiled.pick_tile(len(y), y.shape[1], gated, self._shared)

    def _linear(self, x: Tensor, w: Linear, y: Tensor) -> None:
        if self.is_quantized and self.dtype == torch.float32:
            x = x.half().float()  # as the kernels for few rows take them
        if self.deterministic:
            exact.matmul(x, w.weight, y, bias=w.bias, tile=self._exact(len(x)), ahead=self.ahead)
        elif self._in_tiles(len(x)):
            tiled.matmul(x, w.weight, y, self._tile(y), bias=w.bias, ahead=self.ahead)
        elif w.bias is None:
            torch.mm(x, self._dense(w).t(), out=y)
        else:
            torch.addmm(w.bias, x, self._dense(w).t(), out=y)

    def _exact(self, rows: int) -> tiled.MatmulTile | None:
        """The tile of matmuls in deterministic mode; None for the one that fits any number of rows."""
        if rows <= exact.MANY:
            return None
        if self._wide is None:  # the first step of a size is never captured
            self._wide = exact.wide_tile_is_exact(self.decoder.layers[0].qkv.weight)
        return exact.WIDE if self._wide else None

    # -- what the reader asks for ----------------------------------------------------------------------------------

    def finish(self, x: Tensor, tile: int | None) -> Tensor:
        """The final norm of residual rows [R, E]."""
        return self.decoder.finish(x, tile)

    def logits(self, x: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] float32 of residual rows [R, E]."""
        logits = torch.empty(len(x), self.config.vocab_size, dtype=torch.float32, device=self.device)
        self.head(x, None, torch.empty_like(x), logits)
        return logits

    @property
    def functions(self) -> Any:
        """What reads its logits."""
        return self.decoder.functions

    def best(self, logits: Tensor) -> tuple[list[bool], list[int] | None]:
        """For each row whether it has a NaN."""
        return self.decoder.best(logits)

    def sample(self, logits: Tensor, samplers: Sequence[RowSampler]) -> list[int]:
        """The token sampled at each row."""
        return self.decoder.sample(logits, samplers)

    def head(self, x: Tensor, rows: Tensor | None, h: Tensor, logits: Tensor) -> None:
        """Logits into [R, V] float32, of residual rows x, or of the `rows` [R] int32 of it. h [R, E] is scratch."""
        d = self.decoder
        if isinstance(d.output, CudaQuantizedMatrix):
            half = torch.empty_like(h, dtype=torch.float16)
            fused.norm(x, d.final_norm, self.config.norm_eps, half, rows=rows, ahead=self.ahead)
            self._quantized_matmul(half, d.output, logits)
            return
        if self.deterministic:
            fused.norm(x, d.final_norm, self.config.norm_eps, h, rows=self._first(len(h)) if rows is None else rows)
            exact.matmul(h, d.output, logits, tile=self._exact(len(h)), ahead=self.ahead)
            return
        if len(h) == 1 and rows is None:
            norm = RmsNorm(d.final_norm, self.config.norm_eps)
            matvec(x[0], d.output, logits[0], norm=norm, ahead=self.ahead)
            return
        fused.norm(x, d.final_norm, self.config.norm_eps, h, rows=rows, ahead=self.ahead)
        if len(h) == 1:
            matvec(h[0], d.output, logits[0], ahead=self.ahead)
        elif self._in_tiles(len(h)):
            tiled.matmul(h, d.output, logits, self._tile(logits), ahead=self.ahead)
        elif self.dtype == torch.float32:
            torch.mm(h, d.output.t(), out=logits)
        else:
            torch.mm(h, d.output.t(), out_dtype=torch.float32, out=logits)


def _in_calls(singles: Tensor | None) -> Sequence[Tensor | None]:
    """The rows that attention takes one by one, call by call; None stands for every row of the step."""
    if singles is None:
        return (None,)
    return singles.split(SINGLES) if len(singles) else ()


def pick_splits(rows: int, kv_heads: int) -> Splits:
    """How the keys of this many single rows are split: enough programs for the device, none with too little to do."""
    programs = rows * kv_heads
    most = 1
    while most < 32 and most * programs < PROGRAMS:
        most *= 2
    if most < 4:
        return Splits(4 if rows <= 128 else 2, 1024)  # long sequences among short ones
    return Splits(most, 64 if most >= 8 else 128)


def pick_tile(rows: int, splits: Splits, row_bytes: int) -> AttentionTile:
    """What was fastest on an H200: wide tiles where programs are few, small programs where they are many.

    `row_bytes` are those of a key: of long ones less fits.
    """
    if row_bytes > 512:
        return AttentionTile(32, 4, 2)
    if splits.least < 1024:
        return AttentionTile(64, 4, 2)
    if row_bytes > 256:
        return AttentionTile(32, 4, 3)
    if rows > 96:
        return AttentionTile(16, 1, 3)
    return AttentionTile(64, 2, 2) if rows > 40 else AttentionTile(32, 4, 5)


def _matrices(layer: DecoderLayer) -> list[CudaQuantizedMatrix]:
    return [m for m in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(m, CudaQuantizedMatrix)]


def fixed_tile(dim: int, dtype: torch.dtype) -> AttentionTile:
    """The one tile of a model in deterministic mode; FIXED.least holds a whole number of them."""
    return AttentionTile(32, 4, 2) if dim > 128 or dtype == torch.float32 else AttentionTile(64, 4, 2)
