"""The table of generation parameters: name, type, bounds, default and meaning of each.

    PARAMETERS["min_p"].check(0.05)

Samplers, `ctx.generate` and generation_config.json check their values with it. Flags, HTTP fields, the Lab's controls
and pipeline options are declared where they are used; tests/program/test_generation_table.py holds them to this table,
and tests/clients/test_javascript_types.py the JavaScript client's options.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

from headway.base.checks import as_integer, check_number
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, WrongType
from headway.base.text import short_repr

FACES: Mapping[str, str] = {
    "generate": "the arguments of ctx.generate",
    "sampler": "the fields of Sampling",
    "sync": "the fields of SamplingParams",
    "file": "the keys of generation_config.json",
    "cli": "the flags of headway run and headway chat",
    "http": "the fields of /v1/completions and /v1/chat/completions",
    "llama_server": "the fields of llama-server's /completion and /infill",
    "responses": "the fields of /v1/responses",
    "messages": "the fields of /v1/messages",
    "ollama": "the options of Ollama's routes",
    "lab": "the Lab's controls",
    "decoder": "the options of the text-generation pipeline",
    "seq2seq": "the options of pipelines for encoder-decoder models",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter. Bounds are inclusive, except `above` and `below`; `hint` says what the edge of the range does."""

    name: str
    type: type  # bool, int or float; object where the value is checked by its own module
    default: Any  # what takes effect where nobody gives a value
    meaning: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    hint: str = ""
    words: tuple[str, ...] = ()  # values besides those of the type
    faces: frozenset[str] = frozenset()  # those of FACES that offer it; the others do not
    names: Mapping[str, str] = field(default_factory=dict)  # its name on a face, where it is another
    defaults: Mapping[str, Any] = field(default_factory=dict)  # its default on a face, where it is another
    differs: Mapping[str, str] = field(default_factory=dict)  # why a face has other bounds

    def check(self, value: Any, name: str | None = None) -> Any:
        """`value` as Python's own bool, int or float; raises where it has another type or is out of bounds."""
        name = name or self.name
        if self.type is bool:
            return self._flag(value, name)
        number = as_integer(value, name) if self.type is int else check_number(value, name)
        low, above, high, below = self.low, self.above, self.high, self.below
        fits = (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
        if not fits or (below is not None and number >= below):
            hint = f" ({self.hint})" if self.hint else ""
            raise InvalidInput(f"{name} is {short_repr(number)}; it must be {self.range}{hint}")
        return number

    def name_on(self, face: str) -> str:
        """What a face calls it."""
        return self.names.get(face, self.name)

    @property
    def range(self) -> str:
        """The bounds in words."""
        kind = "an integer " if self.type is int else ""
        if self.low is not None and self.high is not None:
            return f"{kind}in [{self.low}, {self.high}]"
        low = "" if self.low is None else f"{kind and kind + 'of '}at least {self.low}"
        above = "" if self.above is None else f"above {self.above}"
        high = "" if self.high is None else f"at most {self.high}"
        below = "" if self.below is None else f"below {self.below}"
        return " and ".join(filter(None, (low, above, high, below))) or "a number"

    def _flag(self, value: Any, name: str) -> bool | str:
        if isinstance(value, bool) or (isinstance(value, str) and value in self.words):
            return value
        choices = ", ".join(["true", *(["false"] if self.words else [])])
        last = repr(self.words[-1]) if self.words else "false"
        raised = InvalidInput if isinstance(value, str) and self.words else WrongType
        raise raised(f"{name} is {short_repr(value)}; it must be {choices} or {last}")


def _on(faces: str) -> frozenset[str]:
    chosen = frozenset(faces.split())
    assert chosen <= FACES.keys(), chosen
    return chosen


_NEW = {"file": "max_new_tokens", "decoder": "max_new_tokens", "seq2seq": "max_new_tokens"}
_LEAST = {face: name.replace("max", "min") for face, name in _NEW.items()}
_CALLS = _on("generate file decoder seq2seq")  # with the names that transformers has
_APIS = _on("http llama_server responses messages")  # whose fields for drawing are one class
_RULES = _APIS | _on("generate sampler cli ollama decoder")
_DRAWING = _APIS | _CALLS | _on("sampler cli ollama lab")

_TABLE = (
    Parameter(
        "max_tokens", int, 256, "New tokens at most.", low=1,
        names={**_NEW, "ollama": "num_predict", "llama_server": "n_predict", "responses": "max_output_tokens"},
        faces=_APIS | _CALLS | _on("cli ollama"), defaults={"cli": {"run": 256, "chat": 512}},
        differs={
            "http": "0 scores a prompt and generates nothing",
            **dict.fromkeys(("ollama", "llama_server"), "-1 is no limit"),
        },
    ),
    Parameter(
        "max_length", int, None, "Tokens at most, those of the prompt included.", low=1, faces=_CALLS,
        differs={"seq2seq": "a decoder starts from one token, so 1 leaves no room"},
    ),
    Parameter(
        "min_tokens", int, 0, "New tokens before an end token may come.", low=0, names=_LEAST,
        faces=_APIS | _CALLS,
    ),
    Parameter(
        "min_length", int, 0, "Tokens before an end token may come, those of the prompt included.", low=0,
        faces=_CALLS,
    ),
    Parameter(
        "do_sample", bool, False, "Draw tokens; otherwise the likeliest token is taken.",
        faces=_CALLS,
    ),
    Parameter(
        "temperature", float, 1.0, "Divides the logits before a draw; 0 takes the likeliest token.", low=0,
        hint="0 is argmax, 1 leaves the model as it is", faces=_DRAWING | _on("sync"),
        defaults={"sync": 0.0, "cli": {"run": 0.0, "chat": None}},
        differs={"seq2seq": "do_sample=False takes the likeliest token there"},
    ),
    Parameter(
        "top_k", int, 0, "Draw among the k likeliest tokens.", low=0, hint="0 turns it off",
        faces=_DRAWING | _on("sync"),
        differs=dict.fromkeys((*sorted(_APIS), "ollama"), "-1 turns it off too, as on other servers"),
    ),
    Parameter(
        "top_p", float, 1.0, "Draw among the fewest tokens whose probabilities reach p.", above=0, high=1,
        hint="1 keeps every token", faces=_DRAWING | _on("sync"),
    ),
    Parameter(
        "min_p", float, 0.0, "Draw among tokens at least p times as likely as the likeliest.", low=0, high=1,
        hint="0 keeps every token", faces=_DRAWING | _on("sync"),
    ),
    Parameter(
        "typical_p", float, 1.0, "Draw among the fewest tokens of typical surprise whose probabilities reach p.",
        above=0, high=1, hint="1 keeps every token", faces=_DRAWING,
    ),
    Parameter(
        "epsilon_cutoff", float, 0.0, "Draw among tokens whose probabilities are at least this.", low=0, below=1,
        hint="0 keeps every token", faces=_DRAWING,
    ),
    Parameter(
        "eta_cutoff", float, 0.0, "The same with a limit that falls where the distribution is flat.", low=0, below=1,
        hint="0 keeps every token", faces=_DRAWING,
    ),
    Parameter(
        "repetition_penalty", float, 1.0, "Above 1, tokens that occurred before are less likely.", above=0,
        hint="1 turns it off, higher values discourage repeats", names={"ollama": "repeat_penalty"},
        faces=_DRAWING | _on("sync"),
    ),
    Parameter(
        "presence_penalty", float, 0.0, "Subtracted from the logit of every token generated before.",
        faces=_APIS | _on("sampler sync cli ollama lab"),
    ),
    Parameter(
        "frequency_penalty", float, 0.0, "Subtracted from a token's logit each time the token was generated.",
        faces=_APIS | _on("sampler sync cli ollama lab"),
    ),
    Parameter(
        "dry_multiplier", float, 0.0, "How much a token loses that would continue a repeated sequence (DRY).", low=0,
        hint="0 turns it off", faces=_RULES,
    ),
    Parameter("dry_base", float, 1.75, "Grows that loss with each repeated token.", low=1, high=100, faces=_RULES),
    Parameter("dry_allowed_length", int, 2, "Tokens that may repeat before it begins.", low=1, faces=_RULES),
    Parameter(
        "dry_penalty_last_n", int, -1, "How many of the last tokens are looked at.", low=-1, hint="-1 is all of them",
        faces=_RULES,
    ),
    Parameter(
        "dry_sequence_breakers", object, ("\n", ":", '"', "*"), "Texts that no repeated sequence goes across.",
        names={"cli": "dry_sequence_breaker"}, faces=_RULES,
    ),
    Parameter(
        "xtc_probability", float, 0.0, "How often all top choices but the last are excluded (XTC).", low=0, high=1,
        hint="0 turns it off", faces=_RULES,
    ),
    Parameter(
        "xtc_threshold", float, 0.1, "The probability from which a token is a top choice.", low=0, high=1,
        hint="above 0.5 nothing is excluded", faces=_RULES,
    ),
    Parameter(
        "mirostat", int, 0, "Keep the surprise of the text near mirostat_tau, by version 1 or 2.", low=0, high=2,
        hint="0 turns it off", faces=_RULES,
    ),
    Parameter("mirostat_tau", float, 5.0, "That surprise, in bits.", low=0, high=1000, faces=_RULES),
    Parameter("mirostat_eta", float, 0.1, "How quickly it is followed.", low=0, high=1000, faces=_RULES),
    Parameter(
        "logit_bias", object, None, "Added to the logits: of the tokens named, or of all by an array.",
        faces=_APIS | _on("sampler lab"),
    ),
    Parameter(
        "seed", int, None, "The same seed draws the same tokens.", low=0, high=(1 << 64) - 1,
        faces=_APIS | _on("sampler cli ollama lab decoder seq2seq"),
        differs={
            **dict.fromkeys((*sorted(_APIS), "ollama"), "clients send negative seeds, which stand for their 64 bits"),
            "seq2seq": "torch's seeds end below 2**63",
        },
    ),
    Parameter(
        "no_repeat_ngram_size", int, 0, "No run of n tokens comes twice.", low=0, hint="0 turns it off",
        faces=_CALLS,
    ),
    Parameter(
        "num_beams", int, 1, "Beams of a beam search.", low=1, high=1024, hint="1 turns it off", faces=_CALLS,
        differs={"seq2seq": "transformers sets no limit"},
    ),
    Parameter(
        "length_penalty", float, 1.0, "A beam's score is its log-probability over length ** penalty.",
        faces=_CALLS | _on("http"),
    ),
    Parameter(
        "early_stopping", bool, False, "Whether a beam search ends as soon as num_beams sequences have ended.",
        words=("never",), faces=_CALLS | _on("http"),
    ),
    Parameter(
        "num_return_sequences", int, 1, "Sequences to return.", low=1, high=1024,
        names={"http": "n", "llama_server": "n_cmpl"}, faces=_CALLS | _on("http llama_server"),
        differs={
            **dict.fromkeys(("http", "llama_server"), "the server's max_n bounds it"),
            "seq2seq": "transformers sets no limit",
        },
    ),
    Parameter(
        "stop", object, (), "Strings and token ids that end the text, besides the model's end tokens.",
        names={"messages": "stop_sequences"}, faces=_APIS | _on("generate cli ollama decoder"),
    ),
    Parameter(
        "stop_only", bool, False, "Ignore the model's end tokens: only `stop` ends the text.",
        names=dict.fromkeys(_APIS, "ignore_eos"), faces=_APIS | _on("generate"),
    ),
    Parameter(
        "constrain", object, None, "A grammar, or an object, that says which tokens may come next.",
        names={
            "http": "structured_outputs", "llama_server": "grammar", "responses": "text", "messages": "output_config"
        },
        faces=_APIS | _on("generate"),
    ),
    Parameter(
        "probe", object, None, "What to read at every step, as log-probabilities: one probe or a list.",
        names={"http": "logprobs", "cli": "logprobs", "llama_server": "n_probs", "responses": "top_logprobs"},
        defaults={"cli": 0}, faces=_on("generate cli http llama_server responses"),
    ),
    Parameter("attention_mask", object, None, "What every new token attends to.", faces=_on("generate")),
    Parameter(
        "bad_words_ids", object, None, "Sequences of token ids that must not come.",
        names=dict.fromkeys(_APIS, "bad_words"), faces=_APIS | _CALLS,
    ),
    Parameter(
        "sequence_bias", object, None, "Added to the logit of a sequence's last token where the others have just come.",
        faces=_on("generate file decoder"),
    ),
    Parameter("prepare", object, None, "A function that gets every pass before it is executed.", faces=_on("generate")),
    Parameter(
        "logits", object, None, "A function between a row's logits and its draw, which may change them.",
        faces=_on("generate"),
    ),
    Parameter(
        "penalize_prompt", bool, True, "Whether the repetition penalty counts the prompt's tokens.",
        faces=_on("generate"),
    ),
    Parameter(
        "adapter", object, None, "LoRA adapters that new tokens are computed under.",
        names=dict.fromkeys(("cli", "llama_server"), "lora"), faces=_on("generate cli llama_server"),
    ),
    Parameter(
        "speculate", object, None, "What drafts tokens to verify: the same text in fewer passes.",
        faces=_on("generate cli"),
    ),
    Parameter(
        "verify", object, "match", "Keep drafts that are drawn, or, with rejection, by a chance that changes no odds.",
        faces=_on("generate"),
    ),
)  # fmt: skip
PARAMETERS: Mapping[str, Parameter] = MappingProxyType({parameter.name: parameter for parameter in _TABLE})


def parameters_of(face: str) -> tuple[Parameter, ...]:
    """The parameters that a face offers, in the table's order."""
    return tuple(parameter for parameter in _TABLE if face in parameter.faces)


# Those of a beam search, and what changes nothing without one.
WITHOUT_BEAMS: Mapping[str, Any] = MappingProxyType({"length_penalty": 1.0, "early_stopping": False})
# Arguments of transformers' and vLLM's `generate` that are called something else here, and what to give instead.
ELSEWHERE: Mapping[str, str] = MappingProxyType({
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "max_completion_tokens": "max_tokens",
    "n": "num_return_sequences",
    "best_of": "num_return_sequences",
    "stop_strings": "stop, which leaves the string out of the text",
    "stop_sequence": "stop, which leaves the string out of the text",
    "stop_token_ids": "stop, which takes token ids too",
    "eos_token_id": "stop with stop_only=True, which takes token ids",
    "ignore_eos": "stop_only",
    "pad_token_id": "nothing: rows are not padded",
    "prefix_allowed_tokens_fn": "constrain, an object with mask() and accept()",
    "logits_processor": "logits, a function of a row's logits",
    "guided_json": "constrain=hw.Grammar.json_schema(...), or gen.json(schema)",
    "response_format": "constrain=hw.Grammar.json_schema(...), or gen.json(schema)",
    "grammar": "constrain",
    "streamer": "an async for over the generation",
    "stream": "an async for over the generation",
    "seed": "a sampler with a seed, or engine.context(seed=...)",
    "presence_penalty": "a sampler: hw.Sampling(presence_penalty=...)",
    "frequency_penalty": "a sampler: hw.Sampling(frequency_penalty=...)",
    "logit_bias": "a sampler: hw.Sampling(logit_bias=...)",
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
    "logprobs": "probe=hw.Ranking(k)",
    "output_scores": "probe=hw.Logits()",
    "output_hidden_states": "probe=hw.Hidden(layer)",
    "output_attentions": "probe=hw.AttentionScores(layer)",
    "use_cache": "nothing: the context keeps the KV cache",
    "generation_config": "its values by name; the model's own generation_config.json is used already",
    "assistant_model": "speculate=hw.DraftModel(engine)",
    "prompt_lookup_num_tokens": "speculate=hw.PromptLookup()",
    "speculative_config": "speculate=hw.PromptLookup(), or hw.DraftModel(engine)",
})  # fmt: skip


def unknown_parameter(name: str, face: str = "generate") -> WrongType:
    """The error for an argument that a face does not have, with what to give instead."""
    known = [parameter.name_on(face) for parameter in parameters_of(face)]
    close = difflib.get_close_matches(name, known, n=1)
    if name in ELSEWHERE:
        hint = f"give {ELSEWHERE[name]}"
    else:
        hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
    return WrongType(f"{face} takes no argument {name!r}; {hint}")
