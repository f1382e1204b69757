"""Routes that load and unload LoRA adapters, as vLLM has them. A server has them only with --lora-dir."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from headway.base.text import short_repr
from headway.server import logs
from headway.server.api.parsing import JsonRoute
from headway.server.api.request_schema import LoadAdapterRequest, UnloadAdapterRequest
from headway.server.api.response_schema import ERRORS
from headway.server.errors import ApiError, bad_request
from headway.server.models import requested_model
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder or a .gguf file below the server's --lora-dir; its name is then a model's."""
    serving: Serving = request.app.state.serving
    _check_admin(serving, request)
    lease, models = await requested_model(request, body.base_model_name), serving.models
    if lease.adapter is not None:
        raise bad_request(
            f"base_model_name is {short_repr(body.base_model_name)}, an adapter itself", "base_model_name"
        )
    owner = models.adapter_owner(body.lora_name)
    await lease.model.adapters.load(
        lease.engine,
        body.lora_name,
        body.lora_path,
        is_taken=models.is_taken(body.lora_name) or owner not in (None, lease.model),
        others=sum(len(one.adapters.known) for one in models.all() if one is not lease.model),
        replace=bool(body.load_inplace),
    )
    logs.info("loaded an adapter", adapter=body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Unload an adapter; requests that use it go on."""
    serving: Serving = request.app.state.serving
    _check_admin(serving, request)
    owner = serving.models.adapter_owner(body.lora_name) or serving.default_model
    await owner.adapters.unload(owner.engine, body.lora_name)
    logs.info("unloaded an adapter", adapter=body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_admin(serving: Serving, request: Request) -> None:
    if not serving.tenant(request).admin:
        raise ApiError(
            403, "adapters are loaded and unloaded with an admin key (--new-key NAME --admin) only", code="not_admin"
        )
