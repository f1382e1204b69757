"""JSON-RPC messages as MCP has them, and the tools and results in them, checked: nothing of a server is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput
from headway.base.json_text import loads
from headway.base.text import shorten

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # revisions that begin with a handshake
NAME_CHARS = 128
SHOWN = 200  # characters of a server's own words in a message
PROTOCOL, TRANSPORT = "mcp_protocol_error", "http_error"  # kinds of errors, as OpenAI names them
UNKNOWN_METHOD = -32601
NOT_SHOWN = "[{kind}, not shown: this model takes only text]"


class McpError(HeadwayError):
    """An MCP server that cannot be reached, or does not answer as it should."""

    def __init__(self, message: str, *, kind: str = PROTOCOL, code: int = 0) -> None:
        super().__init__(message)
        self.message, self.kind, self.code = message, kind, code


@dataclass(frozen=True)
class McpTool:
    """A tool of an MCP server."""

    name: str
    description: str
    schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None

    @property
    def is_read_only(self) -> bool:
        return (self.annotations or {}).get("readOnlyHint") is True


@dataclass(frozen=True)
class McpOutput:
    """The result of a call: a text for the model, and whether the tool says that it failed."""

    text: str
    failed: bool


def request(id: int, method: str, params: Mapping[str, Any]) -> bytes:
    """A request, as one line."""
    return _line({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def notification(method: str, params: Mapping[str, Any]) -> bytes:
    """A message that nobody answers, as one line."""
    return _line({"jsonrpc": "2.0", "method": method, "params": params})


def answer_to(message: Mapping[str, Any]) -> bytes | None:
    """The answer to a request of the server: it may ask whether this client is there, and nothing else."""
    if "method" not in message or not isinstance(id := message.get("id"), int | str):
        return None
    if message["method"] == "ping":
        return _line({"jsonrpc": "2.0", "id": id, "result": {}})
    return _line({"jsonrpc": "2.0", "id": id, "error": {"code": UNKNOWN_METHOD, "message": "not supported"}})


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"


def parse(data: bytes) -> Mapping[str, Any]:
    """One message of a server."""
    try:
        value = loads(data.decode(), bounded=True)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not Unicode
    except (ValueError, RecursionError, InvalidInput):  # not JSON, not UTF-8, nested too deeply, too many values
        raise McpError(f"it sent what is not valid JSON: {shown(data[:SHOWN].decode('utf-8', 'replace'))}") from None
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        raise McpError("it sent a message that is not JSON-RPC 2.0")
    return value


def result_of(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result in a response; raises the error that it has instead."""
    error, result = message.get("error"), message.get("result")
    if isinstance(error, dict):
        code = error.get("code")
        raise McpError(f"it answered: {shown(error.get('message'))}", code=code if isinstance(code, int) else 0)
    if not isinstance(result, dict):
        raise McpError("it sent a response without a result")
    return result


def read_version(result: Mapping[str, Any]) -> str:
    """The revision of the protocol that a server chose in the handshake."""
    version = result.get("protocolVersion")
    if version not in VERSIONS:
        raise McpError(f"it speaks revision {shown(version)} of the protocol; known are {', '.join(VERSIONS)}")
    return version


def read_tools(result: Mapping[str, Any]) -> list[McpTool]:
    """The tools of one page of a list."""
    listed = result.get("tools")
    if not isinstance(listed, list):
        raise McpError("its list of tools is not a list")
    return [_tool(one) for one in listed]


def _tool(value: Any) -> McpTool:
    match value:
        case {"name": str(name), "inputSchema": dict(schema)} if name.isprintable() and 0 < len(name) <= NAME_CHARS:
            description, hints = value.get("description"), value.get("annotations")
            return McpTool(
                name,
                description if isinstance(description, str) else "",
                schema,
                hints if isinstance(hints, dict) else None,
            )
    raise McpError(f"its list has what is not a tool with a name and an inputSchema: {shown(value)}")


def read_output(result: Mapping[str, Any], limit: int) -> McpOutput:
    """The result of a call as a text of at most `limit` bytes."""
    content = result.get("content")
    if not isinstance(content, list):
        raise McpError("the tool's result has no list of contents")
    texts = [_text(part) for part in content]
    if not texts and result.get("structuredContent") is not None:
        texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    text = "\n".join(texts)
    if (size := len(text.encode())) > limit:
        raise McpError(f"the tool's output has {size} bytes; {limit} are left for this response")
    return McpOutput(text, result.get("isError") is True)


def _text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource_link", "uri": str(uri)}:
            return uri
        case {"type": "image" | "audio" | "resource" as kind}:
            return NOT_SHOWN.format(kind=kind)
    raise McpError(f"the tool's result has a content that is not known: {shown(part)}")


def shown(value: Any) -> str:
    """Words of a server in a message of ours: one line, and not long."""
    text = value if isinstance(value, str) else repr(value)[: 2 * SHOWN]
    return shorten("".join(char if char.isprintable() else " " for char in text[: 2 * SHOWN]), SHOWN)
