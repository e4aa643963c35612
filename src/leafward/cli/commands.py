"""One module for each command of the command line; see `leafward.cli`."""

from leafward.systems import EVALUATIONS, EXPLANATIONS, PREPARATIONS

COMMANDS = {
    "demo": "the main job on embedded data, offline, minutes on two cores",
    "train": "run a recipe: leafward train RECIPE [--preset NAME] [--key value]",
    **({"evaluate": "scores with the protocol of a task"} if EVALUATIONS else {}),
    "audit": "every matrix of a checkpoint: how superposed, hierarchical and curved; families of models",
    "fit": "scaling laws from a table of losses: exponents, compute-optimal size, rivals",
    **({"explain": "what a model saw, drawn over its input"} if EXPLANATIONS else {}),
    "explore": "a local page: Poincaré-disk view of embeddings, a taxonomy or a run",
    **({"data": "prepare data"} if PREPARATIONS else {}),
    "export": "an adapter as files, or merged into its base model",
    "report": "one page that compares runs, evaluations or audits",
    "evidence": "the papers' claims: list them, test one, render the page",
    "bench": "the benchmarks, side by side",
    "list": "recipes, presets, tasks and optional extras",
    "completion": "print a shell completion script",
}
"""Name -> what it does; the module of the same name has `Args` and `run(args, console)`."""
