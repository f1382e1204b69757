"""Routes about the model: its names, tokenization, its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.engine import Engine
from headway.server.adapters import ServedAdapter
from headway.server.errors import bad_request
from headway.server.openai.chat_fields import template_variables
from headway.server.openai.checks import RequestChecks, unknown_token
from headway.server.openai.messages import read_chat_prompt, texts_of
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.plan import check_tools
from headway.server.openai.prompts import decode, encode
from headway.server.openai.request_schema import DetokenizeRequest, TokenizeRequest
from headway.server.openai.respond import requested_adapter
from headway.server.openai.response_schema import Detokenized, ModelCard, ModelList, Tokenized, TokenizerInfo, ok
from headway.server.openai.streaming import json_bytes
from headway.server.openai.tokens import text_of
from headway.server.pooling.models import PoolingModel
from headway.server.serving import Serving
from headway.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", summary="List the models", response_model=None, responses=ok(ModelList))
async def models(request: Request) -> dict[str, Any]:
    """The engine's model under each of its names, and the models for embeddings, scores and labels."""
    serving: Serving = request.app.state.serving
    cards = [_model_card(serving, name) for name in serving.model_names()]
    cards += [_adapter_card(serving, adapter) for adapter in serving.adapters.names.values()]
    return {
        "object": "list",
        "data": cards + [_pooling_card(serving, pool) for pool in request.app.state.pooling_models.names().values()],
    }


@router.get("/v1/models/{model:path}", summary="One model", response_model=None, responses=ok(ModelCard))
async def model(model: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    serving: Serving = request.app.state.serving
    if (pool := request.app.state.pooling_models.names().get(model)) is not None and model not in serving.model_names():
        return _pooling_card(serving, pool)
    if (adapter := requested_adapter(serving, model)) is not None:
        return _adapter_card(serving, adapter)
    return _model_card(serving, model)


def _adapter_card(serving: Serving, adapter: ServedAdapter) -> dict[str, Any]:
    """An adapter is a model whose parent is the engine's."""
    own = {"created": adapter.loaded_at, "root": adapter.name, "parent": serving.model_name}
    return _model_card(serving, adapter.name) | own


def _pooling_card(serving: Serving, pool: PoolingModel) -> dict[str, Any]:
    return _model_card(serving, pool.name) | {"root": pool.name, "max_model_len": pool.task.limit}


def _model_card(serving: Serving, name: str) -> dict[str, Any]:
    limit = serving.engine.config.max_positions
    return {
        "id": name,
        "object": "model",
        "created": serving.loaded_at or 0,
        "owned_by": "headway",
        "root": serving.model_name,
        "parent": None,
        "max_model_len": limit,
    }


@router.post("/tokenize", summary="Tokenize a text or a chat", response_model=None, responses=ok(Tokenized))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, with a BOS token if the model uses one, or of a chat in the model's template."""
    serving: Serving = request.app.state.serving
    requested_adapter(serving, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("pass exactly one of prompt and messages", "prompt")
    with serving.queue_slot(serving.tenant(request)):
        return Response(
            await serving.readers.run(_tokenize, body, RequestChecks(serving)), media_type="application/json"
        )


def _tokenize(body: TokenizeRequest, check: RequestChecks) -> bytes:
    engine, ids = check.engine, _ids(body, check)
    result: dict[str, Any] = {"count": len(ids), "max_model_len": engine.config.max_positions, "tokens": ids}
    if body.return_token_strs:
        result["token_strs"] = [text_of(id, engine) for id in ids]
    return json_bytes(result)


def _ids(body: TokenizeRequest, check: RequestChecks) -> tuple[int, ...]:
    if body.messages is None:
        check.text([body.prompt or ""], "prompt")
        return _text_ids(body, check.engine)
    check_tools(body.tools or (), check.settings)
    check.text(texts_of(body.messages), "messages")
    return _chat_ids(body, check.engine)


def _text_ids(body: TokenizeRequest, engine: Engine) -> tuple[int, ...]:
    """The ids of a text.

    Names of special tokens are plain text, as they are in prompts, unless `special` is set; but a text that consists of
    one such name is that token, so that clients can look up its id.
    """
    assert body.prompt is not None
    for field in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, field) is not None:
            raise bad_request(f"{field} can only be used with messages; remove it", field)
    begin = body.add_special_tokens is not False
    if body.special is None and (name := special_id(body.prompt, engine.tokenizer)) is not None:
        return encode(body.prompt, engine, begin=begin, special=True) if begin else (name,)
    return encode(body.prompt, engine, begin=begin, special=bool(body.special))


def special_id(text: str, tokenizer: Tokenizer) -> int | None:
    """The id of the special token with this name, or None."""
    id = tokenizer.backend.token_to_id(text)
    return id if id in tokenizer.special_ids else None


def _chat_ids(body: TokenizeRequest, engine: Engine) -> tuple[int, ...]:
    assert body.messages is not None
    for field in ("add_special_tokens", "special"):
        if getattr(body, field) is not None:
            raise bad_request(
                f"{field} can only be used with prompt, since the template decides for messages; remove it", field
            )
    return read_chat_prompt(
        body.messages,
        body.tools or [],
        engine,
        cue=body.add_generation_prompt is not False,
        continue_last=bool(body.continue_final_message),
        variables=template_variables(body.chat_template_kwargs, engine),
    ).ids


@router.post("/detokenize", summary="Decode tokens", response_model=None, responses=ok(Detokenized))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, including the names of special tokens."""
    serving: Serving = request.app.state.serving
    requested_adapter(serving, body.model)
    with serving.queue_slot(serving.tenant(request)):
        text = await serving.readers.run(_detokenize, body, serving.engine)
    return Response(text, media_type="application/json")


def _detokenize(body: DetokenizeRequest, engine: Engine) -> bytes:
    for i, id in enumerate(body.tokens):
        if not 0 <= id < engine.vocab_size:
            raise unknown_token(f"tokens[{i}]", id, engine.vocab_size, "tokens")
    _ = engine.tokenizer  # raises for a model without one
    return json_bytes({"prompt": decode(body.tokens, engine)})


@router.get("/tokenizer_info", summary="The tokenizer", response_model=None, responses=ok(TokenizerInfo))
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to tokenize as the server does."""
    serving: Serving = request.app.state.serving
    engine = serving.engine
    tokenizer, template = engine.tokenizer, engine.chat_template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": engine.config.max_positions,
        "add_bos_token": tokenizer.add_bos,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_ids": list(tokenizer.eos_ids),
        **tokenizer.special_tokens,
        "chat_template": None if template is None else template.source,
    }
