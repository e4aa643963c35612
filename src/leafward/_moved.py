"""Where things lay before: old import paths and command names, which work for one version and warn.

`page()` is docs/moving.md, made from these tables.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HERE = "leafward"
MODULES: dict[str, tuple[str, ...]] = {
    "adapters.encoders": ("encoders.encoder",),
    "adapters.latent_hierarchy": ("systems.lathadapter.attributes",),
    "adapters.prompts": ("systems.lathadapter.prompts",),
    "adapters.prompts.features": ("systems.lathadapter.prompts.features",),
    "adapters.prompts.host": ("systems.lathadapter.prompts.host",),
    "adapters.prompts.hosts": ("systems.lathadapter.prompts.hosts",),
    "adapters.prompts.tokens": ("systems.lathadapter.prompts.tokens",),
    "adapters.radial": ("systems.radial.loss",),
    "adapters.radial_config": ("systems.radial.objective",),
    "adapters.scores": ("encoders.scores",),
    "commands": ("cli.commands",),
    "commands.audit": ("cli.audit",),
    "commands.bench": ("cli.bench",),
    "commands.completion": ("cli.completion",),
    "commands.data": ("cli.data",),
    "commands.demo": ("cli.demo",),
    "commands.evaluate": ("cli.evaluate",),
    "commands.explain": ("cli.explain",),
    "commands.explore": ("cli.explore",),
    "commands.export": ("cli.export",),
    "commands.list": ("cli.list",),
    "commands.report": ("cli.report",),
    "commands.train": ("cli.train",),
    "hierarchy.pairs": ("geometry.pairs",),
    "intervals": ("stats.intervals",),
    "models": ("systems.hcformer", "systems.helm", "systems.himapper"),
    "models.hcformer": ("systems.hcformer.model",),
    "models.helm": ("systems.helm",),
    "models.helm.config": ("systems.helm.model_config",),
    "models.helm.model": ("systems.helm.model",),
    "models.himapper": ("systems.himapper",),
    "models.himapper.loss": ("systems.himapper.losses", "systems.himapper.losses.contrast"),
    "models.himapper.mapper": ("systems.himapper.mapper",),
    "models.himapper.model": ("systems.himapper.model",),
    "models.himapper.tree": ("systems.himapper.tree",),
    "nn.cluster_mixer": ("systems.hcformer.mixer",),
    "recipes": ("systems",),
    "recipes.chains": ("systems.radial.chains",),
    "recipes.data_features": ("cli.data_features",),
    "recipes.data_index": ("systems.taxonomy.index",),
    "recipes.data_tokens": ("cli.data_tokens",),
    "recipes.evaluate_breeds": ("systems.radial.evaluate_breeds",),
    "recipes.evaluate_fewshot": ("systems.lathadapter.evaluate",),
    "recipes.evaluate_hierarcaps": ("systems.radial.evaluate_hierarcaps",),
    "recipes.evaluate_hierarchy": ("systems.taxonomy.evaluate",),
    "recipes.evaluate_himapper": ("systems.himapper.evaluate",),
    "recipes.evaluate_hyperlex": ("systems.radial.evaluate_hyperlex",),
    "recipes.evaluate_language": ("systems.helm.evaluate",),
    "recipes.evaluate_open_vocabulary": ("systems.hyperclip.segment.evaluate",),
    "recipes.evaluate_retrieval": ("systems.radial.evaluate_retrieval",),
    "recipes.evaluate_sample": ("systems.helm.evaluate_sample",),
    "recipes.evaluate_search": ("systems.taxonomy.evaluate_search",),
    "recipes.evaluate_vision": ("systems.vision.evaluate",),
    "recipes.evaluate_zeroshot": ("systems.hyperclip.evaluate",),
    "recipes.explain_hcformer": ("systems.hcformer.explain",),
    "recipes.explain_himapper": ("systems.himapper.explain",),
    "recipes.explain_segmenter": ("systems.hyperclip.segment.explain",),
    "recipes.hcformer": ("systems.hcformer.config", "systems.hcformer.train"),
    "recipes.helm": ("systems.helm.config", "systems.helm.train"),
    "recipes.himapper": ("systems.himapper.config", "systems.himapper.train"),
    "recipes.hyperclip": ("systems.hyperclip.config", "systems.hyperclip.train"),
    "recipes.lathadapter": ("systems.lathadapter.config", "systems.lathadapter.train"),
    "recipes.radial": ("systems.radial.config", "systems.radial.train"),
    "recipes.segmenter": ("systems.hyperclip.segment.config", "systems.hyperclip.segment.train"),
    "recipes.superposition": ("systems.superposition.config", "systems.superposition.train"),
    "recipes.taxonomy": ("systems.taxonomy.config", "systems.taxonomy.train"),
    "scaling": ("stats.power_laws",),
    "scaling.checks": ("stats.power_laws.checks",),
    "scaling.compare": ("stats.power_laws.compare",),
    "scaling.huber": ("stats.power_laws.huber",),
    "scaling.intervals": ("stats.power_laws.intervals",),
    "scaling.laws": ("stats.power_laws.laws",),
    "scaling.line": ("stats.power_laws.line",),
    "scaling.ranges": ("stats.power_laws.ranges",),
    "scaling.results": ("stats.power_laws.results",),
    "scaling.separable": ("stats.power_laws.separable",),
    "scaling.width": ("stats.power_laws.width",),
    "superposition": ("systems.superposition", "measure"),
    "superposition.audit_family": ("measure.audit_family",),
    "superposition.audit_matrix": ("measure.audit_matrix",),
    "superposition.audit_pairs": ("measure.audit_pairs",),
    "superposition.audit_report": ("measure.audit_report",),
    "superposition.audit_verdict": ("measure.audit_verdict",),
    "superposition.devices": ("measure.devices",),
    "superposition.fleet": ("systems.superposition.fleet",),
    "superposition.laws": ("systems.superposition.laws", "data.counts"),
    "superposition.matrices": ("measure.matrices",),
    "superposition.matrix_files": ("measure.matrix_files", "data.arrays"),
    "superposition.matrix_hub": ("measure.matrix_hub",),
    "superposition.matrix_zoo": ("measure.matrix_zoo",),
    "superposition.measures": ("systems.superposition.measures",),
    "superposition.optim": ("systems.superposition.optim",),
    "superposition.overlap": ("measure.overlap",),
    "superposition.pack": ("systems.superposition.pack",),
    "superposition.sampler": ("systems.superposition.sampler",),
    "superposition.step": ("systems.superposition.step",),
    "superposition.theory": ("measure.theory", "systems.superposition.theory"),
    "tasks": (),
    "tasks.augment": ("systems.vision.augment",),
    "tasks.breeds": ("systems.radial.breeds",),
    "tasks.captions": ("data.captions",),
    "tasks.classification": ("systems.vision.classification",),
    "tasks.cost_aggregation": ("systems.hyperclip.segment.cost_aggregation",),
    "tasks.decisions": ("hierarchy.answers",),
    "tasks.detection": ("systems.vision.detection", "data.boxes"),
    "tasks.features": ("data.features",),
    "tasks.fewshot": ("data.fewshot",),
    "tasks.generalise": ("systems.radial.generalise",),
    "tasks.hierarcaps": ("systems.radial.hierarcaps",),
    "tasks.hyperlex": ("systems.radial.hyperlex",),
    "tasks.images": ("data.images",),
    "tasks.language": ("data.text", "systems.helm"),
    "tasks.language.corpus": ("data.text.corpus",),
    "tasks.language.folders": ("data.text.folders",),
    "tasks.language.harness": ("systems.helm.harness",),
    "tasks.language.hub": ("systems.helm.hub",),
    "tasks.language.sampling": ("systems.helm.sampling",),
    "tasks.language.scoring": ("systems.helm.scoring",),
    "tasks.language.shards": ("data.text.shards",),
    "tasks.language.task": ("systems.helm.task",),
    "tasks.language.text": ("data.text.documents",),
    "tasks.language.throughput": ("systems.helm.throughput",),
    "tasks.language.tokenizer": ("data.text.tokenizer",),
    "tasks.open_vocabulary": ("systems.hyperclip.segment.task",),
    "tasks.pyramids": ("systems.vision.pyramids",),
    "tasks.radial": ("systems.radial.task",),
    "tasks.retrieval": ("systems.radial.retrieval",),
    "tasks.segmentation": ("systems.vision.segmentation", "data.scenes"),
    "tasks.standard_sets": ("data.standard_sets",),
    "tasks.taxonomy_captions": ("systems.radial.taxonomy_captions",),
    "tasks.zeroshot": ("encoders.zeroshot",),
}
"""Old module -> the modules that have its names now, the first of them that has one; all without `leafward.`."""

SETTINGS: dict[str, str] = {"from_dict": "config:checked"}
SETTINGS.update(dict.fromkeys(("config_hash", "load_yaml", "save_yaml", "to_dict"), "config"))

NAMES: dict[str, dict[str, str]] = {
    "adapters": {
        "LatentHierarchyConfig": "systems.lathadapter",
        "RadialConfig": "systems.radial",
        "load_encoder": "encoders",
    },
    "cli": {"entry": "cli.dispatch", "main": "cli.dispatch", "overview": "cli.dispatch"},
    "engine": {**SETTINGS, "fit": "engine:train_loop"},
    "engine.config": {
        **SETTINGS,
        **dict.fromkeys(("check_numbers", "flatten", "from_yaml", "parse_yaml", "to_yaml"), "config"),
    },
    "data": dict.fromkeys(("Photo", "embedded", "photos", "write_photos"), "data.samples"),
}
"""Package that is still there -> a name that it had -> where that is now, as HOME:NAME if it is called otherwise."""

RENAMED: dict[str, str] = {
    "tasks.features.read_features": "data.features.read_vectors",
    "tasks.fewshot.read_features": "data.fewshot.read_feature_set",
    "tasks.fewshot.write_features": "data.fewshot.write_feature_set",
}
"""Name in an old module -> what it is called now."""

COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("train", "segmenter"): ("train", "hyperclip", "--task", "segment"),
}
"""First words of a command line -> what they are now."""


class Moved(ModuleType):
    """A module that lay here: its names are looked up where they are now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        old = _inside(self.__name__)
        if f"{old}.{name}" in MODULES:
            return importlib.import_module(f"{HERE}.{old}.{name}")
        if new := RENAMED.get(f"{old}.{name}"):
            warn(f"{self.__name__}.{name}", f"{HERE}.{new}")
            home, _, name = new.rpartition(".")
            return getattr(importlib.import_module(f"{HERE}.{home}"), name)
        for home in MODULES[old]:
            try:
                return getattr(importlib.import_module(f"{HERE}.{home}"), name)
            except AttributeError:
                continue
        raise AttributeError(f"module {self.__name__!r} is gone, and {name!r} is not where its names are now")


class Finder:
    """Finds old modules; Python asks it after all other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        old = _inside(name)
        if not name.startswith(f"{HERE}.") or old not in MODULES:
            return None
        package = any(each.startswith(f"{old}.") for each in MODULES)
        return ModuleSpec(name, Finder, is_package=package)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return Moved(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        warn(module.__name__, " and ".join(f"{HERE}.{home}" for home in MODULES[_inside(module.__name__)]))


def warn(old: str, new: str) -> None:
    """Say once, at the line that uses the old name, what it is called now."""
    message = f"{old} is now {new}" if new else f"{old} is gone"
    warnings.warn(f"{message}; the old name works for this version only", DeprecationWarning, stacklevel=3)


def moved_name(package: str, name: str) -> Any:
    """The value of a name that `package` had, with a warning. AttributeError where it never had it."""
    if name not in NAMES.get(_inside(package), {}):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    home, now = name_today(_inside(package), name)
    warn(f"{package}.{name}", f"{HERE}.{home}.{now}")
    return getattr(importlib.import_module(f"{HERE}.{home}"), now)


def name_today(package: str, name: str) -> tuple[str, str]:
    """The module, without `leafward.`, that has what was `name` in `package`, and what it is called there."""
    home, _, now = NAMES[package][name].partition(":")
    return home, now or name


def today(words: Sequence[str]) -> list[str]:
    """A command line in the words of today."""
    for old, new in COMMANDS.items():
        if tuple(words[: len(old)]) == old:
            print(f"leafward: {' '.join(old)} is now: leafward {' '.join(new)}", file=sys.stderr)
            return [*new, *words[len(old) :]]
    return list(words)


def _inside(name: str) -> str:
    return name.removeprefix(f"{HERE}.")


def page() -> str:
    """docs/moving.md."""
    return "\n".join(
        [
            "# Moving",
            "",
            "A system is a place: each paper has a folder of its own under `leafward.systems`, and what several need",
            "is a shared room. Old import paths and command names work for this version only, and warn.",
            "",
            *_table("Commands", ((" ".join(old), " ".join(new)) for old, new in COMMANDS.items()), "leafward "),
            *_table(
                "Names",
                (
                    (f"{package}.{name}", ".".join(name_today(package, name)))
                    for package, names in NAMES.items()
                    for name in names
                ),
            ),
            *_table("Renamed", RENAMED.items()),
            *_table("Modules", ((old, *homes) for old, homes in MODULES.items() if homes)),
        ]
    )


def _table(title: str, rows: Any, before: str = f"{HERE}.") -> list[str]:
    lines = [f"## {title}", "", "| before | now |", "|---|---|"]
    for old, *new in rows:
        lines.append(f"| `{before}{old}` | {', '.join(f'`{before}{each}`' for each in new)} |")
    return [*lines, ""]


def install(finders: list[Any] | None = None) -> None:
    """Let imports find what moved."""
    finders = sys.meta_path if finders is None else finders
    if Finder not in finders:
        finders.append(Finder)
