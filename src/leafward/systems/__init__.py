"""The systems: a folder for each paper, and for each training that several share, with the same file names in each.

`config.py` has a dataclass `Config`, a dictionary `PRESETS` of functions that return one, and a line `SUMMARY`; it
imports no torch. `train.py` has `run(config, out, *, resume, overwrite)`.

The modules of the other tables have a dataclass `Args`, a line `SUMMARY` and `run(args, console) -> dict`, like a
command; those of `EVALUATIONS` and `EXPLANATIONS` take the run directory or model as the positional field `target`.
"""

from __future__ import annotations

TRAININGS: dict[str, str] = {
    "radial": "leafward.systems.radial",
    "lathadapter": "leafward.systems.lathadapter",
    "hyperclip": "leafward.systems.hyperclip",
    "superposition": "leafward.systems.superposition",
    "hcformer": "leafward.systems.hcformer",
    "vision": "leafward.systems.vision",
    "helm": "leafward.systems.helm",
    "himapper": "leafward.systems.himapper",
    "taxonomy": "leafward.systems.taxonomy",
}
"""``leafward train NAME`` -> folder."""

TASKS: dict[str, dict[str, str]] = {"hyperclip": {"segment": "leafward.systems.hyperclip.segment"}}
"""Training -> its other tasks: ``leafward train NAME --task TASK`` -> folder."""

EVALUATIONS: dict[str, str] = {
    "vision": "leafward.systems.vision.evaluate",
    "himapper": "leafward.systems.himapper.evaluate",
    "fewshot": "leafward.systems.lathadapter.evaluate",
    "open-vocabulary": "leafward.systems.hyperclip.segment.evaluate",
    "hierarcaps": "leafward.systems.radial.evaluate_hierarcaps",
    "hyperlex": "leafward.systems.radial.evaluate_hyperlex",
    "breeds": "leafward.systems.radial.evaluate_breeds",
    "retrieval": "leafward.systems.radial.evaluate_retrieval",
    "zeroshot": "leafward.systems.hyperclip.evaluate",
    "hierarchy": "leafward.systems.taxonomy.evaluate",
    "language": "leafward.systems.helm.evaluate",
    "sample": "leafward.systems.helm.evaluate_sample",
    "search": "leafward.systems.taxonomy.evaluate_search",
}
"""``leafward evaluate TARGET --task NAME`` -> module."""

EVALUATION_OF: dict[str, str] = {
    "hcformer": "vision",
    "vision": "vision",
    "himapper": "himapper",
    "lathadapter": "fewshot",
    "hyperclip": "zeroshot",
    "segmenter": "open-vocabulary",
    "radial": "hierarcaps",
    "helm": "language",
}
"""Training of a run -> the evaluation that is meant when no task is named."""

ENCODER_EVALUATIONS = ("hierarcaps", "hyperlex", "breeds", "retrieval", "zeroshot")
"""Evaluations that take any encoder of texts and images, so that the model alone does not say which is meant."""

EXPLANATIONS: dict[str, str] = {
    "segmenter": "leafward.systems.hyperclip.segment.explain",
    "himapper": "leafward.systems.himapper.explain",
    "hcformer": "leafward.systems.hcformer.explain",
    "vision": "leafward.systems.hcformer.explain",
}
"""Training of a run, or model family -> module of ``leafward explain TARGET INPUT...``."""

PREPARATIONS: dict[str, str] = {
    "features": "leafward.cli.data_features",
    "chains": "leafward.systems.radial.chains",
    "index": "leafward.systems.taxonomy.index",
    "tokenise": "leafward.cli.data_tokens",
}
"""``leafward data NAME`` -> module."""
