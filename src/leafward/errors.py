"""Errors meant for people: what was wrong, what it was, what is allowed."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

MOST_NAMES = 16  # of a list in an error
LONGEST = 2000  # characters of a message: a name in a file may have a million

_HIDDEN = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in (*_HIDDEN, *range(0xD800, 0xE000))}
_SHOWN = {code: text for code, text in _SHOWN.items() if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: control characters, changes of direction and lone surrogates, which
    cannot be written at all, become escapes. Line ends and tabs stay."""
    return text.translate(_SHOWN)


def bounded(text: str) -> str:
    """Text of at most about `LONGEST` characters, its middle left out."""
    left_out = len(text) - LONGEST
    if left_out <= 0:
        return text
    return f"{text[: LONGEST * 3 // 4]} … ({left_out:,} characters left out) … {text[-LONGEST // 4 :]}"


EXTRAS: dict[str, tuple[str, ...]] = {
    "lm": ("transformers", "tokenizers", "datasets", "pandas", "huggingface_hub", "pyarrow", "accelerate", "lm_eval"),
    "vision": ("timm", "torchvision", "PIL", "open_clip", "segmentation_models_pytorch", "pycocotools", "pyarrow"),
    "search": ("faiss",),
    "serve": ("fastapi", "uvicorn"),
    "cluster": ("ray",),
}
"""Extra of the installation -> the packages that it brings, as they are imported."""


class LeafwardError(Exception):
    """Something a user can fix. The command line prints it without a traceback and exits with 1."""

    def __str__(self) -> str:
        return bounded(super().__str__())


class UsageError(LeafwardError, ValueError):
    """Wrong arguments or configuration. The command line exits with 2."""


class DataError(LeafwardError):
    """A file or data set that cannot be used: missing, truncated, foreign or out of range."""


def nearest(name: object, allowed: Iterable[str], all_of_them: str = "allowed:") -> str:
    """A half-sentence that helps with a misspelt name: the nearest valid one, else all of them."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(allowed) - MOST_NAMES} more" if len(allowed) > MOST_NAMES else ""
    return f"{all_of_them} " + (", ".join(allowed[:MOST_NAMES]) or "nothing") + more


@contextmanager
def named(source: object) -> Iterator[None]:
    """Wrong values that came out of a file are the file's fault: name it."""
    try:
        yield
    except UsageError as error:
        raise DataError(f"{source}: {error}") from error


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Failures of a library that reads what a user handed in, as errors that name it.

    Such readers raise all kinds of exceptions; a panic of one that is written in Rust is not even an `Exception`.
    """
    try:
        yield
    except (LeafwardError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{what}: {error or type(error).__name__}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {error}") from error


def need(condition: bool, name: str, allowed: str, value: object) -> None:
    """Refuse the argument `name` unless the condition holds, saying what is allowed and what came."""
    if not condition:
        raise UsageError(f"{name} must be {allowed}, got {value!r}")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LeafwardError(_wanted(module, extra, error)) from error


def missing_extra(error: ImportError) -> str | None:
    """What to tell about an import that failed: which extra brings the package. None where none does."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return None if extra is None else _wanted(package, extra, error)


TOO_LARGE = (
    "can't allocate memory",  # torch on Linux, numpy's own is a MemoryError
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
    "array is too big",
    "Maximum allowed dimension exceeded",
    "Overflow when unpacking long",
    "too large to convert to C",
)
"""How libraries say that something does not fit into memory, or into any memory there could be."""


def too_large(error: BaseException) -> str | None:
    """What to tell about an allocation that failed, with its size where the error says it; None for other errors."""
    said = str(error)
    if not isinstance(error, MemoryError) and not any(words.lower() in said.lower() for words in TOO_LARGE):
        return None
    asked = re.search(r"allocate (\d+) bytes", said)
    size = f"{int(asked[1]) / 2**30:,.1f} GiB at once" if asked else said.partition("\n")[0] or "an allocation failed"
    return f"there is not enough memory for this: {size}; a size that was given is too large for this machine"


def _wanted(module: str, extra: str, error: ImportError) -> str:
    return (
        f"this needs the package {module.partition('.')[0]!r}, which could not be imported ({error}); "
        f"install it with: pip install 'leafward[{extra}]'"
    )
