"""The line of the lesson, as a shell has it."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_next_token_of_the_lesson(served):
    body = '{"prompt":"Kubernetes pods are scheduled by the","max_tokens":1,"logprobs":8}'
    done = subprocess.run(
        ["curl", "-sS", f"{served.url}/v1/completions", "-d", body], capture_output=True, text=True, check=True
    )
    (choice,) = json.loads(done.stdout)["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert 8 <= len(top) <= 9
    assert max(top, key=lambda token: top[token]) == " Ku"
    assert choice["text"] in top
