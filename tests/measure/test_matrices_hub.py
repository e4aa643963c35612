"""Hugging Face directories made with tiny real configurations: which matrix, which rows, which gain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leafward.errors import DataError, UsageError
from leafward.measure.audit_matrix import audit
from leafward.measure.matrices import open_matrix
from leafward.measure.matrix_files import Matrix

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


def everything(matrix: Matrix) -> torch.Tensor:
    return torch.cat([block for _, block in matrix.slices(CPU)])


def save(folder: Path, config: str, model: str | None = None, **options: object):
    """Save a tiny random model; its final norm gets a gain that is not 1."""
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**options)
    network = (
        getattr(transformers, model)(settings) if model else transformers.AutoModelForCausalLM.from_config(settings)
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 2.0)
    network.save_pretrained(folder)
    return network


LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 60,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 50, "bos_token_id": 0,
        "eos_token_id": 0}  # fmt: skip
NEOX = {**LLAMA, "intermediate_size": 32}
del NEOX["num_key_value_heads"]
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
       "max_position_embeddings": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options", "role"),
    [
        ("GPT2Config", GPT2, "tied embedding"),
        ("LlamaConfig", {**LLAMA, "tie_word_embeddings": False}, "output head"),
        ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}, "tied embedding"),
        ("GPTNeoXConfig", {**NEOX, "tie_word_embeddings": False}, "output head"),
        ("OPTConfig", OPT, "tied embedding"),
    ],
)
def test_the_audited_matrix_is_what_makes_the_logits(tmp_path: Path, config: str, options: dict, role: str) -> None:
    network = save(tmp_path, config, **options)
    matrix = open_matrix(tmp_path)
    assert matrix.role == role
    assert matrix.hidden_size == 16
    assert torch.equal(everything(matrix), network.get_output_embeddings().weight.detach())


def test_a_stored_head_of_a_tied_model_is_not_taken(tmp_path: Path) -> None:
    # Some converters write both; loading replaces the head by the embedding.
    network = save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=True)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = torch.randn(60, 16)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(everything(open_matrix(tmp_path)), network.get_input_embeddings().weight.detach())


def test_a_model_without_a_head_gives_its_input_embedding_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, "LlamaConfig", "LlamaModel", **LLAMA, tie_word_embeddings=False)
    matrix = open_matrix(tmp_path)
    assert matrix.role == "input embedding"
    assert any("no output head is stored" in note for note in matrix.notes)


def test_a_projected_embedding_reports_the_width_that_is_used(tmp_path: Path) -> None:
    # The published overlaps of OPT-350m are 512 wide while its fit uses 1024.
    save(tmp_path, "OPTConfig", **{**OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False})
    report = audit(tmp_path)
    assert (report.width, report.hidden_size) == (8, 16)
    assert any("8 wide while hidden_size is 16" in note for note in report.notes)
    with pytest.raises(DataError, match="--fold-norm"):
        open_matrix(tmp_path, fold_norm=True)


def test_sharded_checkpoints(tmp_path: Path) -> None:
    network = save(tmp_path / "whole", "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    network.save_pretrained(tmp_path / "parts", max_shard_size="4KB")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    matrix = open_matrix(tmp_path / "parts")
    assert torch.equal(everything(matrix), network.lm_head.weight.detach())
    needed = index["weight_map"]["lm_head.weight"]
    (tmp_path / "parts" / needed).unlink()
    with pytest.raises(DataError, match=f"missing shard {needed}"):
        open_matrix(tmp_path / "parts")


def tokenizer_json(folder: Path, tokens: int, added: int = 0) -> None:
    content = {
        "model": {"type": "BPE", "vocab": {f"t{k}": k for k in range(tokens)}, "merges": []},
        "added_tokens": [{"id": tokens + k, "content": f"<{k}>"} for k in range(added)],
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_padding_rows_are_left_out(tmp_path: Path) -> None:
    # Padded rows were counted in the published overlaps; here they are copies of one vector, as after padding.
    network = save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"][50:] = state["lm_head.weight"][0]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    padded = audit(tmp_path)
    assert padded.rows == 60
    tokenizer_json(tmp_path, tokens=46, added=4)
    report = audit(tmp_path)
    assert (report.rows, report.stored_rows) == (50, 60)
    assert any("left out 10 padding rows" in note for note in report.notes)
    unit = torch.nn.functional.normalize(network.lm_head.weight.detach()[:50].double())
    o = (unit @ unit.T)[~torch.eye(50, dtype=torch.bool)]
    assert report.mean_squared_overlap == pytest.approx(float(o.square().mean()), rel=1e-5)
    assert padded.mean_squared_overlap > 1.2 * report.mean_squared_overlap


@pytest.mark.parametrize("kind", ["vocab.json", "vocab.txt", "unigram", "config", "added_tokens_decoder"])
def test_vocabulary_length_from_every_source(tmp_path: Path, kind: str) -> None:
    save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    if kind == "vocab.json":
        (tmp_path / kind).write_text(json.dumps({f"t{k}": k for k in range(50)}))
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 52}))
    elif kind == "vocab.txt":
        # Some real vocabularies hold characters at which Python, but no tokenizer, ends a line.
        (tmp_path / kind).write_text("\n".join(f"t\u2028{k}" for k in range(53)) + "\n", encoding="utf-8")
    elif kind == "unigram":
        vocabulary = [[f"t{k}", -1.0] for k in range(53)]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    elif kind == "config":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 53}))
    else:
        tokenizer_json(tmp_path, 50)
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": {"52": {"content": "<x>"}}})
        )
    assert open_matrix(tmp_path).rows == 53


def test_a_tokenizer_longer_than_the_matrix_keeps_all_rows_and_is_noted(tmp_path: Path) -> None:
    save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    tokenizer_json(tmp_path, tokens=64)
    matrix = open_matrix(tmp_path)
    assert matrix.rows == 60
    assert any("64 tokens but the matrix has 60 rows" in note for note in matrix.notes)


@pytest.mark.parametrize(
    ("config", "options", "norm"),
    [
        ("GPT2Config", GPT2, "transformer.ln_f"),
        ("LlamaConfig", {**LLAMA, "tie_word_embeddings": False}, "model.norm"),
        ("GPTNeoXConfig", {**NEOX, "tie_word_embeddings": False}, "gpt_neox.final_layer_norm"),
        ("OPTConfig", OPT, "model.decoder.final_layer_norm"),
    ],
)
def test_folding_multiplies_the_final_gain_into_the_rows(tmp_path: Path, config: str, options: dict, norm: str) -> None:
    network = save(tmp_path, config, **options)
    matrix = open_matrix(tmp_path, fold_norm=True)
    gain = network.get_submodule(norm).weight.detach()
    torch.testing.assert_close(everything(matrix), network.get_output_embeddings().weight.detach() * gain)
    assert any(f"folded {norm}.weight" in note for note in matrix.notes)
    assert audit(tmp_path).mean_squared_overlap != audit(tmp_path, fold_norm=True).mean_squared_overlap


def test_folding_reads_gemma_gains_as_one_plus_w(tmp_path: Path) -> None:
    network = save(tmp_path, "GemmaConfig", **LLAMA, head_dim=8)
    matrix = open_matrix(tmp_path, fold_norm=True)
    expected = network.lm_head.weight.detach() * (1 + network.model.norm.weight.detach())
    torch.testing.assert_close(everything(matrix), expected)
    assert any("1 + w" in note for note in matrix.notes)
    # The convention itself: the module's own output for a vector of known scale.
    x = torch.randn(1, 16)
    out = network.model.norm(x)
    plain = x * torch.rsqrt(x.square().mean() + network.config.rms_norm_eps)
    torch.testing.assert_close(out, plain * (1 + network.model.norm.weight))


def test_a_named_tensor_keeps_all_its_rows(tmp_path: Path) -> None:
    network = save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    tokenizer_json(tmp_path, tokens=10)
    matrix = open_matrix(tmp_path, tensor="model.layers.0.mlp.up_proj.weight")
    assert matrix.role == "chosen tensor"
    assert torch.equal(everything(matrix), network.model.layers[0].mlp.up_proj.weight.detach())
    assert open_matrix(tmp_path, tensor="lm_head.weight").rows == 10  # but a head named by hand is still a head
    with pytest.raises(UsageError, match=r"did you mean 'lm_head\.weight'"):
        open_matrix(tmp_path, tensor="lm_haed.weight")


@pytest.mark.parametrize("content", ['{"model": null}', '{"model": {"vocab": 3}}', '{"added_tokens": [3]}', "{"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=tmp_path.name):
        open_matrix(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json"):
        open_matrix(tmp_path)


def test_without_config_a_directory_is_only_a_set_of_tensors(tmp_path: Path) -> None:
    save(tmp_path, "LlamaConfig", **LLAMA, tie_word_embeddings=False)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="choose one with --tensor"):
        open_matrix(tmp_path)
    assert open_matrix(tmp_path, tensor="lm_head.weight").rows == 60


def test_a_config_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="holds no weights"):
        open_matrix(tmp_path)


def test_a_checkpoint_of_something_else_asks_for_a_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    save_file({"classifier.weight": torch.randn(10, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"neither an output head.*classifier\.weight"):
        open_matrix(tmp_path)
    assert open_matrix(tmp_path, tensor="classifier.weight").rows == 10


def test_two_embeddings_need_a_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "vocab_size": 10}))
    names = ("left.embed_tokens.weight", "right.embed_tokens.weight")
    save_file({name: torch.randn(10, 4) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"--tensor: left\.embed_tokens\.weight, right\.embed_tokens\.weight"):
        open_matrix(tmp_path)
    assert open_matrix(tmp_path, tensor=names[1]).tensor == names[1]


def test_only_the_text_part_of_a_larger_model_counts(tmp_path: Path) -> None:
    config = {"text_config": {"hidden_size": 4, "vocab_size": 9, "model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = torch.randn(10, 4)
    gain = torch.rand(4)
    tensors = {
        "model.language_model.embed_tokens.weight": text,
        "model.language_model.norm.weight": gain,
        "model.vision_tower.norm.weight": torch.rand(7),
        "model.language_model.layers.0.norm.weight": torch.rand(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    matrix = open_matrix(tmp_path, fold_norm=True)
    torch.testing.assert_close(everything(matrix), text[:9] * (1 + gain))
