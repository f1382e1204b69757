"""The models that a command line names."""

from pathlib import Path

import pytest

from headway.base.errors import InvalidInput, ModelNotFound
from headway.cli.flags.shared import ComputeOptions
from headway.cli.serve.models import SeveralModels
from headway.server.models import ModelSources
from headway.server.settings import ServerSettings


def sources(*models: str) -> ModelSources:
    several = SeveralModels.of(models, None, (), (), None)
    return several.sources(ServerSettings(model=""), ComputeOptions(), {}, lambda path: None)


def test_one_model_may_have_two_names_and_is_then_known_by_these_alone() -> None:
    first, second = sources("a=smollm2", "b=smollm2").named
    assert (first.names, second.names) == (("a",), ("b",))
    assert first.accepted == second.accepted == ()


def test_a_model_is_also_known_by_what_it_was_loaded_from(tmp_path: Path) -> None:
    (tmp_path / "other.gguf").touch()
    first, second = sources("a=smollm2", str(tmp_path / "other.gguf")).named
    assert first.accepted == ("smollm2",)
    assert second.names == ("other",)


def test_two_models_with_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two models are called 'a'"):
        sources("a=smollm2", "a=org/other")


@pytest.mark.parametrize("wrong", ["/nowhere/model", "nowhere.gguf", "./nowhere", "smollm3"])
def test_a_model_that_is_nowhere_is_refused_before_anything_is_served(wrong: str) -> None:
    with pytest.raises(ModelNotFound, match=f"there is no model '{wrong}'"):
        sources("a=smollm2", f"b={wrong}")
