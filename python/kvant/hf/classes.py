"""The class of an enabled model: its own, with kvant's steps inside generate().

generate() is not replaced: a wrapper that stands on the model, whenever it came there, is called as before, and kvant
works inside, where the token ids are those that the model gets. A method of a class also holds no model: an attribute
that held its model would be a cycle, which keeps weights until the collector comes by, and an attribute that held its
model weakly would die with it (enable(model).generate(...) of a model that nobody else holds).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import versions
from .prefixes import decode


class Enabled:
    """A mark of classes that were made here."""


def _decoding(of: type, name: str, continues: bool) -> Callable:
    @functools.wraps(getattr(of, name))  # generate() reads the signature
    def method(self, input_ids, *positional, **arguments):
        if positional:  # not from generate()
            return getattr(of, name)(self, input_ids, *positional, **arguments)
        return decode(getattr(of, name), continues, self, input_ids, arguments)

    return method


def _made_again(of: type) -> Any:
    """For copies: an empty object of the class that enable() gives."""
    return object.__new__(_classes[of])


_classes: dict[type, type] = {}


def _step(of: type, name: str, function: Callable) -> Callable:
    def method(self, *positional, **named):
        return function(getattr(of, name), self, *positional, **named)

    return functools.wraps(getattr(of, name))(method)


def class_of(of: type, steps: dict[str, Callable]) -> type:
    """The class of enabled models of a class. steps: by a method's name (original, model, *arguments) in its place."""
    if of in _classes:
        return _classes[of]

    def __reduce_ex__(self, protocol):
        made, arguments, *rest = super(_classes[of], self).__reduce_ex__(protocol)
        return (_made_again, (of,), *rest)

    contents = {"__module__": of.__module__, "__qualname__": of.__qualname__, "__doc__": of.__doc__}
    contents["__reduce_ex__"] = __reduce_ex__
    if all(hasattr(of, name) for name in steps):  # it has generate()
        contents |= {name: _step(of, name, function) for name, function in steps.items()}
        methods = {name: continues for name, continues in versions.DECODING.items() if hasattr(of, name)}
        contents |= {name: _decoding(of, name, continues) for name, continues in methods.items()}
    return _classes.setdefault(of, type(of)(of.__name__, (of, Enabled), contents))


def put_on(model: Any, steps: dict[str, Callable]) -> None:
    if not isinstance(model, Enabled):
        model.__class__ = class_of(type(model), steps)


def take_off(model: Any) -> None:
    """The class goes back, unless others put one of theirs above (FSDP does): without enable() it changes nothing."""
    for of, made in _classes.items():
        if type(model) is made:
            model.__class__ = of
            return
