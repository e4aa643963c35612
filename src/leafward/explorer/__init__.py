"""The explorer: embeddings, a taxonomy or a run in the Poincaré disk, as a local page or as one static file.

from leafward.explorer import build_scene, read_source, write_page
write_page(build_scene(read_source("runs/taxonomy")), "scene.html")
"""

from leafward._lazy import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "sources": ("Options", "Source", "Space", "read_source"),
        "scene": ("Scene", "View", "build_scene"),
        "export": ("static_page", "write_page"),
        "server": ("create_app", "serve"),
    },
)
