"""``leafward demo``: the main job from end to end on embedded data, offline, in a few minutes on two cores."""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leafward.errors import LeafwardError

if TYPE_CHECKING:
    from rich.console import Console

    from leafward.cli.demo_parts.part import Part
    from leafward.report import Result

PARTS = {"measure": {}, "adapt": {"PIL": "vision"}, "build": {"transformers": "lm", "timm": "vision"}}
"""The parts in their order, each a module of leafward.cli.demo_parts, and the packages with extras that they need."""


SMALL = (
    "The runs are small, to fit into minutes on two cores: they show what the tools do, and are no evidence for or "
    "against a method."
)


@dataclass
class Args:
    only: Literal["measure", "adapt", "build", "all"] = "all"
    """Run one part alone."""
    out: Path = Path("demo")
    """Folder for the report and the runs; what an earlier demo left there is replaced."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.files import check_writable, write_json

    began = time.monotonic()
    names = list(PARTS) if args.only == "all" else [args.only]
    _check(names)
    check_writable(args.out)
    from leafward.engine.devices import threads

    modules = {name: importlib.import_module(f"leafward.cli.demo_parts.{name}") for name in names}
    # The models are so small that several threads wait for each other longer than they work, the more so on a busy
    # machine. The sweep has processes of its own for the other cores.
    with threads(1):
        parts = {name: module.run(args.out, console) for name, module in modules.items()}
    seconds = time.monotonic() - began
    result = {
        name: part.result | {"headline": [each.to_json() for each in part.numbers]} for name, part in parts.items()
    }
    write_json(args.out / "result.json", result)
    report = args.out / "report.html"
    made = _result(args, parts, seconds)
    made.write(report)
    made.show(console, "leafward demo")
    console.print(f"{SMALL}\ndone in {seconds:.0f} s", markup=False)
    console.print(f"report:   {report}", markup=False)
    for part in parts.values():
        console.print(f"explorer: {_runnable(part.explore)}   ({part.explored})", markup=False, soft_wrap=True)
    explore = [part.explore for part in parts.values()]
    return {"report": str(report), "seconds": seconds, "explore": explore, **result}


def _runnable(command: str) -> str:
    """A command of leafward as it can be typed here: `make demo` runs a program that is not on the path."""
    program = Path(sys.argv[0])
    if program.name != "leafward" or shutil.which("leafward") is not None:
        return command
    near = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    return shlex.quote(str(near)) + command.removeprefix("leafward")


def _check(names: list[str]) -> None:
    """Whatever is not installed is said before the work, not after minutes of it, and all of it at once."""
    wanted = {package: extra for name in names for package, extra in PARTS[name].items()}
    absent = [package for package in wanted if find_spec(package) is None]
    if absent:
        extras = ",".join(dict.fromkeys(wanted[package] for package in absent))
        raise LeafwardError(
            f"the demo's {' and '.join(names)} need what is not installed ({', '.join(absent)}); install it with: "
            f"pip install 'leafward[{extras}]', or run the part that needs nothing more: leafward demo --only measure"
        )


def _result(args: Args, parts: dict[str, Part], seconds: float) -> Result:
    from leafward.engine.run import environment
    from leafward.report import Result

    made = Result(
        "leafward demo",
        f"{', '.join(parts)}: embedded real data, {seconds:.0f} s on this machine",
        [number for part in parts.values() for number in part.numbers],
    )
    made.text(f"Every number on this page was computed by the run that wrote it. {SMALL}")
    for part in parts.values():
        part.draw(made)
    made.section("How this was made")
    only = [] if args.only == "all" else ["--only", args.only]
    made.command(shlex.join(["leafward", "demo", *only, "--out", str(args.out)]))
    for part in parts.values():
        made.text(f"To look around in {part.explored}:")
        made.command(part.explore)
    made.details("Environment", environment({}))
    return made
