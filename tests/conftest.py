"""Settings that must hold before torch is imported, and the hypothesis profile."""

import os
import time

# oneDNN's bf16 path crashes on some CPUs that advertise AMX; this keeps it to instructions that work.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("suite")
torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent))  # child processes import `ranks` by name

import full_tier  # noqa: E402

BEGUN = pytest.StashKey[float]()
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The larger real data beside the checkout; tests that want it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the larger real data (../shared/data) is not on this machine")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: workers take whole files, and a long one at the end would leave the others idle."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/FULL.json after a run of the tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGUN] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    _say_bad_inputs(terminalreporter)
    if config.getoption("record"):
        full_tier.write(full_tier.record(terminalreporter.stats, time.monotonic() - config.stash[BEGUN]))
    complaint = full_tier.complaint(full_tier.read())
    if complaint:
        terminalreporter.write_line(f"warning: {complaint}", yellow=True)


def _say_bad_inputs(terminalreporter: pytest.TerminalReporter) -> None:
    """How many bad inputs tests/fuzz gave to the package and saw refused, also where workers ran them."""
    passed = terminalreporter.stats.get("passed", [])
    count = sum(value for report in passed for name, value in report.user_properties if name == "bad inputs refused")
    if count:
        terminalreporter.write_line(f"fuzz: {count} bad inputs refused")
