"""The vision recipe from data to report, its evaluation and its explanation, on pictures made here."""

import dataclasses
import io
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from leafward.cli import evaluate
from leafward.config import checked, replace
from leafward.engine import LoopConfig, OptimConfig
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.stats.intervals import share_interval
from leafward.systems.hcformer import config as hcformer
from leafward.systems.hcformer import explain as explain_hcformer
from leafward.systems.hcformer import figures as drawing
from leafward.systems.hcformer import train
from leafward.systems.hcformer.open import open_backbone
from leafward.systems.vision import evaluate as evaluate_vision
from leafward.systems.vision.build import open_card, open_model, starting_point
from leafward.systems.vision.train import arms_of, load_backbone, started

COLOURS = ("red", "green", "blue")
LOOP = LoopConfig(steps=8, batch_size=6, eval_every=4, log_every=2, checkpoint_every=4)
OPTIM = OptimConfig(lr=3e-3, weight_decay=0.05, warmup_steps=2)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for k, name in enumerate(COLOURS):
        (folder / name).mkdir()
        for i in range(8):
            pixels = rng.integers(0, 80, (36, 44, 3), dtype=np.uint8)
            pixels[..., k] += 150
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def finished(pictures, tmp_path_factory) -> tuple[Path, dict]:
    """A run of both geometries, with a taxonomy."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tree.csv").write_text("child,parent\nred,warm\ngreen,cool\nblue,cool\nwarm,all\ncool,all\n")
    config = replace(
        hcformer.Config(),
        data=str(pictures),
        size=32,
        held_out=0.25,
        twin=True,
        taxonomy=folder / "tree.csv",
        loop=LOOP,
        optim=OPTIM,
    )
    return folder / "run", train.run(config, folder / "run")


def quiet() -> Console:
    return Console(quiet=True)


def test_run_learns_and_reports(finished):
    out, result = finished
    assert [member["name"] for member in result["members"]] == ["lorentz-0", "euclidean-0"]
    numbers = {number["name"]: number for number in result["headline"]}
    assert numbers["top-1 accuracy"]["value"] > 0.6
    assert numbers["top-1 accuracy"]["twin"] is not None
    share, images, z = numbers["top-1 accuracy"]["value"], 6, 1.959964
    for bound in numbers["top-1 accuracy"]["interval"]:  # Wilson: as far from the share as its own deviation allows
        assert abs(bound - share) == pytest.approx(z * (bound * (1 - bound) / images) ** 0.5, abs=1e-5)
    assert numbers["top-1 accuracy"]["over"] == {"samples": 6, "of": "held-out images"}
    assert numbers["hierarchical F1"]["interval"] is None
    assert "paired, lorentz − euclidean" in numbers["difference in top-1 accuracy"]["note"]
    assert result == json.loads((out / "result.json").read_text())
    page = (out / "report.html").read_text()
    assert "top-1 accuracy" in page
    assert "euclidean-0" in page


def test_published_model_is_the_trained_one(finished):
    out, result = finished
    card = open_model(out)[1]
    assert (card.classes, card.task) == (sorted(COLOURS), "classify")
    twin_card = open_model(out / "members" / "euclidean-0")[1]
    assert (card.arguments["geometry"], twin_card.arguments["geometry"]) == ("lorentz", "euclidean")
    found = evaluate_vision.run(evaluate_vision.Args(out, device="cpu"), quiet())
    for member in result["members"]:
        assert found["scores"][member["name"]]["top1"] == pytest.approx(member["scores"]["top1"])
        assert found["scores"][member["name"]]["loss"] == pytest.approx(member["scores"]["loss"], rel=1e-4)
    kept = json.loads((out / "evaluation.json").read_text())
    assert {key: value for key, value in kept.items() if key != "evaluation"} == found


def test_the_page_of_an_evaluation_leaves_that_of_the_training(finished, evaluation_shown):
    out, result = finished
    trained = (out / "report.html").read_text()
    evaluate_vision.run(evaluate_vision.Args(out, device="cpu", out=out), quiet())
    found, text = evaluation_shown(out / "evaluation.json", out / "evaluation.html")
    assert (out / "report.html").read_text() == trained
    assert [number["name"] for number in found["headline"]] == [number["name"] for number in result["headline"]]
    number = found["headline"][0]
    right = round(6 * found["scores"]["lorentz-0"]["top1"])  # of six held-out images
    assert number["interval"] == pytest.approx(share_interval(right, 6))
    assert number["twin"] == found["scores"]["euclidean-0"]["top1"]
    for name, values in found["scores"].items():
        row = text.partition(f" {name} ")[2].split()[: len(values)]
        assert [None if cell == "–" else float(cell) for cell in row] == pytest.approx(list(values.values()), abs=1e-3)


def test_other_data_are_scored_by_a_published_model(finished, pictures, evaluation_shown):
    out, _ = finished
    words = ["--data", str(pictures), "--device", "cpu", "--out", str(out / "other.json")]
    chosen = evaluate.parse([str(out / "model"), *words])  # its card says that it is a vision model
    assert evaluate.run(chosen, quiet())["scores"]["model"]["top1"] > 0.6
    number = evaluation_shown(out / "other.json", out / "other.html")[0]["headline"][0]
    assert number["name"] == "top-1 accuracy"
    assert number["twin"] is None
    assert len(number["interval"]) == 2
    with pytest.raises(UsageError, match="give --data"):
        evaluate_vision.run(evaluate_vision.Args(out / "model"), quiet())


def test_backbone_goes_into_another_task(finished):
    from leafward.systems.vision.segmentation import SegmentationModel

    out, _ = finished
    model = SegmentationModel("hcformer_nano", 2, arguments={"geometry": "lorentz"})
    load_backbone(model, out)
    trained = open_backbone(out)[0].state_dict()
    own = model.backbone.model.state_dict()
    assert all(torch.equal(own[name], trained[name]) for name in own)
    with pytest.raises(UsageError, match="another backbone"):
        load_backbone(SegmentationModel("hcformer_tiny", 2), out)


def test_a_backbone_of_timm_is_made_for_its_images_and_goes_into_another_task(pictures, tmp_path):
    """timm's pyramid has other names for the same weights, and a ViT must be told the size."""
    from leafward.systems.vision.segmentation import SegmentationModel

    loop = replace(LOOP, steps=1, eval_every=1)
    for name in ("test_convnext", "test_vit"):
        config = replace(
            hcformer.Config(), data=str(pictures), model=name, size=64, held_out=0.25, loop=loop, optim=OPTIM
        )
        train.run(config, tmp_path / name)
    model = SegmentationModel("test_convnext", 2)
    load_backbone(model, tmp_path / "test_convnext")
    trained = open_model(tmp_path / "test_convnext")[0].state_dict()
    own = model.backbone.state_dict()
    assert torch.equal(own["stages_1.blocks.0.mlp.fc1.weight"], trained["stages.1.blocks.0.mlp.fc1.weight"])


def test_each_geometry_starts_from_its_own_backbone(finished, tmp_path):
    """A twin that started from the other geometry's weights would not be one."""
    out, _ = finished
    card = open_card(out)[0]
    twin = dataclasses.replace(card, arguments=card.arguments | {"geometry": "euclidean"})
    assert starting_point(out, card, 0) == out / "model"
    assert starting_point(out, twin, 5) == out / "members" / "euclidean-0" / "model"
    config = replace(hcformer.Config(), data="", init=out, geometry="euclidean", loop=LOOP)
    weights, other = (open_model(folder)[0].state_dict() for folder in (out / "members" / "euclidean-0", out))
    begun = started(config, twin).state_dict()
    assert all(torch.equal(begun[name], weights[name]) for name in begun if not name.startswith("head."))
    assert not all(torch.equal(begun[name], other[name]) for name in begun if not name.startswith("head."))
    with pytest.raises(UsageError, match="has the geometry lorentz, the model euclidean; give a run of that"):
        starting_point(out / "model", twin, 0)


def test_a_euclidean_twin_is_flat_on_both_levels():
    arms = arms_of(replace(hcformer.Config(), patch_geometry="lorentz", twin=True))
    assert {name: (arm.geometry, arm.patch_geometry) for name, arm in arms.items()} == {
        "lorentz": ("lorentz", "lorentz"),
        "euclidean": ("euclidean", "euclidean"),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "hcformer_tinny"}, "did you mean 'hcformer_tiny'"),
        ({"init": Path("nowhere")}, "nowhere does not hold a published model"),
        ({"task": "segment", "decoder": "smp:Nope"}, "no decoder 'Nope'"),
    ],
)
def test_wrong_settings_remove_no_earlier_run(finished, pictures, tmp_path, changes, words):
    out = tmp_path / "run"
    out.mkdir()
    for name in ("config.yaml", "env.json"):
        (out / name).write_text((finished[0] / name).read_text())
    (out / "result.json").write_text("{}")
    data = pictures
    if "task" in changes:
        data = tmp_path / "scenes"
        for part in ("images", "masks"):
            (data / part).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB" if part == "images" else "L", (32, 32)).save(data / part / f"{i}.png")
        (data / "classes.txt").write_text("a\nb\n")
    config = replace(hcformer.Config(), **({"data": str(data), "size": 32, "loop": LOOP, "optim": OPTIM} | changes))
    with pytest.raises(LeafwardError, match=words):
        train.run(config, out, overwrite=True)
    assert (out / "result.json").read_text() == "{}"


@pytest.mark.parametrize("decoder", ["semantic-fpn", "smp:FPN"])
def test_a_published_model_knows_the_pixels_that_do_not_count(finished, tmp_path, decoder):
    """As in ADE20K: with another number every label would be off by one, without a word where the classes are named."""
    for part, mode in (("images", "RGB"), ("masks", "L")):
        (tmp_path / "scenes" / part).mkdir(parents=True)
        for i in range(2):
            drawn = np.zeros((32, 40) + (3,) * (mode == "RGB"), dtype=np.uint8)
            drawn[4:, :20], drawn[4:, 20:] = 1, 2
            Image.fromarray(drawn).save(tmp_path / "scenes" / part / f"{i}.png")
    (tmp_path / "scenes" / "classes.txt").write_text("left\nright\n")
    loop = replace(LOOP, steps=1, batch_size=2, eval_every=1)
    config = replace(
        hcformer.Config(),
        task="segment",
        data=str(tmp_path / "scenes"),
        decoder=decoder,
        size=32,
        ignore=0,
        held_out=0.5,
        init=finished[0],
        loop=loop,
        optim=OPTIM,
    )
    result = train.run(config, tmp_path / "run")
    args = evaluate_vision.Args(
        tmp_path / "run" / "model", data=config.data.source, device="cpu", out=tmp_path / "found"
    )
    found = evaluate_vision.run(args, quiet())["scores"]["model"]
    assert found == pytest.approx(result["members"][0]["scores"])


def test_a_run_is_explained(finished, pictures, tmp_path):
    out, _ = finished
    images = (pictures / "red" / "0.png", pictures / "blue" / "1.png")
    result = explain_hcformer.run(explain_hcformer.Args(str(out), images, tmp_path / "seen"), quiet())
    assert len(result["pictures"]) == 6
    page = (tmp_path / "seen" / "index.html").read_text()
    assert "untrained" not in page
    assert result["trained"] is True
    assert page.count("data:image/png") == 6
    assert "heads that agree" in page
    for rows in result["confidence"].values():
        assert [row["level"] for row in rows] == ["patch", "window"] * 3 + ["patch"]
        assert all(row["equal_shares"] <= row["top_weight"] <= 1.0 for row in rows)
    for counts in result["regions"].values():
        assert counts == sorted(counts, reverse=True)  # coarser stages have fewer regions
    with pytest.raises(UsageError, match="neither a folder nor a model"):
        explain_hcformer.run(explain_hcformer.Args("hcformer_nan", images, tmp_path), quiet())


def test_an_untrained_model_is_explained_as_one(pictures, tmp_path):
    """On the page, on the terminal and in the result."""
    said = io.StringIO()
    args = explain_hcformer.Args("hcformer_nano", (pictures / "red" / "0.png",), tmp_path / "seen", size=64)
    result = explain_hcformer.run(args, Console(file=said, width=200))
    assert result["trained"] is False
    assert "hcformer_nano is untrained: its weights are random" in said.getvalue()
    assert "untrained" in (tmp_path / "seen" / "index.html").read_text()


def test_models_and_checkpoints_are_explained_without_being_told_what_they_are(finished, pictures, tmp_path):
    """A model's folder, also away from its run, a training's checkpoint, and a run that has published nothing yet."""
    from leafward.cli.dispatch import main

    out, result = finished
    best = f"step-{result['members'][0]['step']:08d}"  # it is what was published
    shutil.copytree(out / "model", tmp_path / "elsewhere")
    member = out / "members" / "lorentz-0"
    places = (out / "model", tmp_path / "elsewhere", member, member / "checkpoints" / best)
    for k, place in enumerate(places):
        assert main(["explain", str(place), str(pictures / "red" / "0.png"), "--out", str(tmp_path / f"{k}")]) == 0
        assert "untrained" not in (tmp_path / f"{k}" / "index.html").read_text()
    trained = open_model(out)[0].state_dict()
    found = open_backbone(places[-1])[0].state_dict()
    assert all(torch.equal(found[name], trained[name]) for name in trained)


def test_drawn_regions_are_the_assignments():
    model = open_backbone("hcformer_nano")[0]
    x = torch.randn(2, 3, 72, 60)
    for a in model.assignments(x):
        layout = a.layout
        rows, columns = layout.size
        if a.level == "patch":
            labels = drawing.patch_regions(a, image=1)
            for i, j in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)):
                window = (i // layout.side[0]) * layout.grid[1] + j // layout.side[1]
                place = (i % layout.side[0]) * layout.side[1] + j % layout.side[1]
                weights = a.weights[1, window, :, place].mean(dim=0)
                assert labels[i, j] == window * len(weights) + int(weights.argmax())
        else:
            labels = drawing.window_regions(a, image=1, head=2)
            assert labels[0, 0] == int(a.weights[1, 2, 0].argmax())
            assert labels[-1, -1] == int(a.weights[1, 2, -1].argmax())
        assert labels.shape == (rows, columns)


def test_confidence_is_counted_token_by_token():
    model = open_backbone("hcformer_nano")[0]
    for a in model.assignments(torch.randn(1, 3, 72, 60)):
        top, agree = drawing.confidence(a)
        assert top.shape == agree.shape == a.layout.size
        for i, j in ((0, 0), (top.shape[0] - 1, top.shape[1] - 1), (top.shape[0] // 2, top.shape[1] // 3)):
            window = (i // a.layout.side[0]) * a.layout.grid[1] + j // a.layout.side[1]
            place = (i % a.layout.side[0]) * a.layout.side[1] + j % a.layout.side[1]
            heads = a.weights[0, window, :, place] if a.level == "patch" else a.weights[0, :, window]
            drawn = int(heads.mean(dim=0).argmax())
            assert top[i, j] == pytest.approx(heads[:, drawn].mean().item(), rel=1e-5)
            assert agree[i, j] == pytest.approx(sum(int(h.argmax()) == drawn for h in heads) / len(heads))


def test_each_head_is_drawn_on_request(pictures, tmp_path):
    args = explain_hcformer.Args("hcformer_nano", (pictures / "red" / "0.png",), tmp_path, size=64, heads=True)
    names = [Path(each).stem for each in explain_hcformer.run(args, quiet())["pictures"]]
    assert [name.removeprefix("000-0-") for name in names][-4:] == [f"heads-{stage}" for stage in (1, 2, 3, 4)]


def test_regions_of_shifted_windows_lie_where_their_tokens_are():
    import timm

    model = timm.create_model("hcformer_nano", shifted=True)
    for a in model.assignments(torch.randn(1, 3, 64, 96)):
        if a.level == "patch":
            labels = a.layout.merge(
                (torch.arange(a.weights.shape[1])[:, None] * a.weights.shape[4] + a.weights[0].mean(1).argmax(-1))[
                    None, ..., None
                ]
            )
            np.testing.assert_array_equal(drawing.patch_regions(a), labels[0, ..., 0])


def test_composed_regions_are_nested():
    rng = np.random.default_rng(0)
    stages = [drawing.enlarge(rng.integers(0, k * k, (k, k)), 32, 40) for k in (16, 8, 4)]
    composed = drawing.compose(stages)
    for fine, coarse in itertools.pairwise(composed):
        for label in np.unique(fine):
            assert len(np.unique(coarse[fine == label])) == 1
        assert coarse.max() <= fine.max()
    image = rng.integers(0, 255, (32, 40, 3), dtype=np.uint8)
    painted = drawing.paint(image, composed[2])
    inside = ~(painted == drawing.BORDER).all(axis=-1)
    region = (composed[2] == 0) & inside
    np.testing.assert_array_equal(painted[region][0], image[composed[2] == 0].mean(axis=0).round())


def test_bad_data_leave_no_run_behind(pictures, tmp_path):
    bad = tmp_path / "bad"
    for name in ("a", "b"):
        (bad / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (40, 40)).save(bad / name / f"{i}.png")
    (bad / "a" / "0.png").write_bytes(b"torn")
    config = replace(hcformer.Config(), data=str(bad), size=32, held_out=0.5, loop=LOOP, optim=OPTIM)
    with pytest.raises(DataError, match=r"a/0\.png cannot be read"):
        train.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="--data must name"):
        train.run(replace(config, data=None), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 16}, "size must be an integer from 32"),
        ({"model": "resnet18", "twin": True}, "off for a model without geometry"),
        ({"decoder": "unet"}, "semantic-fpn or smp:NAME"),
        ({"seeds": 0}, "seeds must be"),
    ],
)
def test_bad_settings_are_named(changes, words):
    with pytest.raises(UsageError, match=words):
        checked(hcformer.Config, changes)


def test_presets_are_valid():
    for preset in hcformer.PRESETS.values():
        assert preset().data.task in ("classify", "segment", "detect")
