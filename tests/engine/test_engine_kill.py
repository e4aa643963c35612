"""A run that dies at any moment and is resumed leaves the same record, bit for bit, as one that never died."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from engine_toys import ToyConfig, record, reporting, train, train_until_event

from leafward.config import replace
from leafward.engine import OptimConfig
from ranks import finish, launch

# The first of three evaluations is the best, so that it matters whether a resumed run remembers it.
CONFIG = ToyConfig(replace(ToyConfig().loop, ema=0.7), OptimConfig(lr=0.3, warmup_steps=2), dropout=0.2)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that was never killed, and every moment at which it touched a file."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert finish(launch(train_until_event, -1, folder / "events.json", folder / "run", CONFIG, False)) == [0]
    return folder / "run", json.loads((folder / "events.json").read_text())


def _moments(events: list[str]) -> list[int]:
    """Moments to die at: each kind of moment around a checkpoint once, and some at random."""
    end = next(i for i, event in enumerate(events) if event.startswith("os.rename .result.json"))

    def first(text: str, after: int = 0) -> int:
        return next(i for i, event in enumerate(events) if text in event and i >= after)

    opened = first("open checkpoints/.partial-step-00000006/shard")
    named = [
        first("os.rename .config.yaml"),  # no configuration yet
        first("os.mkdir checkpoints/.partial-step-00000003"),  # before the first checkpoint
        opened,
        opened + 1,  # the tensors are written, the manifest is not
        first(
            "os.rename checkpoints/.partial-step-00000006", first("os.rename checkpoints/.partial-step-00000006") + 1
        ),
        first("os.rename checkpoints/step-00000003"),  # the new one is in place, the old one not yet removed
        first("os.rmdir checkpoints/.partial-old-step-00000003"),  # half removed
        end,  # all done but for the result
    ]
    chosen = random.Random(5)
    return sorted({*named, *(chosen.randrange(15, end) for _ in range(4))})


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(unbroken: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, events = unbroken
    expected = record(path)
    assert len(expected[0]) == 9
    assert expected[2]["best_step"] == 5
    for moment in _moments(events):
        run = tmp_path / f"{moment}"
        killed = launch(train_until_event, moment, tmp_path / "unused", run, CONFIG, False)
        assert finish(killed) == [-signal.SIGKILL], events[moment]
        assert not (run / "result.json").exists()
        assert finish(launch(train, run, CONFIG, True)) == [0], events[moment]
        assert record(run) == expected, events[moment]
        left = [entry.name for entry in (run / "checkpoints").iterdir()]
        assert sorted(left) == ["step-00000005", "step-00000009", "step-00000012"], events[moment]


def test_killed_again_and_again(unbroken: tuple[Path, list[str]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for moment in (20, 25, 40, 60):
        assert finish(launch(train_until_event, moment, tmp_path / "unused", run, CONFIG, True)) == [-signal.SIGKILL]
    assert finish(launch(train, run, CONFIG, True)) == [0]
    assert record(run) == record(unbroken[0])


def test_killed_from_outside_while_a_checkpoint_is_written(unbroken: tuple[Path, list[str]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(train, run, CONFIG, False)
    while process.is_alive() and not any((run / "checkpoints").glob(".partial-*")):
        time.sleep(0.0002)
    process.kill()
    finish(process)
    if not (run / "result.json").exists():
        assert finish(launch(train, run, CONFIG, True)) == [0]
    assert record(run) == record(unbroken[0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_polite_signal_saves_and_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    config = replace(CONFIG, loop=replace(CONFIG.loop, steps=100_000, checkpoint_every=100_000, eval_every=None))
    run, out = tmp_path / "run", tmp_path / "error.txt"
    process = launch(reporting, out, train, run, config, False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
        time.sleep(0.01)
    os.kill(process.pid, number)
    assert finish(process) == [code]
    assert "--resume" in out.read_text()
    assert signal.Signals(number).name in out.read_text()
    (saved,) = (run / "checkpoints").iterdir()
    stopped = int(saved.name.removeprefix("step-"))
    # The stop came between two checkpoints of the plan; going on from it changes nothing.
    steps = stopped + 7
    limited = replace(config, loop=replace(config.loop, steps=steps))
    assert finish(launch(train, run, limited, True)) == [0]
    assert json.loads((run / "result.json").read_text())["step"] == steps
    logged = [line["step"] for line in record(run)[0] if "train/loss" in line]
    assert logged == [*range(2, steps + 1, 2), *([steps] if steps % 2 else [])]
