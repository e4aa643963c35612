"""One module for each command of the command line; see :mod:`leafward.cli`."""

COMMANDS = {
    "demo": "the main job on embedded data, offline, minutes on two cores",
    "train": "run a recipe: leafward train RECIPE [--preset NAME] [--key value]",
    "audit": "superposition of a checkpoint, an embedding matrix or a family of them",
    "report": "one page that compares runs",
    "bench": "the benchmarks, side by side",
    "list": "recipes, presets and optional extras",
    "completion": "print a shell completion script",
}
"""Name -> what it does; the module of the same name has `Args` and `run(args, console)`."""
