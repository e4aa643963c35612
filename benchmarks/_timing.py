"""What the benchmarks share: timing that is fair on a busy machine, and Markdown tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]


def interleaved(calls: Mapping[str, Call], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each call on the CPU, of process time and of wall time.

    The calls take turns, so that whatever else the machine does falls on all alike; process time leaves out the
    time in which other processes had the core.
    """
    for call in calls.values():
        call()
    used: dict[str, list[float]] = {name: [] for name in calls}
    passed: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, own = time.perf_counter(), time.process_time()
            call()
            used[name].append(1e3 * (time.process_time() - own))
            passed[name].append(1e3 * (time.perf_counter() - wall))
    return {
        name: {"cpu_ms": statistics.median(used[name]), "wall_ms": statistics.median(passed[name])} for name in calls
    }


def cuda_ms(call: Call, rounds: int) -> float:
    """Median milliseconds of a call on the current CUDA device, by events, after three calls to warm up."""
    for _ in range(3):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def graphed(call: Call, before: Call = lambda: None) -> Call:
    """The call as a CUDA graph that is replayed; `before` goes before each of the calls that warm it up.

    Numbers drawn in it are new at every replay.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before()
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
