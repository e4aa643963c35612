"""What a text encoder is scored on before and after Radial Embedding: hierarchy, and a standard task beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from leafward.data.captions import image_key, parquet_columns, read_captions, second_captions
from leafward.encoders.encoder import Encoder
from leafward.errors import DataError, UsageError
from leafward.stats.intervals import Interval, rank_correlation_interval, share_interval
from leafward.systems.radial import hierarcaps, hyperlex
from leafward.systems.radial.objective import Geometry
from leafward.systems.radial.retrieval import recall_at_k
from leafward.systems.radial.roots import root_vectors


@dataclass(frozen=True)
class Queries:
    """What stands for the images in path retrieval: pictures, or second captions; and which images they are."""

    keys: tuple[str, ...]
    pictures: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()

    def encode(self, encoder: Encoder) -> Tensor:
        """Unit vectors (M, d)."""
        return encoder.encode_image(self.pictures) if self.pictures else encoder.encode_text(self.texts)


@dataclass(frozen=True)
class Suite:
    """Chains to order and to find, HyperLex; either may be missing."""

    candidates: hierarcaps.Candidates | None = None
    queries: Queries | None = None
    words: dict[str, hyperlex.Pairs] | None = None


def load_suite(
    chains: Path | None,
    encoder: Encoder,
    *,
    second: Path | None = None,
    images: Path | None = None,
    words: Path | None = None,
) -> Suite:
    """Read what is given: test chains, the file with other captions of their images or the images, and HyperLex."""
    candidates = hierarcaps.Candidates(read_captions(chains)) if chains is not None else None
    if candidates is None and (second is not None or images is not None):
        raise UsageError("second captions and images need test chains to go with them")
    queries = None
    if candidates is not None:
        assert chains is not None
        queries = find_queries(candidates, chains, encoder, second, images)
    return Suite(candidates, queries, hyperlex.read_hyperlex(words) if words is not None else None)


def find_queries(
    candidates: hierarcaps.Candidates, chains: Path, encoder: Encoder, second: Path | None, images: Path | None
) -> Queries | None:
    """Second captions where they are given; else the pictures, of the folder `images` or of the parquet file itself."""
    if second is not None:
        found = second_captions(candidates.chains, read_captions(second))
        keys = tuple(key for key in candidates.images if key in found)
        if not keys:
            raise DataError(f"{second} has no second caption for any image of {chains}")
        return Queries(keys, texts=tuple(found[key] for key in keys))
    if not encoder.has_images:
        if images is not None:
            raise UsageError("images are given, but the model has no image side; give second captions instead")
        return None
    pictures = _pictures(candidates, chains, images)
    return Queries(tuple(candidates.images), pictures) if pictures else None


def _pictures(candidates: hierarcaps.Candidates, chains: Path, images: Path | None) -> tuple[Any, ...]:
    if images is not None:
        files = tuple(images / key for key in candidates.images)
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise DataError(f"{len(missing)} images are missing, the first is {missing[0]}")
        return files
    if chains.suffix == ".parquet":
        rows = parquet_columns(chains, ("image_url", "jpeg"))
        if rows and "jpeg" in rows[0]:
            bytes_of = {image_key(row["image_url"]): row["jpeg"] for row in rows}
            return tuple(bytes_of[key] for key in candidates.images)
    return ()


def score_suite(
    suite: Suite,
    encoder: Encoder,
    roots: dict[str, Tensor] | None = None,
    geometry: Geometry = "euclidean",
    c: float = 1.0,
) -> dict[str, float]:
    """All numbers that the suite can give, by name; `roots`: learned ones by their text; geometry: of the angles."""
    return measure_suite(suite, encoder, roots, geometry, c)[0]


def measure_suite(
    suite: Suite, encoder: Encoder, roots: dict[str, Tensor] | None, geometry: Geometry, c: float
) -> tuple[dict[str, float], dict[str, Interval]]:
    """What `score_suite` gives, and intervals over the chains, images, pairs or queries of the test."""
    found: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    if suite.candidates is not None:
        found, intervals = _score_chains(suite.candidates, suite.queries, encoder, roots)
    if suite.words is not None:
        features = encoder.encode_text(hyperlex.words(suite.words))
        scores = hyperlex.score(suite.words, features, root_vectors(encoder, [""], roots)[0], geometry, c)
        for part, values in scores.items():
            for name, value in ((f"hyperlex_{part}", "angle"), (f"hyperlex_{part}_cosine", "cosine")):
                found[name] = values[value]
                interval = rank_correlation_interval(values[value], int(values["pairs"]))
                intervals |= {} if interval is None else {name: interval}
    return found, intervals


def _score_chains(
    candidates: hierarcaps.Candidates, queries: Queries | None, encoder: Encoder, roots: dict[str, Tensor] | None
) -> tuple[dict[str, float], dict[str, Interval]]:
    text = encoder.encode_text(candidates.texts)
    root = root_vectors(encoder, candidates.roots, roots)
    if queries is None:
        scores = hierarcaps.score(candidates, text, root)
        return {"tau": scores.tau}, scores.intervals
    asked = queries.encode(encoder)
    scores = hierarcaps.score(candidates, text, root, asked, queries.keys)
    found = {name: value for name, value in scores.to_dict().items() if name != "chains"}
    # The standard task beside the hierarchy: find the finest caption of each image among those of all images.
    chains = [candidates.chains_of[key][0] for key in queries.keys]
    finest = text[candidates.ids[chains, -1].to(text.device)]
    recalls = {f"retrieval_{name}": value for name, value in recall_at_k(asked, finest).items()}
    shares = {name: share_interval(round(value * len(asked)), len(asked)) for name, value in recalls.items()}
    return found | recalls, scores.intervals | shares
