"""``python -m leafward.cli``: the command line, for launchers such as torchrun."""

from leafward.cli.dispatch import entry

entry()
