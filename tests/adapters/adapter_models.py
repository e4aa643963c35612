"""Six tiny random models, one for each layout of projections, and a call that uses all of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32


def hf_clip() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = size | {"vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 63, "bos_token_id": 62}
    config = CLIPConfig(text_config=text, vision_config=size | {"image_size": 16, "patch_size": 8}, projection_dim=16)
    return CLIPModel(config), _dual


def hf_siglip() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    from transformers import SiglipConfig, SiglipModel

    size = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = size | {"vocab_size": 64, "max_position_embeddings": 8, "projection_size": WIDTH}
    config = SiglipConfig(text_config=text, vision_config=size | {"image_size": 16, "patch_size": 8})
    return SiglipModel(config), _dual


def sentence_encoder() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    return BertModel(config), lambda model: model(input_ids=_tokens()).last_hidden_state.mean(dim=1)


def open_clip_model() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    from open_clip import CLIP

    vision = {"layers": 2, "width": WIDTH, "head_width": 16, "patch_size": 8, "image_size": 16}
    text = {"context_length": 8, "vocab_size": 64, "width": WIDTH, "heads": 2, "layers": 2}
    model = CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    return model, lambda model: torch.cat([model.encode_image(_pixels()), model.encode_text(_tokens())])


def timm_fused() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    return _timm(global_pool="token")


def pooling_head() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    return _timm(global_pool="map", class_token=False)


LAYOUTS = {
    "hf_clip": hf_clip,
    "hf_siglip": hf_siglip,
    "sentence_encoder": sentence_encoder,
    "open_clip": open_clip_model,
    "timm_fused": timm_fused,
    "pooling_head": pooling_head,
}


def build(layout: str, seed: int = 0) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """A model in evaluation mode and its call; the same weights every time."""
    torch.manual_seed(seed)
    model, call = LAYOUTS[layout]()
    return model.eval(), call


def _timm(**options: Any) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=WIDTH, depth=2, num_heads=2, num_classes=0, **options
    )
    return model, lambda model: model(_pixels(32))


def _dual(model: Any) -> Tensor:
    output = model(input_ids=_tokens(), pixel_values=_pixels())
    return torch.cat([output.image_embeds, output.text_embeds])


def _pixels(size: int = 16) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


def _tokens() -> Tensor:
    tokens = torch.randint(1, 60, (3, 8), generator=torch.Generator().manual_seed(2))
    tokens[:, -1] = 63
    return tokens
