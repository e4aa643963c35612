"""The Hi-Mapper recipe from images to report: arms at one budget, backbones from everywhere, pictures, refusals."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from leafward.cli import evaluate, explain
from leafward.cli.train import parse
from leafward.config import replace
from leafward.data.images import IMAGENET, Pixels
from leafward.engine import LoopConfig, OptimConfig
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.stats.intervals import share_interval
from leafward.systems.himapper import Hierarchy, TreeShape, train
from leafward.systems.himapper import config as himapper
from leafward.systems.himapper import figures as drawing
from leafward.systems.himapper.build import (
    LearningMapper,
    backbone_source,
    build,
    card_of,
    expected_pixels,
    mapper_of,
    open_model,
)
from leafward.systems.himapper.explain import relatives
from leafward.systems.vision.train import make_task

LOOP = LoopConfig(steps=2, batch_size=8, log_every=1, device="cpu")
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)
COLOURS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, noise = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for channel, name in enumerate(reversed(COLOURS)):
        (folder / name).mkdir()
        for number in range(6):
            pixels = noise.integers(0, 80, (40, 48, 3), dtype=np.uint8)
            pixels[8:30, 10:30, channel] = 220
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def config(photos: Path, /, **changes: Any) -> himapper.Config:
    settings = {
        "data": str(photos),
        "backbone": "timm:test_resnet",
        "pretrained": False,
        "size": 32,
        "leaves": 4,
        "levels": 2,
        "dim": 8,
        "held_out": 0.3,
        "loop": LOOP,
        "optim": OPTIM,
    }
    return replace(himapper.Config(), **settings | changes)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "all"
    return out, train.run(config(data, twin=True, ablation=True), out)


ARMS = ["lorentz", "plain", "euclidean", "lorentz-deterministic"]


def test_all_arms_are_trained_and_compared(finished: tuple[Path, dict[str, Any]]) -> None:
    out, result = finished
    assert [member["arm"] for member in result["members"]] == ARMS
    lorentz, plain, euclidean, deterministic = (member["parameters"] for member in result["members"])
    assert lorentz - euclidean == 1  # the curvature
    assert lorentz - deterministic == 4 * 8  # the variances of the leaves
    assert plain < deterministic
    names = [number["name"] for number in result["headline"]]
    for other in ARMS[1:]:
        assert f"top-1 accuracy: lorentz − {other}" in names
    assert json.loads((out / "result.json").read_text())["headline"] == result["headline"]
    page = (out / "report.html").read_text()
    assert "Contrast of the hierarchy" in page
    assert "Learned curvature" in page


def test_all_arms_begin_alike_and_see_the_same_images(finished: tuple[Path, dict[str, Any]]) -> None:
    """v^L is zero at first, so the task's own loss of the first step is that of the plain backbone."""
    out, _ = finished
    own = {}
    for arm in ARMS:
        lines = (out / "members" / f"{arm}-0" / "metrics.jsonl").read_text().splitlines()
        first = json.loads(lines[0])
        own[arm] = first["train/loss"] - 0.1 * first.get("train/contrast", 0.0) - 0.01 * first.get("train/kl", 0.0)
        assert ("train/contrast" in first) == ("train/curvature" in first) == (arm != "plain")
    assert own == pytest.approx(dict.fromkeys(ARMS, own["plain"]), abs=1e-5)


def test_resuming_trains_only_what_is_missing(data: Path, tmp_path: Path) -> None:
    small = config(data, seeds=2)
    first = train.run(small, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    kept = tmp_path / "run" / "members" / "lorentz-0" / "result.json"
    before = kept.stat().st_mtime_ns
    (tmp_path / "run" / "members" / "lorentz-1" / "result.json").unlink()
    assert train.run(small, tmp_path / "run", resume=True) == first
    assert kept.stat().st_mtime_ns == before
    assert [member["seed"] for member in first["members"]] == [0, 1]


def backbone_state(settings: himapper.Config) -> dict[str, torch.Tensor]:
    torch.manual_seed(settings.loop.seed)
    with backbone_source(settings) as (name, arguments, source):
        model = build(card_of(settings, name, arguments, list(COLOURS)), source)
    return (model if settings.plain else model.backbone).state_dict()  # pyright: ignore


def test_backbones_of_runs_are_taken_up(finished: tuple[Path, dict[str, Any]], data: Path) -> None:
    out, _ = finished
    for folder in (out, out / "members" / "plain-0"):
        model, _ = open_model(folder)
        expected = model.backbone.state_dict() if mapper_of(model) else model.state_dict()  # pyright: ignore
        found = backbone_state(config(data, backbone=str(folder)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def given() -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    return timm.create_model("test_resnet", num_classes=1000).state_dict()


def test_local_weights_are_loaded_but_for_the_classifier(data: Path, tmp_path: Path) -> None:
    save_file(given(), tmp_path / "weights.safetensors")
    found = backbone_state(config(data, weights=tmp_path / "weights.safetensors", plain=True))
    differing = {name for name, value in found.items() if not torch.equal(value, given()[name])} if found else set()
    assert differing == {"fc.weight", "fc.bias"}
    assert found["fc.weight"].shape[0] == 3


def test_images_are_normalised_as_the_weights_expect(data: Path, tmp_path: Path) -> None:
    """ImageNet's numbers for a backbone that was trained with others would shift and stretch its input."""
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "weights.safetensors")
    settings = config(data, weights=tmp_path / "weights.safetensors")
    train.run(replace(settings, loop=replace(LOOP, steps=1)), tmp_path / "run")
    _, card = open_model(tmp_path / "run")
    halves = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert card.vision.pixels == halves
    assert expected_pixels(config(data, backbone=str(tmp_path / "run"))) == halves
    usual, other = (make_task(settings, pixels).held_out[0][0] for pixels in (IMAGENET, Pixels(*halves)))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    torch.testing.assert_close(other, (usual * std + mean - 0.5) / 0.5)
    assert expected_pixels(replace(settings, weights=None)) == IMAGENET  # nothing is loaded


@pytest.mark.parametrize(("name", "arguments"), [("test_vit", {"img_size": 64}), ("test_resnet", {})])
def test_backbones_of_fixed_size_are_made_for_the_images(data: Path, name: str, arguments: dict[str, Any]) -> None:
    settings = config(data, backbone=f"timm:{name}", size=64)
    with backbone_source(settings) as (found, given, source):
        assert (found, given, source) == (name, arguments, None)
        model = build(card_of(settings, found, given, list(COLOURS)))
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)


@pytest.fixture(scope="module")
def fixed_size(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a backbone that takes images of one size alone."""
    out = tmp_path_factory.mktemp("fixed") / "run"
    settings = config(data, backbone="timm:deit_tiny_patch16_224", size=32)
    with pytest.MonkeyPatch.context() as patch:  # two of its twelve blocks are enough
        patch.setattr("leafward.systems.vision.build.size_arguments", lambda *_: {"img_size": 32, "depth": 2})
        train.run(replace(settings, loop=replace(LOOP, steps=1)), out)
    return out


def test_a_run_s_backbone_is_made_for_images_of_another_size(fixed_size: Path, data: Path) -> None:
    before, _ = open_model(fixed_size)
    settings = config(data, backbone=str(fixed_size), size=64)
    with backbone_source(settings) as (name, arguments, source):
        assert arguments == {"img_size": 64, "depth": 2}
        model = build(card_of(settings, name, arguments, list(COLOURS)), source)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    taken = "blocks.1.mlp.fc1.weight"
    assert torch.equal(model.backbone.state_dict()[taken], before.backbone.state_dict()[taken])  # pyright: ignore


def test_explain_says_which_size_a_backbone_needs(fixed_size: Path, data: Path, tmp_path: Path) -> None:
    chosen = explain.parse([str(fixed_size), str(data / "red" / "0.png"), "--out", str(tmp_path), "--size", "64"])
    with pytest.raises(UsageError, match="size must be 32 for deit_tiny_patch16_224"):
        explain.run(chosen, Console(file=io.StringIO()))


def test_a_frozen_backbone_is_compared_with_a_frozen_backbone(data: Path, tmp_path: Path) -> None:
    """Of the plain one the classifier alone learns, and the averages of its norms stay too."""
    result = train.run(config(data, freeze_backbone=True, twin=True), tmp_path / "run")
    assert [member["arm"] for member in result["members"]] == ["lorentz", "plain", "euclidean"]
    first = backbone_state(config(data, plain=True, loop=replace(LOOP, seed=result["members"][1]["seed"])))
    for member in result["members"]:
        model, _ = open_model(tmp_path / "run" / member["model"])
        found = (model if member["arm"] == "plain" else model.backbone).state_dict()  # pyright: ignore
        assert {name for name, value in found.items() if not torch.equal(value, first[name])} == {
            "fc.weight",
            "fc.bias",
        }


def test_segmentation_goes_through_the_mapped_pyramid(tmp_path: Path) -> None:
    pytest.importorskip("leafward.systems.vision.segmentation")
    noise = np.random.default_rng(1)
    for folder in ("images", "masks"):
        (tmp_path / "scenes" / folder).mkdir(parents=True)
    for number in range(4):
        mask = np.zeros((64, 64), dtype=np.uint8)
        mask[:, 32:] = 1
        pixels = noise.integers(0, 60, (64, 64, 3), dtype=np.uint8) + mask[..., None] * np.uint8(150)
        Image.fromarray(pixels).save(tmp_path / "scenes" / "images" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "scenes" / "masks" / f"{number}.png")
    settings = config(tmp_path / "scenes", task="segment", size=64, loop=replace(LOOP, batch_size=2))
    result = train.run(settings, tmp_path / "run")
    assert 0.0 <= result["members"][0]["scores"]["miou"] <= 1.0
    model, card = open_model(tmp_path / "run")
    mapper = mapper_of(model)
    assert mapper is not None
    assert mapper.pyramid
    assert card.vision.task == "segment"
    with torch.no_grad():
        before = model(torch.zeros(1, 3, 64, 64))
        mapper.mapper.encoding.leave[1].bias.fill_(2.0)  # pyright: ignore
        assert not torch.allclose(model(torch.zeros(1, 3, 64, 64)), before)


def test_detection_goes_through_the_mapped_pyramid(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    (tmp_path / "images").mkdir()
    record: dict[str, list[dict[str, Any]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 1, "name": "box"}],
    }
    for number in range(4):
        pixels = np.zeros((64, 64, 3), dtype=np.uint8)
        pixels[10:40, 12:44] = 200
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        record["images"].append({"id": number, "file_name": f"{number}.png", "width": 64, "height": 64})
        record["annotations"].append({"id": number, "image_id": number, "category_id": 1, "bbox": [12, 10, 32, 30]})
    (tmp_path / "all.json").write_text(json.dumps(record))
    settings = config(tmp_path, task="detect", size=64, loop=replace(LOOP, batch_size=1))
    result = train.run(settings, tmp_path / "run")
    assert "box_ap" in result["members"][0]["scores"]
    mapper = mapper_of(open_model(tmp_path / "run")[0])
    assert mapper is not None
    assert mapper.pyramid
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/contrast"] > 0.0


def test_a_mapper_that_keeps_its_losses_compiles_whole() -> None:
    model = LearningMapper(timm.create_model("test_vit", img_size=32), 4, 2, dim=8, heads=2).train()
    torch.compile(model, fullgraph=True, backend="eager")(torch.randn(2, 3, 32, 32))
    assert model.losses is not None
    model.losses.total().backward()


def test_evaluation_repeats_the_scores_of_every_arm(
    finished: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path, evaluation_shown: Any
) -> None:
    out, result = finished
    file = tmp_path / "scores.json"
    found = evaluate.run(evaluate.parse([str(out), "--out", str(file), "--device", "cpu"]), Console(file=io.StringIO()))
    kept, text = evaluation_shown(file, tmp_path / "scores.html")
    assert {key: kept[key] for key in found} == found
    assert [number["name"] for number in found["headline"]] == [number["name"] for number in result["headline"]]
    images = result["held_out_images"]
    first = found["headline"][0]
    assert first["value"] == found["scores"]["lorentz-0"]["top1"]
    assert first["interval"] == pytest.approx(share_interval(round(first["value"] * images), images))
    for member in result["members"]:
        row = text.partition(f" {member['name']} ")[2].split()[: len(member["scores"])]
        assert [float(cell) for cell in row] == pytest.approx(list(member["scores"].values()), abs=1e-3)
        assert found["scores"][member["name"]] == pytest.approx(member["scores"], rel=1e-5)
    (tmp_path / "other" / "yellow").mkdir(parents=True)
    for number in range(2):
        Image.new("RGB", (40, 40)).save(tmp_path / "other" / "yellow" / f"{number}.png")
    chosen = evaluate.parse([str(out), "--data", str(tmp_path / "other"), "--device", "cpu"])
    with pytest.raises(UsageError, match="knows the classes"):
        evaluate.run(chosen, Console(file=io.StringIO()))


def test_evaluation_of_a_published_model_needs_data_alone(
    finished: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    out, _ = finished
    model, console = str(out / "model"), Console(file=io.StringIO())
    words = ["--device", "cpu", "--out", str(tmp_path / "scores.json")]
    found = evaluate.run(evaluate.parse([model, "--data", str(data), *words]), console)
    assert found["headline"][0]["value"] == found["scores"]["model"]["top1"]
    assert found["headline"][0]["twin"] is None
    with pytest.raises(UsageError, match="is a model, not a run: give --data"):
        evaluate.run(evaluate.parse([model, *words]), console)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="does not hold a model of Hi-Mapper"):
        evaluate.run(evaluate.parse([str(tmp_path), "--task", "himapper", *words]), console)


# Pictures.


def test_explain_draws_the_tree_over_photos(finished: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path) -> None:
    out, _ = finished
    photos = [str(data / "red" / "0.png"), str(data / "blue" / "1.png")]
    chosen = explain.parse([str(out), *photos, "--out", str(tmp_path), "--size", "64"])
    found = explain.run(chosen, Console(file=io.StringIO()))
    assert len(found["pictures"]) == 6
    for picture in found["pictures"]:
        with Image.open(picture) as image:
            assert min(image.size) > 200
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png;base64") == 6
    assert set(found["distances"]) == set(photos)
    with pytest.raises(UsageError, match="without a hierarchy to draw"):
        explain.run(explain.parse([str(out / "members" / "plain-0"), photos[0]]), Console(file=io.StringIO()))


def example(geometry: str = "lorentz") -> Hierarchy:
    shape = TreeShape(8, 3)
    attention = torch.full((1, 14, 4, 8), 1e-3)
    attention[0, 3, 1, 6] = 1.0
    points = torch.randn(1, 14, 6, dtype=torch.float64) * 2.0
    if geometry == "lorentz":
        points = torch.cat([(points.square().sum(-1, keepdim=True) + 0.5).sqrt(), points], dim=-1)
    return Hierarchy(shape, torch.zeros(1, 14, 6), attention, points, 2.0 if geometry == "lorentz" else 0.0)


def test_nodes_stand_where_they_look_more_than_their_level() -> None:
    found = example()
    places = drawing.centres(found.shape, found.attention[0])
    torch.testing.assert_close(places[3], torch.tensor([6.5 / 8, 1.5 / 4]))
    torch.testing.assert_close(places[8:], torch.full((6, 2), 0.5))  # levels whose nodes are all alike


def test_branches_are_those_of_the_top_nodes() -> None:
    assert drawing.branches(TreeShape(8, 3)).tolist() == [0] * 4 + [1] * 4 + [0, 0, 1, 1] + [0, 1]


def test_points_lie_inside_the_disk_at_their_radius() -> None:
    found = example()
    axes = drawing.disk(found).axes[0]
    drawn = np.concatenate([np.asarray(group.get_offsets()) for group in axes.collections])
    space = found.points[0, :, 1:].norm(dim=-1)
    expected = torch.tanh(torch.asinh(2.0**0.5 * space) / 2.0)  # of the distance ρ to the origin, on the unit disk
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), expected.numpy(), rtol=1e-6)
    assert drawing.png(drawing.disk(example("euclidean"))).startswith(b"\x89PNG")


def test_relatives_by_hand() -> None:
    points = torch.tensor([[[0.0], [1.0], [4.0], [6.0], [0.5], [5.5]]])
    found = Hierarchy(TreeShape(4, 2), points, torch.ones(1, 6, 1, 1), points, 0.0)
    assert relatives(found) == pytest.approx(
        {"its parent": (0.5 + 0.5 + 1.5 + 0.5) / 4, "its sibling": 1.5, "the other nodes of its level": 4.5}
    )


# Settings.


@pytest.mark.parametrize("name", himapper.PRESETS)
def test_presets(name: str) -> None:
    preset = himapper.PRESETS[name]()
    if preset.backbone is not None:
        assert timm.is_model(preset.backbone.removeprefix("timm:"))
        assert (preset.loop.epochs, preset.loop.batch_size, preset.optim.lr) == (50, 1024, 1e-4)
        assert preset.loop.over(1_281_167).steps == 62_557  # ImageNet-1k
    assert parse(["himapper", "--preset", name, "--data", "photos"]).config == replace(preset, data="photos")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leaves": 12, "levels": 4}, r"leaves must be a multiple of 2\^\(levels − 1\) = 8, got 12"),
        ({"levels": 1}, "levels must be"),
        ({"dim": 10}, "dim must be a multiple of 4"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"weights": Path("w.pth")}, "weights must be a .safetensors file"),
        ({"plain": True, "twin": True}, "plain must be off"),
        ({"backbone": None}, "--backbone must be"),
        ({"data": None}, "--data must name"),
        ({"backbone": "timm:resnet_50"}, "timm has no model 'resnet_50'"),
        ({"backbone": "resnet50"}, "backbone must be timm:NAME or the folder of a run; there is no folder resnet50"),
    ],
)
def test_wrong_settings_are_refused(data: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train.run(config(data, **changes), tmp_path / "run")


def test_weights_that_do_not_fit_are_refused_by_name(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"weights: no such file: .*gone\.safetensors"):
        train.run(config(data, weights=tmp_path / "gone.safetensors"), tmp_path / "run")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match=r"other.safetensors is not of test_resnet: it has no conv1"):
        train.run(config(data, weights=tmp_path / "other.safetensors"), tmp_path / "second")
    wider = {name: value.repeat(2, *[1] * (value.ndim - 1)) if value.ndim else value for name, value in given().items()}
    save_file(wider, tmp_path / "wider.safetensors")
    message = r"test_resnet does not take these weights: .*size mismatch for conv1"
    with pytest.raises(DataError, match=message) as refused:
        train.run(config(data, weights=tmp_path / "wider.safetensors"), tmp_path / "third")
    assert "\n" not in str(refused.value)
    assert "--no-pretrained" not in str(refused.value)


def test_weights_that_cannot_be_fetched_say_what_to_do(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LeafwardError, match=r"test_resnet could not be made.*--weights FILE.*--no-pretrained"):
        train.run(config(data, pretrained=True), tmp_path / "run")


@pytest.mark.parametrize("name", himapper.ABLATIONS)
def test_every_ablation_runs_to_its_result(data: Path, tmp_path: Path, name: str) -> None:
    settings = config(data, leaves=32, levels=4, ablate=name, check=False, loop=replace(LOOP, steps=1, batch_size=2))
    result = train.run(settings, tmp_path / "run")
    assert [row["cell"] for row in result["cells"]] == list(himapper.ABLATIONS[name])
    for variant in himapper.ABLATIONS[name]:
        assert mapper_of(open_model(tmp_path / "run" / "cells" / variant)[0]) is not None


def test_the_tree_is_drawn_over_the_photo_as_it_is(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """It was drawn over what the model sees: 32 pixels, made large."""
    pixels = np.indices((700, 900)).sum(axis=0) % 2 * 255
    Image.fromarray(np.repeat(pixels[..., None], 3, axis=2).astype(np.uint8)).save(tmp_path / "checks.png")
    chosen = explain.parse([str(finished[0]), str(tmp_path / "checks.png"), "--out", str(tmp_path / "seen")])
    found = explain.run(chosen, Console(file=io.StringIO()))
    drawn = np.asarray(Image.open(found["pictures"][0]).convert("L")).astype(float)
    assert min(drawn.shape) >= 700
    middle = drawn[100:-100, 100:-100]
    assert np.abs(np.diff(middle, axis=1)).mean() > 10  # single pixels, which 32 of them could not show


def test_a_vit_under_a_detector_has_its_hierarchy_below_the_neck() -> None:
    """The tree reads the last block's map as it is; a frozen backbone leaves the neck to learn."""
    from leafward.systems.vision.pyramids import Neck

    card = card_of(
        replace(
            himapper.Config(),
            task="segment",
            leaves=4,
            levels=2,
            dim=8,
            freeze_backbone=True,
            backbone="timm:test_vit",
            pretrained=False,
        ),
        "test_vit",
        {},
        ["a", "b"],
        "semantic-fpn",
    )
    model = build(card).train()
    neck = next(module for module in model.modules() if isinstance(module, Neck))
    assert neck.body is mapper_of(model)
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in neck.resize.parameters())
    assert not any(parameter.requires_grad for parameter in neck.body.backbone.parameters())
