"""Real matrices: Whisper's token embeddings (tied heads) and a small Llama trained on stories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leafward.measure.audit_family import audit_family
from leafward.measure.audit_matrix import audit
from leafward.measure.audit_report import AuditReport


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def whisper(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The first 16,384 token rows of each size, dequantised to .npy files."""
    folder, files = tmp_path_factory.mktemp("whisper"), {}
    for size, meta in json.loads((shared_data / "whisper_embed" / "meta.json").read_text()).items():
        stored = np.load(shared_data / "whisper_embed" / f"whisper_{size}_rows16384_u8.npy")
        files[size] = folder / f"{size}.npy"
        np.save(files[size], ((stored.astype("f4") - meta["zero_point"]) * meta["scale"]).astype("f4"))
    return files


@pytest.fixture(scope="module")
def reports(whisper: dict[str, Path]) -> dict[str, AuditReport]:
    return {size: audit(path, sample=256) for size, path in whisper.items()}


@pytest.mark.parametrize("size", ["tiny", "base", "small"])
def test_whisper_figures_equal_a_direct_computation(
    size: str, whisper: dict[str, Path], reports: dict[str, AuditReport]
) -> None:
    x, report = np.load(whisper[size]).astype("f8"), reports[size]
    assert report.centred is not None
    generator = np.random.default_rng(0)
    for view, data in ((report.raw, x), (report.centred, x - x.mean(0))):
        rows = unit(data)
        some = generator.choice(len(rows), 128, replace=False)
        o = rows[some] @ rows.T
        o[np.arange(128), some] = 0
        np.testing.assert_allclose(view.interference[some], (o**2).sum(1) / (len(rows) - 1), rtol=1e-4)
        total = rows.sum(0)
        pairs = len(rows) * (len(rows) - 1)
        assert view.mean_overlap == pytest.approx((total @ total - len(rows)) / pairs, abs=1e-6)
        # The estimate from 256 rows and the plain mean over 128 others, each within its error.
        fourth = (o**4).sum(1) / (len(rows) - 1)
        plain = fourth.std(ddof=1) / np.sqrt(128)
        assert abs(view.fourth_moment.value - fourth.mean()) < 4 * np.hypot(plain, view.fourth_moment.error)
        assert view.fourth_moment.error < plain


def test_whisper_heads_share_a_mean_direction(reports: dict[str, AuditReport]) -> None:
    raw = {size: report.mean_overlap for size, report in reports.items()}
    assert raw == pytest.approx({"tiny": 0.8258, "base": 0.8308, "small": 0.7739}, abs=5e-4)
    centred = {size: report.centred.mean_squared_overlap for size, report in reports.items() if report.centred}
    assert centred == pytest.approx({"tiny": 0.020175, "base": 0.020074, "small": 0.016724}, rel=1e-3)
    for report in reports.values():
        assert report.verdict.label == "strong superposition"
        assert report.verdict.geometry == "anisotropic: a shared mean direction dominates, a few others follow"
        assert report.duplicate_rows > 40


def test_whisper_is_a_family(reports: dict[str, AuditReport]) -> None:
    family = audit_family(*reports.values())
    np.testing.assert_array_equal(family.width, [384, 512, 768])
    assert (family.scaled_overlap > 200).all()
    assert ((family.centred_scaled_overlap > 5) & (family.centred_scaled_overlap < 15)).all()


@pytest.fixture(scope="module")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """The llama2.c file as a Hugging Face directory: (directory, embedding, final gain)."""
    content = np.fromfile(shared_data / "stories260K" / "stories260K.bin", dtype="<i4")
    width, inner, layers, heads, key_heads, tokens, context = content[:7].tolist()
    numbers = content[7:].view("<f4")
    embedding = numbers[: tokens * width].reshape(tokens, width)
    keys = width * key_heads // heads
    block = 2 * width + 2 * width * width + 2 * width * keys + 3 * width * inner
    at = tokens * width + layers * block
    gain = numbers[at : at + width]
    assert len(numbers) == at + width + context * (width // heads)  # only the rotary tables follow
    folder = tmp_path_factory.mktemp("stories")
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": gain}
    save_file({name: torch.from_numpy(x.copy()) for name, x in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": width, "vocab_size": tokens, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, embedding.astype("f8"), gain.astype("f8")


@pytest.mark.parametrize("fold", [False, True])
def test_stories_model_against_its_gram_matrix(stories: tuple[Path, np.ndarray, np.ndarray], fold: bool) -> None:
    folder, embedding, gain = stories
    report = audit(folder, fold_norm=fold)
    assert (report.rows, report.width, report.role) == (512, 64, "tied embedding")
    assert report.norm_folded is fold
    x = embedding * gain if fold else embedding
    assert report.centred is not None
    for view, data in ((report.raw, x), (report.centred, x - x.mean(0))):
        g = unit(data) @ unit(data).T
        o = g[~np.eye(512, dtype=bool)]
        assert view.mean_overlap == pytest.approx(o.mean(), abs=1e-6)
        assert view.mean_squared_overlap == pytest.approx((o**2).mean(), rel=1e-5)
        assert view.fourth_moment.exact
        assert view.fourth_moment.value == pytest.approx((o**4).mean(), rel=1e-5)
        assert view.largest_overlap.value == pytest.approx(np.abs(o).max(), abs=1e-6)
    assert report.verdict.geometry == "anisotropic: a few directions dominate"
