"""Reading documents: text, JSONL, Parquet, folders of them, and Hugging Face data sets on disk.

Everything that is wrong with a file is said with its name and, where there are lines or rows, their number.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leafward.errors import DataError, UsageError, nearest, require
from leafward.files import LARGEST_RECORD, inside, read_record, read_unpacked

ROWS = 1024
"""Rows of a table that are in memory at a time."""


def find_files(path: str | Path) -> list[Path]:
    """The files that `path` stands for, sorted: itself, those of a folder, or those of a data set on disk.

    A file that is named must have a known extension; others in a folder are passed over.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"the text data {path} does not exist; {_known()}")
    if path.is_file():
        if _kind(path) not in READERS:
            raise UsageError(f"{path} has the extension {path.suffix!r}; {_known()}")
        return [path]
    if (path / "dataset_dict.json").is_file():
        return find_files(_training_split(path))
    if (path / "state.json").is_file():
        return _data_files(path)
    found = sorted(
        inside(path, file.relative_to(path))
        for file in path.rglob("*")
        if file.is_file()
        and _kind(file) in READERS
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise DataError(f"{path} holds no file that can be read; {_known()}")
    return found


def digest(files: Sequence[Path]) -> str:
    """SHA-256 of names and bytes of the files, in order."""
    total = hashlib.sha256()
    for file in files:
        try:
            with open(file, "rb") as opened:
                content = hashlib.file_digest(opened, "sha256").digest()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from error
        total.update(file.name.encode("utf-8", "surrogateescape") + b"\0" + content)
    return total.hexdigest()


def read_documents(files: Sequence[Path], field: str = "text") -> Iterator[str]:
    """The documents of `files`: a text file is one, a table has one in `field` of each row. Blank ones are left out."""
    for file in files:
        empty = True
        try:
            for text in READERS[_kind(file)](file, field):
                if text.strip():
                    empty = False
                    yield text
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
        if empty:
            raise DataError(f"{file} is empty" if file.stat().st_size == 0 else f"{file} holds no text")


def _text(file: Path, field: str) -> Iterator[str]:
    yield _decoded(read_unpacked(file), str(file), 1)


def _jsonl(file: Path, field: str) -> Iterator[str]:
    with _opened(file) as opened:
        for number, line in enumerate(iter(lambda: opened.readline(LARGEST_RECORD), b""), 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(_decoded(line, str(file), number))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise DataError(f"{where}: an object with the field {field!r} is expected, not {type(record).__name__}")
            if field not in record:
                raise DataError(f"{where}: there is no field {field!r}; {nearest(field, record)}")
            yield _string(record[field], where, field)


def _parquet(file: Path, field: str) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "lm")
    with _arrow_errors(file):
        table = parquet.ParquetFile(file)
        _check_column(table.schema_arrow.names, field, file)
        yield from _column(table.iter_batches(ROWS, columns=[field]), field, file)


def _arrow(file: Path, field: str) -> Iterator[str]:
    """Arrow's stream format, in which Hugging Face data sets are kept."""
    pyarrow = require("pyarrow", "lm")
    with _arrow_errors(file), pyarrow.memory_map(str(file)) as source:
        stream = pyarrow.ipc.open_stream(source)
        _check_column(stream.schema.names, field, file)
        yield from _column((batch.select([field]) for batch in stream), field, file)


Reader = Callable[[Path, str], Iterator[str]]
READERS: dict[str, Reader] = {
    ".txt": _text,
    ".text": _text,
    ".md": _text,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
_ZIPPED = (_text, _jsonl)


@contextmanager
def _arrow_errors(file: Path) -> Iterator[None]:
    """Failures of pyarrow as errors that name the file."""
    from pyarrow import ArrowException

    try:
        yield
    except ArrowException as error:
        raise DataError(f"cannot read {file}: {error}") from error


def _column(batches: Any, field: str, file: Path) -> Iterator[str]:
    row = 0
    for batch in batches:
        try:
            values = batch.column(0).to_pylist()
        except UnicodeDecodeError as error:
            where = f"{file}, rows {row + 1} to {row + batch.num_rows}"
            raise DataError(f"{where}: the field {field!r} is not valid UTF-8 ({error})") from error
        for value in values:
            row += 1
            yield _string(value, f"{file}, row {row}", field)


def _check_column(names: list[str], field: str, file: Path) -> None:
    if field not in names:
        raise DataError(f"{file}: there is no column {field!r}; {nearest(field, names)}")


def _string(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {field!r} must hold text, not {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can escape one half of a pair of surrogates
        raise DataError(f"{where}: {value[error.start]!r} in the field {field!r} is not a character") from error
    return value


def _decoded(data: bytes, name: str, line: int) -> str:
    """UTF-8 text without a byte order mark; `line` is that of the first byte."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name} is UTF-16, not UTF-8; convert it, for instance with iconv -f utf-16 -t utf-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += data[: error.start].count(b"\n")
        raise DataError(
            f"{name}, line {line}: byte 0x{data[error.start]:02x} is not valid UTF-8; convert the file, for instance "
            "with iconv -f latin1 -t utf-8"
        ) from error
    if "\0" in text:
        line += text[: text.index("\0")].count("\n")
        raise DataError(f"{name}, line {line}: a zero byte; this is not a text file")
    return text


def _opened(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb")


def _kind(file: Path) -> str:
    """The extension that says how to read a file, of text and JSONL also where it is gzipped."""
    if file.suffix != ".gz":
        return file.suffix.lower()
    inner = Path(file.stem).suffix.lower()
    return inner if READERS.get(inner) in _ZIPPED else ".gz"


def _known() -> str:
    zipped = ", ".join(f"{name}.gz" for name, reader in READERS.items() if reader in _ZIPPED)
    return f"allowed: {', '.join(READERS)}, {zipped}, a folder of these, or a Hugging Face data set on disk"


def _data_files(path: Path) -> list[Path]:
    """The files that a Hugging Face data set names, which lie in its folder."""
    try:
        return [inside(path, each["filename"]) for each in read_record(path / "state.json")["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / 'state.json'} does not name the files of the data set: {error!r}") from error


def _training_split(path: Path) -> Path:
    splits = read_record(path / "dataset_dict.json").get("splits")
    if not isinstance(splits, list):
        raise DataError(f"{path / 'dataset_dict.json'} does not name the splits of the data set")
    if "train" not in splits:
        shown = ", ".join(map(str, splits))
        raise UsageError(f"{path} has the splits {shown} and no 'train'; give one of them, {path}/SPLIT")
    return path / "train"
