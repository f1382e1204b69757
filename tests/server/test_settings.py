"""Names of models, as clients see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.base.errors import InvalidInput
from headway.server.pooling import PoolingModels
from headway.server.settings import named_model, public_name


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "0af3").mkdir(parents=True)
    link = tmp_path / "my-model"
    link.symlink_to(tmp_path / "snapshots" / "0af3")
    assert public_name(str(link)) == "my-model"
    file = tmp_path / "tiny.gguf"
    file.symlink_to(tmp_path / "blob")
    assert public_name(str(file)) == "tiny"


def test_a_model_beside_the_engine_may_have_a_name(tmp_path: Path) -> None:
    assert named_model("vectors=minilm") == ("vectors", "minilm")
    assert named_model("minilm") == ("minilm", "minilm")
    assert named_model("org/name") == ("org/name", "org/name")
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert named_model(str(folder)) == ("a=b", str(folder))
    for wrong in ("=minilm", "vectors=", "two words=minilm"):
        with pytest.raises(InvalidInput, match="NAME=MODEL"):
            PoolingModels({"embed": wrong})
