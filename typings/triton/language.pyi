# Kernels are written in a language of Triton's own that looks like Python: pyright takes all of it as it comes.
from typing import Any

def __getattr__(name: str) -> Any: ...
