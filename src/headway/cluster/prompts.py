"""What a request begins with, as the prefix cache sees it, and which replica it belongs to.

The front reads a prompt by the functions that a replica's server uses (messages, tools, template, tokenizer, salts) and
hashes its pages by the cache's own. It is a guess that costs nothing when it is wrong: the request goes to the least
busy replica. A request that cannot be read here is routed without keys, and the replica says what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headway.base.errors import HeadwayError
from headway.cluster.routing import RouteRequest, short_key
from headway.kv.prefix import page_key, root
from headway.program.chat.conversation import ChatWriter
from headway.program.model.text import ModelText
from headway.server.anthropic import blocks
from headway.server.anthropic.request_schema import MessagesRequest
from headway.server.api.request_schema import ChatRequest
from headway.server.chats.fields import modern_request, template_variables
from headway.server.chats.messages import read_chat_prompt
from headway.server.errors import ApiError
from headway.server.ollama import requests as ollama
from headway.server.ollama.request_schema import OllamaChatRequest, OllamaGenerateRequest
from headway.server.responses import items
from headway.server.responses.request_schema import ResponseRequest

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.text.templates.chat_template import ChatTemplate
    from headway.text.tokenizer import Tokenizer

CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")
PROMPTS = ("/v1/completions", "/api/generate")
HOMES = ("/v1/files", "/v1/batches")  # what is kept for a key is on one replica
OWNED = re.compile(r"/v1/(?:responses|conversations)/([^/?]+)")
OWNER = re.compile(r"(?:resp_|conv_)?([a-z0-9]{4,32})-")  # the name of a replica in an id
MAX_PAGES = 4096  # of a prompt that are hashed


def owner(id: Any) -> str | None:
    """The replica that an id names: of a stored response, a conversation or a session."""
    match = OWNER.match(id) if isinstance(id, str) else None
    return None if match is None else match[1]


class PromptModel:
    """What the server's functions need of an engine to read a prompt: its tokenizer and its chat template."""

    vocab_size = 1 << 31  # the replica checks ids

    def __init__(self, path: Path) -> None:
        self._text = ModelText(path)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._text.template

    @cached_property
    def chat_writer(self) -> ChatWriter | None:
        return None if self.tokenizer is None else ChatWriter(self.chat_template, self.tokenizer)


class PromptReader:
    """Prompts of one model as keys of pages. Used in a thread; an instance is not shared between threads."""

    def __init__(self, model: str, path: Path, page_size: int) -> None:
        self.model, self.page_size = model, page_size
        self._model = PromptModel(path)

    def route(self, path: str, body: bytes, *, salt: str, tenant: str) -> RouteRequest:
        """What is known of a request of this tenant."""
        if path.startswith(HOMES):
            return RouteRequest(home=tenant)
        if (named := OWNED.match(path)) is not None:
            return RouteRequest(replica=owner(named[1]))
        if path not in CHATS and path not in PROMPTS:
            return RouteRequest()
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return RouteRequest()
        if not isinstance(fields, dict):
            return RouteRequest()
        replica = owner(fields.get("previous_response_id")) or owner(_conversation(fields.get("conversation")))
        if (own := fields.get("cache_salt")) is not None:
            salt = f"{salt}\0{own}"
        try:
            return RouteRequest(self.keys(self._ids(path, fields), salt), replica)
        except (ApiError, HeadwayError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return RouteRequest((), replica)

    def keys(self, ids: Sequence[int], salt: str) -> tuple[int, ...]:
        """The keys of a prompt's whole pages."""
        keys, before, size = list[int](), root(salt), self.page_size
        for start in range(0, min(len(ids) - size + 1, MAX_PAGES * size), size):
            end = start + size
            before = page_key(before, ids[start:end], range(start, end), ())
            keys.append(short_key(before))
        return tuple(keys)

    def _ids(self, path: str, fields: Mapping[str, Any]) -> Sequence[int]:
        raw = path in PROMPTS and (path != "/api/generate" or fields.get("raw"))
        if raw or (path == "/api/generate" and self._model.chat_template is None):
            return self._prompt_ids(fields.get("prompt"))
        if self._model.chat_template is None or self._model.chat_writer is None:
            return ()
        engine = cast("Engine", self._model)
        chat = modern_request(_chat(path, fields, engine))
        return read_chat_prompt(
            chat.messages,
            [] if chat.tool_choice == "none" else chat.tools or [],
            engine,
            cue=chat.add_generation_prompt is not False,
            continue_last=bool(chat.continue_final_message),
            variables=template_variables(
                chat.chat_template_kwargs, engine.chat_template, effort=chat.reasoning_effort, verbosity=chat.verbosity
            ),
        ).ids

    def _prompt_ids(self, prompt: Any) -> Sequence[int]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # each prompt is a context of its own
        if isinstance(prompt, list):
            return prompt if all(type(id) is int for id in prompt) else ()
        if tokenizer is None or not isinstance(prompt, str):
            return ()
        ids = tokenizer.encode(prompt)
        begins = tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]
        return [tokenizer.bos_id, *ids] if begins else ids  # type: ignore[list-item]


def _conversation(value: Any) -> Any:
    return value.get("id") if isinstance(value, dict) else value


def _chat(path: str, fields: Mapping[str, Any], engine: Engine) -> ChatRequest:
    """A request of any API as one for a chat, as that API's routes make it."""
    match path:
        case "/v1/messages":
            return blocks.chat_request(MessagesRequest.model_validate(fields), engine)
        case "/v1/responses":
            body = ResponseRequest.model_validate(fields)
            return items.chat_request(body, (), items.chat_messages(items.as_items(body.input)))
        case "/api/chat":
            return ollama.chat_request(OllamaChatRequest.model_validate(fields), {}, engine)
        case "/api/generate":
            return ollama.chat_request(OllamaGenerateRequest.model_validate(fields), {}, engine)
        case _:
            return ChatRequest.model_validate(fields)
