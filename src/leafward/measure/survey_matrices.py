"""Every matrix of a checkpoint, one row each: superposition, spectrum, hyperbolicity, curvature, dimension, duplicates.

    report = survey("path/to/checkpoint")
    report.to_frame(), report.rows[0].values["delta"], report.to_json()

Each matrix is read in slices, twice where it is taller than wide; nothing but sums, a slice and a sample of rows is
held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from leafward.errors import DataError, LeafwardError, need
from leafward.measure import duplicates as near
from leafward.measure.columns import COLUMNS
from leafward.measure.dictionary import dictionary_figures
from leafward.measure.figures import SAMPLE, Figures, beyond, distances_of, sampled_figures, varied
from leafward.measure.initialisation import initial_weights
from leafward.measure.measured import Measured
from leafward.measure.moments import Moments, Rows, moments
from leafward.measure.nulls import NULLS, null_sample
from leafward.measure.spectrum import goodness
from leafward.measure.survey_report import MatrixRow, Survey
from leafward.measure.targets import Entry, Found, Target, open_target

LEVEL = 0.05  # of a false word anywhere in the table: divided by the words that could be said
INIT = "init"
LONG_MEAN = 8  # times what it is for rows around the origin; of three coordinates one in 10,000 has more
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """How matrices are measured; `fresh(name)` gives the same matrix at initialisation, or None."""

    sample: int = SAMPLE
    seed: int = 0
    quick: bool = False
    level: float = 0.999
    fresh: Callable[[str], Entry | None] = field(default=lambda name: None)
    tokens: Callable[[], Sequence[str] | None] = field(default=lambda: None)


def survey(
    target: Target,
    *,
    tensor: str | None = None,
    quick: bool = False,
    sample: int = SAMPLE,
    against: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Survey:
    """Measure every matrix of a target (see `open_target`), or the one named `tensor`.

    `quick` leaves the sampled columns out. `sample` rows, drawn by `seed`, serve those; `against="init"` adds the
    weights as the architecture initialises them to the nulls. `progress(done, total, name)` is called after each
    matrix.
    """
    need(sample >= 64, "sample", "at least 64 rows", sample)
    need(against in (None, INIT), "against", "'init'", against)
    found = open_target(target)
    more = found.extra.get("more", {})
    if tensor in more:
        found = replace(found, entries={**found.entries, **more})
    chosen = found.chosen(tensor)
    words = sum(column.judged for column in COLUMNS.values()) * len(chosen)
    plan = Plan(sample, seed, quick, 1 - LEVEL / words, tokens=found.tokens)
    if against == INIT:
        fresh, counterpart = initial_weights(found)
        plan = replace(plan, fresh=lambda name: fresh.entries.get(counterpart(name) or ""))
    rows = []
    for done, entry in enumerate(chosen.values(), 1):
        try:
            rows.append(measure_matrix(entry, plan))
        except LeafwardError as error:
            if len(chosen) == 1:
                raise type(error)(f"{found.label}: {error}") from error
            rows.append(MatrixRow.broken(entry, str(error)))
        if progress is not None:
            progress(done, len(chosen), entry.name)
    if all(row.problem for row in rows):
        raise DataError(f"{found.label}: none of its {len(rows)} matrices can be measured; {rows[0].problem}")
    extra = _dictionary(found) if "sae" in found.extra and tensor is None else {}
    return Survey(found.label, found.kind, tuple(rows), found.notes, sample, seed, quick, plan.level, found.head, extra)


def _dictionary(found: Found) -> Mapping[str, object]:
    more = found.extra["more"]
    encoder = more["W_enc"].open() if "W_enc" in more else None
    figures = dictionary_figures(found.entries["W_dec"].open(), encoder, lambda rows: None)
    return {"sae": {**found.extra["sae"], **figures}}


def measure_matrix(entry: Entry, plan: Plan) -> MatrixRow:
    """One matrix: exact figures, sampled ones with their nulls, and again without near-duplicates where there are."""
    began = time.process_time()
    reader = entry.open()
    whole = moments(Rows(reader, entry.used), plan.sample, plan.seed)
    notes = [*entry.notes, *_refuse_broken(entry, whole)]
    values = exact_figures(whole)
    row = MatrixRow.of(entry, values, notes)
    if plan.quick:
        return replace(row, seconds=time.process_time() - began)
    values["alpha_p"] = Measured(goodness(whole.eigenvalues, seed=plan.seed))
    distances = distances_of(whole.sample, entry.curvature)
    if not varied(distances):
        notes.append(f"fewer than 16 rows differ in the sample of {len(distances)}: no figure of distances")
        return replace(row, notes=tuple(notes), seconds=time.process_time() - began)
    samples = null_samples(entry, whole, plan)
    nulls = {
        kind: sampled_figures(each, distances_of(each, entry.curvature), plan.seed) for kind, each in samples.items()
    }
    values |= sampled_figures(whole.sample, distances, plan.seed)
    values_of = {kind: {**found, "overlap": Measured(1.0)} for kind, found in nulls.items()}
    calls = said(values, nulls, plan.level)
    row = replace(row, values=values, nulls=values_of, calls=tuple(calls))
    if beyond(values["duplicates"], {k: v["duplicates"] for k, v in nulls.items()}, plan.level) > 0:
        row = _without(row, entry, whole, distances, plan)
    return replace(row, notes=tuple(notes), seconds=time.process_time() - began)


def exact_figures(found: Moments) -> Figures:
    """The columns that come from all rows and have no error."""
    norms = found.norms[found.norms > 0]
    mean = float(norms.mean())
    plain = {
        "norm_mean": mean,
        "norm_sd": float(norms.std()),
        "norm_min": float(found.norms.min()),
        "norm_max": float(norms.max()),
        "represented": float((found.norms > mean / 2).mean()),
        "overlap_mean": found.raw.mean,
        "overlap": found.raw.scaled,
        "overlap_centred": found.centred.scaled,
        "participation": found.raw.participation,
        "participation_centred": found.centred.participation,
        "effective_rank": found.raw.effective_rank,
        "frobenius": found.frobenius,
        "spectral": found.spectral,
        "stable_rank": found.stable_rank,
        "alpha_distance": found.tail.distance,
        "alpha_count": float(found.tail.count) if found.tail.count else float("nan"),
    }
    figures = {name: Measured(value) for name, value in plain.items()}
    return figures | {"alpha": Measured(found.tail.alpha, found.tail.error, found.tail.count)}


def _refuse_broken(entry: Entry, found: Moments) -> list[str]:
    """Refuse NaN, infinities, and matrices without two rows; notes on zero rows."""
    broken = np.flatnonzero(~np.isfinite(found.norms))
    if len(broken):
        shown = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
        raise DataError(
            f"{entry.name} has {len(broken)} of {len(found.norms)} rows with NaN or values that are infinite in "
            f"float32: {shown}"
        )
    zero = int((found.norms == 0).sum())
    if len(found.norms) - zero < 2:
        raise DataError(f"{entry.name} has {len(found.norms) - zero} non-zero rows; overlaps need at least two")
    notes = [f"{zero:,} rows are zero"] if zero else []
    if found.centred.rows < 2:
        notes.append("all rows are equal: nothing is left when their mean is removed")
    return notes


def null_samples(entry: Entry, whole: Moments, plan: Plan) -> dict[str, np.ndarray]:
    """The sample with its structure taken out in each way, and the same rows as they are initialised."""
    found = {kind: with_lengths(null_sample(kind, whole.sample, plan.seed), whole.sample, entry) for kind in NULLS}
    fresh = plan.fresh(entry.name)
    if fresh is not None:
        reader = fresh.open()
        index = np.sort(whole.index[whole.index < fresh.used])
        rows = [reader.read(int(at), int(at) + 1).float().numpy() for at in index]
        if len(rows) >= 64:
            found[INIT] = np.random.default_rng(plan.seed).permutation(np.concatenate(rows))
    return found


def with_lengths(null: np.ndarray, sample: np.ndarray, entry: Entry) -> np.ndarray:
    """A null (n, k) whose rows have the lengths of those of the sample (n, m), about the mean row or about the origin.

    Rows of one length, as a normalised dictionary has, have other neighbourhoods than rows of many; that is no
    structure of directions. Points of a curved space have their radii about the origin.
    """
    if entry.curvature is None and _has_mean(sample):
        null, sample = null - null.mean(0), sample - sample.mean(0)
    own, wanted = (np.linalg.norm(each, axis=1, keepdims=True) for each in (null, sample))
    return (null * (wanted / np.where(own > 0, own, 1))).astype(np.float32)


def _has_mean(sample: np.ndarray) -> bool:
    """Whether the mean row (m,) is longer than that of rows (n, m) around the origin: |mean|² = mean |x|²/n there."""
    mean = np.square(sample.mean(0, dtype=np.float64)).sum()
    return bool(mean > LONG_MEAN * np.square(sample, dtype=np.float64).sum() / len(sample) ** 2)


def said(values: Figures, nulls: Mapping[str, Figures], level: float) -> list[str]:
    """What may be said: of each judged column whether its interval lies beyond those of all nulls."""
    words = []
    for key, column in COLUMNS.items():
        if column.judged and key in values:
            others = {kind: found[key] for kind, found in nulls.items() if kind not in column.shared}
            side = beyond(values[key], others, level)
            word = {-1: column.below, 0: "", 1: column.above}[side]
            words += [word] if word else []
    return words


def _without(row: MatrixRow, entry: Entry, whole: Moments, distances: np.ndarray, plan: Plan) -> MatrixRow:
    """All figures again without near-duplicate rows: of each cluster its first row stays."""
    tokens = plan.tokens() if row.vocabulary else None
    rows = find_clusters(entry, whole, distances)
    clusters = tuple(near.called(each, tokens) for each in rows)
    keep = np.ones(entry.used, dtype=bool)
    for each in rows:
        keep[each[1:]] = False
    if keep.sum() < 64:
        return replace(row, clusters=clusters)
    rest = moments(Rows(entry.open(), entry.used, keep), plan.sample, plan.seed)
    values = exact_figures(rest)
    apart = distances_of(rest.sample, entry.curvature)
    calls = [COLUMNS["duplicates"].above]
    if varied(apart):
        samples = null_samples(entry, replace(rest, index=np.flatnonzero(keep)[rest.index]), plan)
        nulls = {k: sampled_figures(x, distances_of(x, entry.curvature), plan.seed) for k, x in samples.items()}
        values |= sampled_figures(rest.sample, apart, plan.seed)
        calls += [f"without them: {word}" for word in said(values, nulls, plan.level)]
        row = replace(row, nulls_without={k: {**v, "overlap": Measured(1.0)} for k, v in nulls.items()})
    return replace(row, clusters=clusters, without=values, rows_without=int(keep.sum()), calls=tuple(calls))


def find_clusters(entry: Entry, whole: Moments, distances: np.ndarray) -> list[np.ndarray]:
    """Near-duplicate clusters by rows of the matrix: those of the sample, and all rows near their middles."""
    found = near.clusters_of(distances)
    if len(whole.index) == entry.used:
        return [np.sort(whole.index[each]) for each in found]
    middles = near.middles(whole.sample, found, least=2)
    sample = whole.sample - whole.sample.mean(0)
    reach = near.CLOSE * float(np.sqrt(2 * np.square(sample, dtype=np.float64).sum(1).mean()))
    members: list[list[np.ndarray]] = [[] for _ in middles]
    squares = np.square(middles).sum(1)
    for first, block in Rows(entry.open(), entry.used).slices():
        apart = np.square(block).sum(1)[:, None] + squares - 2 * block @ middles.T
        nearest, place = apart.min(1), apart.argmin(1)
        for each in np.unique(place[nearest <= reach**2]):
            members[each].append(first + np.flatnonzero((place == each) & (nearest <= reach**2)))
    return sorted((np.concatenate(each) for each in members if each), key=lambda rows: -len(rows))
