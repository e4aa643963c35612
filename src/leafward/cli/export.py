"""``leafward export ADAPTER --to DIR [--merged]``: an adapter's files, or the base model with it written in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from leafward.errors import DataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

ADAPTER = "adapter"  # where a run keeps one


@dataclass
class Args:
    target: Annotated[Path, tyro.conf.Positional]
    """Directory of an adapter (adapter_config.json), or a run directory that holds one."""
    to: Path
    """Directory to write; must be new or empty."""
    merged: bool = False
    """Write the base model with the adapter merged into its weights, in its own layout."""
    base: str | None = None
    """The base model: a directory, a name on the hub or open_clip:NAME@WEIGHTS (default: the one the adapter names)."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.adapters.io import CONFIG, WEIGHTS, read_config, read_weights
    from leafward.files import inside

    source = _adapter(args.target, CONFIG)
    if args.to.exists() and (not args.to.is_dir() or any(args.to.iterdir())):
        raise UsageError(f"--to {args.to} is not empty, or not a directory; give a new one")
    record = read_config(source)
    if args.merged:
        base = args.base or record["base_model"]["name"]
        if not base:
            raise UsageError(f"the adapter in {source} does not name its base model; give it with --base")
        foreign = _merge(source, base, args.to, check_base=args.base is None)
        if foreign is not None:
            console.print(f"note: the adapter {foreign}; it was merged all the same, as --base asks", markup=False)
        console.print(f"wrote {base} with the adapter merged to {args.to}", markup=False)
        return {"out": str(args.to), "base_model": base, "method": record["method"], "merged": True}
    read_weights(source)  # a damaged file is refused here, and not only where it is put to use
    for path in [inside(source, name) for name in (WEIGHTS, CONFIG)]:
        _copy(path, args.to / path.name)
    console.print(f"wrote the adapter to {args.to}", markup=False)
    return {"out": str(args.to), "method": record["method"], "merged": False}


def _adapter(target: Path, config: str) -> Path:
    """The directory of the adapter itself."""
    for folder in (target, target / ADAPTER):
        if (folder / config).is_file():
            return folder
    whole = f"; its trained model is whole already, in {target / 'model'}" if (target / "model").is_dir() else ""
    raise DataError(f"{target} holds no adapter: there is neither {config} nor {ADAPTER}/{config} in it{whole}")


def _merge(source: Path, base: str, to: Path, *, check_base: bool) -> str | None:
    """Write `base` with the adapter; what tells it from the adapter's own base, where that is not refused."""
    from leafward.adapters import from_pretrained, merge
    from leafward.adapters.io import foreign_base, read_config
    from leafward.encoders import load_encoder

    encoder = load_encoder(base)
    foreign = foreign_base(read_config(source)["base_model"], encoder.model)
    merge(from_pretrained(encoder.model, source, check_base=check_base))
    encoder.save_pretrained(to)
    return foreign


def _copy(source: Path, to: Path) -> None:
    from leafward.files import LARGEST_UNPACKED, read_bytes, replacing

    content = read_bytes(source, LARGEST_UNPACKED)
    with replacing(to) as temporary:
        temporary.write_bytes(content)
