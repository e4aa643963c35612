"""Detection: COCO and VOC data, COCO AP on known answers, and a detector that trains."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from leafward.data.boxes import ObjectSets, Photo, Thing, load_objects
from leafward.data.images import Pixels
from leafward.errors import DataError, UsageError
from leafward.systems.vision.detection import Detection, average_precision, detector

pytest.importorskip("pycocotools")


def coco(folder, change=None, photos=4):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for i in range(photos):
        Image.fromarray(np.zeros((40, 60, 3), dtype=np.uint8)).save(folder / "images" / f"{i}.png")
        images.append({"id": 10 + i, "file_name": f"{i}.png", "width": 60, "height": 40})
        x, y, w, h = 5 + i, 4, 20, 16
        outline = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        annotations.append(
            {"id": i, "image_id": 10 + i, "category_id": (3, 7)[i % 2], "bbox": [x, y, w, h], "segmentation": outline}
        )
    record = {"images": images, "annotations": annotations}
    record["categories"] = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
    if change is not None:
        change(record)
    (folder / "all.json").write_text(json.dumps(record))
    return folder


def voc(folder):
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / part).mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (60, 40)).save(folder / "JPEGImages" / f"{name}.jpg")
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.jpg</filename><size><width>60</width><height>40</height></size>"
            "<object><name>cell</name><bndbox><xmin>1</xmin><ymin>11</ymin><xmax>20</xmax><ymax>30</ymax></bndbox>"
            "</object></annotation>"
        )
    (folder / "ImageSets/Main/train.txt").write_text("a\n")
    (folder / "ImageSets/Main/val.txt").write_text("b\n")
    return folder


def answers(photos, shift=0.0):
    """The truth as a detector would say it, moved to the right."""
    from pycocotools import mask

    found = []
    for index, photo in enumerate(photos):
        for thing in photo.things:
            left, top, right, bottom = thing.box
            drawn = np.zeros((40, 60), dtype=np.uint8)
            drawn[int(top) : int(bottom), int(left + shift) : int(right + shift)] = 1
            found.append(
                {
                    "image_id": index,
                    "category_id": thing.label,
                    "score": 0.9,
                    "bbox": [left + shift, top, right - left, bottom - top],
                    "segmentation": mask.encode(np.asfortranarray(drawn)),
                }
            )
    return found


def test_coco_is_read(tmp_path):
    objects = load_objects(coco(tmp_path), held_out=0.25)
    assert objects.classes == ["cat", "dog"]
    assert (len(objects.train), len(objects.held_out), objects.masks) == (3, 1, True)
    image, target = Detection(objects, hflip=0.0).dataset[0]
    left, top, right, bottom = (int(end) for end in target["boxes"][0])
    assert image.shape == (3, 40, 60)
    assert int(target["labels"][0]) in (1, 2)
    assert int(target["masks"].sum()) == (right - left) * (bottom - top) == 320
    assert int(target["masks"][0, top:bottom, left:right].sum()) == 320
    flipped = Detection(objects, hflip=1.0).dataset[0][1]
    assert flipped["boxes"][0].tolist() == [60 - right, top, 60 - left, bottom]


def test_voc_is_read(tmp_path):
    objects = load_objects(voc(tmp_path))
    assert (objects.classes, objects.masks) == (["cell"], False)
    assert objects.train[0].things[0].box == (0.0, 10.0, 20.0, 30.0)
    task = Detection(objects)
    assert task.decoder == "faster-rcnn"
    task.check()
    file = tmp_path / "Annotations" / "b.xml"
    file.write_text(file.read_text().replace("<name>cell</name>", ""))
    with pytest.raises(DataError, match=r"b\.xml is not a VOC annotation: an object has no name"):
        load_objects(tmp_path)


def test_the_instances_are_found_among_the_files_of_coco(tmp_path):
    """COCO's own folder has captions and key points beside them, captions first in the alphabet."""
    (coco(tmp_path) / "annotations").mkdir()
    (tmp_path / "all.json").rename(tmp_path / "annotations" / "instances_train2017.json")
    whole = (tmp_path / "annotations" / "instances_train2017.json").read_text()
    (tmp_path / "annotations" / "instances_val2017.json").write_text(whole)
    for name in ("captions_train2017", "captions_val2017", "person_keypoints_train2017"):
        (tmp_path / "annotations" / f"{name}.json").write_text("{}")
    assert load_objects(tmp_path).classes == ["cat", "dog"]


def test_one_file_is_not_both_trained_on_and_held_out(tmp_path):
    coco(tmp_path)
    (tmp_path / "all.json").rename(tmp_path / "val.json")
    with pytest.raises(DataError, match=r"none of val\.json has 'train' in its name"):
        load_objects(tmp_path)


def test_boxes_without_area_are_left_out_of_the_training(tmp_path):
    """COCO has one, and torchvision stops at it."""
    objects = load_objects(coco(tmp_path, lambda r: r["annotations"][0].update(bbox=[5, 4, 20, 0])), held_out=0.25)
    dataset = Detection(objects, hflip=0.0).dataset
    targets = [dataset[i][1] for i in range(len(dataset))] + [
        Detection(ObjectSets(objects.held_out, [], objects.classes), hflip=0.0).dataset[0][1]
    ]
    assert sorted(len(target["boxes"]) for target in targets) == [0, 1, 1, 1]
    assert all(len(target["boxes"]) == len(target["labels"]) == len(target["masks"]) for target in targets)


def test_average_precision(tmp_path):
    photos = load_objects(coco(tmp_path)).train
    perfect = average_precision(photos, ["cat", "dog"], answers(photos), True)
    assert perfect == {"box_ap": 1.0, "box_ap50": 1.0, "mask_ap": 1.0, "mask_ap50": 1.0}
    # Moved by 4 of 20 pixels the overlap is 16/24: right for the thresholds 0.5, 0.55, 0.6 and 0.65 of ten.
    moved = average_precision(photos, ["cat", "dog"], answers(photos, 4.0), True)
    assert moved["box_ap"] == pytest.approx(0.4)
    assert moved["mask_ap"] == pytest.approx(0.4)
    assert moved["box_ap50"] == 1.0
    assert average_precision(photos, ["cat", "dog"], [], True)["mask_ap"] == 0.0


def test_bad_data_are_named(tmp_path):
    def bad(name, change, words):
        with pytest.raises(DataError, match=words):
            Detection(load_objects(coco(tmp_path / name, change))).check()

    bad("box", lambda r: r["annotations"][1].update(bbox=[5, 5, 0, 4]), r"1\.png has the box .* empty or outside")
    bad("category", lambda r: r["annotations"][2].update(category_id=5), "annotation 2 has category 5")
    bad("size", lambda r: r["images"][3].update(width=50), r"3\.png is \(60, 40\), but its annotation says \(50, 40\)")
    bad("class", lambda r: r["categories"].append({"id": 9, "name": "owl"}), "the class 'owl' has no object")
    bad(
        "outline",
        lambda r: r["annotations"][1].update(segmentation=[[1, 2]]),
        r"1\.png: an outline cannot be drawn \(annotation 1 of .*all\.json\)",
    )
    bad("keys", lambda r: r.pop("images"), "not a COCO annotation file")
    (tmp_path / "size" / "images" / "0.png").write_bytes(b"nothing")
    bad_image = coco(tmp_path / "image")
    (bad_image / "images" / "2.png").unlink()
    with pytest.raises(DataError, match=r"2\.png cannot be read"):
        Detection(load_objects(bad_image)).check()
    with pytest.raises(DataError, match="neither COCO's"):
        load_objects(tmp_path)
    with pytest.raises(UsageError, match="mask-rcnn, faster-rcnn"):
        detector("hcformer_nano", 2, 64, kind="yolo")


def test_a_detector_trains_and_answers(tmp_path):
    torch.manual_seed(0)
    task = Detection(load_objects(coco(tmp_path, photos=2), held_out=0.5))
    model = detector("hcformer_nano", 2, 64, {"depths": (1, 1, 1, 1)}, task.decoder).train()
    loss = task.loss(model, task.collate([task.dataset[0]]))
    assert set(loss.metrics) >= {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness"}
    assert loss.total.isfinite()
    loss.total.backward()
    assert all(p.grad is not None for p in model.backbone.body.parameters())
    values, _ = task.measure(model.eval())
    assert set(values) == {"box_ap", "box_ap50", "mask_ap", "mask_ap50"}


def test_outlines_of_some_objects_only_are_refused_by_the_name_of_the_photo(tmp_path):
    """They would otherwise be left out without a word, and a detector without masks trained."""
    objects = load_objects(coco(tmp_path, lambda record: record["annotations"][2].pop("segmentation")))
    with pytest.raises(DataError, match=r"1 of 4 objects have no outline.*the first in .*2\.png with the box \(7, 4,"):
        Detection(objects)
    none = load_objects(coco(tmp_path, lambda record: [each.pop("segmentation") for each in record["annotations"]]))
    assert Detection(none).decoder == "faster-rcnn"


def blobs(count=4, height=40, width=60):
    """Masks of every kind: speckled, in blocks, one pixel, all but one, and full from the first pixel on."""
    rng = np.random.default_rng(0)
    found = [(rng.random((height, width)) < share).astype(np.uint8) for share in (0.02, 0.5, 0.98)]
    for _ in range(count):
        block = np.zeros((height, width), dtype=np.uint8)
        top, left = rng.integers(0, height - 8), rng.integers(0, width - 8)
        block[top : top + rng.integers(1, 40), left : left + rng.integers(1, 50)] = 1
        found.append(block)
    for place in (0, height * width - 1):
        one = np.zeros(height * width, dtype=np.uint8)
        one[place] = 1
        found += [one.reshape(height, width), 1 - one.reshape(height, width)]
    return [*found, np.ones((height, width), dtype=np.uint8)]


def runs(mask):
    """COCO's uncompressed counts, by looking for changes down the columns."""
    line = np.concatenate([[0], mask.ravel(order="F")])
    ends = np.flatnonzero(np.diff(line))
    return np.diff([0, *ends, mask.size]).tolist()


def with_outlines(folder, outlines):
    """COCO's layout, with one photo for each outline, in its order; all are trained on."""

    def change(record):
        for each, outline in zip(record["annotations"], outlines, strict=True):
            each["segmentation"] = outline

    objects = load_objects(coco(folder, change, photos=len(outlines)), held_out=0.1)
    photos = sorted(objects.train + objects.held_out, key=lambda photo: int(photo.file.stem))
    return ObjectSets(photos, photos, objects.classes)


@pytest.mark.parametrize("form", ["compressed text", "compressed bytes", "uncompressed"])
def test_run_length_codes_are_drawn(tmp_path, form):
    """Against the masks that they were made of; all forms that pycocotools itself takes for an annotation."""
    from pycocotools import mask as peer

    drawn = blobs()
    packed = [peer.encode(np.asfortranarray(mask)) for mask in drawn]
    text = [{"size": code["size"], "counts": code["counts"].decode()} for code in packed]
    counted = [{"size": [40, 60], "counts": runs(mask)} for mask in drawn]
    objects = with_outlines(tmp_path, counted if form == "uncompressed" else text)
    if form == "compressed bytes":
        for photo, code in zip(objects.train, packed, strict=True):
            photo.things[0] = dataclasses.replace(photo.things[0], outline=code)
    task = Detection(objects, hflip=0.0)
    task.check()
    for index, mask in enumerate(drawn):
        np.testing.assert_array_equal(task.dataset[index][1]["masks"][0].numpy(), mask)
    found = [record | {"segmentation": code} for record, code in zip(answers(objects.train), packed, strict=True)]
    assert average_precision(objects.train, objects.classes, found, True)["mask_ap"] == 1.0


def test_large_run_length_codes_are_drawn(tmp_path):
    """Runs of many digits, in a picture of a million pixels."""
    from pycocotools import mask as peer

    rows, columns = np.mgrid[:1000, :1200]
    mask = ((rows - 400) ** 2 / 9 + (columns - 700) ** 2 < 300**2).astype(np.uint8)
    code = peer.encode(np.asfortranarray(mask))
    Image.new("RGB", (1200, 1000)).save(tmp_path / "a.png")
    photo = Photo(tmp_path / "a.png", [Thing((0, 0, 1200, 1000), 0, code)])
    target = Detection(ObjectSets([photo], [photo], ["x"]), hflip=0.0).dataset[0][1]
    np.testing.assert_array_equal(target["masks"][0].numpy(), mask)


def test_polygons_are_drawn_as_by_pycocotools(tmp_path):
    from pycocotools import mask as peer

    two = [[5.0, 4.0, 25.5, 4.0, 18.0, 20.0], [30.0, 10.0, 58.0, 12.0, 50.0, 39.0, 31.0, 30.0]]
    square = [[10, 10, 20, 10, 20, 20, 10, 20]]
    task = Detection(with_outlines(tmp_path, [two, square]), hflip=0.0)
    expected = peer.decode(peer.merge(peer.frPyObjects(two, 40, 60)))
    np.testing.assert_array_equal(task.dataset[0][1]["masks"][0].numpy(), expected)
    assert int(task.dataset[1][1]["masks"].sum()) == 100


@pytest.mark.parametrize(
    ("outline", "words"),
    [
        ({"size": [60, 40], "counts": [2400]}, r"the size of its run-length code is \[60, 40\].*image \[40, 60\]"),
        ({"size": 2400, "counts": [2400]}, "the size of its run-length code is 2400"),
        ({"counts": [2400]}, "the size of its run-length code is None"),
        ({"size": [40, 60]}, "must be a text or a list, not NoneType"),
        ({"size": [40, 60], "counts": [2000, 300]}, "are of 2300 pixels, the image has 2400"),
        ({"size": [40, 60], "counts": [2500, -100]}, "must be whole numbers ≥ 0"),
        ({"size": [40, 60], "counts": [2000.5, 399.5]}, "must be whole numbers ≥ 0"),
        ({"size": [40, 60], "counts": ""}, "are of 0 pixels, the image has 2400"),
        ({"size": [40, 60], "counts": "no such code"}, "are broken at character 2"),
        ({"size": [40, 60], "counts": "0ö0"}, "are broken at character 1"),
        ({"size": [40, 60], "counts": "oooooooo0"}, "are broken at character 7"),
        ({"size": [40, 60], "counts": "PP"}, "are cut off"),
        ({"size": [40, 60], "counts": "11"}, "are of 2 pixels"),
        ([[1, 2, 3, 4], [1, 2]], "it is no list of polygons"),
        ("nothing", "it is no list of polygons"),
    ],
)
def test_broken_outlines_are_named(tmp_path, outline, words):
    """By photo, file and annotation, also where nothing is looked at before the training."""
    square = [[10, 10, 20, 10, 20, 20, 10, 20]]
    objects = with_outlines(tmp_path, [square, outline])
    place = r"1\.png: an outline cannot be drawn \(annotation 1 of .*all\.json\): .*"
    with pytest.raises(DataError, match=f"training photos: .*{place}{words}"):
        Detection(objects).check()
    with pytest.raises(DataError, match=f"{place}{words}"):
        Detection(objects).dataset[1]
    with pytest.raises(DataError, match=f"{place}{words}"):
        average_precision(objects.train, objects.classes, answers(objects.train), True)


def test_photos_are_normalised_as_asked():
    pixels = Pixels((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    transform = detector("hcformer_nano", 2, 64, {"depths": (1, 1, 1, 1)}, pixels=pixels).transform
    assert (tuple(transform.image_mean), tuple(transform.image_std)) == pixels
