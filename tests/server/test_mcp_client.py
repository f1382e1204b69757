"""The client of MCP servers by itself: the operator's file, addresses, TLS; and a bystander among bad servers."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.base.errors import InvalidInput
from headway.server.mcp.addresses import HostList, McpUrl, is_public
from headway.server.mcp.config import McpConfig
from headway.server.mcp.messages import McpError, answer_to, read_output
from headway.server.mcp.servers import McpServers
from headway.server.settings import ServerSettings
from support.live import Live, live
from support.mcp_hostile import hostile
from support.small import at_rest, small_engine, tokens_of

CERTIFICATE = tuple(Path(__file__).parent / "process" / f"localhost.{end}" for end in ("pem", "key"))


def written(folder: Path, value: Any) -> Path:
    path = folder / "mcp.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ([], "is not a JSON object"),
        ({"server": {}}, "unknown field 'server'; the fields are servers, hosts"),
        ({"servers": {"two words": {"url": "http://x.org"}}}, "a name has 1 to 64 of"),
        ({"servers": {"a": {}}}, "must have either a command or a url"),
        ({"servers": {"a": {"command": "x", "url": "http://x.org"}}}, "must have either a command or a url"),
        ({"servers": {"a": {"command": "x", "headers": {}}}}, "headers, which are for a url"),
        ({"servers": {"a": {"url": "http://x.org", "env": {}}}}, "args or env, which are for a command"),
        ({"servers": {"a": {"url": "ftp://x.org"}}}, "it must be http or https"),
        ({"servers": {"a": {"url": "http://x.org", "headers": {"Host": "y"}}}}, "'Host', which is not a header"),
        ({"servers": {"a": {"url": "http://x.org", "headers": {"A": "b\nc"}}}}, "the value of A must be"),
        ({"servers": {"a": {"url": "http://x.org", "credentials": {"ada": {"env": {}}}}}}, "unknown field 'env'"),
        ({"servers": {"a": {"command": "x", "env": {"A=B": "c"}}}}, "'A=B', which is not a variable"),
        ({"servers": {"a": {"command": ["x"]}}}, "which is not a text"),
        ({"servers": {"a": {"command": "x", "timeout": -1}}}, "timeout is -1; it must be a number of seconds"),
        ({"servers": {"a": {"command": "x", "always": "yes"}}}, "always is 'yes'; it must be true or false"),
        ({"servers": {"a": {"command": "x", "comand": "y"}}}, "unknown field 'comand'"),
        ({"hosts": ["x.org:443"]}, "the MCP host 'x.org:443' is not valid"),
        ({"hosts": ["10.0.0.1/8"]}, "the MCP host '10.0.0.1/8' is not valid"),
    ],
)
def test_files_that_are_refused_at_the_start(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        McpConfig.read(written(tmp_path, value))


def test_a_file_must_be_there_and_not_anyones(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        McpServers.of(ServerSettings(mcp_file=tmp_path / "absent.json"))
    path = written(tmp_path, {"servers": {}})
    path.chmod(0o666)
    with pytest.raises(InvalidInput, match="is world-writable, and its commands are run"):
        McpConfig.read(path)


def test_hosts_of_the_list() -> None:
    hosts = HostList(["Tools.example", "10.1.0.0/16", "::1", "localhost"])
    listed = ("tools.example", "10.1.2.3", "::1", "localhost")
    assert [one for one in (*listed, "10.2.0.1", "x.tools.example", "127.0.0.1") if hosts.has_host(one)] == [*listed]
    assert hosts.may_connect("localhost", ipaddress.ip_address("127.0.0.1"))
    assert not hosts.may_connect("tools.example", ipaddress.ip_address("127.0.0.1"))
    assert hosts.may_connect("tools.example", ipaddress.ip_address("10.1.0.9"))
    assert hosts.may_connect("tools.example", ipaddress.ip_address("93.184.215.14"))
    assert not HostList(())
    assert McpUrl.of("https://tools.example./a?b=c").host == "tools.example"
    assert McpUrl.of("http://[::1]:80/").host_header == "[::1]"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2002:a00:1::1"),
    ],
)
def test_addresses_inside_others_are_seen(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    for public in ("93.184.215.14", "2606:2800:21f:cb07::1", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e"):
        assert is_public(ipaddress.ip_address(public))


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the host's name, although the connection is to its address."""

    async def ask(servers: McpServers, url: str) -> str:
        session = await servers.open_url("x", McpUrl.of(url), {})
        return (await session.call("go", {}, 60, 100)).text

    servers = McpServers.of(ServerSettings(mcp_hosts=("localhost", "127.0.0.1")))
    with hostile((CERTIFICATE[0], CERTIFICATE[1])) as (url, _):
        named = url.replace("127.0.0.1", "localhost") + "/ok"
        with pytest.raises(McpError, match="TLS fails"):
            asyncio.run(ask(servers, named))
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE[0]))
        assert asyncio.run(ask(servers, named)) == "gone"


def test_what_servers_may_ask_and_send() -> None:
    assert answer_to({"id": 1, "method": "ping"}) == b'{"jsonrpc": "2.0", "id": 1, "result": {}}\n'
    refused = answer_to({"id": "a", "method": "sampling/createMessage"})
    assert refused is not None
    assert json.loads(refused)["error"]["code"] == -32601
    assert answer_to({"method": "notifications/progress"}) is None
    parts = [{"type": "text", "text": "a"}, {"type": "image", "data": "…"}, {"type": "resource_link", "uri": "b:c"}]
    shown = "a\n[image, not shown: this model takes only text]\nb:c"
    assert read_output({"content": parts}, 100).text == shown
    assert read_output({"content": [], "structuredContent": {"a": 1}}, 100).text == '{"a": 1}'
    for bad in ({}, {"content": [1]}, {"content": [{"type": "x"}]}):
        with pytest.raises(McpError):
            read_output(bad, 100)


def test_a_server_without_mcp_calls_nobody(tmp_path: Path) -> None:
    with live(small_engine(tmp_path / "model", pages=64)) as served:
        for tool in ({"server_label": "x", "server_url": "http://127.0.0.1:1/"}, {"server_label": "x"}):
            body = {"type": "mcp", "require_approval": "never", **tool}
            error = served.refused("/v1/responses", input="x", tools=[body])
            assert error["code"] == ("mcp_host_not_allowed" if "server_url" in tool else "mcp_server_not_found")


def bad_calls(served: Live, label: str, rounds: int) -> None:
    choice = {"type": "mcp", "server_label": label, "name": "go"}
    tool = {"type": "mcp", "server_label": label, "require_approval": "never"}
    for i in range(rounds):
        fields: dict[str, Any] = {"tools": [tool], "tool_choice": choice, "store": False, "max_output_tokens": 60}
        answer = served.post("/v1/responses", input="x", **fields, stream=i % 2 == 1)
        assert answer.status in (200, 424), answer.body


@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_bad_mcp_servers_change_no_token_of_a_bystander(tmp_path: Path, rounds: int) -> None:
    with hostile() as (url, _):
        paths = ("ok", "list-hang", "list-pages", "call-hang", "call-megabytes", "call-endless")
        servers: dict[str, Any] = {path: {"url": f"{url}/{path}", "timeout": 1} for path in paths}
        for name, code in (("talks", "print('x', flush=True)"), ("hangs", "import time; time.sleep(600)")):
            servers[name] = {"command": sys.executable, "args": ["-c", code], "timeout": 1}
        file = written(tmp_path, {"servers": servers})
        with live(
            small_engine(tmp_path / "model", pages=512, max_position_embeddings=1024),
            mcp_file=file,
            max_mcp_bytes=1 << 18,
        ) as served:
            right = tokens_of(served)
            with ThreadPoolExecutor(len(servers)) as pool:
                others = [pool.submit(bad_calls, served, label, rounds) for label in servers]
                while not all(one.done() for one in others):
                    assert tokens_of(served) == right
                for one in others:
                    one.result()
            assert tokens_of(served) == right
            at_rest(served)


def test_a_server_may_be_for_every_request(tmp_path: Path) -> None:
    with hostile() as (url, _):
        file = written(tmp_path, {"servers": {"all": {"url": f"{url}/ok", "always": True}}})
        with live(small_engine(tmp_path / "model", pages=128, max_position_embeddings=1024), mcp_file=file) as served:
            fields: dict[str, Any] = {"input": "x", "max_output_tokens": 60, "temperature": 0, "store": False}
            whole = served.post("/v1/responses", **fields, tool_choice="required").json
            assert [item["type"] for item in whole["output"][:2]] == ["mcp_list_tools", "mcp_call"]
            assert whole["output"][1]["output"] == "gone"
            whole = served.post("/v1/responses", **fields, tool_choice="none").json
            assert {item["type"] for item in whole["output"]} <= {"message", "reasoning"}
            at_rest(served)
