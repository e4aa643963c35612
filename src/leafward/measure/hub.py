"""A model of the Hugging Face hub by its name: from the cache where it is there, else from the network."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from leafward.errors import DataError, LeafwardError, require

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "vocab*", "merges.txt")
SECONDS = 10


def cached_folder(text: str) -> Path:
    """The folder of `org/name[@revision]` on this machine; downloaded if it is not yet here."""
    name, _, revision = text.partition("@")
    if not NAME.fullmatch(name) or name.startswith((".", "/")):
        raise DataError(
            f"no such file or directory: {text} (a model of the hub is org/name[@revision], one of a zoo timm:NAME or "
            "open_clip:NAME)"
        )
    hub = require("huggingface_hub", "lm")
    options = {"repo_id": name, "revision": revision or None, "allow_patterns": list(WEIGHTS)}
    with suppress(Exception):  # not in the cache, in whatever way the library says so
        return Path(hub.snapshot_download(**options, local_files_only=True))
    said = f"{name!r} is no file or folder here, and not in the hub's cache"
    try:
        hub.HfApi().model_info(name, revision=revision or None, timeout=SECONDS)
    except hub.errors.RevisionNotFoundError as error:
        raise DataError(f"{name} has no revision {revision!r} on the hub") from error
    except hub.errors.RepositoryNotFoundError as error:
        raise DataError(f"no such file or directory: {text}; the hub knows no model of that name") from error
    except Exception as error:  # no network, a proxy that refuses, a time-out
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise LeafwardError(f"{said}; the hub could not be asked ({reason}): give a folder") from error
    return Path(hub.snapshot_download(**options))
