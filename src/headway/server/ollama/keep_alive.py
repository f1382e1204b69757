"""`keep_alive`: for how long a model stays loaded after a request.

It is for models that load on demand: an only model and those of `--keep` stay. Where the server has keys, only admin
keys decide for how long models stay, since others use them too.
"""

from __future__ import annotations

import math
import re

from headway.base.text import short_repr
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.serving import Serving

LONGEST = 10 * 365 * 86400.0  # seconds; longer is for ever
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d{1,9}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART}){{1,8}}|0)")


def stay_seconds(given: float | str | None) -> float | None:
    """How long a model is to stay: a number of seconds, or a duration such as "5m"; below 0 is for ever."""
    if given is None:
        return None
    if isinstance(given, str):
        match = _DURATION.fullmatch(given)
        if match is None:
            raise bad_request(
                f'keep_alive is {short_repr(given)}; it must be a number of seconds, or a duration such as "5m"',
                "keep_alive",
                "invalid_value",
            )
        given = sum(float(number) * UNITS[unit] for number, unit in re.findall(_PART, match[2]))
        given = -given if match[1] == "-" else given
    return math.inf if not 0 <= given <= LONGEST else float(given)


async def keep_for(serving: Serving, tenant: Tenant, name: str, seconds: float | None) -> None:
    """Have a model stay loaded for so long after its last request, where this key may decide that; by default for as
    long as others do."""
    model, _ = await serving.models.find(name)
    if serving.keys is None or tenant.admin:
        model.idle_timeout = serving.settings.idle_timeout if seconds is None else seconds
