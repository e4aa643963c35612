"""Configuration files that are broken, hostile or of something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)

FILES: dict[str, tuple[str, str | bytes, str]] = {
    # name -> (recipe, content, what the message must name beside the file or in its place)
    "empty": ("superposition", "", "c.yaml"),
    "comment": ("superposition", "# nothing\n", "c.yaml"),
    "list": ("superposition", "- steps\n- 3\n", "c.yaml"),
    "text": ("superposition", "steps", "c.yaml"),
    "number": ("superposition", "3", "c.yaml"),
    "tab": ("superposition", "steps:\t3\n\tbatch: 2\n", "c.yaml"),
    "open-bracket": ("superposition", "widths: [1, 2\n", "c.yaml"),
    "open-quote": ("superposition", "corr: 'block\n", "c.yaml"),
    "two-documents": ("superposition", "steps: 3\n---\nsteps: 4\n", "c.yaml"),
    "key-twice": ("superposition", "steps: 3\nsteps: 4\n", "steps"),
    "nested-key-twice": ("helm", "loop:\n  steps: 3\n  steps: 4\n", "steps"),
    "unknown-key": ("superposition", "stepz: 3\n", "did you mean 'steps'"),
    "nested-unknown-key": ("helm", "loop:\n  stepz: 3\n", "loop.stepz"),
    "key-of-another-recipe": ("superposition", "backbone: timm:resnet18\n", "backbone"),
    "number-as-key": ("superposition", "3: 4\n", "3"),
    "null-as-key": ("superposition", "null: 4\n", "None"),
    "list-as-key": ("superposition", "? [a, b]\n: 4\n", "c.yaml"),
    "text-for-number": ("superposition", "steps: many\n", "steps"),
    "float-for-integer": ("superposition", "steps: 3.5\n", "steps"),
    "truth-for-integer": ("superposition", "steps: true\n", "steps"),
    "list-for-number": ("superposition", "steps: [3]\n", "steps"),
    "mapping-for-number": ("superposition", "steps: {a: 3}\n", "steps"),
    "null-for-number": ("superposition", "steps: null\n", "steps"),
    "date-for-number": ("superposition", "steps: 2024-01-01\n", "steps"),
    "number-for-list": ("superposition", "widths: 4\n", "widths"),
    "text-in-list": ("superposition", "widths: [4, six]\n", "widths"),
    "number-for-text": ("superposition", "laws: [1]\n", "laws"),
    "unknown-choice": ("superposition", "optim: adamx\n", "optim"),
    "unknown-law": ("superposition", "laws: [powr:1]\n", "powr"),
    "law-without-a-number": ("superposition", "laws: ['power:x']\n", "power:x"),
    "law-of-no-file": ("superposition", "laws: ['counts:gone.npy']\n", "gone.npy"),
    "wrong-correlation": ("superposition", "corr: blok\n", "blok"),
    "zero": ("superposition", "batch: 0\n", "batch"),
    "negative": ("superposition", "seed: -1\n", "seed"),
    "nan": ("superposition", "density: .nan\n", "density"),
    "infinity": ("superposition", "lr: .inf\n", "lr"),
    "overflow": ("superposition", "lr: 1e999\n", "lr"),
    "beyond-64-bits": ("superposition", f"seed: {10**30}\n", "seed"),
    "beyond-all-digits": ("superposition", f"seed: {'9' * 5000}\n", "c.yaml"),
    "wider-than-features": ("superposition", "features: 4\nwidths: [8]\n", "widths"),
    "empty-list": ("superposition", "widths: []\n", "widths"),
    "repeats": ("superposition", "widths: [4, 4]\n", "widths"),
    "python-object": ("superposition", "steps: !!python/object/apply:os.system ['touch hacked']\n", "c.yaml"),
    "python-name": ("superposition", "steps: !!python/name:os.system\n", "c.yaml"),
    "python-tuple": ("superposition", "widths: !!python/tuple [4, 8]\n", "c.yaml"),
    "own-tag": ("superposition", "steps: !secret 3\n", "c.yaml"),
    "anchor-bomb": ("superposition", BOMB, "c.yaml"),
    "anchor-bomb-in-a-known-key": ("superposition", BOMB + "steps: *j\n", "c.yaml"),
    "unknown-anchor": ("superposition", "steps: *gone\n", "c.yaml"),
    "anchor-to-itself": ("superposition", "steps: &a [*a]\n", "c.yaml"),
    "deep": ("superposition", "steps: " + "[" * 5000 + "]" * 5000 + "\n", "c.yaml"),
    "latin": ("superposition", "steps: 3  # caf\xe9\n".encode("latin-1"), "c.yaml"),
    "utf16": ("superposition", "steps: 3\n".encode("utf-16"), "c.yaml"),
    "zeros": ("superposition", b"\0\0\0\0", "c.yaml"),
    "binary": ("superposition", bytes(range(256)), "c.yaml"),
    "betas": ("helm", "optim:\n  betas: [0.9]\n", "optim.betas"),
    "betas-above-one": ("helm", "optim:\n  betas: [0.9, 1.5]\n", "betas"),
    "section-as-text": ("helm", "loop: fast\n", "loop"),
    "section-as-null": ("helm", "loop: null\n", "loop"),
    "precision": ("helm", "loop:\n  precision: float8\n", "precision"),
    "geometry": ("helm", "geometry: spherical\n", "geometry"),
    "validation": ("helm", "validation: 1.0\n", "validation"),
    "levels": ("himapper", "levels: 1000000000\n", "levels"),
    "leaves": ("himapper", "leaves: 33\n", "leaves"),
    "plain-with-twin": ("himapper", "plain: true\ntwin: true\n", "plain"),
    "pickled-weights": ("himapper", "weights: model.pt\n", "weights"),
    "size": ("hcformer", "size: 8\n", "size"),
    "decoder": ("hcformer", "decoder: unet\n", "decoder"),
    "twin-without-geometry": ("hcformer", "model: resnet18\ntwin: true\n", "twin"),
    "template": ("hyperclip", "template: a photo\n", "template"),
    "hosts": ("lathadapter", "hosts: [koop]\n", "koop"),
    "margin": ("lathadapter", "margin: -0.5\n", "margin"),
    "objective": ("radial", "objective:\n  loss: cones\n", "loss"),
    "aperture": ("radial", "objective:\n  aperture: 0\n", "aperture"),
    "curvature": ("taxonomy", "c: -1.0\n", "c must"),
    "twin-of-euclidean": ("taxonomy", "geometry: euclidean\ntwin: true\n", "twin"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_configuration(case, place, refuses):
    recipe, content, named = FILES[case]
    (place / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses(["train", recipe, "--config", "c.yaml", "--out", "run"], named)


@pytest.mark.parametrize("kind", ["folder", "absent", "dangling", "device", "pipe", "huge"])
def test_what_is_no_configuration(kind: str, place: Path, refuses):
    path = place / "c.yaml"
    {
        "folder": path.mkdir,
        "absent": lambda: None,
        "dangling": lambda: path.symlink_to("gone"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(path),
        "huge": lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 30),
    }[kind]()
    refuses(["train", "superposition", "--config", "c.yaml", "--out", "run"], "c.yaml")
