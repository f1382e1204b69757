"""Where a pipeline's model runs and in which float type: on a GPU float16 files stay float16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headway.pipelines.backends import torch as backend
from headway.pipelines.backends.loading import stored_dtype
from support import encoders


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float16", torch.float16), ("bfloat16", torch.bfloat16), ("float32", torch.bfloat16), (None, torch.bfloat16)],
)
def test_auto_keeps_the_half_type_of_the_files_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, stored: str | None, dtype: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", key: stored}))
    monkeypatch.setattr(backend, "pick_device", lambda _: torch.device("cuda"))  # no GPU is needed to choose
    assert backend.place("cuda", "auto", stored_dtype(tmp_path)).dtype == dtype
    assert backend.place("cuda", "float32", stored_dtype(tmp_path)).dtype == torch.float32


def test_a_module_in_memory_has_the_type_of_its_matrices() -> None:
    module = encoders.model("bert", "classify")
    assert stored_dtype(module) == torch.float32
    assert stored_dtype(module.half()) == torch.float16
    assert backend.place("cpu", "auto", torch.float16).dtype == torch.float32
    assert stored_dtype(3) is None
