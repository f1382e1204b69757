"""What operators and clients of other servers ask about a server: /ping, /version, /props, /slots, /docs."""

from __future__ import annotations

import openai

from headway.base.version import VERSION
from headway.server.operator_routes import Props, Slot


def test_ping_is_open_and_the_others_are_not(scene):
    assert scene.server.get("/ping").status == 200
    assert scene.server.get("/ping").json == {}
    for path in ("/version", "/props", "/slots", "/docs"):
        assert scene.server.get(path).status == 401
        assert scene.ask("GET", path).status == 200


def test_version_and_properties(scene):
    assert scene.ask("GET", "/version").json == {"version": VERSION}
    props = Props.model_validate(scene.ask("GET", "/props").json, strict=True)
    assert (props.model_alias, props.bos_token, props.eos_token) == ("speaker", "<s>", "</s>")
    assert props.default_generation_settings.n_ctx == scene.engine.config.max_positions
    params = props.default_generation_settings.params
    given = scene.engine.generation_defaults.given
    assert (params["n_predict"], params["temperature"]) == (-1, given.get("temperature", 1.0))
    (card,) = scene.ask("GET", "/v1/models").json["data"]
    assert card["meta"]["n_ctx_train"] == scene.engine.config.max_positions
    assert card["meta"]["n_params"] == scene.engine.info.parameters


def test_slots_are_those_of_the_key(scene):
    """A request in flight is seen by its own key, and not by another."""
    scene.say("y" * 3000)
    with openai.OpenAI(base_url=f"{scene.url}/v1", api_key=scene.keys["bob"], max_retries=0) as bob:
        stream = bob.completions.create(model="speaker", prompt="x", max_tokens=3000, temperature=0, stream=True)
        next(stream)
        headers = {"authorization": f"Bearer {scene.keys['bob']}"}
        listed = scene.server.ask("GET", "/slots", None, headers).json
        assert scene.ask("GET", "/slots").json == []
        stream.close()
    (slot,) = (Slot.model_validate(one, strict=True) for one in listed)
    assert (slot.prompt_tokens, slot.is_processing, slot.model) == (1, True, "speaker")
    assert slot.generated_tokens > 0
    scene.server.until(lambda: scene.server.ask("GET", "/slots", None, headers).json == [])


def test_the_page_of_the_api_has_every_path_and_no_script(scene):
    answer = scene.ask("GET", "/docs")
    page = answer.body.decode()
    for path in scene.ask("GET", "/openapi.json").json["paths"]:
        assert f" {path}<" in page
    assert "<script" not in page
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
