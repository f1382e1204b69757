"""The Lab: a page at /lab on which live logits become a token, and the small API that it and others may call.

    wire      the requests and answers below
    tracing   POST /lab/api/trace: one pass with everything asked for
    branches  POST /lab/api/branches: continuations of one prompt that share pages
    watching  GET  /lab/api/model, vocab, pages, steps: what is served, and what the engine does
    page      GET  /lab/…: the page itself, plain files under static/, behind a strict Content-Security-Policy

Three kinds of data go between the engine, the page and whoever keeps a link.

**A trace.** `TraceRequest` → `Trace`. Arrays travel as `Packed`: base64 of little-endian numbers. All V logits come
as float32, and the page works in float64 from there, by the rules of `kernels/reference/sampling`: the same order of filters,
the same ranking (by probability, then by lower id), the same counter-based draws.

**The recorded distribution.** `static/recorded.bin`, for a page with no server: gzip of JSON {"made_by", "model",
"vocab", "trace", "greedy"}, where "model", "vocab" and "trace" are what the API answered for one prompt
and "greedy" is a greedy run. `python -m headway.server.lab.record` writes it from the default model.

**A link.** The part of the address behind `#lab?s=`: base64url of JSON, which no server ever sees.

    {"v": 1,                   its version
     "model": "smollm2",       which model it was made on; another one is told
     "prompt": "…",
     "knobs": {"temperature": 0.7, "top_k": 0, …},
     "seed": 7,
     "mask": null | {"kind": "window" | "sink" | "cells", …},
     "tree": [[token, parent], …],    nodes in the order they were taken; parent −1 is the prompt
     "at": 3,                  the node that is shown; −1 is the prompt
     "tab": "next"}
"""  # noqa: E501

from __future__ import annotations

from fastapi import APIRouter

from headway.server.lab import branches, page, tracing
from headway.server.lab import monitor as watching
from headway.server.openai.response_schema import ERRORS

router = APIRouter(responses=ERRORS)
for part in (tracing, branches, watching, page):
    router.include_router(part.router)
