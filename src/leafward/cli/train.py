"""``leafward train RECIPE``: a recipe from a preset or a saved configuration, with any field changed by a flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from leafward.commands._choice import load, show_choices, take_value
from leafward.errors import UsageError, nearest
from leafward.recipes import RECIPES

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass
class Args:
    recipe: str
    config: Any
    out: Path
    resume: bool
    overwrite: bool


LARGEST = {"seeds": 10_000, "workers": 1_024, "batch_size": 1 << 24, "vocab_size": 1 << 24, "size": 1 << 16}
"""Settings that would make a run endless, or kill it without a word, long before an allocation fails."""

USAGE = "leafward train RECIPE [--preset NAME | --config FILE] [--out DIR] [--key value]"


def load_recipe(name: str) -> ModuleType:
    """The module of a recipe by its name."""
    return load(RECIPES, name, "recipe")


def parse(argv: list[str]) -> Args:
    """The first word is the recipe; a preset or a saved file gives the defaults for the rest."""
    from leafward.commands._parse import parse_into

    if not argv or argv[0].startswith("-"):
        show_choices(USAGE, RECIPES, "recipe", 0 if {"-h", "--help"} & set(argv) else 2)
    name, words = argv[0], argv[1:]
    recipe = load_recipe(name)
    preset, file = take_value(words, "--preset")[0], take_value(words, "--config")[0]
    cls = _flags(recipe, name, preset)
    parsed = parse_into(
        cls, f"leafward train {name}", words, description=recipe.SUMMARY, default=_default(cls, recipe, preset, file)
    )
    out = parsed.out or Path("runs") / f"{name}-{parsed.preset or Path(file or '').stem or 'run'}"
    return Args(name, parsed.settings, out, parsed.resume, parsed.overwrite)


def _flags(recipe: ModuleType, name: str, preset: str | None) -> type:
    """A dataclass of the shared training flags and, without a prefix, the recipe's own configuration."""
    import tyro

    def flag(kind: Any, text: str) -> Any:
        return Annotated[kind, tyro.conf.arg(help=text)]

    presets = ", ".join(recipe.PRESETS)
    first = next(iter(recipe.PRESETS))
    return dataclasses.make_dataclass(
        f"Train{name.title()}",
        [
            ("preset", flag(str | None, f"A ready configuration: {presets} (default: {first})."), None),
            ("config", flag(Path | None, "A saved config.yaml to start from instead of a preset."), None),
            ("out", flag(Path | None, "The run directory (default: runs/RECIPE-PRESET)."), None),
            ("resume", flag(bool, "Continue an unfinished run."), False),
            ("overwrite", flag(bool, "Replace a finished run."), False),
            (
                "settings",
                Annotated[recipe.Config, tyro.conf.arg(name="")],
                dataclasses.field(default_factory=recipe.Config),
            ),
        ],
    )


def _default(cls: type, recipe: ModuleType, preset: str | None, file: str | None) -> Any:
    if preset is not None and file is not None:
        raise UsageError("give --preset or --config, not both")
    if file is not None:
        from leafward.engine.config import load_yaml

        return cls(config=Path(file), settings=load_yaml(recipe.Config, file))
    preset = next(iter(recipe.PRESETS)) if preset is None else preset
    if preset not in recipe.PRESETS:
        raise UsageError(f"--preset {preset!r} is not a preset of this recipe; {nearest(preset, recipe.PRESETS)}")
    return cls(preset=preset, settings=recipe.PRESETS[preset]())


def run(args: Args, console: Console) -> dict[str, Any]:
    """Train, then say where everything is."""
    from leafward.engine.run import discard_unbegun

    _check_device(args.config)
    _check_sizes(args.config)
    fresh = [path for path in (args.out, *args.out.parents) if not path.exists()]
    try:
        result = load_recipe(args.recipe).run(args.config, args.out, resume=args.resume, overwrite=args.overwrite)
    except Exception:
        if fresh:
            discard_unbegun(args.out)
        for parent in fresh[1:]:  # the folders that were made for it, the deepest first
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    from leafward.commands._show import show_headline

    show_headline(console, result)
    console.print(f"run directory: {args.out}   report: {args.out / 'report.html'}")
    return {"run": str(args.out), **result}


def _check_device(config: Any) -> None:
    """Refuse a device that is not there before a run directory is made."""
    if "cuda" in (getattr(config, "device", None), getattr(getattr(config, "loop", None), "device", None)):
        import torch

        if not torch.cuda.is_available():
            raise UsageError("device is cuda, but torch finds no CUDA device here; use cpu or auto")


def _check_sizes(config: Any) -> None:
    """Refuse what nobody can mean before a run directory is made."""
    from leafward.engine.config import flatten

    for path, value in flatten(config).items():
        largest = LARGEST.get(path.rpartition(".")[2])
        if largest is not None and isinstance(value, int) and value > largest:
            raise UsageError(f"{path} must be at most {largest:,}, got {value:,}")
