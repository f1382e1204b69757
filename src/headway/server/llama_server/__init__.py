"""Routes that llama.cpp's server has and other servers do not.

completion       `/completion`: continues a prompt
infill           `/infill`: fills in what is between two texts
templates        `/apply-template`: what a chat's prompt is
adapter_routes   `/lora-adapters`
embeddings       `/embedding`
"""

from __future__ import annotations

from fastapi import APIRouter

from headway.server.api.response_schema import ERRORS
from headway.server.llama_server import adapter_routes, completion, embeddings, infill, templates

router = APIRouter(responses=ERRORS)
for part in (completion, infill, templates, adapter_routes, embeddings):
    router.include_router(part.router)
