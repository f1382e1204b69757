"""The table of generation parameters, and every face that offers them: same names, types, defaults and bounds."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from pydantic import BaseModel

import headway as hw
import headway.server
from headway.base.specs.generation import FACES, PARAMETERS, Parameter, parameters_of
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.specs.logits_rules import SWITCHES
from headway.cli.chat import chat
from headway.cli.flags.shared import Decoding
from headway.cli.run import run
from headway.pipelines.generation.decoder_options import TextGenerationOptions
from headway.pipelines.generation.options import GenerationOptions
from headway.program.generation.parameters import Options
from headway.remote.protocol.values import sampler_of, spec_json
from headway.server import lab
from headway.server.anthropic.request_schema import MessagesRequest
from headway.server.api.request_schema import ChatRequest, CompletionRequest, SamplingFields
from headway.server.lab.schema import TraceRequest
from headway.server.llama_server.completion import NativeCompletionRequest
from headway.server.llama_server.infill import InfillRequest
from headway.server.ollama.request_schema import LOADING, OllamaOptions
from headway.server.responses.request_schema import ResponseRequest
from headway.testing import scripted_engine

(LAB,) = [kind for kind in get_args(TraceRequest.model_fields["sampling"].annotation) if kind is not NoneType]
STATIC = Path(inspect.getfile(lab)).parent / "static"
MISSING = inspect.Parameter.empty

Fields = dict[str, tuple[Any, Any]]  # name → (type, default)


def of_function(function: Callable[..., Any]) -> Fields:
    hints = get_type_hints(function)
    names = inspect.signature(function).parameters
    return {name: (hints[name], each.default) for name, each in names.items() if name != "self"}


def of_dataclass(kind: Any) -> Fields:
    hints = get_type_hints(kind)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(kind)}


def of_model(kind: type[BaseModel]) -> Fields:
    fields = kind.model_fields.items()
    return {name: (field.annotation, None if field.is_required() else field.default) for name, field in fields}


DECLARED: dict[tuple[str, str], Callable[[], Fields]] = {
    ("generate", ""): lambda: of_function(hw.Context.generate),
    ("sampler", ""): lambda: of_dataclass(hw.Sampling),
    ("sync", ""): lambda: of_dataclass(hw.SamplingParams),
    ("file", ""): lambda: of_dataclass(hw.GenerationDefaults),
    ("cli", "run"): lambda: of_function(run),
    ("cli", "chat"): lambda: of_function(chat),
    ("http", "completions"): lambda: of_model(CompletionRequest),
    ("http", "chat"): lambda: of_model(ChatRequest),
    ("llama_server", "completion"): lambda: of_model(NativeCompletionRequest),
    ("llama_server", "infill"): lambda: of_model(InfillRequest),
    ("responses", ""): lambda: of_model(ResponseRequest),
    ("messages", ""): lambda: of_model(MessagesRequest),
    ("ollama", ""): lambda: of_model(OllamaOptions),
    ("lab", ""): lambda: of_model(LAB),
    ("decoder", ""): lambda: of_dataclass(TextGenerationOptions),
    ("seq2seq", ""): lambda: of_dataclass(GenerationOptions),
}
# What a face has besides parameters of generating.
OTHERS = {
    "generate": "sampler unknown",
    "file": "eos_ids bos_id pad_id unknown",
    "cli": "model dtype device threads quantize memory memory_fraction kv_dtype tensor_parallel system prompt raw "
    "cache_host cache_folder cache_folder_size profile profile_json json quiet",
    "http": "model stream stream_options priority allowed_token_ids stop_token_ids prompt_logprobs "
    "logprobs_mode metadata prediction prompt_cache_key prompt_cache_retention safety_identifier service_tier store "
    "user prompt suffix best_of echo messages max_completion_tokens top_logprobs response_format tools tool_choice "
    "parallel_tool_calls modalities add_generation_prompt cache_salt chat_template_kwargs continue_final_message "
    "function_call functions include_stop_str_in_output reasoning_effort return_token_ids skip_special_tokens "
    "truncate_prompt_tokens thinking_token_budget verbosity grammar chat_template repeat_penalty use_beam_search "
    "prompt_cache_options",
    "llama_server": "model max_tokens max_completion_tokens n logprobs post_sampling_probs stream samplers "
    "repeat_last_n n_indent t_max_predict_ms return_tokens timings_per_token response_fields cache_prompt id_slot "
    "n_keep n_discard t_max_prompt_ms allowed_token_ids cache_salt priority repeat_penalty stop_token_ids prompt "
    "json_schema input_prefix input_suffix input_extra",
    "responses": "allowed_token_ids background cache_salt chat_template_kwargs conversation include input instructions "
    "max_tool_calls metadata model parallel_tool_calls previous_response_id priority prompt_cache_key "
    "prompt_cache_retention reasoning repeat_penalty safety_identifier service_tier stop_token_ids store stream "
    "stream_options tool_choice tools user prompt_cache_options",
    "messages": "allowed_token_ids cache_control cache_salt messages metadata model priority repeat_penalty "
    "service_tier stop_token_ids stream system thinking tool_choice tools",
    "ollama": " ".join(("repeat_last_n", *LOADING)),
    "lab": "draws",
    "decoder": "stop_strings stop_sequence eos_token_id pad_token_id return_full_text return_text return_tensors "
    "continue_final_message prefix skip_special_tokens batch_size",
    "seq2seq": "encoder_repetition_penalty encoder_no_repeat_ngram_size suppress_tokens "
    "forced_bos_token_id forced_eos_token_id decoder_start_token_id eos_token_id pad_token_id renormalize_logits "
    "use_cache",
}
SETTLED = ("sampler", "lab")  # faces whose defaults take effect; elsewhere None leaves a parameter open


@pytest.mark.parametrize(("face", "part"), DECLARED)
def test_a_face_offers_what_the_table_says(face: str, part: str) -> None:
    declared = set(DECLARED[face, part]()) - set(OTHERS.get(face, "").split())
    assert declared == {parameter.name_on(face) for parameter in parameters_of(face)}, FACES[face]


@pytest.mark.parametrize(("face", "part"), DECLARED)
def test_types_and_defaults_are_the_tables(face: str, part: str) -> None:
    declared = DECLARED[face, part]()
    for parameter in parameters_of(face):
        kind, default = declared[parameter.name_on(face)]
        if parameter.type is not object:
            allowed = {parameter.type, NoneType} | ({str} if parameter.words else set())
            assert parameter.type in leaves(kind) <= allowed, (parameter.name, kind)
        expected = parameter.defaults.get(face, parameter.default)
        expected = expected[part] if isinstance(expected, dict) else expected
        if face in parameter.defaults or face in SETTLED:
            assert default == expected, parameter.name
        else:
            assert default is None or default == expected, parameter.name


def leaves(kind: Any) -> set[Any]:
    """The plain types in an annotation; a Literal counts as the types of its values."""
    if get_origin(kind) is Literal:
        return {type(value) for value in get_args(kind)}
    inside = [one for one in get_args(kind) if not isinstance(one, str) and not hasattr(one, "json_schema_extra")]
    if isinstance(kind, type) or not inside:
        return {kind}
    inside = inside[:1] if hasattr(kind, "__metadata__") else inside
    return set().union(*(leaves(one) for one in inside))


# -- bounds --------------------------------------------------------------------------------------------------------


def values_near(parameter: Parameter) -> list[Any]:
    """Values inside, at and outside the bounds."""
    if parameter.type is bool:
        return [True, False, *parameter.words]
    step = 1 if parameter.type is int else 0.01
    edges = [edge for edge in (parameter.low, parameter.above, parameter.high, parameter.below) if edge is not None]
    near = {parameter.type(edge + by) for edge in edges for by in (-step, 0, step)}
    return [value for value in sorted(near | {parameter.type(1)}) if abs(value) < 1 << 53 or parameter.type is int]


def fits(check: Callable[[], Any]) -> bool:
    """Whether a value is inside its bounds; other errors are not about them."""
    try:
        check()
    except hw.HeadwayError as error:
        if re.search("it must be|it takes", str(error)):
            return False
    return True


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with scripted_engine(pages=8) as engine:
        yield engine


def generated(engine: hw.Engine, name: str, value: Any) -> None:
    with engine.context().fill([1, 2]) as context:
        context.generate(**{name: value})


def by_schema(model: type[BaseModel], name: str, value: Any) -> bool:
    """Whether a value lies inside what the OpenAPI description says of a field."""
    said = model.model_json_schema()["properties"][name]
    kinds = [one for one in said.get("anyOf", [said]) if one.get("type") != "null"]
    if isinstance(value, bool | str):
        return any(
            one.get("type") == "boolean" if isinstance(value, bool) else one.get("const") == value for one in kinds
        )
    (said,) = kinds
    low, above = said.get("minimum"), said.get("exclusiveMinimum")
    high, below = said.get("maximum"), said.get("exclusiveMaximum")
    inside = (low is None or value >= low) and (above is None or value > above)
    return inside and (high is None or value <= high) and (below is None or value < below)


def accepts(face: str, engine: hw.Engine) -> Callable[[str, Any], bool]:
    checks: dict[str, Callable[[str, Any], bool]] = {
        "generate": lambda name, value: fits(lambda: generated(engine, name, value)),
        "sampler": lambda name, value: fits(lambda: hw.Sampling(**{name: value})),
        "sync": lambda name, value: fits(lambda: hw.SamplingParams(**{name: value})),
        "file": lambda name, value: fits(lambda: hw.GenerationDefaults(**{name: value})),
        "cli": lambda name, value: fits(lambda: Decoding(**{"max_tokens": 8, "temperature": 1.0, name: value}).check()),
        "http": lambda name, value: all(by_schema(kind, name, value) for kind in (CompletionRequest, ChatRequest)),
        "llama_server": lambda name, value: by_schema(NativeCompletionRequest, name, value),
        "responses": lambda name, value: by_schema(ResponseRequest, name, value),
        "messages": lambda name, value: by_schema(MessagesRequest, name, value),
        "ollama": lambda name, value: by_schema(OllamaOptions, name, value),
        "seq2seq": lambda name, value: fits(lambda: GenerationOptions(**{name: value})),
    }
    return checks[face]


@pytest.mark.parametrize("face", sorted({face for face, _ in DECLARED} - {"decoder", "lab"}))
def test_bounds_are_the_tables(face: str, engine: hw.Engine) -> None:
    accepted = accepts(face, engine)
    for parameter in parameters_of(face):
        if parameter.type is object:
            continue
        by_table = {value: fits(lambda p=parameter, v=value: p.check(v)) for value in values_near(parameter)}
        by_face = {value: accepted(parameter.name_on(face), value) for value in by_table}
        if face in parameter.differs:
            assert by_face != by_table, f"{parameter.name} no longer differs: {parameter.differs[face]}"
        else:
            assert by_face == by_table, parameter.name


def test_the_labs_page_has_the_tables_defaults_and_stays_in_its_bounds() -> None:
    numbers = {p.name for p in parameters_of("lab") if p.type is not object} - {"seed"}
    off = block((STATIC / "sampling.js").read_text(), r"OFF = Object\.freeze\(")
    assert off == {name: PARAMETERS[name].default for name in numbers}
    ranges = block((STATIC / "link.js").read_text(), "RANGES = ")
    assert set(ranges) == numbers
    sliders = re.findall(r'\["(\w+)", "[\w-]+", (-?[\d.]+), (-?[\d.]+), ([\d.]+), "', (STATIC / "next.js").read_text())
    assert {name for name, *_ in sliders} == numbers
    for name, low, high in [*((n, *r[:2]) for n, r in ranges.items()), *((n, l, h) for n, l, h, _ in sliders)]:
        for edge in (low, high):
            PARAMETERS[name].check(PARAMETERS[name].type(float(edge)))


def test_the_labs_page_says_which_parameters_it_lacks_and_why() -> None:
    """By the switch of each rule: the other values of a rule mean nothing without it."""
    said = re.search(r'ABSENT = "([^"]+)"', (STATIC / "next.js").read_text())
    assert said is not None
    assert {name for name in PARAMETERS if re.search(rf"\b{name}\b", said[1])} == set(SWITCHES.values())
    assert {p.name for p in parameters_of("sampler")} - {p.name for p in parameters_of("lab")} == set(RULES)
    assert "A draw at one row, which this page shows and compares with the engine, takes none of them." in said[1]
    for name in SWITCHES.values():
        with pytest.raises(hw.Unsupported, match=f"{name} is 1, .* are rules of a generation"):
            hw.draw(np.zeros(8, np.float32), hw.Sampling(**{name: 1}), seed=1, position=0)


def block(script: str, before: str) -> dict[str, Any]:
    """An object literal of numbers in a script."""
    found = re.search(before + r"(\{[^}]*\})", script)
    assert found is not None
    quoted = re.sub(r"(\w+):", r'"\1":', found[1])
    return json.loads(re.sub(r",\s*\}", "}", quoted))


def test_every_request_that_draws_is_a_face() -> None:
    """A new API's request cannot lack a parameter unnoticed: it has to be declared above."""
    for module in pkgutil.walk_packages(headway.server.__path__, "headway.server."):
        importlib.import_module(module.name)

    def kinds(of: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for kind in of.__subclasses__():
            yield from kinds(kind) if kind.__subclasses__() else (kind,)

    drawing = {kind for kind in kinds(SamplingFields) if kind.__module__.startswith("headway.")}
    assert drawing == {
        CompletionRequest,
        ChatRequest,
        NativeCompletionRequest,
        InfillRequest,
        ResponseRequest,
        MessagesRequest,
    }
    assert {face for face, _ in DECLARED} == FACES.keys()


# -- every face that draws has every way of drawing ----------------------------------------------------------------

ABSENT = {  # parameters of `Sampling` that a face does not offer, and why
    "generate": {
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "logit_bias"), "transformers has no such argument"),
        "seed": "the sampler's or the context's",
    },
    "cli": {"logit_bias": "token ids are not known on a command line"},
    "http": {},
    "llama_server": {},
    "responses": {},
    "messages": {},
    "ollama": {"logit_bias": "Ollama has no such option"},
    "decoder": {
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), "transformers has no such option"),
        "logit_bias": "sequence_bias is its name in transformers",
    },
    "lab": dict.fromkeys(RULES, "the page shows one row, and these are rules of a generation"),
}


@pytest.mark.parametrize("face", ABSENT)
def test_a_way_of_drawing_is_on_every_face_that_draws(face: str) -> None:
    offered = {parameter.name for parameter in parameters_of(face)}
    assert {parameter.name for parameter in parameters_of("sampler")} - offered == set(ABSENT[face])


def test_a_sampler_keeps_every_value_over_a_connection() -> None:
    values: dict[str, Any] = {p.name: p.type(1) for p in parameters_of("sampler") if p.type is not object}
    values |= {"epsilon_cutoff": 0.5, "eta_cutoff": 0.5, "dry_sequence_breakers": ("!",), "logit_bias": {3: 1.5}}
    assert set(values) == {parameter.name for parameter in parameters_of("sampler")}
    sampler = hw.Sampling(**values)
    assert sampler_of(json.loads(json.dumps(spec_json(sampler)))) == sampler


# -- the table itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda parameter: parameter.name)
def test_a_row_is_complete(parameter: Parameter) -> None:
    assert parameter.meaning.endswith(".")
    assert parameter.faces
    assert {*parameter.names, *parameter.defaults, *parameter.differs} <= parameter.faces
    if parameter.type is not object and parameter.default is not None:
        assert parameter.check(parameter.default) == parameter.default
    for value in ("x", [1], None):
        if parameter.type is not object:
            with pytest.raises((hw.WrongType, hw.InvalidInput), match=parameter.name):
                parameter.check(value)


def test_the_types_for_type_checkers_are_those_of_the_call() -> None:
    names = set(of_function(hw.Context.generate)) - {"sampler", "unknown"}
    assert names == {*Options.__annotations__, "probe", "num_beams", "num_return_sequences"}
