"""Sizes that no machine has room or time for: refused by the name of the setting, or with the memory asked for."""

from __future__ import annotations

import pytest

from leafward.data.samples import embedded
from leafward.errors import too_large

HUGE = 10**15
TREE, FEATURES, TEXT = embedded("clothing.csv"), embedded("clothing_features.npz"), embedded("shakespeare.txt.gz")
TAXONOMY = f"train taxonomy --data {TREE}"
SWEEP = "train superposition --widths 4 6 --laws power:1 --processes 0 --device cpu"
FEWSHOT = f"train lathadapter --features {FEATURES} --protocol few-shot --shots 1 --epochs 1"
LANGUAGE = f"train helm --data {TEXT} --loop.device cpu"
MEMORY = "not enough memory"

SIZES: list[tuple[str, str]] = [
    # a command line without the size of its last flag -> what its message must name
    (f"{TAXONOMY} --dim", MEMORY),
    (f"{TAXONOMY} --geometry euclidean --dim", MEMORY),
    (f"{TAXONOMY} --objective cones --dim", MEMORY),
    (f"{TAXONOMY} --seeds", "seeds must be an integer from 1 to 10,000"),
    (f"{SWEEP} --features", MEMORY),
    (f"{SWEEP} --seeds", "seeds must be an integer from 1 to 10,000"),
    (f"{SWEEP} --processes", "processes must be an integer from 0 to 1,024"),
    (f"{FEWSHOT} --seeds", "seeds must be an integer from"),
    (f"{LANGUAGE} --seeds", "seeds must be an integer from"),
    (f"{LANGUAGE} --vocab-size", "vocab_size must be an integer from"),
    (f"{LANGUAGE} --loop.batch-size", "loop.batch_size must be an integer from"),
    (f"{LANGUAGE} --loop.workers", "loop.workers must be an integer from"),
    ("train hcformer --data . --size", "size must be an integer from"),
    ("train hcformer --data . --loop.batch-size", "loop.batch_size must be an integer from"),
    ("train himapper --data . --backbone timm:resnet10t --seeds", "seeds must be an integer from"),
    ("train radial --model m --data d.csv --batch-size", "batch_size must be an integer from"),
]


@pytest.mark.parametrize(("line", "named"), SIZES, ids=[line.partition(" --")[0] + line[-12:] for line, _ in SIZES])
def test_a_size_beyond_every_machine(line, named, refuses):
    refuses([*line.split(), str(HUGE), "--out", "deep/er/run"], named)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
            " to allocate 2799999999972 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"),
        RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
        ValueError("Maximum allowed dimension exceeded"),
        OverflowError("Python int too large to convert to C ssize_t"),
        MemoryError(),
    ],
)
def test_how_libraries_say_that_memory_does_not_suffice(error):
    said = too_large(error)
    assert said is not None
    assert MEMORY in said
    assert "\n" not in said


def test_the_memory_asked_for_is_said_in_gibibytes():
    error = RuntimeError("can't allocate memory: you tried to allocate 10737418240 bytes. Error code 12")
    assert "10.0 GiB at once" in (too_large(error) or "")


def test_other_errors_are_no_matter_of_memory():
    assert too_large(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert too_large(ValueError("cannot reshape array of size 3")) is None
