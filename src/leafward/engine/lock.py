"""One writer for a run directory: `lock.json` in it says which process writes there, and keeps every other one out.

The lock is the kernel's (flock on the open file), so it ends with its process however that dies; the file's content
(pid, host, since when) is for people, and for where the kernel cannot tell:

- On a network file system a lock may hold on one machine alone. A `lock.json` that another host left there, rather than
  removed, is refused with how to remove it, unless the mount says that its locks reach all machines.
- Where there is no flock (Windows, file systems without locks) it is said once, and the file alone is looked at: a
  process of this host that lives is refused, one that has ended is not; two that start in the same moment are not seen.

A lock belongs to a process, not to an object: the process that holds it may take it again. A process forked from it
(the workers that read data) holds nothing. Of several ranks only the first writes and locks. Readers never look at it.
Members of a run, and trainings below its checkpoints, each have the lock of their own directory, for as long as they
train. Imports no torch.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from leafward.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

P = ParamSpec("P")
R = TypeVar("R")

LOCK = "lock.json"
MOUNTS = Path("/proc/self/mountinfo")
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "apfs", "hfs"})
"""File systems of one machine: whoever can lock there is alone."""
SHARED_LOCKS = {"nfs": "local_lock=none", "nfs4": "local_lock=none", "lustre": "flock"}
"""File systems of many machines -> the option of the mount with which their locks reach all."""


class RunLocked(UsageError):
    """Another process writes in the run directory, or nobody can tell that none does."""


_held: dict[str, tuple[int | None, bool]] = {}
"""What this process holds: directory -> the open file (None where the kernel holds no lock), and whether a
`releasing` block will let it go."""
_block: ContextVar[list[str] | None] = ContextVar("block", default=None)
"""What the innermost `releasing` block of this thread will let go."""
_told: set[str] = set()


def acquire(directory: str | os.PathLike[str]) -> bool:
    """Take the lock of a directory that exists; False where this process has it already. Raises `RunLocked`."""
    place = os.path.realpath(directory)
    if place in _held:
        handle, _ = _held[place]
        if handle is None or _same(handle, Path(directory, LOCK)):
            return False
        os.close(handle)  # the directory was removed and made again
        del _held[place]
    block = _block.get()
    _held[place] = (_locked(Path(directory)), block is not None)
    if block is not None:
        block.append(place)
    return True


def release(directory: str | os.PathLike[str], unless_in_block: bool = False) -> None:
    """Let the lock of a directory go, if this process has it; `unless_in_block`: not if `releasing` will do so."""
    place = os.path.realpath(directory)
    if place not in _held or (unless_in_block and _held[place][1]):
        return
    handle, _ = _held.pop(place)
    # While it is still held: whoever opens the old file finds that its name is gone and tries again.
    with suppress(OSError):
        os.unlink(os.path.join(place, LOCK))
    if handle is not None:
        os.close(handle)


@contextmanager
def releasing() -> Iterator[None]:
    """Locks that are taken in the block are let go at its end, however it ends."""
    taken: list[str] = []
    token = _block.set(taken)
    try:
        yield
    finally:
        _block.reset(token)
        for place in taken:
            release(place)


def one_writer(train: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a training: the run directories that it makes or takes up are locked until it ends."""

    @wraps(train)
    def training(*args: P.args, **kwargs: P.kwargs) -> R:
        with releasing():
            return train(*args, **kwargs)

    return training


def _locked(directory: Path) -> int | None:
    """The open file of the lock, taken; None where there are no locks."""
    path = directory / LOCK
    while True:
        try:
            handle = _opened(path)
        except OSError as error:  # nobody can write here; the first file that the run writes says so
            return _without(directory, error)
        try:
            if fcntl is None:
                _refuse_living(directory, _read(handle))
                return _without(directory, None, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunLocked(_taken(directory, _read(handle))) from None
            except OSError as error:
                _refuse_living(directory, _read(handle))
                return _without(directory, error, handle)
            if not _same(handle, path):  # its holder has removed it meanwhile
                os.close(handle)
                continue
            _refuse_elsewhere(directory, _read(handle))
            _write(handle)
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        return handle


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # somebody else's file can be locked all the same
        return os.open(path, os.O_RDONLY)


def _without(directory: Path, error: OSError | None, handle: int | None = None) -> None:
    """Say, once for each directory, that nothing keeps others out."""
    if handle is not None:
        _write(handle)
        os.close(handle)
    reason = "this system has no flock" if error is None else f"{error.strerror or error}"
    if str(directory) not in _told:
        _told.add(str(directory))
        warnings.warn(
            f"{directory} cannot be locked ({reason}): nothing keeps a second process from writing there, so start "
            "only one",
            stacklevel=5,
        )


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _read(handle: int) -> dict[str, Any]:
    """Who holds or held the lock; empty where it does not say."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        found = json.loads(os.read(handle, 4096))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(handle: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    body = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "started": _started(os.getpid())}
    with suppress(OSError):  # it is for people; the lock holds without it
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, (json.dumps(body) + "\n").encode())


def _taken(directory: Path, holder: dict[str, Any]) -> str:
    who = _named(holder) if holder else "another process"
    return f"{directory} is being written by {who}; a run has one writer: wait for it, stop it, or give another path"


def _named(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


def _refuse_living(directory: Path, holder: dict[str, Any]) -> None:
    """Without flock: refuse a holder that lives, or of which nobody here can tell."""
    if not holder:
        return
    if holder.get("host") != socket.gethostname():
        raise RunLocked(_unverified(directory, holder))
    if holder.get("pid") != os.getpid() and _lives(holder):
        raise RunLocked(_taken(directory, holder))


def _refuse_elsewhere(directory: Path, holder: dict[str, Any]) -> None:
    """With flock: refuse what another host left, where its lock might hold there alone."""
    if holder and holder.get("host") != socket.gethostname() and not _reaches_all(directory):
        raise RunLocked(_unverified(directory, holder))


def _unverified(directory: Path, holder: dict[str, Any]) -> str:
    return (
        f"{directory} was locked by {_named(holder)}, and from {socket.gethostname()} nobody can tell whether that "
        f"process has ended; if it has, remove {directory / LOCK}"
    )


def _lives(holder: dict[str, Any]) -> bool:
    """Whether a process of this host is there and is the one that locked, not a later one of the same number."""
    pid, started = holder.get("pid"), holder.get("started")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass  # it is there and belongs to somebody else
    return started is None or _started(pid) == started


def _started(pid: int) -> str | None:
    """When a process of this host started, as boot and clock ticks since; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may hold blanks; the start is the 22nd field, 20 after it.
        return f"{boot} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None


def _reaches_all(directory: Path) -> bool:
    """Whether a lock in `directory` keeps out every process that can write there, on any machine."""
    place, chosen = Path(os.path.realpath(directory)), ("", "", "")
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        front, _, back = (part.split() for part in line.partition(" - "))
        if len(front) < 5 or len(back) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), front[4])  # a blank is \040
        if place.is_relative_to(point) and len(point) >= len(chosen[0]):
            chosen = (point, back[0], back[2])
    return chosen[1] in LOCAL or SHARED_LOCKS.get(chosen[1], " ") in chosen[2].split(",")


@atexit.register
def _release_all() -> None:
    for place in list(_held):
        release(place)


def _forget() -> None:
    """In a forked process: close the files, which does not free the lock, and hold nothing."""
    for handle, _ in _held.values():
        if handle is not None:
            with suppress(OSError):
                os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
