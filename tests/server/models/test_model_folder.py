"""--models-dir: names come from its listing only, links lead nowhere else, and it may change while it is served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headway.base.errors import InvalidInput
from headway.server.models import ModelSources
from headway.server.models import sources as listing
from headway.server.models.sources import is_inside
from support.many_models import ASKED, POSITIONS, Loader, alone, many, model_folders


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(listing, "LISTING_SECONDS", 0.0)
    root = tmp_path / "models"
    model_folders(root, "ada")
    outside = model_folders(tmp_path / "outside", "secret")["secret"]
    (root / "linked").symlink_to(outside)
    shutil.copytree(root / "ada", root / "half")
    (root / "half" / "model.safetensors").unlink()
    (root / "half" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (root / "loop").symlink_to(root / "loop")
    (root / "file.gguf").symlink_to("/etc/passwd")
    shutil.copytree(root / "ada", root / "two words")
    (root / "notes.txt").write_text("not a model")
    shutil.copytree(root / "ada", root / ".hidden")
    return root


def test_only_the_models_of_the_folder_are_served(root: Path) -> None:
    loader = Loader()
    with many(ModelSources((), loader.folder(root), budget=1 << 30), loader) as served:
        assert set(served.states()) == {"ada"}
        assert served.said("ada") == served.said(None) == alone(root / "ada")  # the only one is the default
        names = ("linked", "half", "loop", "file", "two words", ".hidden", "notes.txt", "..", "../outside/secret")
        for name in (*names, str(root / "ada"), "ada/", "ADA", "", "\0", "x" * 10_000):
            answer = served.post("/v1/completions", **ASKED, model=name)
            assert (answer.status, answer.error["code"]) == (404, "model_not_found"), name
            assert len(answer.error["message"]) < 300
            assert "secret" not in answer.error["message"] or "secret" in name
        assert served.get("/v1/models/..%2Foutside%2Fsecret").status in (400, 404)
        assert loader.opened == ["ada"]


def test_a_folder_may_change_while_it_is_served(root: Path) -> None:
    loader = Loader()
    with many(ModelSources((), loader.folder(root), budget=1 << 30), loader) as served:
        shutil.copytree(root / "ada", root / "new")
        assert served.said("new") == alone(root / "ada")
        answer = served.post("/v1/completions", **ASKED)
        assert (answer.status, answer.error["code"]) == (400, "missing_field")  # which of the two?
        shutil.copytree(root / "ada", root / "gone")
        assert "gone" in served.states()
        shutil.rmtree(root / "gone")
        served.post("/v1/completions", **ASKED, model="gone")  # a 503 if nobody has noticed yet
        assert "gone" not in served.states()
        assert served.post("/v1/completions", **ASKED, model="gone").status == 404


def test_a_model_that_was_repaired_is_tried_at_once(root: Path) -> None:
    """Its failure and what was known of its files are those of the files that there were."""
    loader = Loader()
    config = (root / "ada" / "config.json").read_text()
    broken = {"weights": "model.safetensors", "config": "config.json", "words": "tokenizer.json"}
    for name, file in broken.items():
        shutil.copytree(root / "ada", root / name)
        (root / name / file).write_bytes((root / name / file).read_bytes()[:-20])
    with many(ModelSources((), loader.folder(root), budget=1 << 30), loader) as served:
        for name, file in broken.items():
            answer = served.post("/v1/completions", **ASKED, model=name)
            assert (answer.status, answer.error["code"]) == (503, "load_failed"), name
            assert file in answer.error["message"]
            assert str(root) not in answer.error["message"]
            assert served.states()[name] == "failed"
            again = served.post("/v1/completions", **ASKED, model=name)
            assert again.error["code"] == "load_failed"  # and it was not tried again
            shutil.copy(root / "ada" / file, root / name / file)
            assert served.said(name) == alone(root / "ada")
        assert served.models.failed_loads == len(broken)
        assert served.get("/v1/models/ada").json["max_model_len"] == POSITIONS
        changed = config.replace(f'"max_position_embeddings": {POSITIONS}', '"max_position_embeddings": 64')
        assert changed != config
        (root / "ada" / "config.json").write_text(changed)
        assert served.get("/v1/models/ada").json["max_model_len"] == 64


def test_a_model_that_became_a_link_is_not_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Loader().folder(root)
    source = folder.sources()["ada"]
    shutil.rmtree(root / "ada")
    (root / "ada").symlink_to(root.parent / "outside" / "secret")
    with pytest.raises(Exception, match="'ada' is no longer in the folder of models"):
        source.open(None, lambda done, total: None)
    assert not is_inside(root / "ada", root)


def test_no_more_models_than_the_limit_are_listed(root: Path) -> None:
    for name in ("b", "c", "d"):
        shutil.copytree(root / "ada", root / name)
    assert set(Loader().folder(root, limit=2).sources()) == {"ada", "b"}
    with pytest.raises(InvalidInput, match="must be a folder"):
        Loader().folder(root / "nothing")
