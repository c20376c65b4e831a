"""Structs of numbers and names that the library fills, as objects of Python."""

from __future__ import annotations

from ctypes import byref, sizeof
from typing import Any

from . import _c


class Facts:
    """The fields of a struct of kvant.h, which do not change. A subclass says their types, and which struct it is."""

    _struct: type

    @classmethod
    def of(cls, function: Any, handle: Any) -> Any:
        """The facts that function(handle, &struct) of the library fills in."""
        struct = cls._struct()
        struct.struct_size = sizeof(struct)
        _c.check(function(handle, byref(struct)))
        self = cls.__new__(cls)
        for name, _ in struct._fields_:
            value = getattr(struct, name)
            if name in cls.__annotations__:
                is_name = cls.__annotations__[name] == "str"
                self.__dict__[name] = (value or b"").decode() if is_name else cls._read(name, value)
        return self

    @staticmethod
    def _read(name: str, value: Any) -> Any:
        return value

    def __init__(self):
        raise TypeError(f"a kvant.{type(self).__name__} is made by the library alone")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is a fact: it cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} is a fact: it cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"
