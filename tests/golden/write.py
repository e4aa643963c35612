"""Write the golden numbers anew and print what changed: python tests/golden/write.py [SYSTEM ...].

They change only in a commit that says why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))

import golden_data
import golden_presets
import golden_runs
from golden_cases import SYSTEMS

SHOWN = 50


def main(words: list[str]) -> int:
    unknown = [word for word in words if word not in SYSTEMS]
    if unknown:
        print(f"SYSTEM must be among {', '.join(SYSTEMS)}, got {unknown[0]!r}", file=sys.stderr)
        return 2
    for system in words or SYSTEMS:
        write_presets(system)
    with TemporaryDirectory() as folder:
        data = golden_data.make_all(Path(folder))
        for system in words or SYSTEMS:
            write_runs(system, data)
    return 0


def write_presets(system: str) -> None:
    old, new = golden_presets.recorded(system), golden_presets.resolved(system)
    report(f"{system}: {len(new)} presets", golden_presets.changes(old, new) if old else ["all new"])
    golden_presets.write(system, new)


def write_runs(system: str, data: Path) -> None:
    """Numbers that moved by less than the tolerance stay as they are, so that another machine changes nothing."""
    old = golden_runs.recorded(system)
    new = {name: golden_runs.run(system, name, data) for name in SYSTEMS[system].cases}
    for name in old.keys() - new.keys():
        report(f"{system} {name}", ["is gone"])
    for name, numbers in new.items():
        changed = golden_runs.changes(old[name], numbers) if name in old else ["all new"]
        report(f"{system} {name}", changed)
        new[name] = numbers if changed else old[name]
    golden_runs.write(system, new)


def report(title: str, changed: list[str]) -> None:
    print(f"{title}: {len(changed)} changes")
    for change in changed[:SHOWN]:
        print(f"  {change}")
    if len(changed) > SHOWN:
        print(f"  … and {len(changed) - SHOWN} more; git diff shows them all")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
