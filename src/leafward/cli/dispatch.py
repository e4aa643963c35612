"""The command line: dispatch and the behaviour that all commands share.

A command is a module of `leafward.cli` with a dataclass ``Args`` (what tyro parses and documents) and a
function ``run(args, console) -> dict``. Nothing heavy is imported until the command runs, so ``--help`` is quick.

Shared: ``--json`` puts one JSON object on the last line of stdout (everything else goes to stderr), ``--debug`` shows
tracebacks. Exit status: 0 done, 1 failed, 2 wrong usage; 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from leafward import __version__, _moved
from leafward.cli.commands import COMMANDS
from leafward.errors import LeafwardError, UsageError, bounded, missing_extra, nearest, printable, too_large

if TYPE_CHECKING:
    from rich.console import Console


def entry() -> None:
    """Console script."""
    # oneDNN's bf16 path crashes on some CPUs that advertise AMX; must be set before torch is imported.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    shown = warnings.formatwarning
    warnings.formatwarning = lambda *words, **options: printable(shown(*words, **options))
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    argv = _moved.today(argv)
    if argv[:1] == ["help"]:  # help COMMAND is what git and others answer to
        argv = [*argv[1:2], "--help"]
    as_json, debug = "--json" in argv, "--debug" in argv
    try:
        if not argv or argv[0] in ("-h", "--help"):
            print(overview(), flush=True)
            return 0
        if argv[0] in ("-V", "--version"):
            print(f"leafward {__version__}", flush=True)
            return 0
        return _dispatch(argv[0], argv[1:], as_json)
    except BrokenPipeError:  # the reader of a pipe went away; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:  # help, and choices that were shown to somebody who gave none
        if stop.code and as_json:
            print(_json({"error": "wrong usage", "exit_status": stop.code}))
        raise
    except KeyboardInterrupt:
        return _failed("interrupted", 130, as_json)
    except LeafwardError as error:
        if debug:
            _trace()
        status = getattr(error, "exit_code", 2 if isinstance(error, UsageError) else 1)
        return _failed(str(error), status, as_json)
    except Exception as error:
        if debug:
            _trace()
        if isinstance(error, OSError) and error.filename is not None:  # a name too long, a place that may not be read
            return _failed(f"cannot use {error.filename}: {error.strerror}", 1, as_json)
        known = missing_extra(error) if isinstance(error, ImportError) else too_large(error)
        if known is not None:
            return _failed(known, 1, as_json)
        hint = "" if debug else " (--debug shows where)"
        return _failed(f"unexpected {type(error).__name__}: {error}{hint}", 1, as_json)


def overview() -> str:
    """The text of ``leafward --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "leafward: the geometry of representations. Measure, adapt, build.",
            "",
            "usage: leafward COMMAND [options]   (leafward COMMAND --help for each)",
            "",
            *lines,
            "",
            "Every command takes --json (one JSON object on the last line of stdout) and --debug (tracebacks).",
        ]
    )


def _dispatch(name: str, argv: list[str], as_json: bool) -> int:
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}; {nearest(name, COMMANDS)}")
    module = importlib.import_module(f"leafward.cli.{name}")
    args = parse(module, name, argv)
    console = _console(as_json)
    result = module.run(args, console)
    if as_json:
        print(_json(result))
    return 0


def parse(module: ModuleType, name: str, argv: list[str]) -> Any:
    """The command's ``Args`` from its words. A module may bring its own ``parse(argv)`` (``train``, ``bench``)."""
    if hasattr(module, "parse"):
        return module.parse(argv)
    from leafward.cli.parse import parse_into

    return parse_into(module.Args, f"leafward {name}", argv, description=COMMANDS[name])


def _console(as_json: bool) -> Console:
    """Where commands print. Names come from files: no character of theirs commands the terminal."""
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return Printable(stderr=as_json, highlight=False, soft_wrap=not sys.stdout.isatty())


def _json(value: Any) -> str:
    from leafward.files import finite

    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, default=str)
    # What a terminal would obey, or nothing could write, goes as an escape of JSON, which reads as the same character.
    return text if printable(text) == text else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    return char if printable(char) == char else f"\\u{ord(char):04x}"


def _trace() -> None:
    print(printable(traceback.format_exc()), file=sys.stderr)


def _failed(message: str, status: int, as_json: bool) -> int:
    message = printable(bounded(message))
    print(f"leafward: error: {message}", file=sys.stderr)
    if as_json:
        print(_json({"error": message, "exit_status": status}))
    return status
