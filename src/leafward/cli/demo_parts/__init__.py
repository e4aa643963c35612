"""The parts of ``leafward demo``: measure, adapt and build, each with `run(out, console)`."""
