"""Child processes import the toys by name, so their folder is on the path, and those of the tiny trainings."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "golden", HERE.parent / "adapters"):
    sys.path.insert(0, str(folder))
