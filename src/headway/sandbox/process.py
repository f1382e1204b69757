"""One program in a process of its own, for programs that need packages: what bubblewrap runs.

Its session is the socket 3, on which it is told what to run and says what came of it the socket 4. It has threads and
an ordinary event loop, and imports whatever is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import time

from headway.remote.program import ProgramEngine
from headway.sandbox import source
from headway.sandbox.limits import ProgramLimits, send_json
from headway.sandbox.worker import limit_process, received

SESSION, CONTROL = 3, 4  # file descriptors


def main() -> None:
    """Run it, say how it ended, and end."""
    control = socket.socket(fileno=CONTROL)
    os.set_inheritable(CONTROL, False)
    os.set_inheritable(SESSION, False)
    given = received(control)
    limits = ProgramLimits(**given["limits"])
    limit_process(limits, grace=0)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
    outcome = _run(given["source"], given["args"], limits)
    send_json(control, {**outcome, "cpu": time.process_time()})
    os._exit(0)


def _run(text: str, args: dict[str, object] | None, limits: ProgramLimits) -> dict[str, str]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        if args is None:
            return {"returned": source.check(text)}
        value = source.run(text, json.dumps(args), ProgramEngine(f"fd:{SESSION}"), loop)
    except source.Raised as raised:
        return {"raised": str(raised)}
    if len(value) > limits.message:
        return {"stopped": f"what it returned has more than {limits.message} bytes"}
    return {"returned": value}


if __name__ == "__main__":
    main()
