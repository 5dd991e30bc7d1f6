"""The command line: `monoplan COMMAND`, see COMMANDS.

Each command is a module of its own with `add_arguments(parser)` and `run(args) -> exit status`; only the one
that runs is imported. Text goes to stdout; timings and errors go to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from monoplan.cli.common import end_ranks
from monoplan.ir.errors import MonoplanError

# name -> (module, what it does): the order is that of the help.
COMMANDS = {
    "generate": ("monoplan.cli.generate", "continue a prompt, streamed"),
    "chat": ("monoplan.cli.chat", "talk with a model"),
    "bench": ("monoplan.cli.bench", "tokens per second of prompt processing and generation"),
    "compile": ("monoplan.cli.compile", "compile a model and write the IR, the source and the plan"),
    "inspect": ("monoplan.cli.inspect", "IR at any stage, a diff for each pass, the plan, the source"),
    "verify": ("monoplan.cli.verify", "compare the compiled model with the float64 interpreter"),
    "bisect": ("monoplan.cli.bisect", "name the pass or the kernel that makes the numbers wrong"),
    "report": ("monoplan.cli.report", "one HTML page: graphs, passes, memory, roofline, kernels, source"),
    "golden": ("monoplan.cli.golden", "record what a model gives, and check later that it still does"),
    "run-ir": ("monoplan.cli.run_ir", "execute IR text on given or random inputs"),
    "doctor": ("monoplan.cli.doctor", "what this machine offers: compiler, threads, cache, packages"),
    "cache": ("monoplan.cli.cache", "the compiled plans on disk: info, clear, prune"),
}
# Packages that not every user needs -> the extra that brings them.
EXTRAS = {"safetensors": "llm", "tokenizers": "llm", "gguf": "llm", "cupy": "cuda", "mpi4py": "mpi"}
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the number of the signal, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; an error of ours is a message, and a traceback as well if MONOPLAN_DEBUG asks."""
    _prepare_output()
    try:
        status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # a closed pipe shows here, where it can still be handled
        return status
    except MonoplanError as error:
        return _failed(error)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS or debug_level() >= 1:
            raise
        print(f"monoplan: the package {error.name} is not installed", file=sys.stderr)
        print(f"  to do: pip install 'monoplan[{EXTRAS[error.name]}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmonoplan: interrupted", file=sys.stderr)
        end_ranks(None, INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()  # whoever read our text has left
        end_ranks(None, BROKEN_PIPE)
        return BROKEN_PIPE
    except OSError as error:  # a path of the command line that can't be read or written, or a full disk
        try:
            sys.stdout.flush()
        except OSError:
            _forget_stdout()
        what = "a file can't be read or written"
        return _failed(MonoplanError(what, where=error.filename, why=error.strerror or str(error)))


def _failed(error: MonoplanError) -> int:
    if debug_level() >= 1:
        import traceback

        traceback.print_exc()
    end_ranks(error, 1)
    print(f"monoplan: {error}", file=sys.stderr)
    return 1


def _forget_stdout() -> None:
    """After stdout failed: Python would complain once more when it flushes what is left at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="monoplan", description="A language model as one compiled plan.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    module = None
    for name, (path, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        if argv and argv[0] == name:
            module = importlib.import_module(path)
            module.add_arguments(command)
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"monoplan {version('monoplan')}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            print("monoplan (not installed)")
        return 0
    if module is None:
        parser.print_help()
        return 0
    status: int = module.run(args)
    return status


def _prepare_output() -> None:
    """Text always goes somewhere: nowhere if stdout is closed, with `?` for what the terminal can't show."""
    if sys.stdout is None:  # `monoplan doctor >&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    elif isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def debug_level() -> int:
    """MONOPLAN_DEBUG as a number; what is not one counts as 0."""
    text = os.environ.get("MONOPLAN_DEBUG", "").strip()
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    sys.exit(main())
