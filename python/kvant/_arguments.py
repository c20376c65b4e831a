"""Numbers, names and flags on their way to C, checked in one place.

ctypes cuts integers to the width of C's argument in silence, takes a bool for a number, and ends texts at their first
zero. Each function here returns what C may be given, or raises InvalidArgument with the argument, its value, and what
is allowed. The library checks the meaning of a number.
"""

from __future__ import annotations

import itertools
import operator
import os
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from ._errors import InvalidArgument
from ._signals import attempt

_MOST_ITEMS = 1 << 24
_LARGEST_F32 = 3.4028234663852886e38


def show(value: Any) -> str:
    """A value as an error names it: short, and never an error itself."""
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        text = f'"{repr(str.__str__(value))[1:-1]}"'
    else:
        text, error = attempt(repr, value)  # an object of the caller's may do anything here
        text = " ".join(text.split()) if error is None else f"<{type(value).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def integer(name: str, value: Any, low: int, high: int) -> int:
    """A whole number of any integer type."""
    number = value if type(value) is int else None if _is_bool(value) else attempt(operator.index, value)[0]
    if number is None:  # a float, a text; an array of many numbers, whose library says so in its own way
        short = re.fullmatch(r"(\d{1,9})([kKmM])", value, re.ASCII) if type(value) is str else None
        hint = f"; write {int(short[1]) << (10 if short[2] in 'kK' else 20)}" if short else ""
        raise InvalidArgument(
            f"{name} = {show(value)}: must be a whole number (an int), not a {type(value).__name__}{hint}"
        )
    if not low <= number <= high:
        raise InvalidArgument(f"{name} = {show(number)}: must be {low} to {high}")
    return number


def int32(name: str, value: Any, low: int = -(1 << 31)) -> int:
    return integer(name, value, low, (1 << 31) - 1)


def int64(name: str, value: Any, low: int = -(1 << 63)) -> int:
    return integer(name, value, low, (1 << 63) - 1)


def real(name: str, value: Any) -> float:
    """A number of any type, but no text, whose digits float() would read."""
    if type(value) is float:
        return value
    number = None if _is_bool(value) or isinstance(value, (str, bytes, bytearray)) else attempt(float, value)[0]
    if number is None:
        raise InvalidArgument(f"{name} = {show(value)}: must be a number, not a {type(value).__name__}")
    return number


def items(name: str, values: Any, what: str, count: int | None = None, of: str = "") -> list:
    """The items of an iterable. count, of: there must be one for each of `count` sequences, layers, ..."""
    iterator = None
    if not isinstance(values, (str, bytes, bytearray, Mapping, Set)):  # whose items are other things, or in no order
        iterator = attempt(iter, values)[0]
    if iterator is None:
        raise InvalidArgument(f"{name} = {show(values)}: must be a list of {what}, not a {type(values).__name__}")
    # One more than wanted shows that there are too many; an iterable may have no end.
    found = list(itertools.islice(iterator, _MOST_ITEMS if count is None else count + 1))
    if count is not None and len(found) != count:
        given = f"more than {count}" if len(found) > count else len(found)
        raise InvalidArgument(f"{name} has {given} {what} for {count} {of}s: give one a {of}")
    return found


def integers(name: str, values: Any, low: int, high: int, count: int | None = None, of: str = "") -> list[int]:
    """A list of whole numbers."""
    found = items(name, values, "numbers", count, of)
    if set(map(type, found)) == {int} and low <= min(found) and max(found) <= high:
        return found  # a long list of token ids takes 1/20 of the time that way
    return [integer(f"{name}[{i}]", n, low, high) for i, n in enumerate(found)]


def one_or_each(name: str, values: Any, count: int, low: int, high: int) -> list[int]:
    """A whole number for each of `count` sequences: one for all, or a list."""
    if isinstance(values, Iterable) and getattr(values, "shape", None) != ():
        return integers(name, values, low, high, count, "sequence")
    return [integer(name, values, low, high)] * count


def slopes(name: str, values: Any, count: int) -> list[float]:
    """Numbers that f32 holds, one for each query head."""
    found = [real(f"{name}[{i}]", x) for i, x in enumerate(items(name, values, "values", count, "query head"))]
    for i, x in enumerate(found):
        if not -_LARGEST_F32 <= x <= _LARGEST_F32:
            raise InvalidArgument(f"{name}[{i}] = {x}: must be finite in float32")
    return found


def flag(name: str, value: Any) -> int:
    """True or False, as 1 or 0. Texts such as "False" are true to Python, and arrays have no truth."""
    if type(value) is int and value in (0, 1):
        return value
    if _is_bool(value):
        truth, error = attempt(bool, value)  # an error: of an array of several
        if error is None:
            return int(truth)
    raise InvalidArgument(f"{name} = {show(value)}: must be True or False")


def text(name: str, value: Any) -> str:
    """A name."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} = {show(value)}: must be a str, not a {type(value).__name__}")
    value = str.__str__(value)  # of an enumeration of texts: the value
    if not value or "\0" in value or not value.isascii():
        raise InvalidArgument(f"{name} = {show(value)}: must be a name, of ASCII characters without zeros")
    return value


def name_or_none(name: str, value: Any) -> bytes | None:
    """A name for C, NULL for None."""
    return None if value is None else text(name, value).encode()


_DTYPES = {"float32": "f32", "float": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16"}  # torch's names


def choice(name: str, value: Any, allowed: dict[str, int]) -> int:
    """The number of a name."""
    if not isinstance(value, str) or value not in allowed:
        own = _DTYPES.get(show(value).strip('"').removeprefix("torch."))
        hint = f'; write "{own}"' if own in allowed else ""
        raise InvalidArgument(f"{name} = {show(value)}: must be one of {', '.join(allowed)}{hint}")
    return allowed[value]


def path(name: str, value: Any) -> str:
    """The path of a file or a folder. A text that begins with "~" or "~user" leads to a home folder, as in a shell.
    Bytes are taken as they are."""
    given = attempt(os.fspath, value)[0]
    found = attempt(os.path.expanduser if isinstance(given, str) else os.fsdecode, given)[0]
    if attempt(os.fsencode, found)[1] is not None:  # a lone surrogate is no byte of a name
        found = None
    if not found or "\0" in found:
        raise InvalidArgument(
            f"{name} = {show(value)}: must be the path of a file, of characters that names of files can have"
        )
    if isinstance(given, str) and found.startswith("~"):
        user = found[1:].partition("/")[0]
        whose = f"of the user {show(user)}" if user else "of this user"
        raise InvalidArgument(
            f"{name} = {show(value)}: the home folder {whose} is not known; a file of that name is {show('./' + found)}"
        )
    return found


def set_dims(owner: Any, head_dim: int, v_head_dim: int, latent: int, rope: int) -> None:
    """Sets how many numbers keys, values and queries of a cache or of pages have."""
    owner.head_dim, owner.v_head_dim = head_dim, v_head_dim or head_dim
    owner.latent, owner.rope = latent, rope
    owner.q_head_dim = latent + rope if latent else head_dim


def geometry(owner: Any) -> str:
    """For the repr of a cache or of pages."""
    if owner.latent:
        return f"latent={owner.latent}, rope={owner.rope}"
    own_v = "" if owner.v_head_dim == owner.head_dim else f", v_head_dim={owner.v_head_dim}"
    return f"kv_heads={owner.kv_heads}, head_dim={owner.head_dim}{own_v}"


def device(value: Any) -> tuple[str, int]:
    """"cuda:1", torch.device("cuda", 1), None as ("cuda", 1), ("cpu", 0)."""
    name = "cpu" if value is None else attempt(str, value)[0]
    found = None if name is None else re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,4}))?", name, re.ASCII)
    if not found or found[1] == "cpu" and int(found[2] or 0) != 0:
        raise InvalidArgument(f'device = {show(value)}: must be "cpu", "cuda", or "cuda:N" for device N')
    return found[1], int(found[2] or 0)


class NotCopied:
    """A class whose objects have memory of the library: a copy would use the original's, and give it back, too."""

    _instead = ""  # the way out
    _made_of: tuple[str, ...] = ()  # attributes that __init__ makes

    def __getattr__(self, name):  # only of attributes that are not there
        if name in type(self)._made_of:
            kind = next((c for c in type(self).__mro__ if "_made_of" in vars(c)), NotCopied).__name__
            raise InvalidArgument(
                f"this kvant.{kind} was never made: its __init__ did not run, or failed; a subclass must call "
                "super().__init__() first"
            )
        return object.__getattribute__(self, name)  # which raises the usual error

    def __reduce_ex__(self, protocol):  # of copy.copy, copy.deepcopy and pickle
        raise TypeError(
            f"a kvant.{type(self).__name__} cannot be copied or pickled: its memory is the library's; {self._instead}"
        )
