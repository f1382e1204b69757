"""transformers as a worker: its model and its cache in the plainest greedy loop, without `generate`'s own costs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
import wire


class Worker:
    """One model, in the type its folder is stored in."""

    def load(self, path: str, form: str, *, threads: int, slots: int, sequences: int, total: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[form]
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.threads = threads
        weights = {p.data_ptr(): p.nbytes for p in self.model.parameters()}
        return {
            "version": transformers.__version__,
            "path": f"{self.model.config._attn_implementation}, {str(dtype).removeprefix('torch.')}",
            "weight_bytes": sum(weights.values()),
        }

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        began = wire.now()
        cache = transformers.DynamicCache(config=self.model.config)
        token = self._step(torch.tensor(prompts), cache)
        return self._continue(began, token, cache, tokens)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        began = wire.now()
        self._step(torch.tensor([prompt]), transformers.DynamicCache(config=self.model.config)).tolist()
        return {"seconds": wire.now() - began}

    @torch.inference_mode()
    def fork(self, prompt: list[int], forks: int, tokens: int) -> dict[str, Any]:
        began = wire.now()
        cache = transformers.DynamicCache(config=self.model.config)
        token = self._step(torch.tensor([prompt]), cache)
        cache.batch_repeat_interleave(forks)
        return self._continue(began, token.repeat_interleave(forks, 0), cache, tokens)

    def _step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    def _continue(self, began: float, token: torch.Tensor, cache: Any, tokens: int) -> dict[str, Any]:
        chosen = [token[0].item()]
        first = wire.now()
        for _ in range(tokens - 1):
            token = self._step(token, cache)
            chosen.append(token[0].item())
        return wire.timing(began, first, wire.now(), len(token) * (tokens - 1), chosen)


if __name__ == "__main__":
    wire.main(Worker)
