"""Arrays in files: what is read back is what was written, whatever the type, and what is refused is refused unread."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leafward.data.arrays import array_names, array_of, read_arrays, read_matrix, read_metadata, rows_of_npy
from leafward.data.features import feature_arrays
from leafward.errors import DataError, UsageError
from leafward.files import check_archive

VALUES = np.random.default_rng(0).normal(size=(5, 3))


def zipped_zeros() -> bytes:
    """An archive that grows a thousandfold."""
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros((40_000, 1000), np.float32))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", ">f4", "i4", ">i8", "u1", "?", "U4", "c8"])
def test_npy_and_npz_come_back_as_they_are(tmp_path: Path, kind: str) -> None:
    values = np.asfortranarray((10 * VALUES).astype(kind))
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", a=values, none=np.zeros((0, 3)), scalar=np.float32(2))
    for found in (read_arrays(tmp_path / "a.npy")["array"], read_arrays(tmp_path / "a.npz")["a"]):
        assert np.array_equal(found, values)
        assert found.dtype == values.dtype.newbyteorder("=") or found.dtype == values.dtype
    assert read_arrays(tmp_path / "a.npz")["none"].shape == (0, 3)
    assert read_arrays(tmp_path / "a.npz")["scalar"] == 2
    assert array_names(tmp_path / "a.npz") == ["a", "none", "scalar"]
    assert array_names(tmp_path / "a.npy") == ["array"]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4,), (2, 3, 4)])
def test_arrays_of_any_shape_are_mapped(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "a.npy", np.ones(shape))
    assert np.array_equal(read_arrays(tmp_path / "a.npy")["array"], np.ones(shape))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_safetensors_keep_their_numbers(tmp_path: Path, kind: torch.dtype) -> None:
    """bfloat16, which numpy lacks, is widened; float64 is not narrowed."""
    values = torch.from_numpy(10 * VALUES).to(kind)
    save_file({"a": values}, tmp_path / "a.safetensors", metadata={"from": "a test"})
    found = read_arrays(tmp_path / "a.safetensors")["a"]
    assert torch.equal(torch.from_numpy(found).to(torch.float64), values.to(torch.float64))
    assert read_metadata(tmp_path / "a.safetensors") == {"from": "a test"}
    assert array_names(tmp_path / "a.safetensors") == ["a"]


def test_features_may_be_bfloat16(tmp_path: Path) -> None:
    values = torch.from_numpy(VALUES).bfloat16()
    save_file({"image": values}, tmp_path / "f.safetensors")
    assert np.array_equal(feature_arrays(tmp_path / "f.safetensors")["image_features"], values.float().numpy())


@pytest.mark.parametrize("read", [read_arrays, feature_arrays, read_matrix])
def test_an_archive_under_another_name_is_not_unpacked(tmp_path: Path, read) -> None:
    """numpy opens an archive by what it is, not by its name, and the check of its size looked at the name."""
    (tmp_path / "bomb.npy").write_bytes(zipped_zeros())
    with pytest.raises(DataError, match=r"bomb\.npy is not a \.npy file"):
        read(tmp_path / "bomb.npy")
    with pytest.raises(DataError, match="would unpack to 160,000,128"):
        check_archive(tmp_path / "bomb.npy")


def test_a_header_that_promises_more_than_the_file_holds(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((1000, 1000), np.float32))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:1000])
    with pytest.raises(DataError, match=r"a\.npy cannot be read as \.npy: .*truncated"):
        read_arrays(tmp_path / "a.npy")


def test_rows_are_read_anew_and_belong_to_the_caller(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES)
    rows = rows_of_npy(tmp_path / "a.npy")
    assert (rows.shape, rows.dtype) == ((5, 3), "float64")
    rows.read(1, 4).zero_()
    assert np.array_equal(rows.read(1, 4).numpy(), VALUES[1:4])
    (tmp_path / "a.npy").unlink()
    with pytest.raises(DataError, match=r"no such file: .*a\.npy"):
        rows.read(0, 1)


def test_errors_name_the_file_and_the_nearest_array(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.pt: expected a file that ends in \.npy or \.npz or \.safetensors"):
        read_arrays(tmp_path / "a.pt")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*folder\.npy: it is a folder"):
        read_arrays(tmp_path / "folder.npy")
    arrays = {"image_features": VALUES, "labels": VALUES}
    with pytest.raises(DataError, match=r"f\.npz: holds no array 'imagefeatures'; did you mean 'image_features'"):
        array_of(arrays, "imagefeatures", "f.npz")
    with pytest.raises(DataError, match=r"f\.npz: holds no array 'x'; it holds image_features, labels"):
        array_of(arrays, "x", "f.npz")
