"""What every bad input must meet: an exit status of 1 or 2, a message that names it, and no trace of it on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from leafward.cli.dispatch import main

for folder in ("fuzz", "adapters"):  # the bad files, and the tiny models of the adapters' tests
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


def snapshot(folder: Path, rewritten: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """Every file under a folder with its size and time (those `rewritten` without); links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        name, state = str(path.relative_to(folder)), path.lstat()
        found[name] = (0, 0) if path.is_dir() or name in rewritten else (state.st_size, state.st_mtime_ns)
    return found


def call(words: Sequence[str]) -> int:
    """The exit status of one command line."""
    try:
        return main(list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with nothing to be had from the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "huggingface_hub" in sys.modules:  # which has read the environment already
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Callable[[], None]:
    """`counts()` notes one bad input that was refused; tests/conftest.py adds them up."""
    return lambda: request.node.user_properties.append(("bad inputs refused", 1))


@pytest.fixture
def refuses(
    place: Path, capsys: pytest.CaptureFixture[str], counts: Callable[[], None]
) -> Callable[[Sequence[str], str], str]:
    """`refuses(words, named)` runs a command line that must fail, naming `named`; returns what it said."""

    def refuses(words: Sequence[str], named: str, *, maybe: bool = False, rewritten: Sequence[str] = ()) -> str:
        """`maybe`: a mutated input may still be a good one; then nothing is asked of it. `rewritten`: whole files that
        are there before and after, and may be replaced."""
        before = snapshot(place, rewritten)
        status = call(words)
        said = capsys.readouterr().err
        if maybe and status == 0:
            return ""
        assert status in (1, 2), f"{words} gave {status}: {said}"
        assert "Traceback" not in said, said
        assert "leafward: error: unexpected " not in said, said  # an error that nobody thought of
        assert named.replace("_", "-") in said.replace("_", "-"), f"{named!r} is not named: {said}"  # flags have dashes
        after = snapshot(place, rewritten)
        assert after == before, sorted(set(after.items()) ^ set(before.items()))
        counts()
        return said

    return refuses
