"""numpy, imported when it is first used: specs, masks and the remote client work on machines that do not have it.

Modules that annotate with numpy and use it in a few functions have

    if TYPE_CHECKING:
        import numpy as np
    else:
        from headway.base.system.lazy_numpy import np
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from headway.base.errors import Unsupported


class _LazyNumpy(ModuleType):
    """Stands for numpy; a name is looked up there once."""

    def __getattr__(self, name: str) -> Any:
        try:
            import numpy
        except ImportError:
            raise Unsupported("this needs numpy, which is not installed; install it, or give lists and runs") from None
        value = getattr(numpy, name)
        self.__dict__[name] = value
        return value


np = _LazyNumpy("numpy")


def has_numpy() -> bool:
    """Whether numpy can be imported."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True
