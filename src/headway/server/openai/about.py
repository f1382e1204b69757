"""Routes about the model: its names, tokenization, its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.engine import Engine
from headway.server.api.checks import RequestChecks, unknown_token
from headway.server.api.parsing import JsonRoute
from headway.server.api.plan import check_tools
from headway.server.api.prompts import decode, encode
from headway.server.api.request_schema import DetokenizeRequest, TokenizeRequest
from headway.server.api.response_schema import Detokenized, ModelCard, ModelList, Tokenized, TokenizerInfo, ok
from headway.server.api.streaming import json_bytes
from headway.server.api.tokens import text_of, token_bytes
from headway.server.chats.fields import template_variables
from headway.server.chats.messages import read_chat_prompt, texts_of
from headway.server.errors import bad_request
from headway.server.models import ServedModel, requested_model
from headway.server.pooling.models import PoolingModel
from headway.server.serving import Serving
from headway.text.tokenizer import Tokenizer

OF_CONTENT, OF_PROMPT = ("add_special", "parse_special", "with_pieces"), ("add_special_tokens", "special")

router = APIRouter(route_class=JsonRoute)


@router.get("/models", summary="List the models", response_model=None, responses=ok(ModelList))
@router.get("/v1/models", summary="List the models", response_model=None, responses=ok(ModelList))
async def models(request: Request) -> dict[str, Any]:
    """Every model under each of its names, its adapters, and the models for embeddings, scores and labels."""
    serving: Serving = request.app.state.serving
    await listed_models(serving)
    cards = [card for one in serving.models.all() for card in _cards(one)]
    return {
        "object": "list",
        "data": cards + [_pooling_card(serving, pool) for pool in request.app.state.pooling_models.names().values()],
    }


@router.get("/v1/models/{model:path}", summary="One model", response_model=None, responses=ok(ModelCard))
async def model(model: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    serving: Serving = request.app.state.serving
    await listed_models(serving)
    pool = request.app.state.pooling_models.names().get(model)
    if pool is not None and model not in serving.models.names():
        return _pooling_card(serving, pool)
    served, adapter = await serving.models.find(model)
    return _model_card(served, model) if adapter is None else _adapter_card(served, adapter)


async def listed_models(serving: Serving) -> None:
    """Have the list of models as it is now; raises a 503 while the only model loads."""
    if serving.models.is_single:
        await serving.models.peek(None)
    else:
        await serving.models.refresh()


def _cards(model: ServedModel) -> list[dict[str, Any]]:
    return [
        *(_model_card(model, name) for name in model.source.names),
        *(_adapter_card(model, name) for name in model.adapters.known),
    ]


def _adapter_card(model: ServedModel, name: str) -> dict[str, Any]:
    """An adapter is a model whose parent is the one that it is for."""
    adapter = model.adapters.names.get(name)
    created = 0 if adapter is None else adapter.loaded_at
    own = {"created": created, "root": name, "parent": model.name, "size": model.adapters.size(name)}
    return _model_card(model, name) | own


def _pooling_card(serving: Serving, pool: PoolingModel) -> dict[str, Any]:
    return {
        "id": pool.name,
        "object": "model",
        "created": serving.started_at or 0,
        "owned_by": "headway",
        "root": pool.name,
        "parent": None,
        "max_model_len": getattr(pool.task, "limit", None),
        "state": "ready",
        "size": pool.size,
        "progress": None,
        "meta": None,
        "role": pool.role,
    }


def _model_card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.loaded_at or 0,
        "owned_by": "headway",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_length,
        "state": model.shown_state,
        "size": model.weight_bytes,
        "progress": None if model.progress is None else model.progress[0] / max(1, model.progress[1]),
        "meta": None if model.engine is None else _meta(model.engine),
        "role": "generate",
    }


def _meta(engine: Engine) -> dict[str, int]:
    return {
        "n_vocab": engine.vocab_size,
        "n_ctx_train": engine.config.max_positions,
        "n_embd": engine.config.hidden_size,
        "n_params": engine.info.parameters,
        "size": engine.info.weight_bytes,
    }


@router.post("/tokenize", summary="Tokenize a text or a chat", response_model=None, responses=ok(Tokenized))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, with a BOS token if the model uses one, or of a chat in the model's template."""
    serving: Serving = request.app.state.serving
    lease = await requested_model(request, body.model)
    body = _with_prompt(body)
    with serving.queue_slot(serving.tenant(request)):
        return Response(
            await serving.readers.run(_tokenize, body, RequestChecks(serving, lease.engine)),
            media_type="application/json",
        )


def _with_prompt(body: TokenizeRequest) -> TokenizeRequest:
    """The request with `content` and its options, which are llama-server's, as a prompt and the options of that."""
    if sum(one is not None for one in (body.prompt, body.content, body.messages)) != 1:
        raise bad_request("pass exactly one of prompt, content and messages", "prompt")
    for field in OF_CONTENT if body.content is None else OF_PROMPT:
        if getattr(body, field) is not None:
            raise bad_request(f"{field} cannot be combined with {_given(body)}; remove it", field)
    if body.content is None:
        return body
    special = {"add_special_tokens": body.add_special is True, "special": body.parse_special is not False}
    return body.model_copy(update={"prompt": body.content, **special})


def _given(body: TokenizeRequest) -> str:
    return next(name for name in ("content", "prompt", "messages") if getattr(body, name) is not None)


def _tokenize(body: TokenizeRequest, check: RequestChecks) -> bytes:
    engine, ids = check.engine, _ids(body, check)
    result: dict[str, Any] = {"count": len(ids), "max_model_len": engine.config.max_positions, "tokens": ids}
    if body.return_token_strs:
        result["token_strs"] = [text_of(id, engine) for id in ids]
    if body.with_pieces:
        result["tokens"] = [{"id": id, "piece": _piece(id, engine)} for id in ids]
    return json_bytes(result)


def _piece(id: int, engine: Engine) -> str | list[int]:
    """A token's text, or its bytes if they are part of a character."""
    spelled = token_bytes(id, engine)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


def _ids(body: TokenizeRequest, check: RequestChecks) -> Sequence[int]:
    if body.messages is None:
        check.text([body.prompt or ""], "prompt")
        return _text_ids(body, check.engine)
    check_tools(body.tools or (), check.settings)
    check.text(texts_of(body.messages), "messages")
    return _chat_ids(body, check.engine)


def _text_ids(body: TokenizeRequest, engine: Engine) -> Sequence[int]:
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
    id = tokenizer.token_to_id(text)
    return id if id in tokenizer.special_ids else None


def _chat_ids(body: TokenizeRequest, engine: Engine) -> Sequence[int]:
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
        variables=template_variables(body.chat_template_kwargs, engine.chat_template),
    ).ids


@router.post("/detokenize", summary="Decode tokens", response_model=None, responses=ok(Detokenized))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, including the names of special tokens."""
    serving: Serving = request.app.state.serving
    lease = await requested_model(request, body.model)
    with serving.queue_slot(serving.tenant(request)):
        text = await serving.readers.run(_detokenize, body, lease.engine)
    return Response(text, media_type="application/json")


def _detokenize(body: DetokenizeRequest, engine: Engine) -> bytes:
    for i, id in enumerate(body.tokens):
        if not 0 <= id < engine.vocab_size:
            raise unknown_token(f"tokens[{i}]", id, engine.vocab_size, "tokens")
    _ = engine.tokenizer  # raises for a model without one
    text = decode(body.tokens, engine)
    return json_bytes({"prompt": text, "content": text})


@router.get("/tokenizer_info", summary="The tokenizer", response_model=None, responses=ok(TokenizerInfo))
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """What a client needs to tokenize as the server does."""
    engine = (await requested_model(request, model)).engine
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
