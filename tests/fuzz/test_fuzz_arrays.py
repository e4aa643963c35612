"""Array files, and the commands that read them: audit, index, predictions, features."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from fuzz_files import ARRAYS, npy, npz, safetensors, tensor

TREE = "child,parent\nanimal,\ndog,animal\ncat,animal\npoodle,dog\ncorgi,dog\ntabby,cat\nmanx,cat\n"


@pytest.fixture(autouse=True)
def taxonomy(place):
    (place / "tree.csv").write_text(TREE)


@pytest.mark.parametrize("case", ARRAYS)
def test_a_file_that_holds_no_array(case, place, refuses):
    """Whoever reads it, and with what library, it is refused by name and nothing in it runs."""
    (place / case).write_bytes(ARRAYS[case][1])
    refuses(["data", "index", case, "--out", "index"], case)
    refuses(["evaluate", case, "--task", "hierarchy", "--taxonomy", "tree.csv", "--out", "answers"], case)
    refuses(["evaluate", "--task", "retrieval", "--features", case, "--out", "r.json"], case)
    if not case.endswith(".npy"):
        refuses(["train", "lathadapter", "--features", case, "--out", "run"], case)
    if not case.endswith(".npz"):
        refuses(["audit", case, "--out", "audit"], case)


@pytest.mark.parametrize("case", [name for name in ARRAYS if name.endswith(".npz")])
def test_images_in_an_archive_that_is_none(case, place, refuses):
    (place / case).write_bytes(ARRAYS[case][1])
    refuses(["train", "hcformer", "--data", case, "--out", "run"], case)


def save(path, **arrays):
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def rng(*shape, kind=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(kind)


MATRICES = {
    "vector": rng(5),
    "cube": rng(2, 3, 4),
    "scalar": np.float32(3),
    "no-rows": rng(0, 4),
    "no-columns": rng(4, 0),
    "one-row": rng(1, 4),
    "nan": np.full((6, 4), np.nan, np.float32),
    "one-infinity": np.where(np.eye(6, 4) > 0, np.float32(np.inf), rng(6, 4)),
    "integers": np.arange(24).reshape(6, 4),
    "complex": rng(6, 4).astype(np.complex64),
    "text": np.array([["a", "b"], ["c", "d"]]),
    "dates": np.array([["2024-01-01"]], "datetime64[D]"),
    "records": np.zeros(3, [("a", "f4"), ("b", "i4")]),
}


@pytest.mark.parametrize("case", MATRICES)
def test_audit_of_what_is_no_matrix(case, place, refuses):
    np.save(place / "m.npy", MATRICES[case])
    refuses(["audit", "m.npy", "--out", "audit"], "m.npy")


@pytest.mark.parametrize("case", [name for name in MATRICES if name not in ("integers", "one-row")])
def test_index_of_what_is_no_matrix(case, place, refuses):
    np.save(place / "m.npy", MATRICES[case])
    refuses(["data", "index", "m.npy", "--out", "index"], "m.npy")


def test_audit_of_tensors_that_do_not_fit(place, refuses):
    held = {
        "quantised": ({"w": tensor([4, 4], "I64")}, b"\0" * 128),
        "only-vectors": ({"w": tensor([4])}, b"\0" * 16),
        "two-matrices": ({"a": tensor([2, 2]), "b": tensor([2, 2], begin=16)}, b"\0" * 32),
        "nothing": ({}, b""),
    }
    for name, (header, data) in held.items():
        (place / f"{name}.safetensors").write_bytes(safetensors(header, data))
        refuses(["audit", f"{name}.safetensors", "--out", "audit"], f"{name}.safetensors")
    refuses(["audit", "two-matrices.safetensors", "--tensor", "c", "--out", "audit"], "'c'")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.npy", npy(np.array([1.0, -1.0]))),
        ("c.npy", npy(np.array([np.nan]))),
        ("c.npy", npy(np.ones((2, 2)))),
        ("c.npy", npy(np.ones(3))),
        ("c.npy", b"junk"),
        ("c.txt", b"one\ntwo\n"),
        ("c.txt", b""),
        ("c.txt", b"\xff\xfe1\n"),
        ("c.txt", b"1 2\n3 4\n"),
        ("c.json", b"{"),
        ("c.json", b'"text"'),
        ("c.json", b'{"a": "b"}'),
        ("c.json", b"[[1], [2, 3]]"),
        ("c.json", b"null"),
        ("c.json", b"[1e999]"),
    ],
)
def test_token_counts(name, content, place, refuses):
    np.save(place / "m.npy", rng(8, 4))
    (place / name).write_bytes(content)
    refuses(["audit", "m.npy", "--token-counts", name, "--out", "audit"], "oken_counts" if content[:1] == b"" else "c")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "model,corpus,m\n",
        "model,corpus,m,loss\n",
        "model,corpus,m,loss,colour\na,x,4,1,red\n",
        "model,corpus,m,loss,loss\na,x,4,1,1\n",
        "model,corpus,m,loss\na,x,4\n",
        "model,corpus,m,loss\na,x,4,1,9\n",
        "model,corpus,m,loss\na,x,four,1\n",
        "model,corpus,m,loss\na,x,4,nan\n",
        "model,corpus,m,loss\na,x,-4,1\n",
        "model,corpus,m,loss\n,x,4,1\n",
        "model,corpus,m,loss\na,x,4,1\na,x,4,2\n",
        "model,corpus,m,loss\na,x,4,1\na,y,8,2\n",
        "model,corpus,m,loss\n" + "x" * 200_000 + ",x,4,1\n",
    ],
    ids=range(14),
)
def test_losses(content, place, refuses):
    (place / "losses.csv").write_text(content)
    refuses(["audit", "a.npy", "b.npy", "--losses", "losses.csv", "--out", "audit"], "losses.csv")


PREDICTIONS = {
    "empty": "",
    "header-only": "true,predicted\n",
    "no-truth": "predicted\ndog\n",
    "unknown-truth": "true,predicted\npudel,corgi\n",
    "unknown-answer": "true,predicted\npoodle,dgo\n",
    "unknown-column": "true,poodle,corgi,tabby,lynx\npoodle,1,0,0,0\n",
    "column-twice": "true,poodle,poodle\npoodle,1,0\n",
    "short-row": "true,poodle,corgi\npoodle,1\n",
    "long-row": "true,poodle,corgi\npoodle,1,0,0\n",
    "text": "true,poodle,corgi\npoodle,much,little\n",
    "nan": "true,poodle,corgi\npoodle,nan,1\n",
    "infinite": "true,poodle,corgi\npoodle,inf,0\n",
    "negative": "true,poodle,corgi\npoodle,1.5,-0.5\n",
    "sum": "true,poodle,corgi\npoodle,0.9,0.9\n",
    "blank": "true,poodle,corgi\npoodle,,1\n",
    "zero-bytes": "true,poodle\npoodle,\0\n",
    "giant": "true,predicted\n" + "x" * 200_000 + ",dog\n",
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predictions(case, place, refuses):
    (place / "p.csv").write_text(PREDICTIONS[case])
    refuses(["evaluate", "p.csv", "--task", "hierarchy", "--taxonomy", "tree.csv", "--out", "answers"], "p.csv")


EVEN = np.full((2, 4), 0.25)
PREDICTED = {
    "no-truth": ({"probabilities": EVEN}, "true"),
    "few-truths": ({"probabilities": EVEN, "true": np.array([0])}, "true"),
    "truth-out-of-range": ({"probabilities": EVEN, "true": np.array([0, 4])}, "4"),
    "truth-negative": ({"probabilities": EVEN, "true": np.array([0, -1])}, "-1"),
    "truth-of-floats": ({"probabilities": EVEN, "true": np.array([0.5, 1.5])}, "true"),
    "truth-as-matrix": ({"probabilities": EVEN, "true": np.zeros((2, 2), int)}, "true"),
    "truth-unknown": ({"probabilities": EVEN, "true": np.array(["poodle", "dgo"])}, "dgo"),
    "few-columns": ({"probabilities": EVEN[:, :3], "true": np.array([0, 1])}, "columns"),
    "classes-unknown": ({"probabilities": EVEN, "true": np.array([0, 1]), "classes": np.array(list("abcd"))}, "'a'"),
    "classes-of-numbers": ({"probabilities": EVEN, "true": np.array([0, 1]), "classes": np.arange(4)}, "classes"),
    "classes-twice": ({"probabilities": EVEN, "true": np.array([0, 1]), "classes": np.array(["tabby"] * 4)}, "tabby"),
    "no-matrix": ({"probabilities": EVEN[0], "true": np.array([0])}, "probabilities"),
    "nan": ({"probabilities": EVEN * np.nan, "true": np.array([0, 1])}, "finite"),
    "two-matrices": ({"a": EVEN, "b": EVEN, "true": np.array([0, 1])}, "a, b"),
    "nothing": ({}, "p.npz"),
}


@pytest.mark.parametrize("case", PREDICTED)
def test_predictions_in_arrays(case, place, refuses):
    arrays, named = PREDICTED[case]
    save(place / "p.npz", **arrays)
    refuses(["evaluate", "p.npz", "--task", "hierarchy", "--taxonomy", "tree.csv", "--out", "answers"], named)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--classes", "gone.txt"], "gone.txt"),
        (["--classes", "tree.csv"], "tree.csv"),
        (["--classes", "bad.json"], "bad.json"),
        (["--classes", "object.json"], "object.json"),
        (["--true", "gone.npy"], "gone.npy"),
        (["--true", "bad.json"], "bad.json"),
        (["--true", "labels.pkl"], "labels.pkl"),
        (["--threshold", "2"], "threshold"),
        (["--threshold", "-1"], "threshold"),
        (["--out", "p.npz"], "p.npz"),
    ],
)
def test_what_goes_with_predictions(words, named, place, refuses):
    save(place / "p.npz", probabilities=EVEN, true=np.array([0, 1]))
    (place / "bad.json").write_text("[1, 2")
    (place / "object.json").write_text('{"a": 1}')
    (place / "labels.pkl").write_bytes(b"\x80\x04.")
    refuses(["evaluate", "p.npz", "--task", "hierarchy", "--taxonomy", "tree.csv", *words], named)


GOOD = {
    "image_features": rng(12, 8),
    "text_features": rng(3, 8),
    "labels": np.arange(12) % 3,
    "class_names": np.array(["a", "b", "c"]),
}
FEATURES = {
    "no-images": {"image_features": None},
    "no-texts": {"text_features": None},
    "no-labels": {"labels": None},
    "no-names": {"class_names": None},
    "few-names": {"class_names": np.array(["a", "b"])},
    "names-as-matrix": {"class_names": np.array([["a", "b"]])},
    "one-width": {"text_features": rng(3, 4)},
    "vector": {"image_features": rng(12)},
    "nan": {"image_features": rng(12, 8) * np.nan},
    "zeros": {"text_features": np.zeros((3, 8), np.float32)},
    "integers": {"image_features": np.ones((12, 8), int)},
    "no-rows": {"image_features": rng(0, 8), "labels": np.zeros(0, int)},
    "few-labels": {"labels": np.arange(4) % 3},
    "label-out-of-range": {"labels": np.full(12, 3)},
    "label-negative": {"labels": np.full(12, -1)},
    "labels-of-floats": {"labels": np.zeros(12)},
    "split-out-of-range": {"split": np.full(12, 3)},
    "split-short": {"split": np.zeros(3, int)},
    "no-training-images": {"split": np.full(12, 2)},
    "no-test-images": {"split": np.zeros(12, int)},
    "half-a-teacher": {"teacher_image_features": rng(12, 16)},
    "short-teacher": {"teacher_image_features": rng(3, 16), "teacher_text_features": rng(3, 16)},
    "one-class": {"labels": np.zeros(12, int), "text_features": rng(1, 8), "class_names": np.array(["a"])},
}


@pytest.mark.parametrize("case", FEATURES)
def test_features(case, place, refuses):
    arrays = {name: array for name, array in (GOOD | FEATURES[case]).items() if array is not None}
    save(place / "pets.npz", **arrays)
    refuses(["train", "lathadapter", "--features", "pets.npz", "--out", "run", "--max-steps", "1"], "pets")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--protocol", "cross-dataset"], "targets"),
        (["--protocol", "domain", "--targets", "gone.npz"], "gone.npz"),
        (["--protocol", "domain", "--targets", "wide.npz"], "wide"),
        (["--protocol", "domain", "--targets", "foreign.npz"], "foreign"),
        (["--taxonomy", "tree.csv"], "tree.csv"),
        (["--taxonomy", "gone.csv"], "gone.csv"),
        (["--out", "pets.npz"], "pets.npz"),
    ],
)
def test_what_goes_with_features(words, named, place, refuses):
    save(place / "pets.npz", **GOOD)
    save(place / "wide.npz", **GOOD | {"image_features": rng(12, 9), "text_features": rng(3, 9)})
    save(place / "foreign.npz", **GOOD | {"class_names": np.array(["a", "b", "z"])})
    refuses(["train", "lathadapter", "--features", "pets.npz", "--out", "run", "--max-steps", "1", *words], named)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"image": rng(4, 8)}, "text"),
        ({"image": rng(4, 8), "text": rng(4, 7)}, "width"),
        ({"image": rng(4, 8), "text": rng(3, 8)}, "owner"),
        ({"image": rng(4, 8), "text": rng(3, 8), "owner": np.array([0, 1, 9])}, "owner"),
        ({"image": rng(4, 8), "text": rng(4, 8), "colour": rng(4)}, "colour"),
        ({"image": rng(4, 8), "text": np.zeros((4, 8), np.float32)}, "zero"),
    ],
)
def test_pairs_for_retrieval(arrays, named, place, refuses):
    save(place / "pairs.npz", **arrays)
    refuses(["evaluate", "--task", "retrieval", "--features", "pairs.npz", "--ks", "1", "--out", "r.json"], named)


def test_class_names_of_safetensors(place, refuses):
    from safetensors.numpy import save_file

    arrays = {name: GOOD[name] for name in ("image_features", "text_features", "labels")}
    for metadata in (None, {"class_names": "a, b, c"}, {"class_names": "3"}, {"class_names": json.dumps(["a"])}):
        save_file(arrays, place / "pets.safetensors", metadata=metadata)
        refuses(["train", "lathadapter", "--features", "pets.safetensors", "--out", "run"], "pets.safetensors")


FOLDERS = {
    "empty": {},
    "two-matrices": {"embeddings.npy": npy(rng(4, 3)), "embeddings.npz": npz(a=npy(rng(4, 3)))},
    "few-names": {"embeddings.npy": npy(rng(4, 3)), "names.txt": b"a\nb\n"},
    "names-latin": {"embeddings.npy": npy(rng(4, 3)), "names.txt": b"a\nb\nc\n\xe9\n"},
    "names-object": {"embeddings.npy": npy(rng(4, 3)), "names.json": b'{"a": 1}'},
    "names-numbers": {"embeddings.npy": npy(rng(4, 3)), "names.json": b"[1, 2, 3, 4]"},
    "labels-deep": {"embeddings.npy": npy(rng(4, 3)), "labels.json": b"[" * 100_000},
    "labels-no-column": {"embeddings.npy": npy(rng(4, 3)), "labels.csv": b"class\na\nb\nc\nd\n"},
    "ragged": {"dog/a.npy": npy(rng(3)), "dog/b.npy": npy(rng(4))},
    "matrix-as-item": {"dog/a.npy": npy(rng(3, 3))},
    "pickled-item": {"dog/a.npy": ARRAYS["objects.npy"][1]},
    "pickled-matrix": {"embeddings.npy": ARRAYS["objects.npy"][1]},
    "unknown-labels": {"embeddings.npy": npy(rng(2, 3)), "labels.txt": b"poodle\nlynx\n"},
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_of_embeddings(case, place, refuses):
    (place / "vectors").mkdir()
    for name, content in FOLDERS[case].items():
        (place / "vectors" / name).parent.mkdir(exist_ok=True)
        (place / "vectors" / name).write_bytes(content)
    refuses(["data", "index", "vectors", "--taxonomy", "tree.csv", "--out", "index"], "vectors")


def test_an_archive_is_measured_before_it_is_unpacked(place, monkeypatch):
    """The bomb is refused by what its table says, without a byte of it being unpacked."""
    from leafward.data.arrays import read_arrays
    from leafward.errors import DataError

    monkeypatch.setattr(np, "load", None)
    (place / "bomb.npz").write_bytes(ARRAYS["bomb.npz"][1])
    with pytest.raises(DataError, match="would unpack to 160,000,128"):
        read_arrays(place / "bomb.npz")
    assert io.BytesIO(ARRAYS["bomb.npz"][1]).getbuffer().nbytes < 1 << 20
