"""A decoder's forward on a CUDA device, kernel by kernel: the same for eager steps, prompts and captured graphs.

Everything that varies lies in device memory (the step's numbers), every intermediate in a `Buffers`; a forward of so
many rows launches the same kernels whatever the batch. One row goes through Triton matvecs with the norms inside,
several through cuBLAS, or about 64 through our own tiles, with the small operations between these matmuls fused.

In deterministic mode a row's bits depend on the row alone: matmuls have fixed tiles, attention takes every row by
itself and cuts its keys at fixed slots, and nothing is chosen by how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.base.system.log import log_event
from headway.kernels.reference.sampling import RowSampler
from headway.kernels.transfer import to_device
from headway.kernels.triton import attention, fused, layout, quantized
from headway.kernels.triton import matmul as tiled
from headway.kernels.triton.attention import AttentionTile, PagedKV, Scratch, Splits
from headway.kernels.triton.attention_parts import attend_shared
from headway.kernels.triton.cuts import CutWorkspace
from headway.kernels.triton.fp8.scaled_rows import Unscaled
from headway.kernels.triton.fused import HeadConfig, RowNorm
from headway.kernels.triton.launch import can_go_ahead
from headway.kernels.triton.matvec import RmsNorm, matvec
from headway.kernels.triton.quantized import CudaQuantizedMatrix
from headway.kernels.triton.variants import latent
from headway.kv.tensor_pool import TensorPool
from headway.models.decoder import Decoder, on_attention, on_hidden
from headway.models.description import KvShape
from headway.models.families import is_llama_like
from headway.models.layers import DecoderLayer
from headway.runtime.memory import is_out_of_memory
from headway.runtime.runners.cuda.adapters import CudaAdapters
from headway.runtime.runners.cuda.attention.prompts import (
    CausalPrompt,
    attend_prompt,
    can_take_prompts,
    cudnn_attention,
)
from headway.runtime.runners.cuda.attention.shared_pages import SharedRoom
from headway.runtime.runners.cuda.buffers import Buffers, fit
from headway.runtime.runners.cuda.described import DescribedLayers, head_config
from headway.runtime.runners.cuda.matmuls import Matmuls
from headway.runtime.runners.cuda.scaled import ScaledLayers, ScaledStep, is_scaled
from headway.runtime.runners.cuda.steps import DeviceStep, Mark
from headway.runtime.runners.cuda.variants.altup import AltUpLayers
from headway.runtime.runners.cuda.variants.latent import LatentRows
from headway.runtime.runners.cuda.variants.per_layer import own_heads

PROGRAMS = 264  # that keep the device busy: two a multiprocessor
MIXED = Splits(8, 256)  # of a few single rows in a step with longer segments
MANY_SINGLES = 32  # from here on they are divided as in a step of single rows alone
FIXED = Splits(16, 64, fixed=True)  # of every row in deterministic mode
SINGLES = 512  # single rows of a mixed step that attention takes in one call
AT_ONCE = 128  # rows that attention takes in one call in deterministic mode: each has scratch for FIXED.most parts


class CudaModel:
    """Weights and pages, bound together."""

    def __init__(self, decoder: Decoder, pool: TensorPool, *, deterministic: bool = False) -> None:
        self.decoder, self.config, self.pool = decoder, decoder.config, pool
        self.device, self.dtype = decoder.device, decoder.dtype
        self.windows = tuple(dict.fromkeys(decoder.config.windows))
        self._run_at = [layout.run_field(self.windows.index(w)) for w in decoder.config.windows]
        self._kv = [(pool.keys[place], pool.values[place]) for place in decoder.config.kv_places]
        self._ropes, self._rope_sets = decoder.config.rope_sets
        self._inv_freq = _frequencies(decoder, self._rope_sets)
        self._softmax = [(layer.softmax.get("cap", 0.0), _wide(layer.softmax.get("sinks"))) for layer in decoder.layers]
        self._scratch: dict[Splits, list[Scratch]] = {}
        self.cuts: CutWorkspace | None = None  # of samplers with filters, once there are any
        self.sampled = torch.zeros(1, dtype=torch.int32, device=self.device)  # tokens that decode rows refer to
        c = decoder.config
        self._latent: LatentRows | None = None
        shapes = {c.kv_shape(layer) for layer in range(c.layers)}
        self._wide = KvShape(max(shape.heads for shape in shapes), max(shape.dim for shape in shapes))
        self.chunk = min(attention.chunk_tokens(c.heads, shape.heads, shape.dim, decoder.dtype) for shape in shapes)
        if c.description.latent is not None:
            self.chunk = latent.chunk_tokens(c.heads, decoder.dtype, self.device)
        self.ahead = can_go_ahead(self.device)
        self._beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.deterministic = deterministic
        alike = all(cap == 0.0 and sinks is None for cap, sinks in self._softmax)
        alike = alike and c.description.latent is None and c.description.per_layer is None
        plain = alike and not deterministic and self.windows == (None,)
        self.shared_room = SharedRoom(c.heads, c.head_dim, self.device) if plain else None
        self.takes_prompts = plain and can_take_prompts(self.device, self.dtype, c.head_dim)
        self._numbers = torch.arange(512, dtype=torch.int32, device=self.device)
        self._given: list[Tensor] = []  # earlier ones, that graphs go on using
        self.is_quantized = isinstance(decoder.output, CudaQuantizedMatrix)
        self.adapters = CudaAdapters(c, decoder.dtype, self.device, half=self.is_quantized)
        self.matmuls = Matmuls(decoder, self.adapters, deterministic=deterministic)
        self._final_norm = RowNorm(decoder.final_norm, c.norm_eps)
        self._described: DescribedLayers | None = None
        self._embedding_scale, self._positions, self._output_bias = 1.0, None, None
        self._heads = [
            HeadConfig(layer.heads, layer.kv_heads, layer.head_dim, layer.q_norm, layer.k_norm, layer.eps)
            for layer in decoder.layers
        ]
        if not is_llama_like(c):
            self._describe(decoder)
        self._scaled = ScaledLayers(self.matmuls) if is_scaled(decoder) else None

    def _describe(self, decoder: Any) -> None:
        """Compute the layers that a `DescribedDecoder` has."""
        kind = self.config.description.norm
        self._final_norm = RowNorm(decoder.final_norm, self.config.norm_eps, kind, decoder.final_norm_bias)
        self._positions, self._output_bias = decoder.positions, decoder.output_bias
        self._embedding_scale = torch.tensor(self.config.description.embedding_scale, dtype=self.dtype).item()
        sets = zip(decoder.layers, self._rope_sets, strict=True)
        heads = [head_config(layer, rotated=ropes >= 0) for layer, ropes in sets]
        self._heads = [own_heads(how, decoder.layers[l], l) for l, how in enumerate(heads)]
        if (what := self.config.description.latent) is not None:
            self._latent = LatentRows(decoder.layers, what, self.matmuls)
        how = self.matmuls, self._heads, self._attention
        streams = self.config.description.altup is not None
        self._described = AltUpLayers(decoder, *how) if streams else DescribedLayers(decoder, *how, self._latent)

    def forward(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> Tensor:
        """Residual rows [T, E] before the final norm; keys and values are in their pages."""
        x = buffers.x[: step.count]
        self.embed(step, x)
        mark("embed")
        for rope, inv_freq, cs in zip(self._ropes, self._inv_freq, buffers.angles, strict=True):
            fused.angles(step.ints, step.rows, cs[: step.count], inv_freq, rope.scale)
        mark("rope")
        if self._described is not None:
            self._described.forward(step, buffers, mark, self.sampled)
        elif self._scaled is not None:
            self._scaled_rows(self._scaled, step, buffers, mark)
        elif self.is_quantized and (self.deterministic or step.count <= quantized.FEW):
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
        how: dict[str, Any] = {"scale": self._embedding_scale, "positions": self._positions}
        fused.embed(step.ints, step.rows, self.decoder.embedding, x, self.sampled, **how)

    def sum_up(self, y: Tensor) -> None:
        """Make the whole of what a matmul gives, where others have some of its inputs."""

    def before_head(self, rows: Sequence[int] | None) -> None:
        """The head is about to be computed of these rows of the last step; None: of its only one."""

    def _one_row(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        x, inner, mixed = buffers.x[0], buffers.inner[0], buffers.mixed[0].flatten()
        for l, layer in enumerate(self.decoder.layers):
            norm = RmsNorm(layer.input_norm, layer.eps)
            self.matmuls.matvec(x, layer.qkv, buffers.qkv[0], norm=norm)
            mark("qkv")
            self._attention(l, step, buffers, mark)
            self.matmuls.matvec(mixed, layer.out, x, add=True)
            mark("output projection")
            self.matmuls.matvec(x, layer.gate_up, inner, norm=RmsNorm(layer.mlp_norm, layer.eps), gated=True)
            self.matmuls.matvec(inner, layer.down, x, add=True)
            mark("feed-forward")

    def _quantized_rows(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        """The same for a few rows with quantized weights, whose matmuls take rows in float16."""
        n = step.count
        x, (h, inner, mixed) = buffers.x[:n], buffers.halves(n)
        for l, layer in enumerate(self.decoder.layers):
            fused.norm(x, layer.input_norm, layer.eps, h, ahead=self.ahead)
            self.matmuls.quantized(h, layer.qkv, buffers.qkv[:n])
            self.matmuls.low_rank((l, "qkv"), h, buffers.qkv[:n], step.adapters)
            mark("qkv")
            self._attention(l, step, buffers, mark, mixed)
            self.matmuls.quantized(mixed.flatten(1), layer.out, x, add=True)
            self.matmuls.low_rank((l, "out"), mixed.flatten(1), x, step.adapters)
            mark("output projection")
            fused.norm(x, layer.mlp_norm, layer.eps, h, ahead=self.ahead)
            self.matmuls.quantized(h, layer.gate_up, inner, bias=self.matmuls.gate_up_delta(l, h, step.adapters))
            self.matmuls.quantized(inner, layer.down, x, factor=1 / quantized.INNER, add=True)
            self.matmuls.low_rank((l, "down"), inner, x, step.adapters, factor=1 / quantized.INNER)
            mark("feed-forward")

    def _scaled_rows(self, layers: ScaledLayers, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        """The same for any number of rows with weights in fp8, whose matmuls take rows in fp8."""
        last = len(self.decoder.layers) - 1

        def attend(l: int, unscaled: Unscaled | None) -> Tensor:
            some = l == last and step.needed is not None
            which = replace(step, singles=step.needed, items=None, prompts=()) if some else step
            self._attention(l, which, buffers, mark, unscaled=unscaled)
            return buffers.mixed[: step.count]

        layers.rows(ScaledStep(buffers.x[: step.count], buffers, step.adapters, step.needed, attend, mark))

    def _rows(self, step: DeviceStep, buffers: Buffers, mark: Mark) -> None:
        n, layers = step.count, self.decoder.layers
        many = self.matmuls.padded_rows(n, buffers)
        x, h, delta = buffers.x[:n], buffers.h[:many], buffers.delta[:many]
        fused.norm(x, layers[0].input_norm, layers[0].eps, h[:n])
        mark("norm")
        for l, layer in enumerate(layers):
            self.matmuls.adapted((l, "qkv"), h, layer.qkv, buffers.qkv[:many], step.adapters)
            mark("qkv")
            if step.needed is not None and l + 1 == len(layers):
                self._finish_needed(step.needed, step, buffers, mark)
                return
            self._attention(l, step, buffers, mark)
            mixed = buffers.mixed[:many].flatten(1)
            self.matmuls.adapted((l, "out"), mixed, layer.out, delta, step.adapters)
            self.sum_up(delta)
            mark("output projection")
            fused.norm(x, layer.mlp_norm, layer.eps, h[:n], add=delta[:n], ahead=self.ahead)
            mark("norm")
            self.matmuls.gate_times_up(l, h, buffers, step.adapters)
            self.matmuls.adapted((l, "down"), buffers.inner[:many], layer.down, delta, step.adapters)
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
        self._attention(l, replace(step, singles=needed, items=None, prompts=()), buffers, mark)
        x, mixed = (t[:n].index_select(0, needed) for t in (buffers.x, buffers.mixed))
        h, delta = buffers.h[:r], buffers.delta[:r]
        self.matmuls.linear(mixed.flatten(1), layer.out, delta)
        self.sum_up(delta)
        mark("output projection")
        fused.norm(x, layer.mlp_norm, layer.eps, h, add=delta, ahead=self.ahead)
        mark("norm")
        self.matmuls.gate_times_up(l, h, buffers, step.adapters)
        self.matmuls.linear(buffers.inner[:r], layer.down, delta)
        self.sum_up(delta)
        mark("feed-forward")
        fused.add(x, delta)
        buffers.x.index_copy_(0, needed.long(), x)

    def _attention(
        self,
        l: int,
        step: DeviceStep,
        buffers: Buffers,
        mark: Mark,
        out: Tensor | None = None,
        *,
        unscaled: Unscaled | None = None,
    ) -> None:
        n, (keys, values), ropes, heads = step.count, self._kv[l], self._rope_sets[l], self._heads[l]
        q = fit(buffers.q, n, heads.heads, heads.dim)
        size = heads.dim if self._latent is None else self._latent.size
        mixed = fit(buffers.mixed, n, heads.heads, size) if out is None else out
        cs = None if ropes < 0 else buffers.angles[ropes][:n]
        if self._latent is not None:
            self._latent.rotate_and_write(l, step, buffers, keys, buffers.angles[ropes][:n])
        else:
            fused.rotate_and_write(
                buffers.qkv[:n], q, keys, values, step.ints, step.rows, cs, heads, self.ahead, unscaled
            )
        mark("rope")
        scale, (cap, sinks) = self.config.attention_scale, self._softmax[l]
        paged = PagedKV(keys, values, step.ints, step.rows, self._run_at[l], scale, cap, sinks)
        self._attend(q, mixed, paged, step)
        mark("attention")
        if step.hooks is not None:  # what a layer writes comes after its attention: x is still what entered it
            on_hidden(step.hooks, l, buffers.x[step.hooks_from : n])
            softmax = self.decoder.layers[l].softmax
            on_attention(step.hooks, l, q[step.hooks_from :], keys, paged.scale, **softmax)

    def _attend(self, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep) -> None:
        n = step.count
        if self.deterministic:
            at_once = AT_ONCE if self._latent is None else self._latent.at_once
            for start in range(0, n, at_once):
                which, scratch = self._first(n)[start : start + at_once], self._scratch_for(FIXED, at_once)
                if self._latent is not None:
                    latent.attend_rows(q, mixed, paged, FIXED, scratch, which=which, ahead=self.ahead)
                    continue
                tile = fixed_tile(q.shape[2], q.dtype)
                attention.attend_rows(q, mixed, paged, FIXED, scratch, which=which, tile=tile, ahead=self.ahead)
            return
        has_long = step.items is not None or step.prompts
        if not has_long or n <= tiled.MOST or self._beside is None:
            self._attend_singles(q, mixed, paged, step, ahead=self.ahead)
            self._attend_long(q, mixed, paged, step)
            return
        # Single rows read memory and chunks compute: beside each other they take little longer than the longer one.
        main = torch.cuda.current_stream()
        self._beside.wait_stream(main)
        with torch.cuda.stream(self._beside):
            self._attend_singles(q, mixed, paged, step, ahead=False)
        self._attend_long(q, mixed, paged, step)
        main.wait_stream(self._beside)

    def _attend_long(self, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep) -> None:
        if step.items is not None:
            kernels = attention if self._latent is None else latent
            kernels.attend_chunks(q, mixed, paged, step.items, self.chunk)
        for prompt in step.prompts:
            self._attend_prompt(q, mixed, paged, prompt)

    def _attend_prompt(self, q: Tensor, mixed: Tensor, paged: PagedKV, prompt: CausalPrompt) -> None:
        if self.takes_prompts:
            try:
                attend_prompt(q, mixed, paged, prompt, cudnn_attention)
                return
            except RuntimeError as error:  # this cuDNN has no such kernel
                if is_out_of_memory(error):
                    raise
                log_event("cuDNN cannot compute attention; our kernel does from now on", why=str(error))
                self.takes_prompts = False
        numbers = attention.chunk_items([(prompt.row, prompt.rows)], self.chunk)
        items = to_device(numbers, torch.int32, self.device).view(-1, 2)
        attention.attend_chunks(q, mixed, paged, items, self.chunk)

    def _attend_singles(self, q: Tensor, mixed: Tensor, paged: PagedKV, step: DeviceStep, *, ahead: bool) -> None:
        row_bytes = q.shape[2] * q.element_size()
        shared = None
        if step.shared is not None:
            assert self.shared_room is not None
            shared = self.shared_room.keys(step.shared)
            attend_shared(q, paged, shared, step.shared.members, step.shared.items)
        for which in _in_calls(step.singles):
            count = step.count if which is None else len(which)
            few = which is not None and count < MANY_SINGLES
            if self._latent is not None:
                splits = MIXED if few else pick_splits(count, self._latent.programs)
                latent.attend_rows(q, mixed, paged, splits, self._scratch_for(splits, count), which=which, ahead=ahead)
                continue
            splits = MIXED if few else pick_splits(count, paged.keys.shape[2])
            attention.attend_rows(
                q, mixed, paged, splits, self._scratch_for(splits, count),
                which=which, tile=pick_tile(count, splits, row_bytes), shared=shared, ahead=ahead,
            )  # fmt: skip

    def _scratch_for(self, splits: Splits, rows: int) -> Scratch:
        """Room for the parts of so many rows. It is never given back, since graphs go on using it: so each is for the
        next power of two, and all of them have fewer than four times the rows of the largest step."""
        fitting = [scratch for scratch in self._scratch.get(splits, ()) if len(scratch.arrived) >= rows]
        if fitting:
            return fitting[0]
        c, wide = self.config, 1 << max(0, rows - 1).bit_length()
        dim = self._wide.dim if self._latent is None else self._latent.size
        scratch = attention.make_scratch(wide, c.heads, self._wide.heads, dim, splits, self.device)
        self._scratch.setdefault(splits, []).append(scratch)
        return scratch

    def _first(self, count: int) -> Tensor:
        """The numbers below count [count] int32."""
        if len(self._numbers) < count:
            self._given.append(self._numbers)
            self._numbers = torch.arange(2 * count, dtype=torch.int32, device=self.device)
        return self._numbers[:count]

    # -- what the reader asks for ----------------------------------------------------------------------------------

    def finish(self, x: Tensor, tile: int | None) -> Tensor:
        """The final norm of residual rows [R, E]."""
        return self.decoder.finish(x, tile)

    def logits(self, x: Tensor, tile: int | None) -> Tensor:
        """Logits [R, V] float32 of residual rows [R, E]."""
        return self.finish_logits(self.products_of(x, tile))

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
        self.products(x, rows, h, logits)
        self.finish_logits(logits)

    def products_of(self, x: Tensor, tile: int | None) -> Tensor:
        """What the output matrix makes of residual rows [R, E]: [R, V] float32, without its bias."""
        products = torch.empty(len(x), self.config.vocab_size, dtype=torch.float32, device=self.device)
        self.products(x, None, torch.empty_like(x), products)
        return products

    @property
    def finishes_logits(self) -> bool:
        """Whether logits are not what the output matrix makes of rows."""
        what = self.config.description
        return self._output_bias is not None or what.logit_scale != 1.0 or what.logit_cap is not None

    def finish_logits(self, products: Tensor) -> Tensor:
        """Logits of what `products` gave and adapters have added to, in its place."""
        if self.finishes_logits:
            what = self.config.description
            fused.finish_logits(products, self._output_bias, what.logit_scale, what.logit_cap)
        return products

    def products(self, x: Tensor, rows: Tensor | None, h: Tensor, logits: Tensor) -> None:
        """The final norm and the output matrix."""
        d = self.decoder
        if isinstance(d.output, CudaQuantizedMatrix):
            half = torch.empty_like(h, dtype=torch.float16)
            fused.norm(x, d.final_norm, self.config.norm_eps, half, rows=rows, ahead=self.ahead)
            self.matmuls.quantized(half, d.output, logits)
            return
        if self.deterministic:
            fused.add_and_norm(x, h, self._final_norm, rows=self._first(len(h)) if rows is None else rows)
            self.matmuls.widened(h, d.output, logits)
            return
        if len(h) == 1 and rows is None and self._described is None:
            norm = RmsNorm(d.final_norm, self.config.norm_eps)
            matvec(x[0], d.output, logits[0], norm=norm, ahead=self.ahead)
            return
        fused.add_and_norm(x, h, self._final_norm, rows=rows, ahead=self.ahead)
        self.matmuls.widened(h, d.output, logits)


def _frequencies(decoder: Decoder, sets: Sequence[int]) -> list[Tensor]:
    """The frequencies of each rope, from those of the model or of each layer."""
    if decoder.inv_freq.ndim == 1:
        return [decoder.inv_freq]
    count = 1 + max(sets)
    ropes, rows = decoder.config.rope_sets[0], [decoder.inv_freq[sets.index(number)] for number in range(count)]
    return [row[: rope.dim // 2].contiguous() for row, rope in zip(rows, ropes, strict=True)]


def _wide(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.float()


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
        return AttentionTile(32 if row_bytes <= 1024 else 16, 8, 2)
    if splits.least < 1024:
        return AttentionTile(64, 4, 2)
    if row_bytes > 256:
        return AttentionTile(32, 4, 3)
    if rows > 96:
        return AttentionTile(16, 1, 3)
    return AttentionTile(64, 2, 2) if rows > 40 else AttentionTile(32, 4, 5)


def fixed_tile(dim: int, dtype: torch.dtype) -> AttentionTile:
    """The one tile of a model in deterministic mode; FIXED.least holds a whole number of them."""
    if dim > 256:
        return AttentionTile(16 if dtype == torch.float32 else 32, 8, 2)
    return AttentionTile(32, 4, 2) if dim > 128 or dtype == torch.float32 else AttentionTile(64, 4, 2)
