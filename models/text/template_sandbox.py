"""Chat templates with a budget: of time, of memory, and of the size of one value.

A template is a program that comes with a model and is not trusted. jinja2's sandbox keeps it from reaching out, but not
from running on. Here
- every line of Python that a render runs counts the thread's processor time, so that no loop lasts;
- one operation of C can't be stopped, so its operands are looked at before: nothing makes a value over a limit;
- all values that were made are counted, so that many of them do not fill the memory.
Budgets grow with the messages, which are the caller's.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 2.0  # processor time of compiling and rendering
LARGEST = 1 << 22  # characters or elements of a value, all that is in it counted
TOTAL = 1 << 28  # bytes of all values that are made
LONGEST = 1 << 20  # characters of a template
DEEPEST = 200  # lists in lists: C recurses through them, and some of it without looking at the stack
BITS = 1 << 16  # of an integer
SLOW = 1 << 14  # characters for filters whose time grows with the square
WORK = 1 << 27  # steps of one operation

_CONTAINERS = (list, tuple, dict, set, frozenset)
_PADDING = ("center", "ljust", "rjust", "zfill", "to_bytes")
_SEARCHES = ("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip")
_REPEATING = ("indent", "tojson", "wordwrap", "batch", "slice")
_SLOW = ("striptags", "urlize", "wordwrap")


class BudgetExceeded(BaseException):
    """A template wants too much. No Exception: jinja2 goes on after those while it compiles."""


class Budget:
    """What one render has used."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._known: dict[int, tuple[Any, int, int]] = {}
        self._end, self._ticks, self._made, self._limit = time.thread_time() + SECONDS, 0, 0, sys.maxsize
        given = self.weigh(dict(values))
        self._limit, self._total = LARGEST + 4 * given, TOTAL + 64 * given

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        """Called by Python in place of a clock that could interrupt it: for each line of the template, and for each
        call of any other function. (Those loop over values, and the size of a value has its limit.)"""
        self.tick()
        return self.trace if frame.f_code.co_filename == "<template>" else None

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % 8 == 0 and time.thread_time() > self._end:
            raise BudgetExceeded(f"it ran for {SECONDS:g} s")

    def fit(self, size: int) -> None:
        """Raises if a value of that size may not be made."""
        if size > self._limit:
            raise BudgetExceeded(f"a value of {size} characters or elements, the limit is {self._limit}")

    def work(self, steps: int) -> None:
        if steps > WORK:
            raise BudgetExceeded(f"an operation of {steps} steps")

    def weigh(self, value: Any) -> int:
        """How many characters and elements are in a value, each as often as a walk meets it."""
        return self._weigh(value, 0)[0]

    def _weigh(self, value: Any, above: int) -> tuple[int, int, bool]:
        """Its weight, its depth, and whether these will stay."""
        if isinstance(value, str | bytes):
            return len(value) or 1, 0, True
        if isinstance(value, int):
            self._bits(value.bit_length())
            return 1 + value.bit_length() // 8, 0, True
        is_namespace = isinstance(value, Namespace)  # its attributes may change
        if not is_namespace and not isinstance(value, _CONTAINERS):
            return 1, 0, True
        if (known := self._known.get(id(value))) is not None:
            return known[1], known[2], True
        if above > DEEPEST:
            raise BudgetExceeded(f"lists in lists over {DEEPEST} deep")
        if is_namespace:
            value = object.__getattribute__(value, "_Namespace__attrs")
        weight, depth, stays = 1, 1, not is_namespace
        for part in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            if type(part) is str:
                weight += len(part) or 1
                continue
            more, deeper, certain = self._weigh(part, above + 1)
            weight, depth, stays = weight + more, max(depth, deeper + 1), stays and certain
        self.fit(weight)
        if above + depth > DEEPEST:
            raise BudgetExceeded(f"lists in lists over {DEEPEST} deep")
        if stays and weight > 16:  # it is held, so that its id stays its own
            self._known[id(value)] = (value, weight, depth)
        return weight, depth, stays

    def take(self, value: Any) -> Any:
        """A value that was made: it is counted, and returned."""
        if isinstance(value, (str, bytes, int, *_CONTAINERS)):
            self.fit(self.weigh(value))
            self._made += sys.getsizeof(value) + 64 * (len(value) if isinstance(value, _CONTAINERS) else 0)
            if self._made > self._total:
                raise BudgetExceeded(f"{self._made} bytes in all, the limit is {self._total}")
        return value

    # -- before operations whose results may be larger than their operands ---------------------------------------

    def before_binary(self, operator: str, left: Any, right: Any) -> None:
        whole = isinstance(left, int), isinstance(right, int)
        if operator == "*" and all(whole):
            self._bits(left.bit_length() + right.bit_length())
        elif operator == "*" and any(whole):
            count, value = (left, right) if whole[0] else (right, left)
            self.fit(max(count, 0) * self.weigh(value))
        elif operator == "**" and all(whole):
            self._bits(left.bit_length() * max(right, 0))
        elif operator == "+":
            self.fit(self.weigh(left) + self.weigh(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self.before_format(left, "%", right)

    def _bits(self, count: int) -> None:
        if count > BITS:
            raise BudgetExceeded(f"an integer of {count} bits")

    def before_format(self, text: Any, mark: str, *values: Any) -> None:
        """`%` and str.format: each place may take all values, and pad by a number in the text or by a value."""
        text = text.decode("latin-1") if isinstance(text, bytes) else text
        widths = sum(int(digits[:20]) for digits in re.findall("[0-9]+", text))
        parts = [p for v in values for p in (v.values() if isinstance(v, dict) else v if isinstance(v, tuple) else [v])]
        if "*" in text or re.search(r"{[^}]*{", text):
            widths += text.count(mark) * max((abs(p) for p in parts if isinstance(p, int)), default=0)
        self.fit(len(text) + widths + text.count(mark) * sum(map(self.weigh, parts)))

    def before_replace(self, text: Any, old: Any, new: Any) -> None:
        if all(isinstance(x, str) for x in (text, old, new)) or all(isinstance(x, bytes) for x in (text, old, new)):
            self.fit(len(text) + text.count(old) * len(new))

    def before_join(self, separator: Any, parts: Any) -> Any:
        """What is joined, as a list where it was a generator."""
        parts = list(parts) if hasattr(parts, "__next__") else parts
        count = len(parts) if hasattr(parts, "__len__") else 0
        self.fit(self.weigh(parts) + count * self.weigh(separator))
        return parts

    def before_method(self, owner: Any, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """A method of a text or a number; gives the arguments to call it with."""
        numbers = sum(abs(a) for a in (*args, *named.values()) if isinstance(a, int))
        if name in _PADDING:
            self.fit(numbers)
        if not isinstance(owner, str | bytes):
            return args
        if name == "expandtabs":
            self.fit(len(owner) * max(numbers, 8))
        elif name == "replace" and len(args) > 1:
            self.before_replace(owner, *args[:2])
        elif name == "join" and args:
            return (self.before_join(owner, args[0]), *args[1:])
        elif name == "translate" and args:
            self.fit(len(owner) * self.weigh(args[0]))
        elif name in ("format", "format_map"):
            self.before_format(owner, "{", args, dict(named), *(a for a in args if isinstance(a, dict)))
        elif name in _SEARCHES:
            self.work(len(owner) * sum(map(self.weigh, args)))
        return args

    def before_filter(self, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """A filter, whose first argument is the value; gives the arguments to call it with."""
        value, rest = args[0] if args else None, (*args[1:], *named.values())
        numbers = sum(abs(a) for a in rest if isinstance(a, int))
        weight = self.weigh(value)
        if name == "center":
            self.fit(numbers)
        elif name in _REPEATING:
            self.fit(weight * (1 + numbers + sum(self.weigh(a) for a in rest if not isinstance(a, int))))
        elif name == "round":
            self._bits(4 * numbers)
        elif name == "format":
            self.before_format(str(value), "%", args[1:], dict(named))
        elif name == "trim":
            self.work(weight * sum(map(self.weigh, rest)))
        elif name == "replace" and len(rest) > 1:
            self.before_replace(value if isinstance(value, str) else str(value), *rest[:2])
        elif name in ("join", "sum"):
            parts = self.before_join(rest[0] if rest else "", value)
            if name == "sum" and any(isinstance(a, _CONTAINERS) for a in rest):
                self.work(self.weigh(parts) * (len(parts) if hasattr(parts, "__len__") else 1))
            return (parts, *args[1:])
        if name in _SLOW and weight > SLOW:
            raise BudgetExceeded(f"{name} of {weight} characters")
        return args


class _Checks(NodeTransformer):
    """Lets what jinja2 compiles to plain Python go through the environment."""

    def _call(self, name: str, args: list[Any], lineno: int) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else self._call("weighed", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _literal  # noqa: N815

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    def visit_Compare(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._call("weighed", [node.expr], node.lineno)
        return node

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        none = nodes.Const(None, lineno=node.lineno)
        ends = [end or none for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._call("sliced", [node.node, *ends], node.lineno)


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its contents."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, filters: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
        self.concat: Any = self._concat  # of a macro's or a block's pieces
        self.globals.pop("lipsum", None)
        self.globals.update(functions)
        self.filters = {name: self._limited(name, f) for name, f in {**self.filters, **filters}.items()}
        self.tests = {name: self._ticking(function) for name, function in self.tests.items()}

    @property
    def budget(self) -> Budget:
        """Of the render that this thread is in: a compiled template is used again."""
        found: Budget = _render.budget
        return found

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some take the context, the environment or such before the value.
        before = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(function)
        def limited(*args: Any, **named: Any) -> Any:
            args = (*args[:before], *self.budget.before_filter(name, args[before:], named))
            return self.budget.take(function(*args, **named))

        return limited

    def _ticking(self, function: Any) -> Callable[..., Any]:
        """A test as a function of Python, of which the trace is told."""

        def test(*args: Any, **named: Any) -> Any:
            return function(*args, **named)

        return functools.update_wrapper(test, function) if hasattr(function, "jinja_pass_arg") else test

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return _Checks().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.before_binary(operator, left, right)
        return self.budget.take(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, B902
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int):
            args = __self.budget.before_method(owner, name, args, kwargs)
        return __self.budget.take(super().call(__context, __obj, *args, **kwargs))

    def _concat(self, pieces: Any) -> str:
        pieces = list(pieces)
        self.budget.fit(sum(map(len, pieces)))
        return str(self.budget.take("".join(pieces)))

    def weighed(self, value: Any) -> Any:
        self.budget.fit(self.budget.weigh(value))
        return value

    def joined(self, *values: Any) -> str:
        self.budget.fit(sum(map(self.budget.weigh, values)))
        return "".join(map(str, values))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return value[start:stop:step]


_render = threading.local()


def render(environment: BoundedEnvironment, template: str, values: Mapping[str, Any]) -> str:
    """Compile and render a template; raises BudgetExceeded, or whatever the template raises."""
    if len(template) > LONGEST:
        raise BudgetExceeded(f"it has {len(template)} characters, the limit is {LONGEST}")
    _render.budget = budget = Budget(values)
    before = sys.gettrace()
    sys.settrace(budget.trace)
    try:
        pieces, size = [], 0
        for piece in _compiled(environment, template).generate(**values):
            pieces.append(piece)
            size += len(piece)
            budget.fit(size)
    finally:
        sys.settrace(before)
        del _render.budget
    return "".join(pieces)


@functools.lru_cache(maxsize=8)
def _compiled(environment: BoundedEnvironment, template: str) -> Any:
    return environment.from_string(template)
