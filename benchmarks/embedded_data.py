"""Make the data that the package embeds for `leafward demo`, in data/samples; the same input gives the same files.

    python benchmarks/embedded_data.py --clothing clothing.parquet --text tinyshakespeare.txt --words MINILM_FOLDER

Photos: of the training part as many of each class as `TRAINED_PHOTOS`, of validation and test all, at most 96 pixels
long. Text: the beginning of the file. Features: a small image–text encoder is trained on the whole training part, from
captions that name the group of a photo (tops, bottoms …) and never its class; the photos of validation and test, which
it has not seen, and the names of the ten classes then get their features from it. So it knows where a class belongs
and not how its neighbours differ, which is what an adapter is for. The training takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import gzip
import io
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leafward.data.fewshot import TEST, TRAIN
from leafward.data.image_files import read_image
from leafward.files import replacing
from leafward.hierarchy import Taxonomy

DATA = Path(__file__).resolve().parents[1] / "src" / "leafward" / "data" / "samples"
TRAINED_PHOTOS = 64
LONGEST, QUALITY = 96, 78
TEXT_CHARACTERS = 500_000
WIDTH, DECODED, SEEN, BATCH, EPOCHS = 128, 72, 64, 64, 12
MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clothing", type=Path, required=True, help="Parquet with split, label, file and jpeg")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True, help="folder of the sentence encoder all-MiniLM-L6-v2")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    taxonomy = Taxonomy.load(DATA / "clothing.csv")
    table = read(arguments.clothing)
    write_text(arguments.text)
    write_photos(table)
    write_features(table, taxonomy, arguments.words, arguments.epochs)


def read(path: Path) -> dict[str, np.ndarray]:
    """The columns of the table, its rows ordered by split, label and file."""
    import pyarrow.parquet as parquet

    columns = {name: np.array(values, dtype=object) for name, values in parquet.read_table(path).to_pydict().items()}
    order = np.lexsort([columns[name].astype(str) for name in ("file", "label", "split")])
    return {name: values[order] for name, values in columns.items()}


def write_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")[:TEXT_CHARACTERS]
    with replacing(DATA / "shakespeare.txt.gz") as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))


def write_photos(table: dict[str, np.ndarray]) -> None:
    """JPEG data end to end, and for each photo where it ends, its class and its split."""
    rows = []
    for label in np.unique(table["label"]):
        trained = np.flatnonzero((table["label"] == label) & (table["split"] == "train"))
        rows += np.random.default_rng(0).permutation(trained)[:TRAINED_PHOTOS].tolist()
    rows = np.array(sorted(rows) + np.flatnonzero(table["split"] != "train").tolist())
    data = [_smaller(jpeg) for jpeg in table["jpeg"][rows].tolist()]
    with replacing(DATA / "clothing.npz") as temporary, open(temporary, "wb") as file:
        np.savez(
            file,
            jpeg=np.frombuffer(b"".join(data), dtype=np.uint8),
            ends=np.cumsum([len(each) for each in data]),
            labels=table["label"][rows].astype(str),
            splits=table["split"][rows].astype(str),
        )


def _smaller(data: bytes) -> bytes:
    from PIL import Image

    image = read_image(data)
    image.thumbnail((LONGEST, LONGEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return buffer.getvalue()


def write_features(table: dict[str, np.ndarray], taxonomy: Taxonomy, words: Path, epochs: int) -> None:
    """Features of validation and test from an encoder that was trained on the groups of the training part."""
    classes = sorted(set(table["label"]))
    labels = np.array([classes.index(label) for label in table["label"]])
    group_of = {name: taxonomy.names[taxonomy.first_parent[taxonomy.ids(name)]] for name in classes}
    groups = sorted(set(group_of.values()))
    group = torch.tensor([groups.index(group_of[label]) for label in table["label"]])
    pixels = torch.stack([_square(data) for data in table["jpeg"]])
    trained = torch.from_numpy(np.flatnonzero(table["split"] == "train"))
    others = torch.from_numpy(np.flatnonzero(table["split"] != "train"))

    torch.manual_seed(0)
    encoder = Encoder(sentences(groups, words))
    train(encoder, pixels[trained], group[trained], epochs)
    with torch.no_grad():
        images = torch.cat([encoder.image(_seen(part)) for part in pixels[others].split(256)])
        texts = encoder.text(sentences(classes, words))
    with replacing(DATA / "clothing_features.npz") as temporary, open(temporary, "wb") as file:
        np.savez(
            file,
            image_features=images.half().numpy(),
            labels=labels[others],
            text_features=texts.half().numpy(),
            class_names=np.array(classes),
            split=np.where(table["split"][others] == "test", TEST, TRAIN),
        )
    right = (images @ texts.mT).argmax(dim=1) == torch.from_numpy(labels)[others]
    print(
        f"scale 1/τ of the encoder {encoder.scale.exp():.1f}; classes by their names {100 * right.float().mean():.1f} %"
    )


class Encoder(nn.Module):
    """A ResNet-10 for images (B, 3, 64, 64) and one linear layer over sentence features of names, on one sphere."""

    def __init__(self, names: Tensor) -> None:
        super().__init__()
        self.names = names
        self.tower = timm.create_model("resnet10t", num_classes=WIDTH)
        self.words = nn.Linear(names.shape[1], WIDTH)
        self.scale = nn.Parameter(torch.tensor(2.3))

    def image(self, images: Tensor) -> Tensor:
        return F.normalize(self.tower(images), dim=-1)

    def text(self, sentences: Tensor) -> Tensor:
        return F.normalize(self.words(sentences), dim=-1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits over the names: (B, 3, H, W) -> (B, names)."""
        return self.scale.exp() * self.image(images) @ self.text(self.names).mT


def train(encoder: Encoder, pixels: Tensor, group: Tensor, epochs: int) -> None:
    """Cross-entropy over the names of the groups."""
    from leafward.engine import Progress

    batches = len(pixels) // BATCH
    steps, order = epochs * batches, ()
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps, pct_start=0.15)
    with Progress(steps, "encoder") as progress:
        for step in range(steps):
            if step % batches == 0:
                order = torch.randperm(len(pixels)).split(BATCH)
            rows = order[step % batches]
            loss = F.cross_entropy(encoder(_varied(pixels[rows])), group[rows], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            progress.update(step + 1, {"loss": loss.item()})
    encoder.eval()


def sentences(names: list[str], folder: Path) -> Tensor:
    """Unit sentence features of captions with these names: (names, 384)."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    tokens = tokenizer([f"a photo of {name}" for name in names], padding=True, return_tensors="pt")
    mask = tokens["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    return F.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def _square(data: bytes) -> Tensor:
    """The middle of a photo: (3, 72, 72) uint8."""
    from PIL import Image, ImageOps

    image = ImageOps.fit(read_image(data), (DECODED, DECODED), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _seen(pixels: Tensor) -> Tensor:
    """The middle as the encoder's input: (B, 3, 72, 72) -> (B, 3, 64, 64)."""
    edge = (DECODED - SEEN) // 2
    return (pixels[..., edge : edge + SEEN, edge : edge + SEEN].float() / 255 - MEAN) / STD


def _varied(pixels: Tensor) -> Tensor:
    """A random part, mirrored or not, lighter or darker, in another hue: (B, 3, 72, 72) -> (B, 3, 64, 64)."""
    count = len(pixels)
    top, left = torch.randint(0, DECODED - SEEN + 1, (2,)).tolist()
    images = (pixels[..., top : top + SEEN, left : left + SEEN].float() / 255 - MEAN) / STD
    mirrored = torch.rand(count, 1, 1, 1) < 0.5
    images = torch.where(mirrored, images.flip(-1), images)
    return images * (1 + 0.2 * torch.randn(count, 1, 1, 1)) + 0.2 * torch.randn(count, 3, 1, 1)


if __name__ == "__main__":
    main()
