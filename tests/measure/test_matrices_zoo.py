"""Model zoos: classifier rows of timm, projections of open_clip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from leafward.errors import DataError, LeafwardError, UsageError
from leafward.measure.matrices import open_matrix
from leafward.measure.matrix_files import Matrix

timm = pytest.importorskip("timm")
open_clip = pytest.importorskip("open_clip")
CPU = torch.device("cpu")


def everything(matrix: Matrix) -> torch.Tensor:
    return torch.cat([block for _, block in matrix.slices(CPU)])


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = timm.create_model("test_vit", pretrained=False)
    path = tmp_path_factory.mktemp("zoo") / "vit.safetensors"
    save_file(model.state_dict(), path)
    return model, path


def test_timm_weights_from_a_file_give_the_classifier(vit: tuple[torch.nn.Module, Path]) -> None:
    model, path = vit
    matrix = open_matrix(f"timm:test_vit@{path}")
    assert matrix.tensor == "head.weight"
    assert torch.equal(everything(matrix), model.state_dict()["head.weight"])
    other = open_matrix(f"timm:test_vit@{path}", tensor="blocks.0.mlp.fc1.weight")
    assert torch.equal(everything(other), model.state_dict()["blocks.0.mlp.fc1.weight"])


def test_timm_pretrained_weights_are_loaded_by_timm() -> None:
    def leafward_audit_probe(pretrained: bool = False, **options: object) -> torch.nn.Module:
        assert pretrained
        torch.manual_seed(7)
        model = torch.nn.Module()
        model.fc = torch.nn.Linear(5, 11)
        return model

    from timm.models import register_model

    leafward_audit_probe.__module__ = __name__
    register_model(leafward_audit_probe)
    matrix = open_matrix("timm:leafward_audit_probe", tensor="fc.weight")
    torch.manual_seed(7)
    assert torch.equal(everything(matrix), torch.nn.Linear(5, 11).weight.detach())
    with pytest.raises(UsageError, match=r"choose one with --tensor.*fc\.weight"):
        open_matrix("timm:leafward_audit_probe")
    with pytest.raises(UsageError, match=r"did you mean 'fc\.weight'"):
        open_matrix("timm:leafward_audit_probe", tensor="fc.wight")


def test_timm_weights_that_cannot_be_had_say_what_to_do() -> None:
    with pytest.raises(LeafwardError, match=r"could not be loaded.*timm:lcnet_035@/path"):
        open_matrix("timm:lcnet_035")  # registered without weights


def test_names_are_checked(vit: tuple[torch.nn.Module, Path]) -> None:
    with pytest.raises(UsageError, match="did you mean 'resnet18'"):
        open_matrix("timm:resnet-18")
    with pytest.raises(UsageError, match=r"no such file.*tag is part of the name"):
        open_matrix("timm:resnet18@a1_in1k")
    with pytest.raises(DataError, match=r"no such file: absent\.safetensors"):
        open_matrix("timm:resnet18@absent.safetensors")
    with pytest.raises(UsageError, match="did you mean 'ViT-B-32'"):
        open_matrix("open_clip:ViT-B32")
    with pytest.raises(UsageError, match=r"neither a file nor a tag.*did you mean 'openai'"):
        open_matrix("open_clip:ViT-B-32@openia")
    with pytest.raises(UsageError, match="--fold-norm"):
        open_matrix(f"timm:test_vit@{vit[1]}", fold_norm=True)


def test_pickled_zoo_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(b"\x80")
    for zoo, name in (("timm", "resnet18"), ("open_clip", "ViT-B-32")):
        with pytest.raises(DataError, match="is a pickle"):
            open_matrix(f"{zoo}:{name}@{tmp_path / 'w.pth'}")


def test_open_clip_gives_the_visual_projection_or_the_tensor_asked_for(tmp_path: Path) -> None:
    state = {"visual.proj": torch.randn(12, 8), "text_projection": torch.randn(8, 8),
             "token_embedding.weight": torch.randn(30, 8)}  # fmt: skip
    save_file(state, tmp_path / "clip.safetensors")
    target = f"open_clip:ViT-B-32@{tmp_path / 'clip.safetensors'}"
    assert torch.equal(everything(open_matrix(target)), state["visual.proj"])
    for name in ("text_projection", "token_embedding.weight"):
        assert torch.equal(everything(open_matrix(target, tensor=name)), state[name])


def test_open_clip_names_its_usual_projections(tmp_path: Path) -> None:
    save_file({"other": torch.randn(4, 4)}, tmp_path / "clip.safetensors")
    with pytest.raises(UsageError, match=r"none of visual\.proj.*here: other"):
        open_matrix(f"open_clip:ViT-B-32@{tmp_path / 'clip.safetensors'}")


@pytest.mark.parametrize("name", ["ViT-B-32", "RN50"])
def test_usual_projections_exist_in_real_models(name: str) -> None:
    from leafward.measure.matrix_zoo import CLIP_PROJECTIONS

    config = open_clip.get_model_config(name)
    config["text_cfg"].update(layers=1, width=64, heads=1)
    vision = config["vision_cfg"]
    vision.update(width=64, **({"layers": [1, 1, 1, 1]} if name == "RN50" else {"layers": 1}))
    state = open_clip.CLIP(**config).state_dict()
    assert any(state[key].ndim == 2 for key in CLIP_PROJECTIONS if key in state)
