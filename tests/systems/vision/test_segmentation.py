"""Segmentation: layouts of data, the head, sliding windows, scores against counting, and what is said of bad masks."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from leafward.data.scenes import IGNORED, confusion, load_scenes, score
from leafward.errors import DataError, UsageError
from leafward.systems.vision.segmentation import Segmentation, SegmentationModel, SemanticFPN, predict

SMALL = {"depths": (1, 1, 1, 1)}


def save(folder, name, mask, size=(24, 20)):
    for part in ("images", "masks"):
        (folder / part / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((size[1], size[0], 3), dtype=np.uint8)).save(folder / "images" / f"{name}.jpg")
    Image.fromarray(np.asarray(mask, dtype=np.uint8)).save(folder / "masks" / f"{name}.png")


def mask(*values):
    made = np.zeros((20, 24), dtype=np.uint8)
    for k, value in enumerate(values):
        made[k] = value
    return made


def test_folder_with_and_without_splits(tmp_path):
    for i in range(4):
        save(tmp_path, f"{i}", mask(1, 2, 255))
    scenes = load_scenes(tmp_path, held_out=0.25)
    assert (len(scenes.train), len(scenes.held_out), scenes.classes) == (3, 1, ["0", "1", "2"])
    assert scenes.train.mask(0)[2, 0] == IGNORED
    other = tmp_path / "other"
    save(other, "training/a", mask(1, 2))
    save(other, "validation/b", mask(1))
    (other / "classes.txt").write_text("wall\nfloor\n")
    scenes = load_scenes(other, ignore=0)  # as ADE20K: 0 does not count, classes begin at 1
    assert scenes.classes == ["wall", "floor"]
    assert scenes.train.mask(0)[:3, 0].tolist() == [0, 1, IGNORED]


def test_splits_of_coco_stuff_are_not_mixed(tmp_path):
    save(tmp_path, "train2017/a", mask(1))
    save(tmp_path, "val2017/b", mask(1))
    (tmp_path / "masks").rename(tmp_path / "stuffthingmaps")
    scenes = load_scenes(tmp_path)
    assert [[image.stem for image, _ in part.pairs] for part in (scenes.train, scenes.held_out)] == [["a"], ["b"]]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_masks_of_16_bits(tmp_path, ending):
    """As ADE20K with its 847 classes: numbers beyond 255, 65535 does not count."""
    wide = mask().astype(np.uint16)
    wide[0], wide[1], wide[2] = 255, 846, 65535
    for name in ("a", "b"):
        save(tmp_path, name, mask())
        (tmp_path / "masks" / f"{name}.png").unlink()
        Image.fromarray(wide).save(tmp_path / "masks" / f"{name}.{ending}")
    scenes = load_scenes(tmp_path, ignore=65535, held_out=0.5)
    assert len(scenes.classes) == 847
    assert scenes.train.mask(0)[:4, 0].tolist() == [255, 846, IGNORED, 0]
    table = confusion(torch.from_numpy(scenes.train.mask(0)).clamp_min(0), torch.from_numpy(scenes.train.mask(0)), 847)
    assert (int(table.sum()), int(table[255, 255]), int(table[846, 846])) == (19 * 24, 24, 24)
    _, labels = Segmentation(scenes, 32).dataset[0]
    assert set(labels.unique().tolist()) <= {IGNORED, 0, 255, 846}


@pytest.mark.parametrize("kind", ["", "Context"])
def test_voc_layout(tmp_path, kind):
    for part in ("JPEGImages", "SegmentationClass", f"SegmentationClass{kind}", f"ImageSets/Segmentation{kind}"):
        (tmp_path / part).mkdir(parents=True, exist_ok=True)
    for name in ("a", "b"):
        Image.new("RGB", (24, 20)).save(tmp_path / "JPEGImages" / f"{name}.jpg")
        painted = Image.fromarray(mask(1, 255), "L").convert("P")
        painted.putdata(list(mask(1, 255).ravel()))
        painted.save(tmp_path / f"SegmentationClass{kind}" / f"{name}.png")
    (tmp_path / f"ImageSets/Segmentation{kind}/train.txt").write_text("a\n")
    (tmp_path / f"ImageSets/Segmentation{kind}/val.txt").write_text("b\n")
    scenes = load_scenes(tmp_path)
    assert scenes.classes == ["0", "1"]
    assert scenes.held_out.mask(0)[1, 0] == IGNORED


def test_bad_masks_are_named(tmp_path):
    save(tmp_path, "a", mask(1))
    save(tmp_path, "b", mask(1))
    Segmentation(load_scenes(tmp_path, held_out=0.5), 32).check()
    (tmp_path / "classes.txt").write_text("x\ny\nz\n")
    with pytest.raises(DataError, match="no mask has a pixel of class 'z'"):
        Segmentation(load_scenes(tmp_path, held_out=0.5), 32).check()
    (tmp_path / "classes.txt").write_text("x\n")
    with pytest.raises(DataError, match=r"masks/[ab]\.png has label 1, of 1 classes"):
        Segmentation(load_scenes(tmp_path, held_out=0.5), 32).check()
    (tmp_path / "classes.txt").unlink()
    save(tmp_path, "a", mask(1)[:10])
    save(tmp_path, "b", mask(1)[:10])
    with pytest.raises(DataError, match=r"masks/[ab]\.png is \(24, 10\), its image .* is \(24, 20\)"):
        Segmentation(load_scenes(tmp_path, held_out=0.5), 32).check()
    for name in ("a", "b"):
        Image.new("RGB", (24, 20)).save(tmp_path / "masks" / f"{name}.png")
    with pytest.raises(DataError, match="one class number for each pixel, not RGB"):
        load_scenes(tmp_path, held_out=0.5)
    (tmp_path / "masks" / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.jpg has no mask"):
        load_scenes(tmp_path)
    with pytest.raises(UsageError, match="multiple of 32"):
        Segmentation(None, 40)  # type: ignore[arg-type]


def test_labels_out_of_range_are_named_without_the_check(tmp_path):
    """Data that are only evaluated are not looked at beforehand, and the table of counts has no place for them."""
    for name in ("a", "b"):
        save(tmp_path, name, mask(1, 4))
    (tmp_path / "classes.txt").write_text("x\ny\nz\n")
    task = Segmentation(load_scenes(tmp_path, held_out=0.5), 32)
    with pytest.raises(DataError, match=r"masks/[ab]\.png has label 4, of 3 classes"):
        task.measure(nn.Conv2d(3, 3, 1))


def test_scores_equal_counting():
    rng = np.random.default_rng(0)
    truth, guess = rng.integers(0, 3, (2, 15, 11))
    truth[:2] = IGNORED
    table = confusion(torch.from_numpy(guess), torch.from_numpy(truth), 4)
    valid = truth != IGNORED
    ious = [
        ((guess == k) & (truth == k) & valid).sum() / (((guess == k) | (truth == k)) & valid).sum() for k in range(3)
    ]
    values = score(table)
    assert values["miou"] == pytest.approx(np.mean(ious))  # class 3 does not occur and does not count
    assert values["pixel_accuracy"] == pytest.approx((guess == truth)[valid].mean())


def test_sliding_equals_whole_for_a_model_without_context():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 1)
    image = torch.randn(3, 64, 150)
    assert torch.equal(predict(model, image, 64, sliding=True), predict(model, image, 64, sliding=False))


RAMP = 2  # pixels to a level of colour, in `landscape`


def landscape(folder, width, height):
    """Two scenes whose red is a ramp from left to right and whose green one from top to bottom, with a mask of four
    classes in quarters; no pixel is black or ignored."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([40 + columns // RAMP, 40 + rows // RAMP, np.full_like(rows, 255)], axis=-1)
    quarters = (columns >= width // 2) + 2 * (rows >= height // 2)
    for name in ("a", "b"):
        for part, values in (("images", image), ("masks", quarters)):
            (folder / part).mkdir(exist_ok=True)
            Image.fromarray(values.astype(np.uint8)).save(folder / part / f"{name}.png")
    return load_scenes(folder, held_out=0.5)


def seen(task, count):
    """Of `count` crops: bytes of the image (n, s, s, 3), labels (n, s, s)."""
    crops = [task.dataset[0] for _ in range(count)]
    mean, std = (np.array(values) for values in task.pixels)
    images = np.stack([image.permute(1, 2, 0).numpy() for image, _ in crops])
    return (images * std + mean) * 255, np.stack([labels.numpy() for _, labels in crops])


def scales(images, labels):
    """How much larger each scene is in its crop than in its file, by the slopes of its ramps."""
    found = []
    for image, inside in zip(images, labels != IGNORED, strict=True):
        rows, columns = (np.flatnonzero(inside.any(axis=k))[[2, -3]] for k in (1, 0))  # away from the borders
        middle = image[rows.mean().astype(int), columns.mean().astype(int)]
        across = abs(image[rows[0], columns[1], 0] - image[rows[0], columns[0], 0]) / (columns[1] - columns[0])
        down = abs(image[rows[1], columns[0], 1] - image[rows[0], columns[0], 1]) / (rows[1] - rows[0])
        assert middle[2] == pytest.approx(255, abs=0.1)
        assert across == pytest.approx(down, rel=0.15)
        found.append(1 / (RAMP * (across + down) / 2))
    return np.array(found)


@pytest.mark.parametrize(("width", "height"), [(171, 128), (128, 171), (256, 128), (320, 64)])
def test_crops_are_scaled_by_the_shorter_side(tmp_path, width, height):
    """As the paper's recipe does, Resize to (2048, 512) with ratios of 0.5 to 2: r is uniform, so the mean scale is
    1.25 times that at which scenes are scored, and the padding is 1 − min(1, rw)·min(1, rh) for sides w and h of the
    scene in crops at ratio 1."""
    torch.manual_seed(0)
    task, count = Segmentation(landscape(tmp_path, width, height), 64), 200
    images, labels = seen(task, count)
    base = min(64 / min(width, height), 4 * 64 / max(width, height))
    ratios = scales(images, labels) / base
    assert ratios.min() > 0.47
    assert ratios.max() < 2.1
    assert ratios.mean() == pytest.approx(1.25, abs=3 * 0.433 / np.sqrt(count))  # (2 − 0.5)/√12 = 0.433
    assert np.quantile(ratios, [0.25, 0.5, 0.75]) == pytest.approx([0.875, 1.25, 1.625], abs=0.12)
    r = np.linspace(0.5, 2.0, 100_001)
    expected = 1 - np.minimum(1, r * width * base / 64) * np.minimum(1, r * height * base / 64)
    padding = (labels == IGNORED).mean(axis=(1, 2))
    assert padding.mean() == pytest.approx(expected.mean(), abs=3 * expected.std() / np.sqrt(count) + 0.01)


@pytest.mark.parametrize(("width", "share"), [(683, 0.10), (1024, 0.08)])
def test_padding_at_the_size_of_the_recipe(tmp_path, width, share):
    """Scenes 512 pixels high in crops of 512, where ScaleJitter left 24 and 43 % to padding."""
    torch.manual_seed(0)
    for name in ("a", "b"):
        save(tmp_path, name, np.zeros((512, width)), size=(width, 512))
    crops = Segmentation(load_scenes(tmp_path, held_out=0.5), 512).dataset
    padding = np.array([(crops[0][1] == IGNORED).float().mean().item() for _ in range(100)])
    assert padding.mean() == pytest.approx(share, abs=3 * padding.std() / 10)


def test_image_and_mask_are_transformed_together(tmp_path):
    """The ramps say which place of the scene a pixel shows, and so its class; padding is black and ignored."""
    torch.manual_seed(0)
    width, height = 171, 128
    images, labels = seen(Segmentation(landscape(tmp_path, width, height), 64), 100)
    assert set(np.unique(labels)) == {IGNORED, 0, 1, 2, 3}  # no mixture of classes: the nearest, not the mean
    padding = labels == IGNORED
    np.testing.assert_array_equal((images < 1).all(axis=-1), padding)
    column, row = (RAMP * (images[..., k] - 40) + RAMP / 2 for k in (0, 1))
    expected = (column >= width // 2) + 2 * (row >= height // 2)
    near = (abs(column - width // 2) < 2 * RAMP) | (abs(row - height // 2) < 2 * RAMP)  # where rounding decides
    assert (~near & ~padding).mean() > 0.5
    np.testing.assert_array_equal(expected[~near & ~padding], labels[~near & ~padding])


def test_head_takes_odd_maps():
    sizes = {32: (25, 17), 64: (13, 9), 200: (7, 5), 320: (4, 3)}
    head = SemanticFPN(tuple(sizes), 7).eval()
    assert head([torch.randn(1, c, *size) for c, size in sizes.items()]).shape == (1, 7, 25, 17)


def test_model_has_the_published_size():
    with torch.device("meta"):
        model = SegmentationModel("hcformer_tiny", 150)
    assert abs(sum(p.numel() for p in model.parameters()) / 10.3e6 - 1) < 0.05


def test_model_trains_and_ignored_pixels_do_not_count(tmp_path):
    for i in range(2):
        save(tmp_path, f"{i}", mask(1, 1, 1), size=(24, 20))
    task = Segmentation(load_scenes(tmp_path, held_out=0.5), 32)
    model = SegmentationModel("hcformer_nano", 2, arguments=SMALL).train()
    images, masks = (torch.stack([part, part]) for part in task.dataset[0])
    assert masks.shape == (2, 32, 32)
    assert set(masks.unique().tolist()) <= {IGNORED, 0, 1}
    masks[:, :4] = IGNORED
    loss = task.loss(model, (images, masks))
    loss.total.backward()
    assert int(torch.as_tensor(loss.count).sum()) == int((masks != IGNORED).sum())
    assert all(p.grad is not None for p in model.decoder.parameters())
    values, units = task.measure(model.eval())
    assert set(values) == {"miou", "pixel_accuracy"}
    assert units is None


@pytest.mark.parametrize("name", ["Unet", "FPN", "UPerNet", "PSPNet", "Segformer", "DeepLabV3Plus", "PAN"])
def test_decoders_of_smp(name):
    pytest.importorskip("segmentation_models_pytorch")
    model = SegmentationModel("hcformer_nano", 3, f"smp:{name}", {"geometry": "euclidean", **SMALL}).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 128, 160)).shape == (1, 3, 128, 160)
    assert not any(name.endswith("log_scale") for name, _ in model.named_parameters())


def test_bad_decoders_are_named():
    with pytest.raises(UsageError, match="semantic-fpn or smp:NAME"):
        SegmentationModel("hcformer_nano", 2, "unet")
    with pytest.raises(UsageError, match="at least two classes, got 1; of masks with 0 and 255"):
        SegmentationModel("hcformer_nano", 1)


def test_scenes_are_normalised_as_asked():
    from leafward.data.images import Pixels
    from leafward.systems.vision.segmentation import normalised

    image = torch.full((3, 2, 2), 255, dtype=torch.uint8)
    assert torch.equal(
        normalised(image, Pixels((0.5, 0.5, 0.5), (0.5, 0.25, 1.0)))[:, 0, 0], torch.tensor([1.0, 2.0, 0.5])
    )


def test_crops_of_one_class_are_drawn_again(tmp_path):
    """A scene of which a corner alone has a second class: most crops show one class, or hardly any of the other."""
    painted = np.zeros((200, 200), dtype=np.uint8)
    painted[:70, :70] = 1
    for name in ("a", "b"):
        save(tmp_path, name, painted, size=(200, 200))
    scenes = load_scenes(tmp_path, held_out=0.5)

    def fullest(most: float) -> np.ndarray:
        torch.manual_seed(0)
        crops = Segmentation(scenes, 64, cat_max_ratio=most).dataset
        masks = [crops[0][1].numpy() for _ in range(60)]
        counts = [np.unique(labels[labels != IGNORED], return_counts=True)[1] for labels in masks]
        return np.array([each.max() / each.sum() for each in counts])

    plain, again = fullest(1.0), fullest(0.75)
    assert (again <= 0.75).mean() > 2 * (plain <= 0.75).mean()
    assert (again > 0.75).any()  # it stops after ten draws


def test_colours_are_distorted_as_drawn_and_masks_are_not():
    from torchvision import tv_tensors

    from leafward.systems.vision.segmentation import Photometric

    torch.manual_seed(0)
    distort = Photometric()
    grey = tv_tensors.Image(torch.full((3, 4, 4), 100, dtype=torch.uint8))
    drawn = [distort.make_params([grey]) for _ in range(4000)]
    for name, low, high in (
        ("brightness", -32, 32),
        ("contrast", 0.5, 1.5),
        ("saturation", 0.5, 1.5),
        ("hue", -0.1, 0.1),
    ):
        values = np.array([each[name] for each in drawn if each[name] is not None])
        assert len(values) == pytest.approx(2000, abs=130)
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
    nothing = dict.fromkeys(("brightness", "contrast", "saturation", "hue")) | {"late": False}
    assert torch.equal(distort.transform(grey, nothing), grey)
    lit = distort.transform(grey, nothing | {"brightness": 20.0, "contrast": 1.5})
    assert isinstance(lit, tv_tensors.Image)
    assert set(lit.unique().tolist()) == {180}  # (100 + 20) · 1.5
    labels = tv_tensors.Mask(torch.arange(16).view(4, 4))
    assert torch.equal(distort(grey, labels)[1], labels)
