"""Wrote the folders beside it, with leafward 0.1.0. They stay as they are: a later version must open them.

python tests/data/formats/write.py FOLDER      # one more set of them, when a format gets a new version
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from leafward.cli.dispatch import main

TREE = "child,parent\nanimal,\ndog,animal\ncat,animal\ntabby,cat\npoodle,dog\ncorgi,dog\n"


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "tree.csv").write_text(TREE)
    run = folder / "run"
    words = ["--data", str(folder / "tree.csv"), "--out", str(run), "--device", "cpu", "--dim", "2", "--epochs", "2"]
    assert main(["train", "taxonomy", *words]) == 0
    assert (
        main(["data", "index", str(run), "--taxonomy", str(folder / "tree.csv"), "--out", str(folder / "index")]) == 0
    )
    for shown in (run / "report.html", *(run / "tensorboard").glob("*"), *run.glob("checkpoints/step-00000001/*")):
        shown.unlink()
    told = json.loads((run / "env.json").read_text())  # without the machine
    (run / "env.json").write_text(json.dumps({**told, "argv": [], "hardware": {}}, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
