"""The members of a comparison of adapters: in which order they are trained, and their tables.

A member is a mapping with part, method, score, seed, rate, trainable, and the mappings of numbers `validation` (of the
first seed at least) and `test`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from _timing import first_line, markdown
from leafward.files import write_json
from leafward.stats.intervals import mean_interval

METHODS = ("frozen", "block-scale", "lora", "orthogonal", "attention", "full")
SCORES = ("cosine", "lorentz", "euclidean")
"""The cosine, the Lorentz distance, and its flat twin, the Euclidean distance."""
UNRECORDED = "orthogonal"
"""The method whose steps cannot be recorded: solving linear equations looks at values."""
Member = dict[str, Any]
Rates = Callable[[str], Sequence[float | None]]


def plan(
    methods: Sequence[str], scores: Sequence[str], seeds: int, rates: Rates, members: list[Member], key: str
) -> Iterator[tuple[str, Any, int, float | None]]:
    """Method, score, seed, rate: all rates with the first seed, then the other seeds at the best by `key`.

    `members` is what has been trained so far, and left out. A method without rates is not trained, and has no other
    seeds.
    """
    pairs = [(method, score) for score in scores for method in methods]

    def missing(*wanted: Any) -> bool:
        return all(tuple(m[name] for name in ("method", "score", "seed", "rate")) != wanted for m in members)

    for method, score in pairs:
        for rate in rates(method) or [None]:
            if missing(method, score, 0, rate):
                yield method, score, 0, rate
    for seed in range(1, seeds):
        for method, score in pairs:
            tried = any((m["method"], m["score"], m["seed"]) == (method, score, 0) for m in members)
            if not rates(method) or not tried:
                continue
            rate = best_rate(members, method, score, key)
            if missing(method, score, seed, rate):
                yield method, score, seed, rate


def best_rate(members: Sequence[Member], method: str, score: str, key: str) -> float | None:
    """The rate with the best validation of the first seed."""
    tried = [m for m in members if (m["method"], m["score"], m["seed"]) == (method, score, 0)]
    return max(tried, key=lambda member: member["validation"][key])["rate"]


def tables(members: Sequence[Member], part: str, keys: Sequence[str], key: str) -> str:
    """Every method at its chosen rate, and differences paired by seed, as Markdown; means and 95 % intervals."""
    members = [member for member in members if member["part"] == part]
    chosen: dict[tuple[str, str], dict[int, Member]] = {}
    pairs = {(m["method"], m["score"]) for m in members}
    for method, score in sorted(pairs, key=lambda pair: (METHODS.index(pair[0]), pair[1])):
        rate = best_rate(members, method, score, key)
        mine = [m for m in members if (m["method"], m["score"], m["rate"]) == (method, score, rate)]
        chosen[method, score] = {member["seed"]: member for member in mine}
    values = []
    for (method, score), seeds in chosen.items():
        rate = "" if seeds[0]["rate"] is None else f"{seeds[0]['rate']:g}"
        cells = [spread([member["test"][each] for member in seeds.values()]) for each in keys]
        values.append([method, score, f"{seeds[0]['trainable']:,}", rate, *cells, str(len(seeds))])
    differences = []
    against = [(("block-scale", score), (method, score)) for score in SCORES for method in METHODS]
    against += [((method, "lorentz"), (method, other)) for other in ("cosine", "euclidean") for method in METHODS]
    for one, two in against:
        both = sorted(set(chosen.get(one, {})) & set(chosen.get(two, {})))
        if one != two and both:
            apart = [[chosen[one][s]["test"][each] - chosen[two][s]["test"][each] for s in both] for each in keys]
            differences.append([f"{', '.join(one)} − {', '.join(two)}", *(spread(each, "+") for each in apart)])
    header = [part, "score", "trained in the encoder", "rate", *keys, "seeds"]
    return f"{markdown(header, values)}\n\n{markdown([f'{part}, difference', *keys], differences)}"


def spread(values: Sequence[float], sign: str = "") -> str:
    mean, interval = mean_interval(values)
    ends = f" [{interval[0]:{sign}.1f}, {interval[1]:{sign}.1f}]" if interval else ""
    return f"{mean:{sign}.1f}{ends}"


def read_members(files: Sequence[Path]) -> list[Member]:
    """The members of several result files."""
    return [member for file in files for member in json.loads(file.read_text(encoding="utf-8"))["members"]]


def train_all(
    args: argparse.Namespace,
    order: Iterator[tuple[str, Any, int, Any]],
    train: Callable[..., Member],
    members: list[Member],
    device: str,
) -> None:
    """Train what `order` names for --seconds; each result is written at once, and a failure keeps no other away.

    `train` takes method, score, seed, rate and whether steps are to be recorded (not with --eager).
    """
    began, failures = time.perf_counter(), 0
    name = torch.cuda.get_device_name() if device == "cuda" else device
    for method, score, seed, rate in order:
        if time.perf_counter() - began > args.seconds:
            break
        record = device == "cuda" and not args.eager and method != UNRECORDED
        try:
            member = train(method, score, seed, rate, record)
        except Exception as error:
            failures += 1
            log(began, f"{method} {score} {seed} {rate}: {first_line(error)}")
            continue
        members.append(member)
        log(began, json.dumps(member))
        if args.out is not None:
            write_json(args.out, {"device": name, "members": members})
    if failures:
        raise SystemExit(f"{failures} members failed")


def curvature(score: str, c: float) -> tuple[Any, float | None]:
    """The score of `leafward.encoders.scores` and its curvature; without one, Lorentz distances are Euclidean."""
    return ("lorentz", None) if score == "euclidean" else (score, c)


def earlier(file: Path | None) -> list[Member]:
    """What a result file already holds."""
    return read_members([file]) if file is not None and file.is_file() else []


def log(began: float, text: str) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)
