"""Headway: a programmable inference engine for transformer models. The forward pass is the API.

    import headway as hw

    async def program(engine):
        async with engine.context() as ctx:
            ctx.user("Name three uses of a brick.")
            return await ctx.generate(hw.Argmax(), max_tokens=64).text()

    print(hw.Engine("smollm2").run(program))

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so `import headway` is quick and
torch is loaded with the first engine.
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

from headway.base.system.extras import explain_missing
from headway.base.system.gc_paused import gc_paused
from headway.base.version import VERSION

__version__ = VERSION

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as ", _STUB, re.MULTILINE)}

__all__ = sorted(_MODULES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    try:
        with nullcontext() if module in sys.modules else gc_paused():
            value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        explain_missing(error, f"headway.{name}", "pipelines" if ".pipelines." in module else "torch")
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
