"""The modules of the golden numbers lie in this folder, the tiny models of adapters in that of their tests."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "adapters"):
    sys.path.insert(0, str(folder))
