"""The command line: one module for each command."""

from leafward._lazy import lazy

__getattr__, __dir__ = lazy(__name__, {})
