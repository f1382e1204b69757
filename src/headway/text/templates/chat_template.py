"""Chat templates: messages → the prompt text the model was trained on.

A template is Jinja source from a model file and is not trusted: it runs in `sandbox.py`, bounded in time, memory and
output by `TemplateLimits`, and sees only plain values. It is compiled by the first rendering, so a model with a broken
template can still be used without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, TemplateError, WrongType
from headway.base.files import read_json
from headway.base.system.gc_paused import gc_paused
from headway.base.text import short_repr

if TYPE_CHECKING:
    import jinja2

    from headway.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A mapping with a `role`, usually a `content` (text or parts), and whatever else the template reads."""

MAX_DEPTH = 64


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering."""

    source_chars: int = 1 << 18
    messages: int = 1 << 14
    input_chars: int = 1 << 22  # of messages, tools and variables; a number or bracket counts as one
    output_chars: int = 1 << 23
    work: int = 1 << 26  # characters and elements produced in all
    seconds: float = 1.0  # of CPU time


class ChatTemplate:
    """A model's chat template and its special tokens."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        limits: TemplateLimits | None = None,
    ) -> None:
        if not isinstance(source, str):
            raise WrongType(f"the template is a {type(source).__name__}; it must be Jinja source as a str")
        named = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self.source = source
        self.tool_source = tool_source  # another template, for conversations with tools
        self.special_tokens = {name: text for name, text in named.items() if text is not None}
        self.limits = limits or TemplateLimits()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
        """The template of a Hugging Face folder; None if it has none."""
        return cls._from_sources(template_sources(Path(path)), tokenizer)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
        """The template in GGUF metadata; None if it has none."""
        return cls._from_sources(gguf_template_sources(metadata), tokenizer)

    @classmethod
    def _from_sources(cls, sources: Mapping[str, str], tokenizer: Tokenizer | None) -> ChatTemplate | None:
        if not sources:
            return None
        special = dict(tokenizer.special_tokens) if tokenizer is not None else {}
        bos, eos = special.pop("bos_token", None), special.pop("eos_token", None)
        source = sources.get("default", next(iter(sources.values())))
        return cls(source, bos_token=bos, eos_token=eos, special_tokens=special, tool_source=sources.get("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. `variables` are passed to the template, which may ignore them."""
        given = _PlainValues(self.limits)
        chat = given.messages(messages)
        values = {
            **self.special_tokens,
            "documents": None,
            **given.value(variables, "variables", 0),
            "messages": chat,
            "tools": given.tools(tools),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        source = self.tool_source if tools and self.tool_source is not None else self.source
        return self._run(source, values)

    def _run(self, source: str, values: dict[str, Any]) -> str:
        import jinja2

        from headway.text.templates import sandbox

        limits = self.limits
        try:
            template = self._compile(source)
            meter = sandbox.Meter(seconds=limits.seconds, work=limits.work, size=limits.output_chars)
            with gc_paused():  # a collection would count as the template's time
                return sandbox.render(template, values, meter, limits.output_chars)
        except sandbox.RaisedByTemplate as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        except sandbox.LimitExceeded as error:
            raise TemplateError(f"the chat template was stopped: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not parse, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateError("the chat template was stopped: it is nested too deeply or calls itself") from error
        except TemplateError:
            raise
        except Exception as error:  # from an expression of the template
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _compile(self, source: str) -> jinja2.Template:
        from headway.text.templates import sandbox

        if len(source) > self.limits.source_chars:
            raise TemplateError(
                f"the chat template has {len(source):,} characters; at most {self.limits.source_chars:,} are read"
            )
        if source not in self._compiled:
            self._compiled[source] = sandbox.compile_template(source)
        return self._compiled[source]


class _PlainValues:
    """Copies a caller's values into plain types, so that a template can reach nothing else, and counts their size."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._left = limits.input_chars

    def messages(self, messages: object) -> list[dict[str, Any]]:
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise WrongType(f"messages is a {type(messages).__name__}; it must be a list of dicts with a role")
        listed = list(messages)
        if len(listed) > self._limits.messages:
            raise TemplateError(f"there are {len(listed)} messages; at most {self._limits.messages} can be rendered")
        for i, message in enumerate(listed):
            if not isinstance(message, Mapping):
                raise WrongType(f"messages[{i}] is a {type(message).__name__}; it must be a dict with a role")
            if not isinstance(message.get("role"), str):
                raise TemplateError(f"messages[{i}] has the role {short_repr(message.get('role'))}; it must be a str")
        return [self.value(message, f"messages[{i}]", 0) for i, message in enumerate(listed)]

    def tools(self, tools: object) -> list[dict[str, Any]] | None:
        if tools is None:
            return None
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
            raise WrongType(f"tools is {short_repr(tools)}; it must be a list of JSON schemas as dicts")
        return self.value(list(tools), "tools", 0)

    def value(self, value: object, where: str, depth: int) -> Any:
        self._count(len(value) if isinstance(value, str) else 1, where, depth)
        if value is None or type(value) in (bool, str, int, float):
            return value
        if isinstance(value, str):  # a subclass may have its own methods
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Mapping):
            return {self._key(k, where): self.value(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        raise WrongType(f"{where} is a {type(value).__name__}; a template takes str, numbers, lists and dicts")

    def _key(self, key: object, where: str) -> str:
        if not isinstance(key, str):
            raise WrongType(f"{where} has the key {short_repr(key)}; keys must be str")
        self._count(len(key), where, 0)
        return str.__str__(key)

    def _count(self, size: int, where: str, depth: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TemplateError(f"the messages have more than {self._limits.input_chars:,} characters, up to {where}")
        if depth > MAX_DEPTH:
            raise TemplateError(f"{where} is nested deeper than {MAX_DEPTH} levels")


def template_sources(folder: Path) -> dict[str, str]:
    """The chat templates of a Hugging Face folder by name; `default` is the main one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{file} is not UTF-8 text: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        templates = read_json(folder / name).get("chat_template")
        if templates is not None:
            return _named(templates, f"chat_template in {folder / name}")
    return {}


def gguf_template_sources(metadata: Mapping[str, object]) -> dict[str, str]:
    """The chat templates in GGUF metadata by name; `default` is the main one."""
    key = "tokenizer.chat_template"
    found = {
        name: metadata[full] for name, full in (("default", key), ("tool_use", key + ".tool_use")) if full in metadata
    }
    for name, source in found.items():
        if not isinstance(source, str):
            raise BadModelFile(f"the {name} chat template in {key} is a {type(source).__name__}; it must be text")
    return {name: str(source) for name, source in found.items()}


def _named(entries: object, where: str) -> dict[str, str]:
    if isinstance(entries, str):
        return {"default": entries}
    pairs = entries if isinstance(entries, list) else [entries]
    named = {}
    for entry in pairs:
        match entry:
            case {"name": str(name), "template": str(source)}:
                named[name] = source
            case _:
                raise BadModelFile(f"{where} has the entry {short_repr(entry)}; it must have a name and a template")
    return named
