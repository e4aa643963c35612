"""``leafward data chains``: captions from general to specific, with negatives, from a taxonomy or from captions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leafward.errors import UsageError, named

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "Make caption chains with negatives: from a taxonomy, or from captions by a language model and an NLI model."


@dataclass(kw_only=True)
class Args:
    out: Path
    """The .csv or .jsonl file to write."""
    taxonomy: str | None = None
    """Taxonomy to make chains of: .csv of child,parent; .json; .txt; wordnet; wordnet:NODE."""
    template: str = "{}"
    """Caption of a node of the taxonomy; {} stands for its name."""
    branching: bool = False
    """One tree for each inner node with its children, in place of one chain for each leaf (.jsonl only)."""
    keep_root: bool = False
    """Count the root of the taxonomy as a level."""
    root: str = ""
    """Text of the root that angles are taken about, where it is not the empty text."""
    captions: Path | None = None
    """Captions to generalise: a .txt file with one on each line, or a captions file whose finest texts count."""
    generator: str | None = None
    """Directory or name of a Hugging Face language model that writes the chains (with --captions)."""
    nli: str | None = None
    """Directory or name of a Hugging Face NLI classifier that checks them (with --captions)."""
    levels: int = 4
    """Levels of a generated chain, the caption included."""
    accept: float = 0.5
    """Least probability of entailment of every step of a chain."""
    refuse: float = 0.2
    """Largest probability that a negative follows from the caption."""
    batch: int = 16
    """Captions generalised together; negatives come from the same batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run."""
    seed: int = 0
    """Seed of negatives and of the language model."""


def run(args: Args, console: Console) -> dict[str, Any]:
    from leafward.data.captions import write_captions

    if (args.taxonomy is None) == (args.captions is None):
        raise UsageError("give either --taxonomy or --captions to make chains of")
    made = list(_from_taxonomy(args) if args.taxonomy is not None else _from_captions(args))
    if not made:
        raise UsageError("no chain was made: every candidate failed the checks; lower --accept or use better models")
    count = write_captions(args.out, made)
    texts = sum(len(each.texts) for each in made)
    missing = sum(wrong is None for each in made for wrong in each.negatives if each.is_chain)
    console.print(f"wrote {count} captions with {texts} texts to {args.out}; {missing} texts have no negative")
    return {"out": str(args.out), "captions": count, "texts": texts, "without_negative": missing}


def _from_taxonomy(args: Args) -> list[Any]:
    from leafward.data.captions import readable
    from leafward.data.taxonomy import read_taxonomy
    from leafward.encoders.zeroshot import checked_templates
    from leafward.systems.radial.taxonomy_captions import taxonomy_chains, taxonomy_trees

    assert args.taxonomy is not None
    (template,) = checked_templates([args.template], "template")
    make = taxonomy_trees if args.branching else taxonomy_chains
    with named(args.taxonomy):
        return make(
            read_taxonomy(args.taxonomy),
            seed=args.seed,
            caption=lambda name: template.replace("{}", readable(name)),
            keep_root=args.keep_root,
            root=args.root,
        )


def _from_captions(args: Args) -> Any:
    from leafward.engine import session
    from leafward.systems.radial.generalise import Generaliser, Inference, generate_chains

    if args.generator is None or args.nli is None:
        raise UsageError("--captions needs --generator, a language model, and --nli, a classifier of entailment")
    with session(args.device) as cluster:
        device = str(cluster.device)
    return generate_chains(
        _captions(args),
        Generaliser(args.generator, device),
        Inference(args.nli, device),
        levels=args.levels,
        accept=args.accept,
        refuse=args.refuse,
        batch_size=args.batch,
        seed=args.seed,
    )


def _captions(args: Args) -> list[tuple[str, str | None]]:
    from leafward.data.captions import read_captions, read_lines

    assert args.captions is not None
    if args.captions.suffix != ".txt":
        return [(each.texts[-1], each.image) for each in read_captions(args.captions)]
    return [(line, None) for line in read_lines(args.captions)]
