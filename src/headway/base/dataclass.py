"""`dataclass` as the standard library has it, made in a tenth of the time: a process imports some 200 of them.

The standard one compiles up to six methods for each class. Here `__init__` alone is compiled, when the first object is
made, which for most classes is never; the others are closures over the names of the fields, which are the standard
library's own, so that `fields`, `replace` and `asdict` work, and inheritance. Without `InitVar`, `order` and
`unsafe_hash`, which nothing here needs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True, slots=False, weakref_slot=False, kw_only=False):
        """A class with fields, as `dataclasses.dataclass` makes it."""

        def make(cls):
            # The standard one freezes what has slots, which become part of another class, and what is derived.
            plain = frozen and not slots and not any(map(dataclasses.is_dataclass, cls.__bases__))
            kept = {"frozen": frozen and not plain, "slots": slots, "weakref_slot": weakref_slot, "kw_only": kw_only}
            kind = dataclasses.dataclass(init=False, repr=False, eq=False, **kept)(cls)
            if plain:
                _freeze(kind)
            return _finished(kind, frozen=frozen, eq=eq, repr=repr, slots=slots)

        return make if cls is None else make(cls)


class _Factory:
    """The default, in a signature, of a field that has a new object each time."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


class _Init:
    """`__init__`, until somebody asks for it: then the class has the compiled one."""

    __slots__ = ("cls", "frozen", "slots")

    def __init__(self, cls: type, frozen: bool, slots: bool) -> None:
        self.cls, self.frozen, self.slots = cls, frozen, slots

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        init = _init(self.cls, fields(self.cls), self.frozen, self.slots)
        if self.cls.__dict__["__init__"] is self:
            self.cls.__init__ = init
        return init.__get__(instance, owner)


def _freeze(cls: Any) -> None:
    """Refuse to set and delete attributes, as the standard library does."""
    cls.__dataclass_params__.frozen = True  # for classes that are derived from it
    names = frozenset(part.name for part in fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    for method in (__setattr__, __delattr__):
        if method.__name__ in cls.__dict__:
            raise TypeError(f"Cannot overwrite attribute {method.__name__} in class {cls.__name__}")
        method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
        setattr(cls, method.__name__, method)


def _finished(cls: Any, *, frozen: bool, eq: bool, repr: bool, slots: bool) -> Any:
    parts = fields(cls)
    methods: dict[str, Any] = {}
    if "__init__" not in cls.__dict__:
        cls.__init__ = _Init(cls, frozen, slots)
    if repr:
        methods["__repr__"] = _repr([part.name for part in parts if part.repr])
    if eq:
        methods["__eq__"] = _eq(_values([part.name for part in parts if part.compare]))
        if "__hash__" not in cls.__dict__ or ("__eq__" in cls.__dict__ and cls.__dict__["__hash__"] is None):
            hashed = [part.name for part in parts if (part.compare if part.hash is None else part.hash)]
            cls.__hash__ = _hash(_values(hashed)) if frozen else None
    for name, method in methods.items():
        if name not in cls.__dict__:
            method.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, method)
    return cls


def _init(cls: Any, parts: tuple[Field[Any], ...], frozen: bool, slots: bool) -> Any:
    names: dict[str, Any] = {"_set": object.__setattr__, "_FACTORY": _FACTORY}
    places: tuple[list[str], list[str]] = ([], [])
    lines: list[str] = []
    for part in parts:
        name, value = part.name, part.name
        if part.default_factory is not MISSING:
            names[f"_new_{name}"] = part.default_factory
            value = f"_new_{name}() if {name} is _FACTORY else {name}" if part.init else f"_new_{name}()"
            default = "=_FACTORY"
        elif part.default is not MISSING:
            names[f"_default_{name}"] = part.default
            default = f"=_default_{name}"
            value = name if part.init else f"_default_{name}"
        else:
            default = ""
        if part.init:
            (places[1] if part.kw_only is True else places[0]).append(name + default)
        elif part.default_factory is MISSING and not (slots and part.default is not MISSING):
            continue
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *places[0], *(["*", *places[1]] if places[1] else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(lines or ["pass"]), names)
    init = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {part.name: part.type for part in parts if part.init} | {"return": None}
    init.__module__ = cls.__module__
    return init


def _values(names: list[str]) -> Any:
    """What gives an object's values as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return (lambda self: (getattr(self, names[0]),)) if names else lambda self: ()


def _repr(names: list[str]) -> Any:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _eq(values: Any) -> Any:
    def __eq__(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(values: Any) -> Any:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__
