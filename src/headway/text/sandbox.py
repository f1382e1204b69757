"""The Jinja environment for chat templates, which come with model files and are not trusted.

No code of a template can run outside Jinja: it is the immutable sandbox, attributes with an underscore and methods that
change or inflate values are refused where they are asked for, and only plain values (str, numbers, lists, dicts) go in.

Rendering is bounded by one `Meter`:
- *time*: CPU seconds of the rendering thread, looked at on every loop turn, call, filter and operator;
- *work*: characters and elements produced by all of these together, which bounds memory and loops;
- *size*: no single value (with everything inside it), and not the output, may be larger than a limit. What could be
  large in one stroke (`*`, `**`, `%`, `format`, `replace`, `join`, `center`, `indent`, …) is measured beforehand.
To see every loop, literal and concatenation the parsed template is rewritten before it is compiled: `for x in y` runs
over `y|_counted`, list and dict literals are `…|_measured`, and `a ~ b` is `[a, b]|_joined`.

The settings, filters and globals are those that chat templates are written for (trim_blocks, lstrip_blocks, break and
continue, tojson, raise_exception, strftime_now, the generation tag), without `lipsum`, `urlize`, `wordwrap`, `xmlattr`
and `pprint`.
"""

from __future__ import annotations

import json
import re
import string
import time
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

MAX_INT_BITS = 4096
MAX_WIDTH = 1_000_000  # for center(…), zfill(…), batch(…) and their like
_REFUSED_METHODS = {
    str: {"translate", "maketrans", "expandtabs", "encode", "format_map"},
    int: {"to_bytes", "from_bytes"},
}
_REFUSED_FILTERS = ("urlize", "wordwrap", "xmlattr", "pprint")
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class Exceeded(Exception):
    """A limit of the rendering was reached."""


class RaisedByTemplate(jinja2.TemplateError):
    """The template called raise_exception."""


class Meter:
    """What one rendering has used, against what it may use."""

    def __init__(self, *, seconds: float, work: int, size: int) -> None:
        self.seconds, self.work, self.size = seconds, work, size
        self._end = time.thread_time() + seconds
        self._used = 0
        self._steps = 0

    def step(self, cost: int = 1) -> None:
        """One operation that handles `cost` characters or elements."""
        self._used += cost + 1
        self._steps += 1
        if self._used > self.work:
            raise Exceeded(f"it produced more than {self.work:,} characters and elements")
        if (self._steps & 15 == 0 or cost > 10_000) and time.thread_time() > self._end:
            raise Exceeded(f"it ran for more than {self.seconds:g} s")

    def fits(self, size: int) -> None:
        """Refuse a value of `size` before it is made."""
        if size > self.size:
            raise Exceeded(f"a value of {size:,} characters or elements is larger than {self.size:,}")

    def weigh(self, value: Any) -> int:
        """The size of `value` with all it holds, counting shared parts each time they appear."""
        if isinstance(value, str):
            return len(value)
        total, looked, stack = 0, 0, [value]
        while stack:
            item = stack.pop()
            looked += 1
            total += len(item) if isinstance(item, str) else 1
            if isinstance(item, list | tuple | set | frozenset):
                stack.extend(item)
            elif isinstance(item, dict):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
                raise Exceeded(f"an integer has more than {MAX_INT_BITS} bits")
            if looked & 1023 == 0:
                self.step(1024)
                self.fits(max(total, looked + len(stack)))
        self.step(looked & 1023)
        self.fits(total)
        return total

    def passed(self, value: Any) -> Any:
        """`value`, counted as produced now."""
        if isinstance(value, str):
            self.fits(len(value))
            self.step(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset | int):
            self.weigh(value)
        elif isinstance(value, _VIEWS):
            self.step(len(value))
        else:
            self.step()
        return value


_METER: ContextVar[Meter | None] = ContextVar("headway_template_meter", default=None)


def _meter() -> Meter:
    meter = _METER.get()
    if meter is None:  # while Jinja folds constants: this makes it leave the work to the rendering
        raise nodes.Impossible
    return meter


def render(template: jinja2.Template, variables: dict[str, Any], meter: Meter, max_output: int) -> str:
    """The text of `template`, or `Exceeded`, or whatever Jinja raises."""
    token = _METER.set(meter)
    try:
        parts, total = [], 0
        for part in template.root_render_func(template.new_context(variables)):
            total += len(part)
            if total > max_output:
                raise Exceeded(f"its output has more than {max_output:,} characters")
            parts.append(part)
            meter.step()
        return "".join(parts)
    finally:
        _METER.reset(token)


def compile_template(source: str) -> jinja2.Template:
    """`source` ready for `render`. Raises Jinja's errors for a template that does not parse."""
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
        self.filters.update(_counted=_Counted, _measured=lambda value: _meter().passed(value), _joined=_joined)
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
        if attribute.startswith("__"):  # refused by name: whether the object has it is none of the template's business
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        _CHECKED_BINOPS.get(operator, _no_check)(meter, left, right)
        return meter.passed(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            meter = _meter()
            _check_braces(meter, value.__self__, args, kwargs)
            return meter.passed(inner(*args, **kwargs))

        return bounded

    # Jinja calls this with the object's own keyword arguments, which may have any name.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | int | float | list | tuple | dict):
            args = _checked_method(meter, owner, getattr(__obj, "__name__", ""), args, kwargs)
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
    """{% generation %}…{% endgeneration %} marks what the assistant wrote; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Counted:
    """An iterable that counts each turn of the loop over it."""

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
    """Jinja's namespace without private names; it prints without its contents, which may hold it many times over."""

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
        raise Exceeded("the format for strftime_now is too long")
    return datetime.now().strftime(format)


def _range(*args: int) -> range:
    try:
        return safe_range(*args)
    except OverflowError as error:
        raise Exceeded(str(error)) from error


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    for option in (indent, *(separators or ())):
        if (isinstance(option, int) and option > 16) or (isinstance(option, str) and len(option) > 16):
            raise Exceeded("tojson takes an indent and separators of at most 16 characters")
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


# --- what could be large in one stroke


def _no_check(meter: Meter, left: Any, right: Any) -> None:
    del meter, left, right


def _check_product(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        return _check_bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | list | tuple):
            meter.fits(meter.weigh(value) * max(count, 0))
    return None


def _check_power(meter: Meter, left: Any, right: Any) -> None:
    del meter
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise Exceeded(f"an integer of about {bits:,} bits is larger than {MAX_INT_BITS} bits")


def _check_sum(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        meter.fits(len(left) + len(right))


def _check_percent(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str):
        if re.search(r"%[^A-Za-z%]*(\d{5}|\*)", left):
            raise Exceeded("a width in a % format is too large")
        meter.fits(len(left) + left.count("%") * (9999 + meter.weigh(right)))


_CHECKED_BINOPS = {"*": _check_product, "**": _check_power, "+": _check_sum, "%": _check_percent}


def _check_braces(meter: Meter, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fields = [spec or "" for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    if any("{" in spec or re.search(r"\d{5}", spec) for spec in fields):
        raise Exceeded("a width in a format string is too large, or computed")
    meter.fits(len(text) + len(fields) * (9999 + meter.weigh([*args, *kwargs.values()])))


def _check_replace(meter: Meter, text: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    meter.fits(len(text) + text.count(old) * len(new))


def _check_join(meter: Meter, items: list[Any], separator: Any) -> None:
    meter.fits(meter.weigh(items) + len(items) * len(str(separator)))


def _check_indent(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else int(width)
    text = str(text)
    meter.fits(len(text) + (text.count("\n") + 1) * size)


def _check_width(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise Exceeded(f"the argument {value} is larger than {MAX_WIDTH:,}")


def _checked_method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments for a method of a plain value, after measuring what it would make."""
    meter.step()
    _check_width((*args, *kwargs.values()))
    if name == "replace" and len(args) >= 2:
        _check_replace(meter, owner, *args)
    if name == "join" and len(args) == 1:
        args = (_listed(meter, args[0]),)
        _check_join(meter, args[0], owner)
    return args


def _listed(meter: Meter, items: Iterable[Any]) -> list[Any]:
    listed = []
    for item in items:
        meter.step()
        listed.append(item)
    return listed


def _check_filter(meter: Meter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments for a filter, after measuring what it would make."""
    if name in ("default", "d"):
        return args
    _check_width((*args[1:], *kwargs.values()))
    match name:
        case "replace":
            _check_replace(meter, *args, *kwargs.values())
        case "indent":
            _check_indent(meter, *args, **kwargs)
        case "format":
            _check_percent(meter, str(args[0]), [*args[1:], *kwargs.values()])
        case "join":
            args = (_listed(meter, args[0]), *args[1:])
            _check_join(meter, args[0], args[1] if len(args) > 1 else kwargs.get("d", ""))
        case "list" | "sort" | "unique" | "reverse" | "sum" if not isinstance(args[0], str | dict):
            args = (_listed(meter, args[0]), *args[1:])
    if name == "round":
        precision = args[1] if len(args) > 1 else kwargs.get("precision", 0)
        _check_bits(4 * abs(precision))
    if name == "sum" and not isinstance(args[2] if len(args) > 2 else kwargs.get("start", 0), int | float):
        raise Exceeded("sum adds numbers only")
    return args


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    front = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, or a part of it, comes first

    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        meter.step()
        values = _check_filter(meter, name, args[front:], kwargs)
        return meter.passed(function(*args[:front], *values, **kwargs))

    if front:
        metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return metered
