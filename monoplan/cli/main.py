"""The command line: `monoplan COMMAND`, see COMMANDS.

A command NAME is two functions of its module, `add_NAME(parser)` and `NAME(args) -> exit status`. Only the module of
the command that runs is imported. Text goes to stdout; timings and errors go to stderr.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from monoplan.cli.common import BROKEN_PIPE, EXTRAS, INTERRUPTED, UsageError, end_ranks
from monoplan.ir.errors import MonoplanError, did_you_mean, install_extra

# name -> (module of monoplan.cli, what it does): the order is that of the help.
COMMANDS = {
    "generate": ("run", "continue a prompt, streamed"),
    "chat": ("run", "talk with a model"),
    "serve": ("serve", "serve a model by the OpenAI protocol, with a page to chat at"),
    "bench": ("bench", "tokens per second of prompt processing and generation"),
    "quantize": ("quantize", "write a model as a GGUF file with weights of a few bits"),
    "compile": ("inspect", "compile a model and write the IR, the source and the plan"),
    "export": ("inspect", "write a model as a C program with its weights"),
    "inspect": ("inspect", "IR at any stage, a diff for each pass, the plan, the source"),
    "verify": ("inspect", "compare the compiled model with the float64 interpreter"),
    "bisect": ("inspect", "name the pass or the kernel that makes the numbers wrong"),
    "report": ("inspect", "one HTML page: graphs, passes, memory, roofline, kernels, source"),
    "golden": ("inspect", "record what a model gives, and check later that it still does"),
    "run-ir": ("inspect", "execute IR text on given or random inputs"),
    "doctor": ("machine", "what this machine offers: compiler, threads, cache, packages"),
    "cache": ("machine", "the compiled plans on disk: info, clear, prune"),
    "pull": ("machine", "fetch a model from the hub, or its newest version"),
    "completion": ("machine", "a script that completes commands and options in your shell"),
}


class Parser(argparse.ArgumentParser):
    """Errors are ours, and name what was probably meant."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ").replace(": must be", " must be")
        raise UsageError(text, fix=f"{self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        name, known = argparse._get_action_name(action), list(action.choices)
        what = f"there is no command {value!r}" if name == "COMMAND" else f"{name} must be one of {', '.join(known)}"
        what += "" if name == "COMMAND" else f", got {value!r}"
        raise UsageError(what, fix=did_you_mean(value, known) or f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; an error of ours is a message, and a traceback as well if MONOPLAN_DEBUG asks."""
    _prepare_output()
    # Most of what a start makes stays, 100 000 texts of a vocabulary among it: looking through all of it for garbage
    # after every 700 objects takes a twentieth of the time to the first token.
    gc.set_threshold(200_000)
    try:
        status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # a closed pipe shows here, where it can still be handled
        return status
    except UsageError as error:
        return _failed(error, 2)
    except MonoplanError as error:
        return _failed(error)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS or debug_level() >= 1:
            raise
        what = f"the package {error.name} is not installed"
        return _failed(MonoplanError(what, fix=install_extra(EXTRAS[error.name])))
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


def _failed(error: MonoplanError, status: int = 1) -> int:
    if debug_level() >= 1:
        import traceback

        traceback.print_exc()
    end_ranks(error, status)
    print(f"monoplan: {error}", file=sys.stderr)
    return status


def _forget_stdout() -> None:
    """After stdout failed: Python would complain once more when it flushes what is left at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the commands; `only`: the others have no options, and their modules are not imported."""
    parser = Parser(prog="monoplan", description="A language model as one compiled plan.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made = {}
    for name, (_, what) in COMMANDS.items():
        made[name] = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        if only is None or only == name:
            _function(name, "add_")(made[name])
    return parser, made


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a command and of the commands in it, and its words that have a choice."""
    for action in parser._actions:
        if action.option_strings or action.choices:
            yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)


def _function(name: str, prefix: str = "") -> Any:
    return getattr(importlib.import_module(f"monoplan.cli.{COMMANDS[name][0]}"), prefix + name.replace("-", "_"))


def _run(argv: list[str]) -> int:
    parser, commands = make_parser(argv[0] if argv and argv[0] in COMMANDS else "")
    args, rest = parser.parse_known_args(argv)
    if rest:
        word = next((text for text in rest if text.startswith("-")), rest[0])
        found = options_of(commands[args.command] if args.command else parser)
        known = [text for action in found for text in action.option_strings]
        option = word.partition("=")[0]
        what = f"there is no option {option}" if option.startswith("-") else f"{word!r} is one word too many"
        raise UsageError(what, fix=did_you_mean(option, known) or f"monoplan {args.command or ''} --help")
    if args.version:
        import monoplan

        print(f"monoplan {monoplan.__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    if (given := getattr(args, "model_path", None)) is not None:
        if args.model is not None:
            raise UsageError("the model is given twice", fix="give one of MODEL and --model")
        args.model = given
    status: int = _function(args.command)(args)
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
