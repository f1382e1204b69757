"""The Jinja sandbox for chat templates, which come with model files and are not trusted.

A template cannot run code outside Jinja: the environment is the immutable sandbox, attributes with an underscore and
methods that change or inflate values are refused, and only plain values (str, numbers, lists, dicts) go in.

Rendering is bounded by one `Meter` (meter.py):
- *time*: CPU seconds of the rendering thread, checked on every loop iteration, call, filter and operator;
- *work*: characters and elements produced by all of these together, which bounds memory and loops;
- *size*: of every value (with everything inside it) and of the output. What could become large in one operation (`*`,
  `**`, `%`, `format`, `replace`, `join`, `center`, `indent`, …) is checked first.
To meter every loop, literal and concatenation, the parsed template is rewritten before compilation: `for x in y` runs
over `y|_counted`, list and dict literals are `…|_measured`, and `a ~ b` is `[a, b]|_joined`.

The settings, filters and globals are those that chat templates expect (trim_blocks, lstrip_blocks, break and
continue, tojson, raise_exception, strftime_now, the generation tag), without `lipsum`, `urlize`, `wordwrap`, `xmlattr`
and `pprint`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headway.text.templates.meter import (
    LimitExceeded,
    Meter,
    check_braces,
    check_operator,
    checked_filter,
    checked_method,
)

_REFUSED_METHODS = {
    str: {"translate", "maketrans", "expandtabs", "encode", "format_map"},
    int: {"to_bytes", "from_bytes"},
}
_REFUSED_FILTERS = ("urlize", "wordwrap", "xmlattr", "pprint")


class RaisedByTemplate(jinja2.TemplateError):
    """The template called raise_exception."""


_METER: ContextVar[Meter | None] = ContextVar("headway_template_meter", default=None)


def _meter() -> Meter:
    meter = _METER.get()
    if meter is None:  # Jinja is folding constants: leave that to the rendering
        raise nodes.Impossible
    return meter


def render(template: jinja2.Template, variables: dict[str, Any], meter: Meter, max_output: int) -> str:
    """The text of `template`; raises `LimitExceeded` or Jinja's errors."""
    token = _METER.set(meter)
    try:
        parts, total = [], 0
        for part in template.root_render_func(template.new_context(variables)):
            total += len(part)
            if total > max_output:
                raise LimitExceeded(f"its output has more than {max_output:,} characters")
            parts.append(part)
            meter.step()
        return "".join(parts)
    finally:
        _METER.reset(token)


def compile_template(source: str) -> jinja2.Template:
    """`source` compiled for `render`; raises Jinja's errors if it does not parse."""
    env = ChatEnvironment()
    tree = _Rewriter().visit(env.parse(source))
    return jinja2.Template.from_code(env, env.compile(tree, filename="<chat template>"), env.make_globals(None))


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, metered."""

    intercepted_binops = frozenset(["//", "%", "+", "*", "-", "/", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=_finalize,
            optimized=False,
        )
        self.filters["tojson"] = _tojson
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters.update({name: _metered_filter(name, function) for name, function in self.filters.items()})
        self.filters.update(_counted=_CountedIterable, _measured=lambda value: _meter().passed(value), _joined=_joined)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
            dict=_Dict(),
            range=_range,
        )
        self.concat = _joined  # type: ignore[assignment]  # macros, set blocks and filter blocks end here

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, refused in _REFUSED_METHODS.items():
            if isinstance(obj, kind) and attr in refused:
                return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is refused")

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute.startswith("__"):  # refused by name, whether or not the object has it
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        check_operator(meter, operator, left, right)
        return meter.passed(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            meter = _meter()
            check_braces(meter, value.__self__, args, kwargs)
            return meter.passed(inner(*args, **kwargs))

        return bounded

    # Jinja calls this with the object's own keyword arguments, which may have any name.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | int | float | list | tuple | dict):
            args = checked_method(meter, owner, getattr(__obj, "__name__", ""), args, kwargs)
        return meter.passed(super().call(__context, __obj, *args, **kwargs))


class _Rewriter(NodeTransformer):
    """Sends loops, literals and concatenations through the meter."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(node, "_measured")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(node, "_measured") if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through(node, "_measured")


def _through(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks assistant text; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _CountedIterable:
    """An iterable that counts each iteration."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        meter = _meter()
        for item in self._items:
            meter.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError here tells Jinja to count for itself


class _Namespace(Namespace):
    """Jinja's namespace without private names; its repr omits the contents, which may be recursive."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, attrs = args[0], dict(*args[1:], **kwargs)
        for name in attrs:
            _check_name(name)
        Namespace.__init__(self, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the private name {name!r}")


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(r"%[^A-Za-z%]*\d{3}", format):
        raise LimitExceeded("the format for strftime_now is too long")
    return datetime.now().strftime(format)


def _range(*args: int) -> range:
    try:
        return safe_range(*args)
    except OverflowError as error:
        raise LimitExceeded(str(error)) from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    for option in (indent, *(separators or ())):
        if (isinstance(option, int) and option > 16) or (isinstance(option, str) and len(option) > 16):
            raise LimitExceeded("tojson takes an indent and separators of at most 16 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _finalize(value: Any) -> Any:
    meter = _METER.get()
    return value if meter is None else meter.passed(str(value))


def _joined(parts: Iterable[Any]) -> str:
    meter = _METER.get()
    if meter is None:
        raise nodes.Impossible
    texts = [part if isinstance(part, str) else meter.passed(str(part)) for part in parts]
    meter.fits(sum(map(len, texts)))
    return meter.passed("".join(texts))


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    front = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or a part of it, comes first

    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        meter.step()
        values = checked_filter(meter, name, args[front:], kwargs)
        return meter.passed(function(*args[:front], *values, **kwargs))

    if front:
        metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return metered
