"""Captions from general to specific: chains, and trees that branch, with negatives; read, written, made of a taxonomy.

Files: CSV and JSONL (also gzipped), and parquet. HierarCaps's own columns are read as they are: ``positive`` and
``negative`` (or ``captions``) as "animal => dog => a small dog => a small dog on a sofa", and ``image_url``. A column
``root`` names the text of the chain's root, which is empty by default. JSONL may hold lists in place of such texts,
and trees: ``{"tree": {"text": "animal", "negative": "vehicle", "children": [{"text": "dog"}, …]}}``.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from leafward.errors import DataError, UsageError, require
from leafward.files import read_unpacked, replacing

ARROW = "=>"
COLUMNS = ("positive", "negative", "image_url", "root")
ENDINGS = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Captions:
    """Captions of one thing as a tree, general at the top; a chain is a tree that does not branch.

    texts (n), parents before children; parents (n): the place of each text's parent, −1 at the top; negatives (n):
    for each text one of its kind that it does not entail, or None; image: a name or address of what is described;
    root: the text of the root that radii and angles are taken about.
    """

    texts: tuple[str, ...]
    parents: tuple[int, ...]
    negatives: tuple[str | None, ...]
    image: str | None = None
    root: str = ""

    def __post_init__(self) -> None:
        if not self.texts or not len(self.texts) == len(self.parents) == len(self.negatives):
            raise UsageError(
                "texts, parents and negatives must be of one length ≥ 1, got "
                f"{len(self.texts)}, {len(self.parents)} and {len(self.negatives)}"
            )
        for place, parent in enumerate(self.parents):
            if not min(place, 1) - 1 <= parent < place:
                raise UsageError(
                    f"text 0 is the top (parent −1), all others stand after their parent; text {place} has {parent}"
                )
        blank = [place for place, text in enumerate(self.texts) if not text.strip()]
        if blank:
            raise UsageError(f"text {blank[0]} is empty")

    @classmethod
    def chain(
        cls, texts: Sequence[str], negatives: Sequence[str | None] = (), image: str | None = None, root: str = ""
    ) -> Captions:
        """A chain of texts, general first, with one negative for each of them or none at all."""
        return cls(
            tuple(texts), tuple(range(-1, len(texts) - 1)), tuple(negatives) or (None,) * len(texts), image, root
        )

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.texts) - 1))

    def edges(self) -> list[tuple[int, int]]:
        """(general, specific) places, one pair for each text that has a parent."""
        return [(parent, place) for place, parent in enumerate(self.parents) if parent >= 0]


# Reading and writing


def read_captions(path: str | Path) -> list[Captions]:
    """All rows of a .csv, .jsonl (also with .gz) or .parquet file; a bad row is refused by its number."""
    kind = ending(path, ENDINGS)
    if kind == ".parquet":
        rows: Iterable[tuple[int, Mapping[str, Any]]] = _parquet_rows(path)
    else:
        rows = _csv_rows(path) if ".csv" in kind else _json_rows(path)
    found = []
    for number, row in rows:
        try:
            found.append(_parse(row))
        except (UsageError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, row {number}: {error}") from error
    if not found:
        raise DataError(f"{path} holds no captions")
    return found


def ending(path: str | Path, allowed: Sequence[str]) -> str:
    """Which of the allowed endings the name of a file has."""
    for kind in allowed:
        if str(path).lower().endswith(kind):
            return kind
    raise UsageError(f"the name of {path} must end in {', '.join(allowed)}")


def _parse(row: Mapping[str, Any]) -> Captions:
    image, root = row.get("image_url") or row.get("image"), row.get("root") or ""
    if "tree" in row:
        return _parse_tree(row["tree"], image, root)
    key = next((key for key in ("positive", "captions") if row.get(key)), None)
    if key is None:
        raise UsageError(f"expected a column positive, captions or tree, got {', '.join(map(str, row)) or 'nothing'}")
    texts, negatives = _split(row[key]), _split(row.get("negative") or [])
    if negatives and len(negatives) != len(texts):
        raise UsageError(f"{len(texts)} positive texts, but {len(negatives)} negative ones")
    return Captions.chain(texts, [text or None for text in negatives], image, root)


def _split(value: str | Sequence[str | None]) -> list[str]:
    parts = value.split(ARROW) if isinstance(value, str) else [part or "" for part in value]
    return [part.strip() for part in parts]


def _parse_tree(tree: Mapping[str, Any], image: str | None, root: str) -> Captions:
    texts, parents, negatives = list[str](), list[int](), list[str | None]()
    waiting = [(tree, -1)]
    while waiting:
        node, parent = waiting.pop(0)
        unknown = set(node) - {"text", "negative", "children"}
        if unknown:
            raise UsageError(f"a node of a tree has text, negative and children, not {min(unknown)!r}")
        waiting += [(child, len(texts)) for child in node.get("children") or ()]
        texts.append(node["text"].strip())
        parents.append(parent)
        negatives.append(node.get("negative"))
    return Captions(tuple(texts), tuple(parents), tuple(negatives), image, root)


def _text_of(path: str | Path) -> str:
    try:
        return read_unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: not UTF-8 text ({error})") from error


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text file that hold something, without the space around them."""
    return [line.strip() for line in _text_of(path).splitlines() if line.strip()]


def _csv_rows(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(_text_of(path), newline=""))
    try:
        for number, row in enumerate(reader, start=1):
            if None in row:
                raise DataError(f"{path}, row {number}: more fields than the header names")
            yield number, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error


def _json_rows(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, row {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: expected an object, got {line[:60]!r}")
            yield number, row


def _parquet_rows(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    columns = ("positive", "negative", "captions", "image_url", "image", "root")
    yield from enumerate(parquet_columns(path, columns), start=1)


def parquet_columns(path: str | Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a parquet file, those of the named columns that it has."""
    parquet = require("pyarrow.parquet", "lm")
    try:
        file = parquet.ParquetFile(path)
        return file.read(columns=[name for name in file.schema_arrow.names if name in columns]).to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def write_captions(path: str | Path, captions: Iterable[Captions]) -> int:
    """Write .csv (chains only) or .jsonl in one step; returns the number of rows."""
    kind, count = ending(path, (".csv", ".jsonl")), 0
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if kind == ".csv":
            table.writerow(COLUMNS)
        for each in captions:
            if kind == ".csv":
                table.writerow(_csv_row(each))
            else:
                file.write(json.dumps(_json_row(each), ensure_ascii=False) + "\n")
            count += 1
    return count


def _csv_row(each: Captions) -> tuple[str, ...]:
    if not each.is_chain:
        raise UsageError("a caption tree that branches does not fit into .csv; write .jsonl")
    if any(ARROW in text for text in (*each.texts, *filter(None, each.negatives))):
        raise UsageError(f"a caption holds {ARROW!r}, which parts the levels in .csv; write .jsonl")
    negative = f" {ARROW} ".join(text or "" for text in each.negatives) if any(each.negatives) else ""
    return f" {ARROW} ".join(each.texts), negative, each.image or "", each.root


def _json_row(each: Captions) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if each.is_chain:
        row["positive"] = list(each.texts)
        if any(each.negatives):
            row["negative"] = list(each.negatives)
    else:
        nodes: list[dict[str, Any]] = [{"text": text} for text in each.texts]
        for node, parent, negative in zip(nodes, each.parents, each.negatives, strict=True):
            if negative is not None:
                node["negative"] = negative
            if parent >= 0:
                nodes[parent].setdefault("children", []).append(node)
        row["tree"] = nodes[0]
    if each.image is not None:
        row["image_url"] = each.image
    if each.root:
        row["root"] = each.root
    return row


# Sets of captions


def image_key(image: str) -> str:
    """What tells images apart: the file's name without folders and address, as COCO's names are unique."""
    return PurePosixPath(image).name


def without_images_of(captions: Sequence[Captions], held_out: Sequence[Captions]) -> list[Captions]:
    """Those of `captions` that describe no image of `held_out`, so that training cannot see the test set."""
    seen = {image_key(each.image) for each in held_out if each.image}
    return [each for each in captions if not each.image or image_key(each.image) not in seen]


def second_captions(chains: Sequence[Captions], others: Sequence[Captions]) -> dict[str, str]:
    """For the images of `chains`, by their key, a caption that another chain of the same image ends in.

    It stands for the image where an encoder has no image side. Captions that occur in the image's own chains do not
    count; images without another one are left out.
    """
    own: dict[str, set[str]] = {}
    for each in chains:
        if each.image:
            own.setdefault(image_key(each.image), set()).update(each.texts)
    found: dict[str, str] = {}
    for each in others:
        key = image_key(each.image) if each.image else ""
        if key in own and each.texts[-1] not in own[key]:
            found.setdefault(key, each.texts[-1])
    return found


def readable(name: str) -> str:
    """A node's name as words: WordNet's "golden_retriever.n.01" becomes "golden retriever"."""
    return re.sub(r"\.[nvars]\.\d+$", "", name).replace("_", " ")
