"""Many independent jobs, each in its own process and directory, on this machine or on a Ray cluster.

A job is a function `job(config, directory) -> result` of a plain mapping and its own directory (a run directory goes
below it), with a JSON result. The directory is named by the hash of the configuration, so that running the same jobs
again does only what is missing.

SIGTERM and SIGINT stop all jobs, wherever they run: a file `stop` beside their directories says so, and every job that
sees it, or that whoever started it is gone, sends itself SIGTERM. A job that handles it, as training does, saves first.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leafward.config import config_hash, to_dict
from leafward.engine.progress import Progress
from leafward.errors import LeafwardError, UsageError, require
from leafward.files import read_record, read_text, write_json, write_text

JOB, RESULT, ERROR, LOG, STOP = "job.json", "result.json", "error.txt", "log.txt", "stop"
ATTEMPTS = 2
GRACE_SECONDS = 30
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class JobFailure:
    """A job that failed twice; `trace` is the file with its traceback."""

    config: dict[str, Any]
    directory: Path
    message: str
    trace: Path


@dataclass(frozen=True)
class Jobs:
    """Results in the order of the configurations (None where a job failed), and the failures."""

    results: list[dict[str, Any] | None]
    failures: list[JobFailure] = field(default_factory=list)


class JobsStopped(LeafwardError):
    """A signal stopped the jobs; what they saved is there. `exit_code` is the shell's 128 + signal number."""

    def __init__(self, number: int, directory: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; the same call goes on from {directory}")
        self.number, self.exit_code = number, 128 + number


def run_jobs(
    function: str | Callable[[dict[str, Any], Path], Mapping[str, Any]],
    configs: Sequence[Any],
    directory: str | Path,
    *,
    executor: str = "local",
    workers: int = 1,
    show: bool = True,
) -> Jobs:
    """Run `function` (a top-level function or "module:function") once for each of `configs`, `workers` at a time.

    Finished jobs are not run again; a failed one is tried once more and then reported, and the others go on. Local
    workers share the cores: each job gets as many threads as there are cores for a worker, unless OMP_NUM_THREADS says.
    Raises `JobsStopped` after SIGTERM or SIGINT, once the jobs have ended.
    """
    if executor not in _EXECUTORS:
        raise UsageError(f"executor must be local or ray, not {executor!r}")
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    name = _name_of(function)
    plains = [to_dict(config) for config in configs]
    place = Path(directory).resolve()
    homes = [place / config_hash({"function": name, "config": plain})[:16] for plain in plains]
    jobs = dict(zip(homes, plains, strict=True))  # the same configuration twice is one job
    todo = {home: plain for home, plain in jobs.items() if _result(home) is None}
    failures: dict[Path, JobFailure] = {}
    bar = Progress(len(jobs), "jobs", unit="job", start=len(jobs) - len(todo), show=show)
    with _stopping_for_signals(place), bar as progress:
        for done, (home, error) in enumerate(_EXECUTORS[executor](name, todo, workers), 1):
            if error is not None:
                failures[home] = JobFailure(jobs[home], home, error, home / ERROR)
            progress.update(progress.start + done, {"failed": str(len(failures))})
    return Jobs([_result(home) for home in homes], list(failures.values()))


@contextmanager
def _stopping_for_signals(place: Path) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT write the file that stops the jobs of `place`, and end in `JobsStopped`."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        (place / STOP).touch()
        raise KeyboardInterrupt

    place.mkdir(parents=True, exist_ok=True)
    (place / STOP).unlink(missing_ok=True)
    # Python allows handlers in the main thread only; elsewhere the program keeps its own.
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT) if main}
    try:
        yield
    except KeyboardInterrupt:
        if not received:
            raise
        raise JobsStopped(received[-1], place) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _stopped_with(stop: Path, parent: int) -> Iterator[None]:
    """Inside, this process gets SIGTERM once `stop` is there, or `parent`, which started it, is gone."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            if stop.exists() or os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _run_locally(name: str, jobs: Mapping[Path, dict[str, Any]], workers: int) -> Iterator[tuple[Path, str | None]]:
    # The job must find what this process finds, also modules that only its path knows.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // workers)))
    pool, stopping = ThreadPoolExecutor(workers), threading.Event()
    try:
        waiting = {
            pool.submit(_attempt_twice, name, config, home, environment, stopping): home
            for home, config in jobs.items()
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        stopping.set()  # after Ctrl-C nothing new starts, neither a job nor the second attempt at one
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _attempt_twice(
    name: str, config: dict[str, Any], home: Path, environment: Mapping[str, str], stopping: threading.Event
) -> str | None:
    """Run one job in a process of its own; None if it succeeded, else the last line of its error."""
    write_json(home / JOB, {"function": name, "config": config})
    for _ in range(ATTEMPTS):
        if stopping.is_set() or (home.parent / STOP).exists():
            break
        with open(home / LOG, "ab") as log:
            command = [sys.executable, "-m", __spec__.name, str(home), str(os.getpid())]
            code = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment).returncode
        if code == 0 and _result(home) is not None:
            return None
        if not (home / ERROR).exists():  # killed, so that it could not say why
            write_text(home / ERROR, f"the process ended with exit code {code}; its output is in {home / LOG}\n")
    return _last_line(home / ERROR) if (home / ERROR).exists() else "stopped before it began"


def _run_on_ray(name: str, jobs: Mapping[Path, dict[str, Any]], workers: int) -> Iterator[tuple[Path, str | None]]:
    ray = require("ray", "cluster")
    started = not ray.is_initialized()
    if started:
        with _own_signals():
            ray.init(
                num_cpus=None if "RAY_ADDRESS" in os.environ else workers, log_to_driver=False, include_dashboard=False
            )
    # One call per process; Ray's own retries are off because a retry is counted here.
    remote = ray.remote(max_calls=1, max_retries=0)(_attempt)
    queue = list(jobs)[::-1]
    tries = dict.fromkeys(jobs, 0)
    running: dict[Any, Path] = {}
    try:
        while queue or running:
            while queue and len(running) < workers:
                home = queue.pop()
                tries[home] += 1
                write_json(home / JOB, {"function": name, "config": jobs[home]})
                running[remote.remote(name, jobs[home], str(home))] = home
            (ready,), _ = ray.wait(list(running), num_returns=1)
            home = running.pop(ready)
            error = _ray_outcome(ray, ready, home)
            if error is not None and tries[home] < ATTEMPTS:
                queue.append(home)
            else:
                yield home, error
    finally:
        if running:  # stopped by a signal: jobs that have been told to stop may save what they have
            ray.wait(list(running), num_returns=len(running), timeout=GRACE_SECONDS)
        if started:
            ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Afterwards SIGTERM and SIGINT do what they did before: Ray would end the process at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)


def _ray_outcome(ray: Any, ready: Any, home: Path) -> str | None:
    """Store what a remote job returned; None if it succeeded."""
    try:
        result, trace = ray.get(ready)
    except ray.exceptions.RayError as error:
        result, trace = None, f"{type(error).__name__}: {error}\n"
    if trace is None:
        (home / ERROR).unlink(missing_ok=True)
        write_json(home / RESULT, result)
        return None
    write_text(home / ERROR, trace)
    return _last_line(home / ERROR)


_EXECUTORS = {"local": _run_locally, "ray": _run_on_ray}


def _attempt(
    name: str, config: dict[str, Any], home: str, parent: int | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """The result of a job, or its traceback. `parent`: the process that started this one."""
    try:
        Path(home).mkdir(parents=True, exist_ok=True)
        with _stopped_with(Path(home).parent / STOP, parent or os.getppid()):
            result = _resolve(name)(config, Path(home))
        if not isinstance(result, Mapping):
            raise UsageError(f"the job {name} must return a mapping, not {type(result).__name__}")
        json.dumps(dict(result))
        return dict(result), None
    except Exception:
        return None, traceback.format_exc()


def _name_of(function: str | Callable[..., Any]) -> str:
    """ "module:function", checked to lead back to the function."""
    # What has no name of its own (a partial, an object with __call__) is not found under its description either.
    module, own = getattr(function, "__module__", ""), getattr(function, "__qualname__", function)
    name = function if isinstance(function, str) else f"{module}:{own}"
    found = _resolve(name)
    if not callable(found) or (callable(function) and found is not function) or name.startswith("__main__:"):
        raise UsageError(f"the job {name} must be a top-level function of a module that other processes can import")
    return name


def _resolve(name: str) -> Callable[[dict[str, Any], Path], Any]:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot find the job {name!r} (it must be 'module:function'): {error}") from error


def _result(home: Path) -> dict[str, Any] | None:
    return read_record(home / RESULT) if (home / RESULT).exists() else None


def _last_line(path: Path) -> str:
    lines = read_text(path).strip().splitlines()
    return lines[-1] if lines else "unknown error"


def _main(home: Path, parent: int) -> int:
    """One job, started by `_attempt_twice` in a process of its own."""
    job = read_record(home / JOB)
    (home / ERROR).unlink(missing_ok=True)
    result, trace = _attempt(job["function"], job["config"], str(home), parent)
    if trace is not None:
        write_text(home / ERROR, trace)
        return 1
    write_json(home / RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
