"""transformers on a CUDA device as a worker: random weights of a shape, eager or compiled, one by one or batched.

The loops are the plainest there are, in its favor: greedy, without `generate`'s own costs, and no token is read back
before the last one of a run.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import transformers
import wire

BLOCK = 256  # slots in a block of its paged cache, by default
WARM = 4  # steps until a compiled step is captured and replayed


class Worker:
    """One model; with `static`, a cache of so many sequences and slots, and a step that is compiled for it; with
    `batched`, continuous batching for requests of that kind, which have run once."""

    @torch.no_grad()
    def load(
        self,
        shape: dict[str, Any],
        device: str,
        dtype: str,
        static: tuple[int, int] | None,
        batched: dict[str, Any] | None,
    ) -> dict[str, Any]:
        began = wire.now()
        self.device = torch.device(device)
        self.model: Any = _random_model(shape, self.device, getattr(torch, dtype))
        self.cache, self.step = None, _step
        if static is not None:
            self._prepare(*static)
        if batched is not None:
            self._start(**batched)
        return {
            "version": transformers.__version__,
            "attention": self.model.config._attn_implementation,
            "compiled": self.step is not _step,
            "seconds": wire.now() - began,
        }

    @torch.no_grad()
    def decode(self, sequences: int, context: int, tokens: int, repeats: int) -> dict[str, Any]:
        """Seconds a step, after a short run to warm up: the median."""
        self._decode(sequences, context, min(WARM, tokens))
        return {"seconds": statistics.median(self._decode(sequences, context, tokens) for _ in range(repeats))}

    @torch.no_grad()
    def prefill(self, tokens: int, repeats: int) -> dict[str, Any]:
        """Seconds from a prompt to its first token, after two runs to warm up: the median."""
        found = []
        for _ in range(repeats + 2):
            ids = self._ids(1, tokens)
            found.append(self._seconds(lambda ids=ids: _step(self.model, ids, self._new_cache())))
        return {"seconds": statistics.median(found[2:])}

    def many(self, requests: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Seconds for so many requests by continuous batching, all there at once, and how many tokens they got."""
        prompts = self._ids(requests, prompt).tolist()
        began = wire.now()
        generated = self._answers(prompts, tokens)
        return {"seconds": wire.now() - began, "tokens": generated}

    def _start(self, requests: int, prompt: int, tokens: int, graphs: bool | None) -> None:
        """Continuous batching, which goes on by itself, with blocks for half as many requests again."""
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=requests * -(-(prompt + tokens) // BLOCK) * 3 // 2 + 16,
            max_batch_tokens=8192,
            max_requests_per_batch=requests,
            use_cuda_graph=graphs,
        )
        how = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.manager = self.model.init_continuous_batching(generation_config=how, continuous_batching_config=batching)
        self.manager.start()
        self.many(requests, prompt, tokens)

    def _prepare(self, sequences: int, slots: int) -> None:
        """A static cache; on a CUDA device a compiled step, run until it is warm."""
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=slots)
        if self.device.type == "cuda":
            self.step = torch.compile(_step, mode="reduce-overhead", dynamic=False)
        self._decode(sequences, slots - WARM, WARM)

    def _decode(self, sequences: int, context: int, tokens: int) -> float:
        cache = self._new_cache()
        token = _step(self.model, self._ids(sequences, context), cache)

        def steps(token: torch.Tensor = token) -> torch.Tensor:
            for _ in range(tokens):
                torch.compiler.cudagraph_mark_step_begin()
                token = self.step(self.model, token, cache).clone()
            return token

        return self._seconds(steps) / tokens

    def _new_cache(self) -> Any:
        if self.cache is None:
            return transformers.DynamicCache(config=self.model.config)
        self.cache.reset()
        return self.cache

    def _ids(self, sequences: int, tokens: int) -> torch.Tensor:
        return torch.randint(self.model.config.vocab_size, (sequences, tokens), device=self.device)

    def _seconds(self, work: Callable[[], torch.Tensor]) -> float:
        """Seconds until what the work gives is on the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = wire.now()
        work().tolist()
        return wire.now() - began

    def _answers(self, prompts: list[list[int]], tokens: int) -> int:
        """How many tokens came back for these prompts in all."""
        manager = self.manager
        missing = set(manager.add_requests(inputs=prompts, max_new_tokens=tokens))
        generated = 0
        while missing:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("its generation thread ended by itself")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"a request failed: {result.error}")
                missing.remove(result.request_id)
                generated += len(result.generated_tokens)
        return generated


def _step(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The likeliest next token of each sequence. [R, 1]"""
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)


def _random_model(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(**shape)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


if __name__ == "__main__":
    wire.main(Worker)
    os._exit(0)  # a manager's thread would go on
