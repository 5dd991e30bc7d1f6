"""What this machine offers, as one page of text: `monoplan doctor` prints it, and it never fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence

from monoplan.ir.errors import CompileError
from monoplan.runtime.build import cache, compilers
from monoplan.runtime.machine import features, threads

Rows = Sequence[tuple[str, str]]

# What to import -> the distributions that provide it.
EXTRAS = {
    "safetensors": ("safetensors",),
    "tokenizers": ("tokenizers",),
    "gguf": ("gguf",),
    "tqdm": ("tqdm",),
    "huggingface_hub": ("huggingface_hub",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
    "mpi4py": ("mpi4py",),
}


def report(colour: bool | None = None) -> str:
    """The page: an aligned label and value per line; labels are bold on a terminal, or as `colour` says."""
    bold = _wants_colour() if colour is None else colour
    rows = [row for section in _SECTIONS for row in _guarded(section)]
    width = max(len(label) for label, _ in rows)
    lines = []
    for label, value in rows:
        first, *rest = value.splitlines() or [""]
        head = f"\x1b[1m{label:<{width}}\x1b[0m" if bold else f"{label:<{width}}"
        lines.append(f"{head}  {first}".rstrip())
        lines += [f"{'':<{width}}  {line}".rstrip() for line in rest]
    return "\n".join(lines) + "\n"


def _guarded(section: Callable[[], Rows]) -> Rows:
    try:
        return section()
    except Exception as error:  # whatever is broken on this machine is what the reader came to see
        return [(section.__name__.strip("_"), f"{type(error).__name__}: {error}")]


def _python() -> Rows:
    rows = [("python", f"{platform.python_version()} ({sys.executable})")]
    rows += [(name, _version((name,)) or "not installed") for name in ("monoplan", "numpy", "cffi")]
    return [*rows, ("system", f"{platform.system()} {platform.release()} {features.machine()}")]


def _compiler() -> Rows:
    try:
        compiler = compilers.find_compiler()
    except CompileError as error:
        return [("compiler", str(error))]
    source = "CC" if os.environ.get("CC", "").strip() else "PATH"
    openmp = "yes" if compilers.has_openmp(compiler, fresh=True) else "no: -fopenmp does not compile and link"
    return [
        ("compiler", f"{' '.join(compiler.command)} (from {source})"),
        ("version", f"{compiler.version_line} ({compiler.kind})"),
        ("openmp", openmp),
    ]


def _cpu() -> Rows:
    model, flags = features.read_cpu()
    rows = [("cpu", model), ("claims", ", ".join(features.levels(features.machine(), flags)))]
    found = features.detect()
    return [
        *rows,
        ("isa", f"{found.isa} ({found.note})"),
        ("features", " ".join(found.flags) or "none beyond the baseline"),
        ("flags", " ".join(features.compile_flags(found)) or "none"),
    ]


def _threads() -> Rows:
    return [("threads", threads.default_threads().reason)]


def _cache() -> Rows:
    info = cache.info()
    place = f"{info.root} (temporary: the usual place can't be used)" if info.temporary else str(info.root)
    noun = "entry" if info.entries == 1 else "entries"
    size = f"{info.entries} {noun}, {_size(info.nbytes)} of at most {_size(info.max_bytes)}"
    weights = f"weights of {info.weights} plans, {_size(info.weight_bytes)} of at most {_size(info.max_weight_bytes)}"
    return [("cache", place), ("cached", size), ("packed", weights)]


def _gpu() -> Rows:
    if _version(EXTRAS["cupy"]) is None:
        return [("gpu", "none: CuPy is not installed (the extra `cuda` of this package brings it)")]
    try:
        import cupy
    except Exception as error:  # a CuPy without its CUDA libraries fails in many ways
        return [("gpu", f"none: CuPy does not import: {error}")]
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        devices = [("gpu", _device(cupy, index)) for index in range(count)]
        return [*devices, ("cuda", _cuda(cupy))] if devices else [("gpu", "none: CuPy sees no device")]
    except Exception as error:  # no driver, a driver too old, a device in a bad state
        return [("gpu", f"none: CuPy is installed but CUDA does not answer: {error}")]


def _device(cupy: object, index: int) -> str:
    cuda = cupy.cuda  # type: ignore[attr-defined]
    properties = cuda.runtime.getDeviceProperties(index)
    name = properties["name"].decode() if isinstance(properties["name"], bytes) else properties["name"]
    major, minor = properties["major"], properties["minor"]
    capability, size = f"{major}.{minor}", _size(properties["totalGlobalMem"])
    old = " (too old: kernels need 7.5)" if (major, minor) < (7, 5) else ""
    return f"{index}: {name}, compute capability {capability}, {size}{old}"


def _cuda(cupy: object) -> str:
    """Versions of what a plan on a GPU is built and run with; what is missing is named."""
    from monoplan.runtime.cuda.blas import load_library
    from monoplan.runtime.cuda.build import load_nvrtc

    runtime = cupy.cuda.runtime  # type: ignore[attr-defined]
    parts = []
    questions: tuple[tuple[str, Callable[[], str]], ...] = (
        ("driver for CUDA", lambda: _cuda_version(runtime.driverGetVersion())),
        ("runtime", lambda: _cuda_version(runtime.runtimeGetVersion())),
        ("NVRTC", lambda: ".".join(map(str, load_nvrtc().getVersion()))),
        ("cuBLASLt", lambda: "found" if load_library() is not None else "missing: large products will be slow"),
    )
    for name, ask in questions:
        try:
            parts.append(f"{name} {ask()}")
        except Exception as error:  # one that is broken hides none of the others
            parts.append(f"{name} does not answer ({str(error).splitlines()[0]})")
    return ", ".join(parts)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _extras() -> Rows:
    return [(name, _version(names) or "not installed") for name, names in EXTRAS.items()]


_SECTIONS: tuple[Callable[[], Rows], ...] = (_python, _compiler, _cpu, _threads, _cache, _gpu, _extras)


def _version(distributions: Sequence[str]) -> str | None:
    """The installed version, by metadata alone: nothing is imported for it."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def _wants_colour() -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
