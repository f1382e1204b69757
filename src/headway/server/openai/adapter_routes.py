"""Routes that load and unload LoRA adapters, as vLLM has them. A server has them only with --lora-dir."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from headway.server import logs
from headway.server.errors import ApiError
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.request_schema import LoadAdapterRequest, UnloadAdapterRequest
from headway.server.openai.response_schema import ERRORS
from headway.server.serving import Serving

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder or a .gguf file below the server's --lora-dir; its name is then a model's."""
    serving: Serving = request.app.state.serving
    _check_admin(serving, request)
    taken = (*serving.model_names(), serving.settings.model)
    await serving.adapters.load(
        serving.engine, body.lora_name, body.lora_path, taken=taken, replace=bool(body.load_inplace)
    )
    logs.info("loaded an adapter", adapter=body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", summary="Unload a LoRA adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Unload an adapter; requests that use it go on."""
    serving: Serving = request.app.state.serving
    _check_admin(serving, request)
    await serving.adapters.unload(serving.engine, body.lora_name)
    logs.info("unloaded an adapter", adapter=body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_admin(serving: Serving, request: Request) -> None:
    if not serving.tenant(request).admin:
        raise ApiError(
            403, "adapters are loaded and unloaded with an admin key (--new-key NAME --admin) only", code="not_admin"
        )
