"""A small dual encoder for the evidence on CLIP adapters: a Vision Transformer trained here, MiniLM as the text tower.

It is a Hugging Face CLIP model in all but its text tower, so that adapters, scores and segmentation take it as they
take CLIP. The image tower learns on a few thousand small pictures: 100 ImageNet classes by their names and COCO photos
by their captions, with the text tower locked. Its numbers compare methods and say nothing about CLIP itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, CLIPConfig, CLIPModel

from _dual_data import TRAIN, VALIDATION, crops, decoded, load, normalised
from _steps import Steps
from leafward.encoders.encoder import HuggingFaceEncoder, SentenceEncoder, load_encoder
from leafward.files import write_json
from leafward.systems.hyperclip.config import Adapt
from leafward.systems.hyperclip.methods import adapt as adapt_model

WIDTH, LAYERS, PATCH, SIDE, SPACE = 256, 8, 8, 64, 256
"""Image tower: width, layers, patch, side of the pictures it learned on; width of the common space."""
BLOCK, OFT_BLOCK, RANK = 64, 128, 32
"""Free blocks of 64, orthogonal ones of 128 and rank 32 have nearly as many parameters."""
NORM = 3.0
"""Mean norm of the features of either side once trained: where a Lorentz distance is neither flat nor all radius."""
NAMED, TOLD = 192, 64
"""Pictures with names and with captions in a batch of `pretrain`."""
WEIGHTS = "model.safetensors"


class MiniClip(CLIPModel):
    """CLIP's image tower and projections, with a BERT-like text tower whose states are averaged."""

    def __init__(self, config: CLIPConfig, text: nn.Module) -> None:
        super().__init__(config)
        self.text_model = text

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # pyright: ignore
        return self.text_projection(pooled(self.text_model, input_ids, attention_mask))


def pooled(text: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    # For every pair of places: of a mask of places the library would look at the values at every step.
    pairs = attention_mask[:, None, None, :].bool().expand(-1, 1, input_ids.shape[1], -1)
    states = text(input_ids=input_ids, attention_mask=pairs).last_hidden_state
    mask = attention_mask.unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


def untrained(minilm: Path) -> HuggingFaceEncoder:
    text = AutoModel.from_pretrained(minilm, use_safetensors=True, dtype=torch.float32)
    width = text.config.hidden_size
    small = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 4}
    small |= {"vocab_size": 8, "bos_token_id": None, "eos_token_id": None}
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // 64,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = CLIPConfig(text_config=small, vision_config=vision, projection_dim=SPACE)
    return HuggingFaceEncoder(MiniClip(config, text), AutoTokenizer.from_pretrained(minilm))


def open_encoder(folder: Path, minilm: Path, device: str) -> HuggingFaceEncoder:
    """What `pretrain` wrote to `folder`."""
    encoder = untrained(minilm)
    encoder.model.load_state_dict(load_file(folder / WEIGHTS))
    return encoder.to(device)


def adapt(model: nn.Module, method: str, seed: int) -> int:
    """Leave trainable what a method trains; how many parameters that is."""
    settings = Adapt(method=method, block_size=OFT_BLOCK if method == "orthogonal" else BLOCK, rank=RANK)
    adapt_model(model, settings, seed)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def pretrain(
    data: Path,
    minilm: Path,
    out: Path,
    device: str,
    steps: int,
    seconds: float,
    most: int | None = None,
    record: bool = False,
) -> dict[str, Any]:
    """Train the image tower and both projections, on the first `most` of each set; weights and scores go to `out`."""
    torch.manual_seed(0)
    encoder = untrained(minilm).to(device)
    model: MiniClip = encoder.model
    named, told = (load(data, name).few(most) for name in ("tiny_imagenet", "hierarcaps"))
    assert told.captions is not None
    pictures = decoded(named.images, (SIDE, SIDE), device)
    photos = decoded(told.images, (96, 96), device)
    labels = torch.from_numpy(named.labels).to(device)
    rows, held = (torch.from_numpy(named.rows(part)).to(device) for part in (TRAIN, VALIDATION))
    names = sentences(encoder, [f"a photo of a {name}." for name in named.names])
    captions = sentences(encoder, [str(text) for text in told.captions.flatten()]).unflatten(0, told.captions.shape)
    for part in (model.vision_model, model.visual_projection, model.text_projection):
        part.requires_grad_(True)
    scale = nn.Parameter(torch.tensor(math.log(10.0), device=device))
    everyone = torch.arange(len(photos), device=device)

    def batch(_: int) -> tuple[Tensor, ...]:
        one = rows[torch.randint(len(rows), (NAMED,), device=device)]
        two = everyone[torch.randperm(len(photos), device=device)[:TOLD]]
        level = torch.randint(captions.shape[1], (len(two),), device=device)
        pixels = torch.cat([crops(pictures[one], SIDE, 0.5)[0], crops(photos[two], SIDE, 0.5)[0]])
        return pixels, labels[one], captions[two, level]

    def loss(pixels: Tensor, label: Tensor, told: Tensor) -> Tensor:
        image = F.normalize(encoder._image(pixels).float(), dim=-1)
        text = F.normalize(model.text_projection(torch.cat([names, told])).float(), dim=-1)
        logits = scale.exp().clamp(max=100.0) * image @ text.mT
        class_part = F.cross_entropy(logits[: len(label), : len(names)], label, label_smoothing=0.1)
        pairs = logits[len(label) :, len(names) :]
        own = torch.arange(len(told), device=device)
        return class_part + 0.25 * (F.cross_entropy(pairs, own) + F.cross_entropy(pairs.mT, own))

    groups = [{"params": [p for p in model.parameters() if p.requires_grad] + [scale], "lr": 1e-3}]
    taken = descend(batch, loss, groups, steps, device, seconds=seconds, weight_decay=0.05, record=record)
    with torch.no_grad():
        image = encoder._image(normalised(pictures[held])).float()
        text = model.text_projection(names)
        guess = (F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).mT).argmax(dim=1)
        # The cosine does not tell how long features are to be: both sides get the same mean norm.
        for projection, features in ((model.visual_projection, image), (model.text_projection, text)):
            projection.weight *= NORM / features.norm(dim=1).mean()
    found = {
        "steps": taken,
        "pictures": len(rows) + len(photos),
        "classes": len(names),
        "held_out_accuracy": 100.0 * float((guess == labels[held]).float().mean()),
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, out / WEIGHTS)
    write_json(out / "pretraining.json", found)
    return found


@torch.no_grad()
def sentences(encoder: HuggingFaceEncoder, texts: Sequence[str]) -> Tensor:
    """MiniLM's averaged states, before any projection: (N, 384)."""
    tokens = encoder.tokenize(texts)
    parts = zip(*(tensor.split(256) for tensor in tokens.values()), strict=True)
    return torch.cat([pooled(encoder.model.text_model, *(x.to(encoder.device) for x in part)) for part in parts])


def open_text(minilm: Path, device: str) -> SentenceEncoder:
    encoder = load_encoder(minilm)
    assert isinstance(encoder, SentenceEncoder)
    return encoder.to(device)


def descend(
    batch: Callable[[int], tuple[Tensor, ...]],
    loss: Callable[..., Tensor],
    groups: list[dict[str, Any]],
    steps: int,
    device: str,
    *,
    seconds: float = math.inf,
    weight_decay: float = 1e-4,
    record: bool = False,
) -> int:
    """AdamW with a tenth of warm-up and a cosine to zero, in bfloat16 on a GPU; how many steps were taken.

    `loss` is a function of what `batch` gives for a step; with `record` it is recorded (see `Steps`). The schedule
    follows the steps or the time, whichever is further on, and so ends well when the time runs out.
    """

    def mixed(*tensors: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return loss(*tensors)

    take = Steps(mixed, groups, weight_decay=weight_decay, betas=(0.9, 0.98), record=record)
    began = time.perf_counter()
    for step in range(steps):
        done = max(step / steps, (time.perf_counter() - began) / seconds)
        if done >= 1.0:
            return step
        factor = min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1.0 + math.cos(math.pi * done))
        take(factor, *batch(step))
    return steps
