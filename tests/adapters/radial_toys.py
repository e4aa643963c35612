"""Directories of tiny random encoders, saved as their libraries save them, and captions to go with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = "animal dog cat puppy kitten vehicle car truck bus food pizza bread a small red on the grass table photo of"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tokenizer(length: int = 16) -> Any:
    """A tokenizer of whole words that puts [CLS] and [SEP] around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *WORDS.split()))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=length, bos_token="[CLS]", eos_token="[SEP]", **names
    )


SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY = len(SPECIAL) + len(WORDS.split())
TEXT = SIZE | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3}


def sentence(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    sizes = SIZE | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
    BertModel(BertConfig(**sizes, initializer_range=0.3)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    vision = SIZE | {"image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=TEXT, vision_config=vision, projection_dim=24)).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def siglip(folder: Path) -> Path:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    vision = SIZE | {"image_size": 16, "patch_size": 8}
    text = TEXT | {"projection_size": 32}
    SiglipModel(SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def open_clip(folder: Path) -> Path:
    import json

    from open_clip import CLIP
    from safetensors.torch import save_model

    config = {
        "embed_dim": 24,
        "vision_cfg": {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    folder.mkdir(parents=True)
    save_model(CLIP(**config), str(folder / "open_clip_model.safetensors"))
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    return folder


KINDS = {"sentence": sentence, "clip": clip, "siglip": siglip, "open_clip": open_clip}


def make(kind: str, folder: Path) -> Path:
    """The directory of a tiny encoder; the same weights every time."""
    torch.manual_seed(0)
    return KINDS[kind](folder / kind)


CHAINS = [
    (["animal", "dog", "a small dog on the grass"], ["vehicle", "car", "a red car"], "1.jpg"),
    (["animal", "cat", "a cat on the table"], ["food", "bread", "a red bus"], "2.jpg"),
    (["vehicle", "car", "a small red car on the grass"], ["animal", "dog", "pizza on the table"], "3.jpg"),
    (["vehicle", "bus", "a red bus"], ["food", "pizza", "a dog on the grass"], "4.jpg"),
    (["food", "pizza", "pizza on the table"], ["vehicle", "truck", "a cat on the grass"], "5.jpg"),
    (["food", "bread", "a small bread on the table"], ["animal", "puppy", "a red truck"], "6.jpg"),
]
"""(texts, negatives, image): three levels of three kinds of things."""
