"""The commands about this machine: doctor, cache, pull (models), completion (of the shell)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monoplan.cli.common import CHECKPOINT, DEFAULT_MODEL, find_model, whole
from monoplan.ir.errors import LoadError


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def doctor(args: argparse.Namespace) -> int:
    """Prints the report of the runtime."""
    from monoplan.runtime.machine.doctor import report

    sys.stdout.write(report())
    return 0


def add_cache(parser: argparse.ArgumentParser) -> None:
    """What to do with the cache."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("info", help="place, number of entries, size")
    actions.add_parser("clear", help="remove every entry")
    prune = actions.add_parser("prune", help="remove the longest unused entries")
    until = "until N bytes of {} are left (default: the cache's own cap)"
    prune.add_argument("--max-bytes", type=whole(0), metavar="N", help=until.format("plans"))
    prune.add_argument("--max-weight-bytes", type=whole(0), metavar="N", help=until.format("packed weights"))


def cache(args: argparse.Namespace) -> int:
    """Shows or removes entries."""
    from monoplan.runtime.build import cache

    if args.action == "info":
        found = cache.info()
        note = " (temporary: the usual place can't be used)" if found.temporary else ""
        print(f"place    {found.root}{note}\nentries  {found.entries}")
        print(f"size     {_size(found.nbytes)} of {_size(found.max_bytes)}")
        print(f"weights  {found.weights}, {_size(found.weight_bytes)} of {_size(found.max_weight_bytes)}")
        return 0
    if args.action == "clear":
        count, freed = cache.clear()
    else:
        pruned = (cache.prune(args.max_bytes), cache.prune_weights(args.max_weight_bytes))
        count, freed = map(sum, zip(*pruned, strict=True))
    print(f"removed {count} entries, {_size(freed)}")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def add_pull(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("-m", "--model", metavar="MODEL", help=f"{CHECKPOINT} {DEFAULT_MODEL}")


def pull(args: argparse.Namespace) -> int:
    """Fetches a model, or what has changed of it, and prints where it is."""
    from monoplan.models.load.hub import local_path

    path = Path(find_model(None)) if args.model is None else local_path(args.model, update=True).expanduser()
    if not path.exists():
        raise LoadError("there is no such model", where=args.model, fix=f"give {CHECKPOINT}")
    print(path)
    return 0


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    use = 'eval "$(monoplan completion bash)", for instance in ~/.bashrc'
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help=use)


def completion(args: argparse.Namespace) -> int:
    """Prints a script that completes commands, options and their values; other words are file names."""
    from monoplan.cli.main import COMMANDS, make_parser, options_of

    _, parsers = make_parser()
    options = {name: list(options_of(parser)) for name, parser in parsers.items()}
    if args.shell == "fish":
        lines = [_fish("__fish_use_subcommand", f"-xa {name}", what) for name, (_, what) in COMMANDS.items()]
        for name, actions in options.items():
            lines += [_fish(f"__fish_seen_subcommand_from {name}", _fish_words(a), _help(a)) for a in actions]
        print("\n".join(lines))
        return 0
    if args.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    values = [
        (f"{name}:{text}", a.choices)
        for name, actions in options.items()
        for a in actions
        if a.choices
        for text in a.option_strings or [name]
    ]
    flags = {name: [text for a in actions for text in a.option_strings] for name, actions in options.items()}
    print(
        _BASH.format(
            commands=" ".join(COMMANDS),
            values="\n".join(f'    {key}) words="{" ".join(words)}" ;;' for key, words in values),
            options="\n".join(f'      {name}) words="{" ".join(found)}" ;;' for name, found in flags.items()),
        )
    )
    return 0


# A word is completed by the words of the command before it: its options after a dash, the values of the option (or of
# the command, where it has some) before the word. With none of them bash completes file names.
_BASH = """\
_monoplan() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words=
  case "${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands} --help --version"
  elif [ "${{cur#-}}" != "$cur" ]; then
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _monoplan monoplan"""


def _fish(condition: str, words: str, what: str) -> str:
    quoted = what.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c monoplan -n '{condition}' {words} -d '{quoted}'"


def _fish_words(action: argparse.Action) -> str:
    words = [f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}" for text in action.option_strings]
    if action.choices:
        words.append(f"-xa '{' '.join(action.choices)}'")
    elif action.nargs != 0:
        words.append("-r")
    return " ".join(words)


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default} if "%" in (action.help or "") else action.help or ""
