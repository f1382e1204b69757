"""What a request to a path that does not exist is told: what to use, if it is a path of an API that clients know."""

from __future__ import annotations

import difflib
from collections.abc import Collection

PATHS = "GET /docs lists the paths of this server, and GET /openapi.json describes them"
LONGEST = 64  # characters of a path that is looked for among those that exist
HINTS = {  # beginnings of paths that clients of other APIs call, the longest match counts
    "/api/": "of Ollama's API there are chat, generate, embed, embeddings, tags, ps, show and version: "
    "models are not managed here",
    "/slots": "GET /slots lists requests; what they computed is in the prefix cache, not saved or erased by slot",
    "/v1/stream": "a stream ends with its connection: send the request again",
    "/generate": "use POST /v1/completions",
    "/redoc": "GET /docs is the API's description, and GET /openapi.json the same for programs",
    "/v1/v1/": "the client adds /v1 itself: its base URL must not end in /v1",
    "/v1/complete": "use POST /v1/chat/completions",
    "/v1/assistants": "OpenAI's Assistants API is not supported; use POST /v1/chat/completions",
    "/v1/threads": "OpenAI's Assistants API is not supported; use POST /v1/chat/completions",
    "/v1/audio/speech": "speech is not supported over HTTP; use hw.pipeline in Python",
    "/v1/images": "images are not supported",
    "/v1/moderations": "moderation is not supported; POST /classify serves a classifier",
    "/v1/fine_tuning": "training is not supported",
    "/lab": "this server has no Lab",
}


def not_found(path: str, routes: Collection[str] = ()) -> str:
    """The message of a 404 of a server that has `routes`. It repeats nothing that the client sent."""
    known = [known for known in HINTS if f"{path}/".startswith(f"{known.rstrip('/')}/")]
    if any(route.startswith("/lab") for route in routes):
        known = [name for name in known if name != "/lab"]
    if known:
        hint = HINTS[max(known, key=len)]
    elif len(path) <= LONGEST and (near := difflib.get_close_matches(path, routes, n=1, cutoff=0.8)):
        hint = f"did you mean {near[0]}? {PATHS}"
    else:
        hint = PATHS
    return f"there is no such path; {hint}"
