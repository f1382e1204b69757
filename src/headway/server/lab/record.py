"""Records one real distribution for a page without a server: `python -m headway.server.lab.record`.

Everything in the file comes from the default model, through the API that the page calls.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

import headway as hw
from headway.server import lab
from headway.server.app import create_app
from headway.server.lab.page import STATIC
from headway.server.settings import ServerSettings

PROMPT = "Once upon a time, there was a little"
GREEDY = 96  # tokens
NEEDED = (
    "name",
    "vocab_size",
    "layers",
    "heads",
    "page_size",
    "pages",
    "max_positions",
    "parameters",
    "dtype",
    "format",
)


def record(model: str = "smollm2") -> dict[str, Any]:
    """The contents of the file, from a server that is started for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = create_app(
        ServerSettings(model=model, port=port), lambda: hw.Engine(model, pages=256, threads=1), routers=[lab.router]
    )
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        while "vocab_size" not in (facts := _call(port, "GET", "/lab/api/model")):
            time.sleep(0.2)
        count = len(_call(port, "POST", "/lab/api/trace", prompt=PROMPT, logits=False)["tokens"])
        trace = _call(
            port, "POST", "/lab/api/trace", prompt=PROMPT, lens={"k": 16}, attention={"rows": count}, scores=4
        )
        greedy = _call(
            port, "POST", "/v1/completions",
            prompt=PROMPT, max_tokens=GREEDY, temperature=0, repetition_penalty=1, logprobs=0, ignore_eos=True,
        )  # fmt: skip
        return {
            "made_by": "python -m headway.server.lab.record",
            "prompt": PROMPT,
            "model": {name: facts[name] for name in NEEDED} | {"has_chat": False, "has_tokenizer": True, "eos_ids": []},
            "vocab": _call(port, "GET", "/lab/api/vocab"),
            "trace": trace,
            "greedy": greedy["choices"][0]["logprobs"]["tokens"],
        }
    finally:
        server.should_exit = True
        thread.join()


def write(content: dict[str, Any], path: Path) -> None:
    """Write the file; equal contents give equal bytes."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _call(port: int, method: str, path: str, **body: Any) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    data = json.dumps(body).encode() if body else None
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    result = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"{path} responded {response.status}: {result}")
    return result


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else STATIC / "recorded.bin"
    write(record(), target)
    print(f"{target}: {target.stat().st_size} bytes")
