"""Progress: a bar on a terminal, few lines elsewhere, nothing when told so."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys

import pytest

from leafward.engine import progress as module
from leafward.engine.progress import Progress, describe, duration


def test_lines_are_few_and_say_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    stream = io.StringIO()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(100, "training", start=10) as progress:
        for step in range(11, 101):
            now[0] += 0.5
            progress.update(step, {"loss": 1.23456789, "phase": "warm"})
    lines = stream.getvalue().splitlines()
    # 45 seconds of work: one line at once, one every ten seconds, one at the end.
    assert len(lines) == 6
    assert lines[0] == "training 11/100 step · loss 1.235 · phase warm · 2 step/s · 0:00:44 left"
    assert lines[-1] == "training 100/100 step · loss 1.235 · phase warm · 2 step/s · 0:00:00 left"


def test_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(3, "work", show=False) as progress:
        progress.update(3)
    assert capfd.readouterr() == ("", "")


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    leader, follower = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress(8, "training", unit="step") as progress:
            progress.update(8, {"loss": 0.5})
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error, not an empty read
        while part := os.read(leader, 65536):
            text += part
    os.close(leader)
    return text.decode()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    raw = _on_a_terminal(monkeypatch)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw)
    assert text != raw
    for part in ("training", "8/8", "step/s", "loss 0.5"):
        assert part in text


def test_without_rich_a_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    assert _on_a_terminal(monkeypatch).startswith("training 8/8 step · loss 0.5")


def test_durations_and_values() -> None:
    assert duration(0.4) == "0:00:00"
    assert duration(3725) == "1:02:05"
    assert describe({"a": 0.000123456, "b": "x"}) == "a 0.0001235 · b x"
