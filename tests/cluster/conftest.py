"""One Ray cluster on this machine for all tests of a process."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.replicas import RayCluster

CLUSTER = """
import sys
from headway.cluster.connect import cluster
with cluster("local", cpus=6, quiet=True) as ray:
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster that counts six CPUs, whatever the machine has."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # see ServerProcess
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    head = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert head.stdout is not None
        line = next((line for line in head.stdout if line.startswith("address ")), None)
        assert line is not None, "Ray did not start"
        yield RayCluster(line.split()[1], env, head.pid)
    finally:
        head.communicate(timeout=120)  # its input ends, and with it the cluster
