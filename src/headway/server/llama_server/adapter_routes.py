"""`/lora-adapters`: the adapters of a model as llama-server lists them, by number."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from headway.server.api.response_schema import Responses, ResponseSchema
from headway.server.errors import bad_request
from headway.server.models import requested_model

router = APIRouter()


class ListedAdapter(ResponseSchema):
    """An adapter: the number that `lora` has for it, and how much of it a request has that does not say."""

    id: int
    path: str
    scale: float


LISTED: Responses = {200: {"model": list[ListedAdapter], "description": "The adapters"}}


@router.get("/lora-adapters", summary="List the adapters of a model", response_model=None, responses=LISTED)
async def adapters(request: Request, model: str | None = None) -> list[dict[str, Any]]:
    """The adapters of a model, by their names on this server. A request uses those of its `lora` alone, or the one that
    its `model` names."""
    lease = await requested_model(request, model)
    return [{"id": i, "path": name, "scale": 0.0} for i, name in enumerate(lease.model.adapters.names)]


@router.post("/lora-adapters", summary="Refused: scales are set in requests", response_model=None, responses=LISTED)
async def set_adapters() -> None:
    """Scales for all clients are refused: a request says its own."""
    raise bad_request(
        "scales of adapters are not set for all requests here; pass lora in each, or an adapter's name as its model",
        code="unsupported",
    )
