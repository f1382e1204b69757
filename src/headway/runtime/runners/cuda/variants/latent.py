"""Latent attention on a CUDA device: what is computed of rows before they attend to slots, and after.

h ──▶ queries, or their latent vectors ──norm──▶ queries ──▶ q [rotated, taken to the latent space]
  └─▶ latent vectors and keys ──norm, rotation──▶ KV cache
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headway.kernels.triton import fused
from headway.kernels.triton.adapters.expert_lora import add_low_rank
from headway.kernels.triton.experts.matmul import Routes
from headway.kernels.triton.variants import latent
from headway.models.description import LatentAttention
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.buffers import Buffers
from headway.runtime.runners.cuda.matmuls import Matmuls
from headway.runtime.runners.cuda.steps import DeviceStep

MOST = 1 << 16  # numbers of the results of rows that attention takes in one call in deterministic mode, for each part


class LatentRows:
    """The latent attention of the layers of one decoder. `size` is that of what a head gets of attention."""

    def __init__(self, layers: Sequence[Any], what: LatentAttention, matmuls: Matmuls) -> None:
        self._layers, self._what, self._matmuls = layers, what, matmuls
        heads = layers[0].heads
        self.size = what.size
        self.programs = latent.row_programs(heads, matmuls.dtype)
        self.at_once = max(8, min(128, MOST // (heads * what.size)))

    def project(self, l: int, h: Tensor, buffers: Buffers, adapters: StepTiles | None) -> None:
        """Queries of rows h [R, E], in the latent space but for what is rotated of them; what slots are made of."""
        layer, what, project, rows = self._layers[l], self._what, self._matmuls.project, len(h)
        room = buffers.latent
        assert room is not None
        queries = room.queries[:rows]
        if layer.q_up is None:
            project((l, "qkv", 0), h, layer.qkv, queries, adapters)
        else:
            low, normed = room.low[:rows], room.normed[:rows]
            project((l, "qkv", 0), h, layer.qkv, low, adapters)
            fused.norm(low, layer.q_down_norm, what.eps, normed, ahead=self._matmuls.ahead)
            project((l, "q_up"), normed, layer.q_up, queries, adapters)
        project((l, "qkv", 1), h, layer.kv_down, room.down[:rows], adapters)
        plain = queries.unflatten(1, (layer.heads, -1))[..., : what.key_dim]
        self._by_head(plain, layer.key_up, buffers.q[:rows, :, what.rotated :])
        self._add((l, "key_up"), plain, buffers.q[:rows, :, what.rotated :], adapters)

    def rotate_and_write(self, l: int, step: DeviceStep, buffers: Buffers, slots: Tensor, cs: Tensor) -> None:
        """The rest of queries, and the slots of the step's rows."""
        layer, what, n = self._layers[l], self._what, step.count
        room = buffers.latent
        assert room is not None
        queries, down, norm = room.queries[:n].unflatten(1, (layer.heads, -1)), room.down[:n], layer.kv_down_norm
        latent.rotate_and_write(
            queries, down, buffers.q[:n], slots, step.ints, step.rows, cs, norm, what.eps,
            paired=what.paired, ahead=self._matmuls.ahead,
        )  # fmt: skip

    def from_latent(self, l: int, mixed: Tensor, buffers: Buffers, adapters: StepTiles | None) -> Tensor:
        """The outputs of all heads [R, H × value], of what attention gave them [R, H × latent]."""
        room = buffers.latent
        assert room is not None
        heads = room.heads[: len(mixed)]
        latents = mixed.unflatten(1, (heads.shape[1], -1))
        self._by_head(latents, self._layers[l].value_up, heads)
        self._add((l, "value_up"), latents, heads, adapters)
        return heads.flatten(1)

    def _add(self, at: tuple[int, str], x: Tensor, y: Tensor, adapters: StepTiles | None) -> None:
        """Add to what heads made [R, H, N] of x [R, H, K] what adapters make of it."""
        terms = self._matmuls.expert_terms(*at, adapters)
        if not terms:
            return
        rows, heads, _ = x.shape
        chosen = torch.arange(heads, dtype=torch.int32, device=x.device).repeat(rows, 1)
        for term in terms:
            pairs, made = (t.as_strided((rows * heads, t.shape[2]), (t.stride(1), 1)) for t in (x, y))
            add_low_rank(pairs, made, Routes(chosen, chosen), term, ahead=self._matmuls.ahead)

    def _by_head(self, x: Tensor, matrices: Tensor, out: Tensor) -> None:
        latent.by_head(x, matrices, out, exact=self._matmuls.deterministic, ahead=self._matmuls.ahead)
