"""Recipes: the place where a system is put together and run, one module for each.

Every recipe module has a dataclass `Config`, a dictionary `PRESETS` of functions that return one, a line `SUMMARY`,
and `run(config, out, *, resume, overwrite)`. Importing it costs nothing: what is heavy is imported by `run`.

The modules of the other tables have a dataclass `Args`, a line `SUMMARY` and `run(args, console) -> dict`, like a
command; those of `EVALUATIONS` and `EXPLANATIONS` take the run directory or model as the positional field `target`.
"""

from __future__ import annotations

RECIPES: dict[str, str] = {
    "radial": "leafward.recipes.radial",
    "lathadapter": "leafward.recipes.lathadapter",
    "hyperclip": "leafward.recipes.hyperclip",
    "segmenter": "leafward.recipes.segmenter",
    "superposition": "leafward.recipes.superposition",
    "hcformer": "leafward.recipes.hcformer",
    "helm": "leafward.recipes.helm",
    "himapper": "leafward.recipes.himapper",
    "taxonomy": "leafward.recipes.taxonomy",
}
"""``leafward train NAME`` -> module."""

EVALUATIONS: dict[str, str] = {
    "vision": "leafward.recipes.evaluate_vision",
    "himapper": "leafward.recipes.evaluate_himapper",
    "fewshot": "leafward.recipes.evaluate_fewshot",
    "open-vocabulary": "leafward.recipes.evaluate_open_vocabulary",
    "hierarcaps": "leafward.recipes.evaluate_hierarcaps",
    "hyperlex": "leafward.recipes.evaluate_hyperlex",
    "breeds": "leafward.recipes.evaluate_breeds",
    "retrieval": "leafward.recipes.evaluate_retrieval",
    "zeroshot": "leafward.recipes.evaluate_zeroshot",
    "hierarchy": "leafward.recipes.evaluate_hierarchy",
    "language": "leafward.recipes.evaluate_language",
    "sample": "leafward.recipes.evaluate_sample",
    "search": "leafward.recipes.evaluate_search",
}
"""``leafward evaluate TARGET --task NAME`` -> module."""

EVALUATION_OF: dict[str, str] = {
    "hcformer": "vision",
    "himapper": "himapper",
    "lathadapter": "fewshot",
    "hyperclip": "zeroshot",
    "segmenter": "open-vocabulary",
    "radial": "hierarcaps",
    "helm": "language",
}
"""Recipe of a run -> the evaluation that is meant when no task is named."""

ENCODER_EVALUATIONS = ("hierarcaps", "hyperlex", "breeds", "retrieval", "zeroshot")
"""Evaluations that take any encoder of texts and images, so that the model alone does not say which is meant."""

EXPLANATIONS: dict[str, str] = {
    "segmenter": "leafward.recipes.explain_segmenter",
    "himapper": "leafward.recipes.explain_himapper",
    "hcformer": "leafward.recipes.explain_hcformer",
}
"""Recipe of a run, or model family -> module of ``leafward explain TARGET INPUT...``."""

PREPARATIONS: dict[str, str] = {
    "features": "leafward.recipes.data_features",
    "chains": "leafward.recipes.chains",
    "index": "leafward.recipes.data_index",
    "tokenise": "leafward.recipes.data_tokens",
}
"""``leafward data NAME`` -> module."""
