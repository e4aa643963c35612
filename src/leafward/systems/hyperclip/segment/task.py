"""Open-vocabulary segmentation: dense CLIP features, a cost volume against any list of words, and its aggregation.

model = Segmenter(load_encoder("openai/clip-vit-base-patch16"))
labels = segment(model, image, ["cat", "grass", "sky"])      # (H, W) places in the list
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.data.scenes import IGNORED, SceneSets, check, confusion, score
from leafward.encoders.encoder import Encoder, HuggingFaceEncoder
from leafward.encoders.scores import Score, similarity
from leafward.engine import Loss
from leafward.errors import UsageError, need
from leafward.geometry.scalars import wide
from leafward.systems.hyperclip.segment.cost_aggregation import CostAggregation

TEMPLATES = ("a photo of a {} in the scene.",)
MOST_CLASSES = 256
"""Classes that are aggregated at inference; of more, those with the highest cosine anywhere in the image."""
LEFT_OUT = -100.0  # logit of the others
SHALLOW = (2 / 3, 1 / 3)  # depths of the maps that guide the two up-sampling stages, deeper first


class Segmenter(nn.Module):
    """A CLIP model and cost aggregation: CLIP's normalised pixels (B, 3, S, S) and words -> logits (B, T, s, s)."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        channels: int = 64,
        window: int = 6,
        score: Score = "cosine",
        c: float = 0.1,
        radius_weight: float = 0.1,
        templates: Sequence[str] = TEMPLATES,
    ) -> None:
        super().__init__()
        kind = getattr(getattr(encoder.model, "config", None), "model_type", type(encoder.model).__name__)
        if not isinstance(encoder, HuggingFaceEncoder) or kind != "clip":
            raise UsageError(f"dense features need a Hugging Face CLIP model, not {kind!r}")
        if score not in get_args(Score):
            raise UsageError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}")
        if not templates or any("{}" not in template for template in templates):
            raise UsageError(f"templates must be texts with {{}} for the word, got {templates!r}")
        self.encoder, self.templates = encoder, tuple(templates)
        self.cost_options: dict[str, Any] = {"score": score, "c": c, "weight": radius_weight}
        config = encoder.model.config
        self.patch = int(config.vision_config.patch_size)
        inner, width = config.vision_config.hidden_size, config.projection_dim
        self.decoder = CostAggregation(inner, width, [inner, inner], channels, window=window)
        self._tokens: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def forward(self, pixels: Tensor, words: Sequence[str] | Tensor) -> Tensor:
        """`words` may be their features (T, d), which `text` gives, where the same words are looked for often."""
        features, maps = dense_features(self.encoder.model, pixels)
        text = words if isinstance(words, Tensor) else self.text(words)
        # (B·H·W, d) against (T, d)
        cost = similarity(features.flatten(0, 2), text, **self.cost_options).unflatten(0, features.shape[:3])
        cost = cost.permute(0, 3, 1, 2)
        appearance, *shallow = maps
        if self.training or len(words) <= MOST_CLASSES:
            return self.decoder(cost, appearance, text.expand(len(cost), -1, -1), shallow)
        chosen = cost.flatten(2).amax(dim=2).topk(MOST_CLASSES, dim=1).indices  # (B, k)
        part = cost.gather(1, chosen[..., None, None].expand(-1, -1, *cost.shape[2:]))
        logits = self.decoder(part, appearance, text[chosen], shallow)
        whole = logits.new_full((len(logits), len(words), *logits.shape[2:]), LEFT_OUT)
        return whole.scatter(1, chosen[..., None, None].expand_as(logits), logits)

    def text(self, words: Sequence[str]) -> Tensor:
        """Features of words, the mean over the templates: -> (T, d)."""
        key = tuple(words)
        # A single text would be taken letter by letter.
        need(bool(key) and not isinstance(words, str), "words", "a list with at least one word", words)
        if key not in self._tokens:  # the list is the same at every step of a training
            self._tokens = {
                key: self.encoder.tokenize([t.replace("{}", word) for word in words for t in self.templates])
            }
        tokens = {name: tensor.to(self.encoder.device) for name, tensor in self._tokens[key].items()}
        features = wide(self.encoder._text(tokens)).unflatten(0, (len(words), len(self.templates)))
        if len(self.templates) == 1:
            return features.squeeze(1)  # with its norm
        return F.normalize(features, dim=-1).mean(dim=1)

    def prepare(self, image: Tensor) -> Tensor:
        """An image (3, H, W) of bytes as CLIP's normalised pixels."""
        processor = getattr(self.encoder, "image_processor", None)
        mean = getattr(processor, "image_mean", None) or (0.48145466, 0.4578275, 0.40821073)
        std = getattr(processor, "image_std", None) or (0.26862954, 0.26130258, 0.27577711)
        as_column = [torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (mean, std)]
        return (image.float() / 255.0 - as_column[0]) / as_column[1]


def dense_features(model: Any, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A feature for each patch, and maps of the image: (B, 3, S, S) -> (B, h, w, d), three of (B, inner, h, w).

    The last block is reduced to its value path (CAT-Seg): out_proj(v_proj(x)) with the class token as the residual, so
    that a patch speaks for itself. The maps are the input of that block and the states at two shallower depths.
    """
    vision = model.vision_model
    patch = int(vision.config.patch_size)
    if pixels.shape[-1] % patch or pixels.shape[-2] % patch:
        raise UsageError(f"the sides of images must be multiples of the patch size {patch}, got {tuple(pixels.shape)}")
    grid = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    states = vision.pre_layrnorm(vision.embeddings(pixels, interpolate_pos_encoding=True))
    layers = vision.encoder.layers
    kept = [states]  # the states after 0, 1, … layers
    for layer in layers[:-1]:
        kept.append(layer(kept[-1], None))
    states = kept[-1]
    depths = [min(round(share * len(layers)), len(kept) - 1) for share in SHALLOW]
    maps = [x[:, 1:].mT.unflatten(-1, grid) for x in (states, *(kept[depth] for depth in depths))]
    last = layers[-1]
    value = last.self_attn.out_proj(last.self_attn.v_proj(last.layer_norm1(states)))
    out = value + states[:, :1]
    out = out + last.mlp(last.layer_norm2(out))
    features = model.visual_projection(vision.post_layernorm(out[:, 1:]))
    return wide(features.unflatten(1, grid)), maps


def mask_loss(logits: Tensor, masks: Tensor) -> Loss:
    """Binary cross-entropy of every class over the pixels that count: (B, T, s, s), (B, H, W) -> sums.

    Ignored pixels are masked out; the published loss takes them as pixels of no class.
    """
    logits = F.interpolate(wide(logits), size=masks.shape[-2:], mode="bilinear", align_corners=False)
    valid = masks != IGNORED
    own = logits.gather(1, torch.where(valid, masks, 0).long().unsqueeze(1)).squeeze(1)
    # softplus(l) − y l, summed over classes: the targets y, as large as the logits, need not be made.
    entropy = (F.softplus(logits).sum(dim=1) - own) / logits.shape[1]
    right = (logits.argmax(dim=1) == masks) & valid
    return Loss(torch.where(valid, entropy, 0.0).sum(), valid.sum(), {"pixel_accuracy": right.sum()})


@torch.no_grad()
def probabilities(model: Segmenter, image: Tensor, words: Sequence[str] | Tensor, size: int) -> Tensor:
    """Sigmoids for every pixel of an image of bytes (3, H, W) -> (T, H, W): windows of `size` over the image at 5/3 of
    it, stride 2/3, averaged where they overlap, and their mean with one view of the whole.

    Texts are encoded once for all views, or not at all where `words` are their features (T, d)."""
    fits = isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3 and len(image) == 3
    need(fits, "image", "bytes (3, H, W)", tuple(image.shape) if isinstance(image, Tensor) else image)
    pixels = model.prepare(image).to(model.encoder.device, model.encoder.dtype).unsqueeze(0)
    text = words if isinstance(words, Tensor) else model.text(words)

    def look(x: Tensor) -> Tensor:
        return F.interpolate(wide(model(x, text)), size=x.shape[-2:], mode="bilinear", align_corners=False).sigmoid()

    def resized(x: Tensor, side: int) -> Tensor:
        return F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False, antialias=True)

    large = max(size, 5 * size // 3)
    view = resized(pixels, large)
    starts = sorted({*range(0, large - size, 2 * size // 3), large - size})
    total, count = view.new_zeros(1, len(text), large, large), view.new_zeros(large, large)
    for top in starts:
        for left in starts:
            rows, columns = slice(top, top + size), slice(left, left + size)
            total[:, :, rows, columns] += look(view[:, :, rows, columns])
            count[rows, columns] += 1
    whole = F.interpolate(look(resized(pixels, size)), size=(large, large), mode="bilinear", align_corners=False)
    mean = 0.5 * (total / count + whole)
    return F.interpolate(mean, size=image.shape[-2:], mode="bilinear", align_corners=False)[0]


def segment(
    model: Segmenter, image: Tensor, words: Sequence[str] | Tensor, size: int = 384, background: float = 0.0
) -> Tensor:
    """The place in `words`, or in their features, of every pixel of an image of bytes: (3, H, W) -> (H, W); −1 where
    no word reaches the probability `background`."""
    model.eval()
    best, place = probabilities(model, image, words, size).max(dim=0)
    return torch.where(best >= background, place, -1).cpu()


class OpenVocabularyTask:
    """Crops of scenes and their masks, for the engine; mIoU over the held-out scenes."""

    unused_parameters = True  # q and k of the last block are not on the value path
    monitor, mode = "miou", "max"

    def __init__(self, scenes: SceneSets, size: int, most_scored: int | None = None) -> None:
        self.scenes, self.size, self.most_scored = scenes, size, most_scored
        self.words = [name.replace("_", " ") for name in scenes.classes]
        self._prepare: Any = None
        self.table: Tensor | None = None
        """Of the last evaluation."""

    def bind(self, model: Segmenter) -> OpenVocabularyTask:
        """Take the normalisation of a model's pixels."""
        self._prepare = model.prepare
        return self

    def check(self) -> None:
        """Look at all masks before training starts; whatever is wrong is reported by the name of its file."""
        check(self.scenes.train, "training scenes", complete=False)
        check(self.scenes.held_out, "held-out scenes", complete=False)

    @property
    def dataset(self) -> OpenVocabularyTask:
        return self

    def __len__(self) -> int:
        return len(self.scenes.train)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A random square of half to the whole shorter side, mirrored now and then, at the training size."""
        image = as_bytes(self.scenes.train.image(index))
        mask = torch.from_numpy(self.scenes.train.mask(index)).unsqueeze(0)
        shorter = min(image.shape[-2:])
        side = int(shorter * float(torch.empty(()).uniform_(0.5, 1.0)))
        top, left = (int(torch.randint(0, full - side + 1, ())) for full in image.shape[-2:])
        image, mask = (x[:, top : top + side, left : left + side] for x in (image, mask))
        if torch.rand(()) < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        to = (self.size, self.size)
        pixels = F.interpolate(image[None].float(), size=to, mode="bilinear", align_corners=False, antialias=True)[0]
        labels = F.interpolate(mask[None].float(), size=to, mode="nearest")[0, 0].long()
        return self._prepare(pixels), labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        pixels, masks = batch
        return mask_loss(model(pixels, self.words), masks)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Segmenter)
        # Not under autocast: as the run is scored afterwards, and by leafward evaluate.
        with torch.autocast(model.encoder.device.type, enabled=False):
            self.table = confusions(model, self.scenes, self.size, self.most_scored)
        return score(self.table)


def measure(model: Segmenter, scenes: SceneSets, size: int, most: int | None = None) -> dict[str, float]:
    """mIoU and pixel accuracy over the (first `most`) held-out scenes."""
    return score(confusions(model, scenes, size, most))


def confusions(model: Segmenter, scenes: SceneSets, size: int, most: int | None = None) -> Tensor:
    """(T, T) pixel counts over the (first `most`) held-out scenes, truth in rows."""
    with torch.no_grad():
        text = model.text([name.replace("_", " ") for name in scenes.classes])
    table = torch.zeros(len(text), len(text), dtype=torch.int64)
    for index in range(min(len(scenes.held_out), most or len(scenes.held_out))):
        guess = segment(model, as_bytes(scenes.held_out.image(index)), text, size)
        table += confusion(guess, torch.from_numpy(scenes.held_out.mask(index)), len(text))
    return table


def class_ious(table: Tensor) -> list[float | None]:
    """The IoU of each class from a table of pixel counts (T, T); None for a class that is nowhere."""
    hits = table.diagonal().double()
    union = table.sum(0) + table.sum(1) - table.diagonal()
    return [float(hit / all_) if all_ else None for hit, all_ in zip(hits, union, strict=True)]


def as_bytes(image: Any) -> Tensor:
    """A PIL image as (3, H, W) of bytes."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
