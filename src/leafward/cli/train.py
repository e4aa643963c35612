"""``leafward train SYSTEM``: from a preset or a saved configuration, with any field changed by a flag."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from leafward.cli.choice import load, show_choices, take_value
from leafward.config import checked, load_yaml, to_dict
from leafward.errors import UsageError, nearest
from leafward.systems import TASKS, TRAININGS

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass
class Args:
    home: str
    """The folder of the training, as a package."""
    config: Any
    out: Path
    resume: bool
    overwrite: bool
    data_changed: bool = False


SHORT = """

The group of a name may be left out where no other setting is called so: --steps is --loop.steps, and --data is the
source of the data. --help-all shows the rarer settings too."""
USAGE = "leafward train SYSTEM [--preset NAME | --config FILE] [--out DIR] [--key value]"


HOMES = {
    **TRAININGS,
    **{f"{name} --task {task}": home for name, tasks in TASKS.items() for task, home in tasks.items()},
}
"""What follows `leafward train` -> the folder of that training, as a package."""
CONFIGS = {words: f"{home}.config" for words, home in HOMES.items()}
"""What follows `leafward train` -> the module of its settings."""


def parse(argv: list[str]) -> Args:
    """The first word is the recipe; a preset or a saved file gives the defaults for the rest."""
    from leafward.cli.parse import brief, parse_into

    if not argv or argv[0].startswith("-"):
        show_choices(USAGE, CONFIGS, "system", 0 if {"-h", "--help"} & set(argv) else 2)
    name, words = chosen(argv)
    recipe = load(CONFIGS, name, "system")
    preset, file = take_value(words, "--preset")[0], take_value(words, "--config")[0]
    kind = brief(recipe.Config) if {"-h", "--help"} & set(words) else recipe.Config
    cls = _flags(recipe, kind)
    words = ["--help" if word == "--help-all" else word for word in words]
    default = _default(cls, kind, recipe, preset, file)
    parsed = parse_into(cls, f"leafward train {name}", words, description=recipe.SUMMARY + SHORT, default=default)
    folder = "-".join([*name.replace("--task ", "").split(), parsed.preset or Path(file or "").stem or "run"])
    out = parsed.out or Path("runs") / folder
    return Args(HOMES[name], parsed.settings, out, parsed.resume, parsed.overwrite, parsed.data_changed)


def chosen(argv: list[str]) -> tuple[str, list[str]]:
    """What is to be trained, a name of `HOMES`, and the words that set it."""
    name, words = argv[0], argv[1:]
    if name in TASKS and (task := take_value(words, "--task")[0]) is not None:
        if task not in TASKS[name]:
            raise UsageError(f"--task {task!r} is not a task of {name}; {nearest(task, TASKS[name])}")
        return f"{name} --task {task}", take_value(words, "--task")[1]
    return name, words


def _flags(recipe: ModuleType, kind: Any) -> type:
    """A dataclass of the shared training flags and, without a prefix, the training's own configuration."""
    import tyro

    def flag(kind: Any, text: str) -> Any:
        return Annotated[kind, tyro.conf.arg(help=text)]

    presets = ", ".join(recipe.PRESETS)
    first = next(iter(recipe.PRESETS))
    return dataclasses.make_dataclass(
        "Train",
        [
            ("preset", flag(str | None, f"A ready configuration: {presets} (default: {first})."), None),
            ("config", flag(Path | None, "A saved config.yaml to start from instead of a preset."), None),
            ("out", flag(Path | None, "The run directory (default: runs/SYSTEM-PRESET)."), None),
            ("resume", flag(bool, "Continue an unfinished run, or write the page that a finished one lacks."), False),
            ("overwrite", flag(bool, "Replace a finished run."), False),
            ("data_changed", flag(bool, "With --resume: go on though the data have changed since."), False),
            (
                "settings",
                Annotated[kind, tyro.conf.arg(name="")],
                dataclasses.field(default_factory=kind),
            ),
        ],
    )


def _default(cls: type, kind: Any, recipe: ModuleType, preset: str | None, file: str | None) -> Any:
    if preset is not None and file is not None:
        raise UsageError("give --preset or --config, not both")
    if file is not None:
        return cls(config=Path(file), settings=load_yaml(kind, file))
    preset = next(iter(recipe.PRESETS)) if preset is None else preset
    if preset not in recipe.PRESETS:
        raise UsageError(f"--preset {preset!r} is not a preset of this training; {nearest(preset, recipe.PRESETS)}")
    return cls(preset=preset, settings=checked(kind, to_dict(recipe.PRESETS[preset]())))


def run(args: Args, console: Console) -> dict[str, Any]:
    """Train, then say where everything is."""
    from leafward.engine.run import discard_unbegun

    if args.data_changed and not args.resume:
        raise UsageError("--data-changed goes with --resume")
    resume = "data-changed" if args.data_changed else args.resume
    _check_device(args.config)
    fresh = [path for path in (args.out, *args.out.parents) if not path.exists()]
    try:
        settings = importlib.import_module(f"{args.home}.config")
        if hasattr(settings, "check"):  # before anything heavy is imported
            settings.check(args.config)
        train = importlib.import_module(f"{args.home}.train")
        result = train.run(args.config, args.out, resume=resume, overwrite=args.overwrite)
    except Exception:
        if not _first_rank():  # it clears up for all
            raise
        if fresh:
            discard_unbegun(args.out)
        for parent in fresh[1:]:  # the folders that were made for it, the deepest first
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    if _first_rank():
        from leafward.report import Result

        found = Result.of(result)
        if result.get("cells"):
            from leafward.engine.sweep_report import table

            found.table(*table(result["cells"]), terminal=True)
        found.show(console)
        if not found.estimates:
            console.print("no headline numbers: the run was given nothing to be scored on")
        console.print(f"run directory: {args.out}   report: {args.out / 'report.html'}")
    return {"run": str(args.out), **result}


def _first_rank() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _check_device(config: Any) -> None:
    """Refuse a device that is not there before a run directory is made."""
    if "cuda" in (getattr(config, "device", None), getattr(getattr(config, "loop", None), "device", None)):
        from leafward.engine.distributed import need_cuda

        need_cuda()
