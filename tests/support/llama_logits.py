"""The logits of a GGUF file by llama.cpp: `PYTHON llama_logits.py MODEL IDS OUT`. That Python has llama-cpp-python.

Float32 KV cache, no flash attention, one batch. IDS are numbers with commas; OUT is an .npy file [T, V].
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


def logits(path: str, ids: list[int]) -> np.ndarray:
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    how = llama_cpp.llama_context_default_params()
    how.n_ctx = how.n_batch = how.n_ubatch = 512
    how.n_threads = how.n_threads_batch = 2
    how.type_k = how.type_v = llama_cpp.GGML_TYPE_F32
    how.swa_full = True
    if hasattr(how, "flash_attn_type"):
        how.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, how)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if llama_cpp.llama_decode(context, batch):
        sys.exit("llama_decode failed")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = llama_cpp.llama_get_logits(context)
    return np.ctypeslib.as_array(ctypes.cast(rows, ctypes.POINTER(ctypes.c_float)), (len(ids), vocab)).copy()


if __name__ == "__main__":
    np.save(sys.argv[3], logits(sys.argv[1], [int(id) for id in sys.argv[2].split(",")]))
