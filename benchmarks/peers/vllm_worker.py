"""vLLM on a CPU as a worker: its engine in this process, stepped by hand so that every token has its moment."""

from __future__ import annotations

import itertools
import os
from typing import Any

import wire

# Read when vllm is imported: one process, room for keys and values in GiB.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Worker:
    """One engine over a Hugging Face folder, eager: compiling takes minutes here and gave nothing."""

    def load(self, path: str, form: str, *, threads: int, slots: int, sequences: int, total: int) -> dict[str, Any]:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import vllm

        self.vllm: Any = vllm
        dtype = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[form]
        model = vllm.LLM(
            path,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max(slots, 64),
            max_num_seqs=max(sequences, 1),
            max_num_batched_tokens=max(slots, 2048),
        )
        self.engine: Any = model.llm_engine
        self.names = itertools.count()
        return {"version": vllm.__version__, "path": f"eager, {dtype}"}

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        options = self.vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = wire.now()
        names = [str(next(self.names)) for _ in prompts]
        for name, prompt in zip(names, prompts):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, options)
        try:
            stamps, texts = self._run(names)
        except Exception:
            self.engine.abort_request(names)
            raise
        if any(len(times) != tokens for times in stamps.values()):
            raise RuntimeError(f"{[len(t) for t in stamps.values()]} tokens came where {tokens} were asked for")
        first, ended = max(t[0] for t in stamps.values()), max(t[-1] for t in stamps.values())
        after = sum(moment > first for times in stamps.values() for moment in times)
        return wire.timing(began, first, ended, after, texts[names[0]])

    def _run(self, names: list[str]) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
        """Step until nothing is left: when each request's tokens came, and which."""
        stamps: dict[str, list[float]] = {name: [] for name in names}
        texts: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            outputs, moment = self.engine.step(), wire.now()
            for output in outputs:
                texts[output.request_id] = list(output.outputs[0].token_ids)
                new = len(texts[output.request_id]) - len(stamps[output.request_id])
                stamps[output.request_id] += [moment] * new
        return stamps, texts

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": self.decode([prompt], 1)["prompt_seconds"]}


if __name__ == "__main__":
    wire.main(Worker)
