"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leafward.errors import LeafwardError
from leafward.files import TEMPORARY


@contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; rename it to `path`, in place of what is there, when the block succeeds.

    On any failure it is removed and `path` stays as it was.
    """
    path = Path(path)
    made = [] if path.parent.exists() else [path.parent]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent))
        partial.chmod(path.parent.stat().st_mode)
    except OSError as error:
        raise LeafwardError(f"cannot write {path}: {error.strerror or error}") from error
    old = partial.with_name(partial.name + ".old")
    try:
        yield partial
        if path.exists():
            os.rename(path, old)
        os.rename(partial, path)
    except OSError as error:
        raise LeafwardError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        for parent in made:  # a folder that was made for nothing is deleted; one that holds something stays
            with suppress(OSError):
                parent.rmdir()
