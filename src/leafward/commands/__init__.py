"""One module for each command of the command line; see :mod:`leafward.cli`."""
