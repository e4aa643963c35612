"""One writer for a run directory: real processes that hold, die, let go and contend."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_toys import ToyConfig, finish, launch, record, reporting, train

from leafward.config import replace
from leafward.engine import Interrupted, RunDirectory, lock
from leafward.engine.lock import LOCK, RunLocked, acquire, one_writer, release
from leafward.engine.run import discard_unbegun
from leafward.errors import UsageError
from leafward.report import read_run

HOST = socket.gethostname()
LONG = ToyConfig(replace(ToyConfig().loop, steps=100_000, checkpoint_every=100_000, eval_every=None))


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    with lock.releasing():
        yield


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def hold(folder: Path, until: Path) -> None:
    """Make a run in `folder` and keep it until the file `until` is there."""
    run = RunDirectory.create(folder, {"a": 1})
    run.path.joinpath("held").touch()
    wait_for(until.exists)


def fork_and_die(folder: Path, until: Path) -> None:
    """Take the lock, fork a child that lives on (as a worker that reads data may), and die by SIGKILL."""
    RunDirectory.create(folder, {"a": 1})
    child = os.fork()
    if child == 0:
        (until.parent / "child").write_text(str(os.getpid()))
        wait_for(until.exists)
        os._exit(0)
    wait_for((until.parent / "child").exists)
    os.kill(os.getpid(), signal.SIGKILL)


def stopped_and_lives(folder: Path, until: Path) -> None:
    """Train until a signal comes, and live on, as a notebook does."""
    try:
        one_writer(train)(folder, LONG)
    except Interrupted:
        (until.parent / "stopped").touch()
        wait_for(until.exists)


def contend(folder: Path, turns: int, done: Path) -> None:
    """Take and free the lock again and again; while it is held nobody else may be inside."""
    inside, got = folder / "inside", 0
    while got < turns:
        try:
            acquire(folder)
        except RunLocked:
            continue
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        time.sleep(0.001)
        inside.unlink()
        release(folder)
        got += 1
    done.write_text(str(got))


def held_by(process: Any) -> str:
    return rf"is being written by process {process.pid} on {HOST} since \d{{4}}-"


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """Two that resume one run at once would both write its metrics and its checkpoints."""
    run, out = tmp_path / "run", tmp_path / "error.txt"
    first = launch(train, run, LONG, False)
    wait_for((run / "metrics.jsonl").exists)
    assert finish(launch(reporting, out, train, run, LONG, True)) == [1]
    assert f"RunLocked: {run} is being written by process {first.pid} on {HOST}" in out.read_text()
    for resume, overwrite in ((True, False), (False, True), (False, False)):
        with pytest.raises(UsageError, match=held_by(first)):
            RunDirectory.create(run, LONG, resume=resume, overwrite=overwrite)
    # Those that read are not kept out.
    assert RunDirectory.open(run).metrics()
    assert not read_run(run).finished
    os.kill(first.pid, signal.SIGTERM)
    finish(first)
    steps = [line["step"] for line in RunDirectory.open(run).metrics()]
    assert steps == sorted(set(steps))


def test_what_a_killed_process_held_is_free_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    expected = tmp_path / "unbroken"
    train(expected, ToyConfig())
    first = launch(train, run, ToyConfig(), False)
    wait_for(lambda: any((run / "checkpoints").glob("step-*")) or not first.is_alive())
    os.kill(first.pid, signal.SIGKILL)
    finish(first)
    if not (run / "result.json").exists():
        assert json.loads((run / LOCK).read_text())["pid"] == first.pid
        assert finish(launch(train, run, ToyConfig(), True)) == [0]
    assert record(run) == record(expected)
    assert not (run / LOCK).exists()


def test_a_child_that_outlives_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    run, until = tmp_path / "run", tmp_path / "until"
    try:
        assert finish(launch(fork_and_die, run, until)) == [-signal.SIGKILL]
        os.kill(int((tmp_path / "child").read_text()), 0)
        RunDirectory.create(run, {"a": 1}, resume=True)
    finally:
        until.touch()


def test_after_a_signal_the_lock_is_free_though_the_process_lives(tmp_path: Path) -> None:
    run, until = tmp_path / "run", tmp_path / "until"
    process = launch(stopped_and_lives, run, until)
    wait_for((run / "metrics.jsonl").exists)
    os.kill(process.pid, signal.SIGTERM)
    wait_for((tmp_path / "stopped").exists)
    assert not (run / LOCK).exists()
    RunDirectory.create(run, LONG, resume=True)
    until.touch()
    assert finish(process) == [0]


def holds(folder: Path) -> bool:
    """Whether this process keeps another one out."""
    out = folder.parent / "probe.txt"
    out.unlink(missing_ok=True)
    code = finish(launch(reporting, out, acquire, folder))[0]
    assert code == 0 or "RunLocked" in out.read_text()
    return code != 0


def test_the_lock_ends_with_the_run_with_its_block_and_with_its_training(tmp_path: Path) -> None:
    # A new thread is in no block yet, as a program is.
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(RunDirectory.create, tmp_path / "a", {}).result()
    assert holds(first.path)
    first.finish({})
    assert not holds(first.path)
    with RunDirectory.create(tmp_path / "b", {}) as second:
        assert holds(second.path)
        RunDirectory.create(tmp_path / "b", {}, resume=True)  # the same process may
    assert not holds(second.path)

    @one_writer
    def fails(path: Path) -> None:
        run = RunDirectory.create(path, {})
        run.finish({})
        assert holds(path), "the page comes after the result"
        raise RuntimeError("no room for the page")

    with pytest.raises(RuntimeError, match="no room"):
        fails(tmp_path / "c")
    assert not holds(tmp_path / "c")
    # A refusal holds nothing either.
    with pytest.raises(UsageError, match="finished run"):
        RunDirectory.create(tmp_path / "c", {})
    assert not holds(tmp_path / "c")


def test_trainings_in_two_threads_let_go_their_own(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    @one_writer
    def long(path: Path) -> None:
        RunDirectory.create(path, {})
        inside.set()
        assert leave.wait(60)

    @one_writer
    def short(path: Path, thread: ThreadPoolExecutor) -> Any:
        RunDirectory.create(path, {})
        job = thread.submit(long, tmp_path / "long")
        assert inside.wait(60)
        return job

    with ThreadPoolExecutor(1) as thread:
        job = short(tmp_path / "short", thread)
        assert not holds(tmp_path / "short")
        assert holds(tmp_path / "long")
        leave.set()
        job.result()
    assert not holds(tmp_path / "long")


def test_members_have_their_own_lock(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    with RunDirectory.create(tmp_path / "run" / "members" / "lorentz-0", {}) as member:
        assert holds(member.path)
    assert not holds(member.path)
    assert holds(run.path)


def test_only_one_of_many_is_ever_inside(tmp_path: Path) -> None:
    folder, outs = tmp_path / "run", [tmp_path / f"{k}.txt" for k in range(4)]
    folder.mkdir()
    crowd = [launch(reporting, tmp_path / f"error-{k}", contend, folder, 40, out) for k, out in enumerate(outs)]
    assert finish(*crowd) == [0] * 4, [path.read_text() for path in tmp_path.glob("error-*")]
    assert [out.read_text() for out in outs] == ["40"] * 4
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_program_that_ends_leaves_no_lock_behind(tmp_path: Path, end: str, code: int) -> None:
    words = (
        f"from leafward.engine import RunDirectory\nrun = RunDirectory.create({str(tmp_path / 'run')!r}, {{}})\n{end}"
    )
    assert subprocess.run([sys.executable, "-c", words], capture_output=True).returncode == code
    assert (tmp_path / "run" / "config.yaml").is_file()
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_killed_while_it_was_being_made_is_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).write_text("")
    RunDirectory.create(run, {"a": 1})


def test_a_directory_removed_and_made_again_is_locked_again(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {})
    for path in (run.path / LOCK, run.path / "config.yaml", run.path / "env.json"):
        path.unlink()
    RunDirectory.create(tmp_path / "run", {})
    assert holds(run.path)


def test_a_run_that_another_process_has_just_made_is_not_discarded(tmp_path: Path) -> None:
    run, until = tmp_path / "run", tmp_path / "until"
    process = launch(hold, run, until)
    wait_for((run / "held").exists)
    (run / "held").unlink()
    discard_unbegun(run)
    assert RunDirectory.open(run).config == {"a": 1}
    until.touch()
    assert finish(process) == [0]
    discard_unbegun(run)
    assert not run.exists()


def left_by(folder: Path, **holder: Any) -> Path:
    folder.mkdir()
    whole = {"pid": 4, "host": "elsewhere", "since": "2026-01-02 03:04:05 +0000", "started": "boot 6"} | holder
    (folder / LOCK).write_text(json.dumps(whole))
    return folder


MOUNT = "36 35 98:0 / {point} rw,noatime shared:1 - {kind} server:/home {options}\n"


@pytest.mark.parametrize(
    ("kind", "options", "trusted"),
    [
        ("nfs4", "rw,vers=4.2,local_lock=none,addr=10.0.0.1", True),
        ("nfs", "rw,nolock,local_lock=all", False),
        ("nfs", "rw,local_lock=flock", False),
        ("lustre", "rw,flock,lazystatfs", True),
        ("lustre", "rw,localflock", False),
        ("lustre", "rw", False),
        ("fuse.sshfs", "rw,flock", False),
        ("9p", "rw", False),
        ("xfs", "rw", True),
    ],
)
def test_what_another_host_left_is_taken_over_where_locks_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, trusted: bool
) -> None:
    share = tmp_path / "a share"
    share.mkdir()
    table = tmp_path / "mounts"
    point = str(share).replace(" ", r"\040")
    table.write_text(
        "22 1 0:20 / / rw - ext4 /dev/vda rw\n" + MOUNT.format(point=point, kind=kind, options=options) + "torn line"
    )
    monkeypatch.setattr(lock, "MOUNTS", table)
    folder = left_by(share / "run")
    if trusted:
        assert acquire(folder)
        assert json.loads((folder / LOCK).read_text())["host"] == HOST
    else:
        with pytest.raises(RunLocked, match=rf"process 4 on elsewhere since 2026-01-02.*remove {folder / LOCK}"):
            acquire(folder)
        (folder / LOCK).unlink()
        assert acquire(folder)
    # The file system that it lies in counts, not one whose name begins alike.
    assert acquire(left_by(tmp_path / "a share of it"))


def without_locks(number: int) -> Callable[[int, int], None]:
    def flock(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, None])
def test_where_there_are_no_locks_it_is_said_once_and_living_holders_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, recwarn: pytest.WarningsRecorder
) -> None:
    """None: a system without the module, such as Windows."""
    if number is None:
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", without_locks(number))
    run = RunDirectory.create(tmp_path / "run", {})
    run.release()
    run = RunDirectory.create(tmp_path / "run", {}, resume=True)
    run.release()
    (said,) = [str(warning.message) for warning in recwarn if "cannot be locked" in str(warning.message)]
    assert (os.strerror(number) if number else "this system has no flock") in said
    assert not (run.path / LOCK).exists()

    alive, dead = launch(time.sleep, 60), launch(time.sleep, 0)
    finish(dead)
    started = lock._started(alive.pid)
    with pytest.raises(RunLocked, match=held_by(alive)):
        acquire(left_by(tmp_path / "alive", pid=alive.pid, host=HOST, started=started))
    acquire(left_by(tmp_path / "dead", pid=dead.pid, host=HOST, started=None))
    if sys.platform == "linux":
        acquire(left_by(tmp_path / "another of the same number", pid=alive.pid, host=HOST, started="boot 7"))
    with pytest.raises(RunLocked, match="on elsewhere"):
        acquire(left_by(tmp_path / "other host"))
    alive.kill()
    finish(alive)


def test_a_file_that_is_somebody_elses_can_be_locked_all_the_same() -> None:
    """In a folder of a group one may replace files without the right to write to them."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        run, until, out = Path(name) / "run", Path(name) / "until", Path(name) / "error.txt"
        process = launch(hold, run, until)
        wait_for((run / "held").exists)
        out.touch()
        for path, mode in ((Path(name), 0o777), (run, 0o777), (run / LOCK, 0o444), (out, 0o666)):
            path.chmod(mode)
        assert finish(launch(reporting, out, _acquire_as_nobody, run)) == [1]
        assert f"is being written by process {process.pid}" in out.read_text()
        until.touch()
        assert finish(process) == [0]


def _acquire_as_nobody(folder: Path) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    acquire(folder)
