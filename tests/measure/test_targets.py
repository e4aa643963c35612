"""Every kind of target is read as float64 arithmetic says, and every broken one gets a sentence."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from leafward.errors import DataError, LeafwardError, UsageError
from leafward.measure.gguf import KINDS
from leafward.measure.targets import open_target


def whole(target: object, name: str) -> np.ndarray:
    entry = open_target(target).entries[name]  # pyright: ignore[reportArgumentType]
    reader = entry.open()
    assert reader.shape == entry.shape
    parts = [reader.read(0, 3), reader.read(3, entry.shape[0])]
    return torch.cat([each.float() for each in parts]).numpy()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_safetensors_with_convolutions_experts_and_vectors(tmp_path: Path) -> None:
    held = {"conv.weight": random(6, 3, 2, 2), "experts.up": random(2, 5, 4), "norm.weight": random(6)}
    held["ids"] = torch.zeros(4, 4, dtype=torch.int32)
    save_file(held, tmp_path / "m.safetensors")
    found = open_target(tmp_path / "m.safetensors")
    assert {name: each.shape for name, each in found.entries.items()} == {"conv.weight": (6, 12), "experts.up": (10, 4)}
    assert found.notes == ("1 tensors of type I32 are not read",)
    np.testing.assert_array_equal(whole(tmp_path, "conv.weight"), held["conv.weight"].reshape(6, 12))
    np.testing.assert_array_equal(whole(tmp_path, "experts.up"), held["experts.up"].reshape(10, 4))
    with pytest.raises(UsageError, match=r"holds no 'cnv.weight'; did you mean 'conv.weight'"):
        found.chosen("cnv.weight")


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_eight_bit_weights_are_times_their_scale(tmp_path: Path, kind: str) -> None:
    stored = random(300, 200).to(torch.float8_e4m3fn)
    scale = {"tensor": torch.tensor(0.5), "rows": random(300, 1).abs(), "blocks": random(3, 2).abs()}[kind]
    name = "w.weight_scale_inv" if kind == "blocks" else "w.weight_scale"
    save_file({"w.weight": stored, name: scale}, tmp_path / "m.safetensors")
    factor = scale
    if kind == "blocks":
        factor = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    np.testing.assert_allclose(whole(tmp_path, "w.weight"), stored.float() * factor, rtol=1e-6)
    assert list(open_target(tmp_path).entries) == ["w.weight"]
    assert name in open_target(tmp_path).entries["w.weight"].notes[0]


def test_pickled_weights_are_read_without_running_them(tmp_path: Path) -> None:
    torch.save({"model": {"a.weight": random(5, 4)}, "step": 3}, tmp_path / "m.bin")
    np.testing.assert_array_equal(whole(tmp_path / "m.bin", "model.a.weight"), random(5, 4))
    np.testing.assert_array_equal(whole(tmp_path, "model.a.weight"), random(5, 4))
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (ran,)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"w": Evil()}))
    for name in ("evil.pt", "plain.pkl"):
        with pytest.raises(DataError, match=name):
            open_target(tmp_path / name)
    assert not ran.exists()


def test_an_adapter_is_the_change_that_it_makes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = torch.nn.Sequential(torch.nn.Linear(12, 8, bias=False))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["0"], use_rslora=True, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    before = base[0].base_layer.weight.detach().clone()
    model.save_pretrained(tmp_path)
    found = open_target(tmp_path)
    assert found.kind == "LoRA adapter"
    merged = model.merge_and_unload()[0].weight.detach()
    np.testing.assert_allclose(whole(tmp_path, "0"), merged - before, atol=1e-6)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(UsageError, match="type IA3"):
        open_target(tmp_path)


def gguf_file(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    """A GGUF file of version 3 by hand: two values in its header, then the tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("b") + text("c")
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += content
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def test_gguf_files_are_dequantised(tmp_path: Path) -> None:
    plain = random(4, 64).numpy()
    scale = np.float16(0.25)
    codes = np.random.default_rng(0).integers(-127, 128, (4, 2, 32), dtype=np.int8)
    blocks = b"".join(scale.tobytes() + each.tobytes() for row in codes for each in row)
    held = {
        "output.weight": (0, (4, 64), plain.tobytes()),
        "half.weight": (1, (4, 64), plain.astype(np.float16).tobytes()),
        "blk.0.weight": (8, (4, 64), blocks),
        "odd.weight": (16, (4, 256), b"\0" * 264),
    }
    gguf_file(tmp_path / "m.gguf", held)
    found = open_target(tmp_path / "m.gguf")
    assert (found.kind, found.head, found.tokens()) == ("GGUF, llama", "output.weight", ["a", "b", "c"])
    assert found.notes == ("tensors of type 16 are not read",)
    np.testing.assert_array_equal(whole(tmp_path / "m.gguf", "output.weight"), plain)
    np.testing.assert_array_equal(whole(tmp_path / "m.gguf", "half.weight"), plain.astype(np.float16))
    np.testing.assert_array_equal(whole(tmp_path / "m.gguf", "blk.0.weight"), 0.25 * codes.reshape(4, 64))
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:-300])
    with pytest.raises(DataError, match="truncated"):
        whole(tmp_path / "cut.gguf", "blk.0.weight")
    for length in (0, 3, 20, 60, 150):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"cut\.gguf"):
            open_target(tmp_path / "cut.gguf")


def test_quantised_blocks_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    for number, kind in KINDS.items():
        if kind.size == 1:
            continue
        raw = rng.integers(0, 256, (6, 2 * kind.bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))
            ours = kind.unpack(raw.reshape(6, 2, kind.bytes)).reshape(6, -1)
        np.testing.assert_array_equal(ours, theirs)


def test_a_four_bit_block_by_hand() -> None:
    # d = 2, low halves count 0 … 15 and high halves count 15 … 0; the value is d·(code − 8).
    codes = np.arange(16, dtype=np.uint8)
    raw = np.frombuffer(np.float16(2).tobytes() + (codes | (15 - codes) << 4).tobytes(), dtype=np.uint8)
    found = KINDS[2].unpack(raw[None, None])[0, 0]
    np.testing.assert_array_equal(found, 2.0 * (np.concatenate([codes, codes[::-1]]).astype(float) - 8))


def autoencoder(folder: Path) -> None:
    rows = random(400, 32)
    rows[3] = rows[7]
    rows[9] = -rows[11]
    rows[20] = 0
    save_file(
        {"W_dec": rows, "W_enc": rows.T.contiguous() * 2, "b_dec": random(32)}, folder / "sae_weights.safetensors"
    )
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard", "hook_name": "blocks.0", "d_in": 32}))


def test_a_sparse_autoencoder_is_its_decoder(tmp_path: Path) -> None:
    from leafward.measure import survey

    autoencoder(tmp_path)
    report = survey(tmp_path)
    assert [row.name for row in report.rows] == ["W_dec"]
    found = report.to_dict()["sae"]
    assert (found["dead"], found["duplicates"], found["antipodes"]) == (1, 2, 2)
    assert (found["duplicate_rows"], found["antipodal_rows"]) == ([3, 7], [9, 11])
    assert found["angle"]["value"] == pytest.approx(0, abs=0.1)
    assert [row.name for row in survey(tmp_path, tensor="W_enc", quick=True).rows] == ["W_enc"]
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(DataError, match=r"cfg\.json"):
        open_target(tmp_path)


def test_zoo_models_have_random_weights_only_when_asked() -> None:
    pytest.importorskip("timm")
    found = open_target("timm:resnet18@random")
    assert found.entries["fc.weight"].shape == (1000, 512)
    assert found.entries["conv1.weight"].shape == (64, 147)
    with pytest.raises(UsageError, match="did you mean 'resnet18'"):
        open_target("timm:resnet81@random")


def test_a_run_is_opened_by_its_name_with_time_columns(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("recipe: helm\n")
    held = {"head.weight": random(50, 8), "head.time_weight": random(50, 1), "model.embed.weight": random(50, 8)}
    save_file(held, model / "model.safetensors")
    config = {"model_type": "helm", "geometry": "lorentz", "curvature": 0.5, "vocab_size": 50, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    found = open_target(tmp_path / "run")
    assert found.head == "head.weight"
    assert found.entries["model.embed.weight"].curvature == 0.5
    both = torch.cat([held["head.time_weight"], held["head.weight"]], 1)
    np.testing.assert_array_equal(whole(tmp_path / "run", "head.weight"), both)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("recipe: helm\n")
    with pytest.raises(DataError, match="published no model"):
        open_target(tmp_path / "empty")


def test_padding_is_left_out_and_rows_have_their_tokens(tmp_path: Path) -> None:
    save_file({"wte.weight": random(64, 8)}, tmp_path / "model.safetensors")
    vocabulary = {f"t{i}": i for i in range(60)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "vocab_size": 64}))
    found = open_target(tmp_path)
    assert found.entries["wte.weight"].used == 60
    tokens = found.tokens()
    assert tokens is not None
    assert tokens[59] == "t59"


def test_names_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
    with pytest.raises(LeafwardError, match=r"not in the hub.s cache; the hub could not be asked .the network is down"):
        open_target("nobody/nothing@v1")

    def unknown(*args: object, **kwargs: object) -> None:
        raise hub.errors.RevisionNotFoundError("404", response=type("R", (), {"headers": {}, "request": None})())

    monkeypatch.setattr(hub.HfApi, "model_info", unknown)
    with pytest.raises(DataError, match="has no revision 'v1'"):
        open_target("nobody/nothing@v1")
    with pytest.raises(DataError, match=r"no such file or directory: ../nothing"):
        open_target("../nothing")


def test_a_model_of_the_cache_is_opened_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    save_file({"w": random(6, 4)}, tmp_path / "model.safetensors")
    asked = {}

    def cached(**options: object) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", cached)
    found = open_target("org/name@abc")
    assert found.label == "org/name@abc"
    assert (asked["repo_id"], asked["revision"], asked["local_files_only"]) == ("org/name", "abc", True)
