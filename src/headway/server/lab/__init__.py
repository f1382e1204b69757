"""The Lab: a page at /lab that shows how live logits become a token, and its small API.

    schema    the requests and responses below
    tracing   POST /lab/api/trace: one pass with everything requested about it
    branches  POST /lab/api/branches: continuations of one prompt that share pages
    monitor   GET  /lab/api/model, vocab, pages, steps: the model, and what the engine is doing
    page      GET  /lab/…: the page itself, plain files under static/ with a strict Content-Security-Policy

It has three data formats.

**A trace.** `TraceRequest` → `TraceResponse`. Arrays are sent as `Base64Array`. The page gets all V logits as float32
and works in float64 from there, by the rules of `kernels/reference/sampling`: the same order of filters, the same
ranking (by probability, then by lower id), the same counter-based random numbers.

**The recorded distribution.** `static/recorded.bin`, for a page with no server: gzip of JSON {"made_by", "model",
"vocab", "trace", "greedy"}, where "model", "vocab" and "trace" are the API's responses for one prompt
and "greedy" is a greedy generation. `python -m headway.server.lab.record` writes it from the default model.

**A link.** The part of the URL after `#lab?s=`: base64url of JSON, which no server ever sees.

    {"v": 1,                   its version
     "model": "smollm2",       the model it was made with; the page says so if it has another
     "prompt": "…",
     "params": {"temperature": 0.7, "top_k": 0, …},
     "seed": 7,
     "mask": null | {"kind": "window" | "sink" | "cells", …},
     "tree": [[token, parent], …],    nodes in the order they were added; parent −1 is the prompt
     "at": 3,                  the selected node; −1 is the prompt
     "tab": "next"}
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.api.response_schema import ERRORS
from headway.server.lab import branches, monitor, page, tracing

router = APIRouter(responses=ERRORS)
for part in (tracing, branches, monitor, page):
    router.include_router(part.router)
