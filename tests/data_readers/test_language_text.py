"""Reading text: every form, and every way in which a file can be wrong."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from leafward.data.text.documents import digest, find_files, read_documents
from leafward.errors import DataError, LeafwardError, UsageError


def read(path, field="text"):
    return list(read_documents(find_files(path), field))


def test_every_form_gives_the_same_documents(tmp_path):
    texts = ["Größe und λ.\nzweite Zeile\n", "\tan indented one", "🍂"]
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(lines.encode())
    table = pyarrow.table({"id": [1, 2, 3], "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    stored = tmp_path / "stored" / "train"
    stored.mkdir(parents=True)
    file = str(stored / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (stored / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (stored / "cache-1.arrow").write_bytes(b"what a map left behind")
    (tmp_path / "stored" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("text", "a.jsonl", "a.jsonl.gz", "a.parquet", "stored", "stored/train"):
        assert read(tmp_path / name) == texts, name


def test_a_real_data_set_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    datasets.DatasetDict({"train": whole.select([2, 0]), "test": whole}).save_to_disk(tmp_path / "d")
    assert read(tmp_path / "d") == ["three", "one"]
    assert read(tmp_path / "d" / "test") == ["one", "two", "three"]


def test_a_byte_order_mark_is_no_text_and_line_ends_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo"]


def test_blank_rows_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "x"}\n{"text": " \\n"}\n')
    assert read(tmp_path / "a.jsonl") == ["x"]


def test_hidden_and_unknown_files_of_a_folder_are_passed_over(tmp_path):
    (tmp_path / ".cache").mkdir()
    for name in ("a.txt", "LICENSE", "b.png", ".hidden.txt", ".cache/c.txt"):
        (tmp_path / name).write_text("text")
    assert [path.name for path in find_files(tmp_path)] == ["a.txt"]


WRONG = {
    "a.txt": [
        (b"", "a.txt is empty"),
        (b" \n\t", "a.txt holds no text"),
        (b"one\ntwo\nGr\xf6\xdfe", "a.txt, line 3: byte 0xf6 is not valid UTF-8.*iconv"),
        ("text".encode("utf-16"), "a.txt is UTF-16, not UTF-8"),
        (b"one\nt\0wo", "a.txt, line 2: a zero byte"),
    ],
    "a.jsonl": [
        (b"", "a.jsonl is empty"),
        (b'{"text": "x"}\n{"txt": "y"}\n', "a.jsonl, line 2: there is no field 'text'; did you mean 'txt'"),
        (b'{"text": "x"}\n\n{"text": ', "a.jsonl, line 3: not valid JSON"),
        (b'["text"]', "a.jsonl, line 1: an object with the field 'text' is expected, not list"),
        (b'{"text": 3}', "a.jsonl, line 1: the field 'text' must hold text, not 3"),
        (b'{"text": null}', "a.jsonl, line 1: the field 'text' must hold text, not None"),
        (b'{"text": "x"}\n{"text": "\xf6"}', "a.jsonl, line 2: byte 0xf6"),
        (b'{"text": ""}', "a.jsonl holds no text"),
        (b'{"text": "x"}\n{"text": "\\ud800"}', r"a.jsonl, line 2: '\\ud800' in the field 'text' is not a character"),
    ],
    "a.txt.gz": [
        (b"not gzipped", "cannot read .*a.txt.gz"),
        (gzip.compress(b"text", mtime=0)[:-6], "cannot read .*a.txt.gz"),
    ],
    "a.parquet": [(b"PAR1 but not really", "cannot read .*a.parquet")],
    "a.arrow": [(b"nothing of the kind", "cannot read .*a.arrow")],
}


@pytest.mark.parametrize(
    ("name", "content", "words"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read(tmp_path / name)


def test_a_parquet_file_without_the_column(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: there is no column 'text'; did you mean 'content'\?|allowed"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "content") == ["x"]


def test_a_parquet_file_with_bytes_that_are_no_text(tmp_path):
    column = pyarrow.array([b"one", b"Gr\xf6\xdfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, rows 1 to 2: the field 'text' is not valid UTF-8.*0xf6"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.txt", "does not exist"),
        ("a.docx", "has the extension '.docx'; allowed: .txt"),
        ("empty", "holds no file"),
    ],
)
def test_paths_that_cannot_be_read(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.docx").write_text("text")
    with pytest.raises(LeafwardError, match=words):
        find_files(tmp_path / name)


def test_a_data_set_without_a_training_split(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "valid"]}')
    with pytest.raises(UsageError, match="splits test, valid and no 'train'"):
        find_files(tmp_path)


def test_the_digest_follows_the_content(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = digest([file])
    file.touch()
    assert digest([file]) == before
    file.write_text("two")
    assert digest([file]) != before
