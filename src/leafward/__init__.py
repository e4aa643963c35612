"""leafward: the geometry of representations. Measure, adapt, build.

The package root imports nothing heavy; take what you need from a subpackage, for example
``from leafward.geometry import Lorentz``.
"""

__version__ = "0.1.0"
