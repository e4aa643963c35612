"""Many jobs: failures are reported and retried once, finished jobs are not run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import engine_executor_jobs as jobs
import pytest

from leafward.engine import executor
from leafward.engine.executor import run_jobs
from leafward.errors import UsageError


@dataclass(frozen=True)
class Square:
    number: float
    mode: str = "good"


def test_results_come_in_order_and_failures_do_not_stop_the_others(tmp_path: Path) -> None:
    configs = [Square(3.0), Square(4.0, "bad"), Square(5.0, "once"), {"number": 6.0, "mode": "killed"}, Square(7.0)]
    done = run_jobs(jobs.square, configs, tmp_path, workers=2, show=False)
    assert done.results == [{"square": 9.0}, None, {"square": 25.0}, None, {"square": 49.0}]
    bad, killed = sorted(done.failures, key=lambda failure: failure.config["number"])
    assert bad.message == "ValueError: 4.0 is a bad number"
    assert "Traceback" in bad.trace.read_text()
    assert "in square" in bad.trace.read_text()
    assert f"exit code {-signal.SIGKILL}" in killed.message
    # Each failed job had two attempts, the one that failed once had two, the good ones one.
    attempts = {config: (tmp_path / f"attempts-{config}").read_text() for config in ("3.0", "4.0", "5.0", "6.0", "7.0")}
    assert {name: len(marks) for name, marks in attempts.items()} == {"3.0": 1, "4.0": 2, "5.0": 2, "6.0": 2, "7.0": 1}
    # Again: only what failed runs again; "module:function" names the same jobs.
    again = run_jobs("engine_executor_jobs:square", configs, tmp_path, show=False)
    assert again.results == done.results
    counts = {name: len((tmp_path / f"attempts-{name}").read_text()) for name in attempts}
    assert counts == {"3.0": 1, "4.0": 4, "5.0": 2, "6.0": 4, "7.0": 1}


def test_the_same_configuration_twice_is_one_job(tmp_path: Path) -> None:
    done = run_jobs(jobs.square, [Square(2.0), {"mode": "good", "number": 2}], tmp_path, show=False)
    assert done.results == [{"square": 4.0}, {"square": 4.0}]
    assert (tmp_path / "attempts-2.0").read_text() == "|"


def test_what_cannot_be_a_job_is_refused(tmp_path: Path) -> None:
    def local(config: dict[str, Any], directory: Path) -> dict[str, Any]:
        return {}

    for function, words in (
        (local, "locals"),
        ("nowhere:job", "nowhere"),
        ("os:no_such", "no_such"),
        ("os", "module:function"),
        ("os:sep", "top-level function"),
        (partial(jobs.square), "functools.partial"),
    ):
        with pytest.raises(UsageError, match=words):
            run_jobs(function, [{}], tmp_path)
    with pytest.raises(UsageError, match="executor must be local or ray"):
        run_jobs(jobs.square, [{}], tmp_path, executor="cloud")
    with pytest.raises(UsageError, match="workers"):
        run_jobs(jobs.square, [{}], tmp_path, workers=0)


def test_workers_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(executor, "_cores", lambda: 4)
    assert run_jobs(jobs.threads, [{"a": 1}], tmp_path, workers=2, show=False).results == [{"threads": 2}]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_jobs(jobs.threads, [{"a": 2}], tmp_path, workers=1, show=False).results == [{"threads": 1}]


def test_nothing_new_starts_after_control_c(tmp_path: Path) -> None:
    """The terminal sends SIGINT to all processes; the jobs that die of it must not be tried again."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(Path(jobs.__file__).parent)!r})\n"
        "from leafward.engine import run_jobs\n"
        f"run_jobs('engine_executor_jobs:wait', [{{'a': 1}}, {{'a': 2}}], {str(tmp_path)!r}, workers=1, show=False)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(tmp_path.glob("*/started")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0
    assert [marks.read_text() for marks in tmp_path.glob("*/started")] == ["|"]


def test_a_job_must_return_json(tmp_path: Path) -> None:
    done = run_jobs(jobs.not_json, [{"kind": "list"}, {"kind": "object"}], tmp_path, show=False)
    assert done.results == [None, None]
    assert {failure.message.partition(":")[0].rpartition(".")[2] for failure in done.failures} == {
        "UsageError",
        "TypeError",
    }


@pytest.mark.slow
def test_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    folder = str(Path(jobs.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    configs = [Square(3.0), Square(4.0, "bad"), Square(5.0, "once"), Square(6.0, "killed")]
    done = run_jobs(jobs.square, configs, tmp_path, executor="ray", workers=2, show=False)
    assert done.results == [{"square": 9.0}, None, {"square": 25.0}, None]
    messages = [failure.message for failure in done.failures]
    assert "ValueError: 4.0 is a bad number" in messages
    assert len(messages) == 2
