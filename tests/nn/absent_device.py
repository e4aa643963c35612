"""A CUDA device that is not there, as far as Triton needs one to compile for it."""

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Absent:
    """What Triton asks a device: compute capability 9.0, 32 threads a warp."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


def pretend() -> None:
    """From now on and for the whole process, which cannot use a real device any more."""
    driver.set_active(Absent())
