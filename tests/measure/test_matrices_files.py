"""Files that hold a matrix: streamed reading, choice of a tensor, refusals by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leafward.errors import DataError, LeafwardError, UsageError
from leafward.measure.audit_matrix import audit
from leafward.measure.matrices import open_matrix
from leafward.measure.matrix_files import Matrix

CPU = torch.device("cpu")


def rows(n: int = 9, m: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(n * m)).to(dtype)


def everything(matrix: Matrix) -> torch.Tensor:
    return torch.cat([block for _, block in matrix.slices(CPU)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_safetensors_rows_arrive_in_order_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    x = rows(20_000, 3, dtype)
    save_file({"w": x, "bias": torch.zeros(3)}, tmp_path / "a.safetensors")
    matrix = open_matrix(tmp_path / "a.safetensors")
    assert (matrix.tensor, matrix.rows, matrix.width) == ("w", 20_000, 3)
    blocks = list(matrix.slices(CPU))
    assert [first for first, _ in blocks] == [0, 8192, 16384]
    assert torch.equal(torch.cat([block for _, block in blocks]), x.float())


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_rows_of_any_layout(tmp_path: Path, kind: str, order: str) -> None:
    x = np.asarray(rows().numpy(), dtype=kind, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", x)
    np.testing.assert_array_equal(everything(open_matrix(tmp_path / "a.npy")).numpy(), x.astype("f4"))


def test_arrays_and_tensors_are_taken_as_they_are() -> None:
    x = rows()
    assert torch.equal(everything(open_matrix(x)), x)
    assert torch.equal(everything(open_matrix(x.numpy().astype(">f4"))), x)
    with pytest.raises(UsageError, match="nothing to choose"):
        open_matrix(x, tensor="w")


def test_several_matrices_need_a_choice_and_a_misspelt_one_is_corrected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"encoder.weight": rows(), "decoder.weight": rows(5, 4), "step": torch.tensor([1.0])}, path)
    with pytest.raises(UsageError, match=r"2 matrices.*--tensor;.*decoder\.weight, encoder\.weight"):
        open_matrix(path)
    with pytest.raises(UsageError, match=r"did you mean 'decoder\.weight'"):
        open_matrix(path, tensor="decoder.wieght")
    assert open_matrix(path, tensor="decoder.weight").rows == 5


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a.weight": rows(6, 4), "b.weight": rows(7, 4)}
    save_file({"a.weight": tensors["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b.weight": tensors["b.weight"]}, folder / "model-00002-of-00002.safetensors")
    weight_map = {f"{name}.weight": f"model-0000{k}-of-00002.safetensors" for k, name in ((1, "a"), (2, "b"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("by_index", [False, True])
def test_shards_by_directory_or_index(tmp_path: Path, by_index: bool) -> None:
    tensors = sharded(tmp_path)
    target = tmp_path / "model.safetensors.index.json" if by_index else tmp_path
    assert torch.equal(everything(open_matrix(target, tensor="b.weight")), tensors["b.weight"])


def test_a_missing_shard_is_named_if_needed_and_noted_if_not(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"missing shard model-00002-of-00002\.safetensors.*'b\.weight'"):
        open_matrix(tmp_path, tensor="b.weight")
    matrix = open_matrix(tmp_path, tensor="a.weight")
    assert "model-00002-of-00002.safetensors" in matrix.notes[0]


def test_an_index_that_is_wrong_about_its_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(DataError, match=r"does not hold 'b\.weight'"):
        open_matrix(tmp_path, tensor="b.weight")
    index.write_text("{}")
    with pytest.raises(DataError, match="weight_map"):
        open_matrix(tmp_path)
    index.write_text("{ not json")
    with pytest.raises(DataError, match=r"cannot read .*index\.json"):
        open_matrix(tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, suffix: str) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = tmp_path / f"model{suffix}"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=rf"model\{suffix} is a pickle.*safetensors"):
        audit(path)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(pickle.dumps([[1.0, 2.0]]))
    with pytest.raises(DataError, match=r"a\.npy is not a \.npy file \(it may be a pickle\)"):
        open_matrix(tmp_path / "a.npy")


def test_a_directory_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DataError, match=r"pytorch_model\.bin cannot be read as weights"):
        open_matrix(tmp_path)


def test_an_object_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[object()]]), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy cannot be read as \.npy"):
        open_matrix(tmp_path / "a.npy")


@pytest.mark.parametrize("name", ["a.npy", "a.safetensors"])
@pytest.mark.parametrize("cut", [1, 100])
def test_truncated_files_are_refused(tmp_path: Path, name: str, cut: int) -> None:
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, rows(50, 8).numpy())
    else:
        save_file({"w": rows(50, 8)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=rf"{name}.*truncated"):
        open_matrix(path)


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 16, b"\x08" + b"\0" * 7 + b"notjson!"])
def test_corrupt_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.safetensors cannot be read as \.safetensors"):
        open_matrix(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(5, dtype="f4"), r"shape \[5\].*2-D"),
        (np.zeros((2, 2, 2), dtype="f4"), r"shape \[2, 2, 2\].*2-D"),
        (np.zeros((4, 3), dtype="u1"), "type uint8.*dequantise"),
        (np.zeros((4, 3), dtype="c8"), "type complex64"),
        (np.zeros((1, 3), dtype="f4"), "at least two rows"),
        (np.zeros((4, 0), dtype="f4"), "at least two rows and one column"),
    ],
)
def test_what_is_no_floating_matrix_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message):
        open_matrix(tmp_path / "a.npy")
    with pytest.raises(DataError, match=message):
        open_matrix(array)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5), r"a\.safetensors: w has shape \[5\].*2-D"),
        (torch.zeros(4, 3, dtype=torch.int32), "w has type I32"),
    ],
)
def test_a_chosen_tensor_must_be_a_floating_matrix(tmp_path: Path, tensor: torch.Tensor, message: str) -> None:
    save_file({"w": tensor}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=message):
        open_matrix(tmp_path / "a.safetensors", tensor="w")
    with pytest.raises(DataError, match="no 2-D floating tensor"):
        open_matrix(tmp_path / "a.safetensors")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or directory"):
        open_matrix(tmp_path / "absent")
    with pytest.raises(DataError, match="holds no weights"):
        open_matrix(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"cannot audit .*notes\.txt"):
        open_matrix(tmp_path / "notes.txt")


def test_a_norm_needs_a_checkpoint(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", rows().numpy())
    for target in (tmp_path / "a.npy", rows()):
        with pytest.raises(UsageError, match="--fold-norm"):
            open_matrix(target, fold_norm=True)


def test_reading_stops_cleanly_when_the_caller_does(tmp_path: Path) -> None:
    save_file({"w": rows(30_000, 2)}, tmp_path / "a.safetensors")
    blocks = open_matrix(tmp_path / "a.safetensors").slices(CPU)
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]
    (tmp_path / "a.safetensors").unlink()


def test_a_file_that_vanishes_between_passes_is_an_error_for_people(tmp_path: Path) -> None:
    save_file({"w": rows()}, tmp_path / "a.safetensors")
    matrix = open_matrix(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(LeafwardError, match=r"a\.safetensors"):
        everything(matrix)
