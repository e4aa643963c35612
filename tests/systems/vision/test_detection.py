"""Detection: COCO and VOC data, COCO AP on known answers, and a detector that trains."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from leafward.errors import DataError, UsageError
from leafward.tasks.detection import Detection, ObjectSets, average_precision, detector, load_objects
from leafward.tasks.images import Pixels

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
    bad("outline", lambda r: r["annotations"][1].update(segmentation=[[1, 2]]), r"1\.png: an outline cannot be drawn")
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


def test_photos_are_normalised_as_asked():
    pixels = Pixels((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    transform = detector("hcformer_nano", 2, 64, {"depths": (1, 1, 1, 1)}, pixels=pixels).transform
    assert (tuple(transform.image_mean), tuple(transform.image_std)) == pixels
