"""What a module's forward takes: the arguments of a call by their names, and back."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Loc

# By the function that a class has as forward: reading a signature takes longer than many a small plan.
_signatures: weakref.WeakKeyDictionary[Any, inspect.Signature] = weakref.WeakKeyDictionary()


class TakesArguments:
    """The part of Module that knows the signature of forward."""

    forward: Callable[..., Any]

    def bind_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by the names that forward gives them."""
        signature = self.signature()
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            problem, fix = str(error), "give one spec or value for each argument of forward that has no default"
            # `bind` tells of a missing argument first, though a misspelt one is why it is missing.
            unknown = [k for k in kwargs if k not in signature.parameters]
            if unknown and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
                problem = f"got an unexpected keyword argument {unknown[0]!r}"
                fix = f"its arguments are {', '.join(signature.parameters) or 'none'}"
            what = f"{type(self).__name__}.forward{signature}: {problem}"
            raise ArgumentError(what, where=self.forward_place(), fix=fix) from None
        return dict(bound.arguments)

    def signature(self) -> inspect.Signature:
        """forward's parameters, without self."""
        function = getattr(self.forward, "__func__", None)
        if not isinstance(function, FunctionType):  # set on this module alone, or wrapped
            return inspect.signature(self.forward)
        found = _signatures.get(function)
        if found is None:
            found = _signatures[function] = inspect.signature(self.forward)
        return found

    def forward_place(self) -> Loc:
        """The file and line where forward is written."""
        code = getattr(self.forward, "__code__", None)
        return Loc(type(self).__name__, code.co_filename, code.co_firstlineno) if code else Loc()

    def unbind_arguments(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inverse of bind_arguments."""
        bound = self.signature().bind_partial()
        bound.arguments.update(arguments)
        return bound.args, bound.kwargs
