"""llama.cpp as a worker, by llama-cpp-python's low-level calls: batches and sequences as its own tools use them.

Tokens are chosen by numpy over the logits it gives, which costs less than its sampler over all candidates.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import llama_cpp as C
import numpy as np
import wire

BATCH = 4096  # tokens that one call may take
MICRO = 512  # rows that it computes at a time, its own default
KINDS = {"q4_k": C.LLAMA_FTYPE_MOSTLY_Q4_K_M}


class Worker:
    """One model; a context for each number of sequences, made when first asked for."""

    def load(self, path: str, form: str, *, threads: int, slots: int, sequences: int, total: int) -> dict[str, Any]:
        C.llama_backend_init()
        self.threads = threads
        model = C.llama_model_load_from_file(path.encode(), C.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.model: Any = model
        self.words = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
        self.batch: Any = C.llama_batch_init(BATCH, 0, 1)
        self.context = lru_cache(maxsize=None)(self._context)
        description = ctypes.create_string_buffer(128)
        C.llama_model_desc(model, description, 128)
        features = C.llama_print_system_info().decode().replace(" = 1", "").replace(" |", "").strip()
        return {
            "version": C.__version__,
            "path": f"{description.value.decode()}; {features}",
            "weight_bytes": C.llama_model_size(model),
        }

    def decode(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        context = self.context(len(prompts), len(prompts) * (max(map(len, prompts)) + tokens), False)
        began = wire.now()
        rows = [(token, at, s, at == len(p) - 1) for s, p in enumerate(prompts) for at, token in enumerate(p)]
        chosen = self._run(context, rows, len(prompts))
        return self._continue(context, began, chosen, [len(p) for p in prompts], tokens)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        return {"seconds": self.decode([prompt], 1)["prompt_seconds"]}

    def fork(self, prompt: list[int], forks: int, tokens: int) -> dict[str, Any]:
        context = self.context(forks, len(prompt) + forks * tokens, True)
        began = wire.now()
        chosen = self._run(context, [(token, at, 0, at == len(prompt) - 1) for at, token in enumerate(prompt)], 1)
        memory = C.llama_get_memory(context)
        for sequence in range(1, forks):
            C.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        return self._continue(context, began, chosen * forks, [len(prompt)] * forks, tokens)

    def _context(self, sequences: int, slots: int, shared: bool) -> Any:
        """`shared` lets sequences have cells in common; apart from that each has a buffer of its own."""
        options = C.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = slots + 256 * sequences, BATCH, MICRO
        options.n_seq_max, options.kv_unified = sequences, shared
        options.n_threads = options.n_threads_batch = self.threads
        options.no_perf = True
        context = C.llama_init_from_model(self.model, options)
        if not context:
            raise RuntimeError(f"llama.cpp could not make a context of {sequences} sequences and {slots} slots")
        return context

    def _continue(
        self, context: Any, began: float, chosen: list[int], lengths: list[int], tokens: int
    ) -> dict[str, Any]:
        first, text = wire.now(), [chosen[0]]
        for step in range(tokens - 1):
            rows = [(chosen[s], length + step, s, True) for s, length in enumerate(lengths)]
            chosen = self._run(context, rows, len(rows))
            text.append(chosen[0])
        ended = wire.now()
        C.llama_memory_clear(C.llama_get_memory(context), False)
        return wire.timing(began, first, ended, len(lengths) * (tokens - 1), text)

    def _run(self, context: Any, rows: list[tuple[int, int, int, bool]], outputs: int) -> list[int]:
        """Compute rows of (token, position, sequence, whether it is read); the likeliest token of each that is read."""
        if len(rows) > BATCH:
            raise ValueError(f"{len(rows)} rows in one call; it takes {BATCH}")
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, read) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, read
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if code := C.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        logits = np.ctypeslib.as_array(C.llama_get_logits(context), (outputs, self.words))
        return logits.argmax(-1).tolist()


def quantize(source: str, target: str, form: str, threads: int) -> dict[str, Any]:
    """Write `source`, a GGUF file of floats, in one of llama.cpp's own formats."""
    options = C.llama_model_quantize_default_params()
    options.ftype, options.nthread = KINDS[form], threads
    if code := C.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama_model_quantize gave {code}")
    return {"path": target}


def logits(path: str, tokens: str, target: str, threads: int) -> dict[str, Any]:
    """Read pieces of text, an int array [pieces, tokens] in a file, each by itself; write all logits to `target`."""
    worker, pieces = Worker(), np.load(tokens)
    about = worker.load(path, "", threads=threads, slots=0, sequences=1, total=0)
    context = worker.context(1, pieces.shape[1], False)
    found = np.lib.format.open_memmap(target, "w+", np.float32, (*pieces.shape, worker.words))
    for piece, rows in zip(pieces.tolist(), found, strict=True):
        worker._run(context, [(token, at, 0, True) for at, token in enumerate(piece)], len(piece))
        rows[:] = np.ctypeslib.as_array(C.llama_get_logits(context), (len(piece), worker.words))
        C.llama_memory_clear(C.llama_get_memory(context), False)
    found.flush()
    return {"version": about["version"], "path": about["path"]}


if __name__ == "__main__":
    wire.main(Worker, {"quantize": quantize, "logits": logits})
