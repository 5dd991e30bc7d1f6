"""Changes to lowered kernels: each replaced by others, or moved to other buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from monoplan.codegen.kernels import Kernel
from monoplan.codegen.lower.lowerer import Loop, Lowered
from monoplan.codegen.views import Buffer, View

Items = Sequence[Kernel | Loop]


def all_kernels(items: Items) -> Iterator[Kernel]:
    """Every kernel, those of rolled layers once."""
    for item in items:
        if isinstance(item, Loop):
            yield from all_kernels(item.items)
        else:
            yield item


def map_kernels(items: Items, change: Callable[[Kernel], Iterable[Kernel]]) -> list[Kernel | Loop]:
    """Each kernel replaced by what `change` makes of it."""
    result: list[Kernel | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            result.append(Loop(item.count, tuple(map_kernels(item.items, change))))
        else:
            result += change(item)
    return result


def moved(lowered: Lowered, new: Mapping[Buffer, Buffer]) -> Lowered:
    """The same kernels with their operands in other buffers."""
    items = map_kernels(lowered.items, lambda k: [_with_buffers(k, new)])
    views = {v: _moved_view(view, new) for v, view in lowered.views.items()}
    return Lowered(items, lowered.params, lowered.outputs, views)


def _with_buffers(k: Kernel, new: Mapping[Buffer, Buffer]) -> Kernel:
    return replace(k, operands=tuple(o.with_view(_moved_view(o.view, new)) for o in k.operands))


def _moved_view(v: View, new: Mapping[Buffer, Buffer]) -> View:
    b = new.get(v.buffer)
    return v if b is None else View(b, v.shape, v.strides, v.offset)
