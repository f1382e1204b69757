"""A Ray cluster: one that exists, or one that is started in this process and ends with it.

What can be wrong with it is said in one sentence: Ray is not installed, nobody answers at the address, versions differ.
A cluster that is started here has a token of its own, so that no other process of the machine can use it.
"""

from __future__ import annotations

import logging
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import Any

from headway.base.config import default_environment
from headway.base.errors import ConnectionFailed, InvalidInput, Unsupported

MISSING = "replicas and jobs on a cluster need Ray, which is not installed: pip install 'headway[ray]'"
LOCAL = "local"  # an address: start a cluster here
PORT = 6379  # of a cluster's head, by default
CONNECT_SECONDS = 5.0
ATTEMPTS = 3  # at starting a cluster: on a machine with much else to do, Ray gives up early
QUIET = {"RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def need_ray() -> None:
    """Raise an error that names the extra to install, if Ray is not there."""
    if find_spec("ray") is None:
        raise Unsupported(MISSING)


@contextmanager
def cluster(address: str | None, *, cpus: int | None = None, quiet: bool = False) -> Iterator[Any]:
    """The module ray, connected to the cluster at an address, or to one that is started here and ends with this."""
    default_environment(QUIET)
    need_ray()
    # Ray reads this when it is imported; a process that has done so gets Ray's own default.
    if address in (None, LOCAL) and "ray" not in sys.modules:
        default_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray

    if ray.is_initialized():
        raise InvalidInput("this process is connected to a Ray cluster already; call ray.shutdown() first")
    if address in (None, LOCAL):
        _start(ray, cpus, quiet=quiet)
    else:
        _connect(ray, address, quiet=quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _start(ray: Any, cpus: int | None, *, quiet: bool) -> None:
    given = {"num_cpus": cpus} if cpus is not None else {}
    for attempt in range(ATTEMPTS):
        try:
            ray.init("local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=not quiet, **given)
            return
        except Exception as error:  # Ray raises Exception itself when a part of it is late
            ray.shutdown()
            if attempt == ATTEMPTS - 1:
                raise ConnectionFailed(f"Ray cannot be started on this machine: {_line(error)}") from None


def _connect(ray: Any, address: str, *, quiet: bool) -> None:
    address = _checked(address)
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=not quiet)
    except RuntimeError as error:
        if "ersion mismatch" not in str(error) and "ersion" not in str(error):
            raise ConnectionFailed(f"the Ray cluster at {address} cannot be used: {_line(error)}") from None
        raise InvalidInput(
            f"the Ray cluster at {address} has another version of Ray or Python than this process "
            f"(Ray {ray.__version__}, Python {sys.version.split()[0]}); install the same on every node"
        ) from None
    except (ConnectionError, ValueError) as error:
        raise ConnectionFailed(
            f"there is no Ray cluster at {address} that answers: {_line(error)}; if it wants a token, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from None
    except Exception as error:  # its authentication errors, among others
        raise ConnectionFailed(f"the Ray cluster at {address} cannot be used: {_line(error)}") from None


def _checked(address: str) -> str:
    """The address as Ray takes it; raises at once if nobody listens there. Ray would wait for minutes."""
    if address == "auto" or "://" in address:
        return address
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(PORT))
    if not host or not port.isdecimal():
        raise InvalidInput(f"the Ray address is {address!r}; it must be HOST:PORT, auto, or local")
    try:
        with closing(socket.create_connection((host, int(port)), CONNECT_SECONDS)):
            return f"{host}:{port}"
    except (OSError, OverflowError) as error:
        raise ConnectionFailed(
            f"there is no Ray cluster at {address}: {error}; start one with `ray start --head`, or use another address"
        ) from None


def _line(error: Exception) -> str:
    """The first line of an error of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
