"""``python -m leafward``: the command line, where its program is not on the path."""

from leafward.cli.dispatch import entry

entry()
