"""What a client can ask about the model: its names, its tokens, its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.engine import Engine
from headway.server.errors import bad_request
from headway.server.openai.checks import Check, outside
from headway.server.openai.messages import read_talk, texts_of
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.plan import check_tools
from headway.server.openai.prompts import decode, encode
from headway.server.openai.request_schema import DetokenizeRequest, TokenizeRequest
from headway.server.openai.respond import check_model
from headway.server.openai.response_schema import Detokenized, Model, ModelList, Tokenized, TokenizerInfo, ok
from headway.server.openai.streaming import packed
from headway.server.openai.tokens import text_of
from headway.server.pooling.pools import Pool
from headway.server.serving import Serving
from headway.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", summary="The models that are served", response_model=None, responses=ok(ModelList))
async def models(request: Request) -> dict[str, Any]:
    """The model of this server under each of its names, and those beside it for vectors, scores and labels."""
    serving: Serving = request.app.state.serving
    own = [_model(serving, name) for name in serving.model_names()]
    return {
        "object": "list",
        "data": own + [_beside(serving, pool) for pool in request.app.state.pools.names().values()],
    }


@router.get("/v1/models/{model:path}", summary="One model", response_model=None, responses=ok(Model))
async def model(model: str, request: Request) -> dict[str, Any]:
    """One model, by a name that it goes by."""
    serving: Serving = request.app.state.serving
    if (pool := request.app.state.pools.names().get(model)) is not None and model not in serving.model_names():
        return _beside(serving, pool)
    check_model(serving, model)
    return _model(serving, model)


def _beside(serving: Serving, pool: Pool) -> dict[str, Any]:
    return _model(serving, pool.name) | {"root": pool.name, "max_model_len": pool.task.limit}


def _model(serving: Serving, name: str) -> dict[str, Any]:
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


@router.post("/tokenize", summary="The tokens of a text or a chat", response_model=None, responses=ok(Tokenized))
async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, with the begin token if the model wants one, or of a chat as its template writes it."""
    serving: Serving = request.app.state.serving
    check_model(serving, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("give exactly one of prompt and messages", "prompt")
    with serving.counted(serving.tenant(request)):
        return Response(await serving.reading.run(_tokenized, asked, Check(serving)), media_type="application/json")


def _tokenized(asked: TokenizeRequest, check: Check) -> bytes:
    engine, ids = check.engine, _ids(asked, check)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.config.max_positions, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = [text_of(id, engine) for id in ids]
    return packed(found)


def _ids(asked: TokenizeRequest, check: Check) -> tuple[int, ...]:
    if asked.messages is None:
        check.text([asked.prompt or ""], "prompt")
        return _text_ids(asked, check.engine)
    check_tools(asked.tools or (), check.settings)
    check.text(texts_of(asked.messages), "messages")
    return _chat_ids(asked, check.engine)


def _text_ids(asked: TokenizeRequest, engine: Engine) -> tuple[int, ...]:
    """The ids of a text.

    Names of special tokens in it are plain text, as they are in prompts, unless `special` says otherwise; but a text
    that is nothing else is that token, for those who look up an id.
    """
    assert asked.prompt is not None
    for field in ("tools", "add_generation_prompt"):
        if getattr(asked, field) is not None:
            raise bad_request(f"{field} was given with prompt; it belongs to messages", field)
    begin = asked.add_special_tokens is not False
    if asked.special is None and (name := special_id(asked.prompt, engine.tokenizer)) is not None:
        return encode(asked.prompt, engine, begin=begin, special=True) if begin else (name,)
    return encode(asked.prompt, engine, begin=begin, special=bool(asked.special))


def special_id(text: str, tokenizer: Tokenizer) -> int | None:
    """The special token that has this name."""
    id = tokenizer.backend.token_to_id(text)
    return id if id in tokenizer.special_ids else None


def _chat_ids(asked: TokenizeRequest, engine: Engine) -> tuple[int, ...]:
    assert asked.messages is not None
    for field in ("add_special_tokens", "special"):
        if getattr(asked, field) is not None:
            raise bad_request(f"{field} was given with messages; the template decides there", field)
    cue = asked.add_generation_prompt is not False
    return read_talk(asked.messages, asked.tools or [], engine, cue=cue).ids


@router.post("/detokenize", summary="The text of tokens", response_model=None, responses=ok(Detokenized))
async def detokenize(asked: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, with the names of special tokens."""
    serving: Serving = request.app.state.serving
    check_model(serving, asked.model)
    with serving.counted(serving.tenant(request)):
        body = await serving.reading.run(_detokenized, asked, serving.engine)
    return Response(body, media_type="application/json")


def _detokenized(asked: DetokenizeRequest, engine: Engine) -> bytes:
    for i, id in enumerate(asked.tokens):
        if not 0 <= id < engine.vocab_size:
            raise outside(f"tokens[{i}]", id, engine.vocab_size, "tokens")
    _ = engine.tokenizer  # a model without one says so
    return packed({"prompt": decode(asked.tokens, engine)})


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
