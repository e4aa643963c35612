"""One surface over text and image encoders: Hugging Face CLIP and SigLIP, open_clip, sentence encoders.

Every encoder maps texts, and images where it can, to unit vectors of one space, (N, d). The text side can be trained,
the image side stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from leafward.adapters.block_scale import BlockScaleConfig
from leafward.adapters.io import CONFIG as ADAPTER_CONFIG
from leafward.adapters.io import from_pretrained, read_config
from leafward.adapters.layouts import ROLES
from leafward.adapters.low_rank import LowRankConfig
from leafward.adapters.surface import adapters, attach, merge
from leafward.data.image_files import read_image
from leafward.data.text.tokenizer import check_tokenizer
from leafward.engine.layout import is_run
from leafward.errors import DataError, UsageError, foreign, nearest, require
from leafward.files import read_json, write_json
from leafward.geometry.scalars import wide

OPEN_CLIP = "open_clip:"
OPEN_CLIP_CONFIG, OPEN_CLIP_WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
#: an image: a file, its bytes, or what PIL opened
Image = Any
Tokens = dict[str, Tensor]


class Encoder(nn.Module, ABC):
    """A pretrained model as an encoder; nothing in it is trainable until asked for."""

    has_images = False
    model: Any
    """A model of one of the libraries; its class is known at run time only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.requires_grad_(False)
        self.train()

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Padded tokens of texts, each tensor (N, L)."""

    @abstractmethod
    def _text(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Embeddings before normalisation: (N, d)."""

    @abstractmethod
    def is_text(self, name: str) -> bool:
        """Whether a parameter of `model`, by its name, belongs to the text side."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path) -> None:
        """Write the model and all that `load_encoder` needs to `directory`."""

    def prepare_images(self, images: Sequence[Image]) -> Tensor:
        """Pixels of opened images, (N, 3, H, W)."""
        raise self._no_images()

    def _image(self, pixels: Tensor) -> Tensor:
        raise self._no_images()

    def _no_images(self) -> UsageError:
        return UsageError(f"{type(self).__name__} has no image side; use a CLIP or SigLIP model for images")

    def train(self, mode: bool = True) -> Encoder:
        """Stays in evaluation mode: CLIP learns without dropout, and so the pull compares like with like."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def text_features(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Unit embeddings with their gradient, in float32 or better: tokens (N, L) -> (N, d)."""
        return normalize(wide(self._text(tokens)), dim=-1)

    def encode_text(self, texts: Sequence[str], batch_size: int = 256, *, unit: bool = True) -> Tensor:
        """Embeddings of texts, of unit length or as they are, in their order: (N, d). Equal texts are computed once."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            raise UsageError("texts: at least one is needed")
        place = {text: row for row, text in enumerate(distinct)}
        rows = torch.tensor([place[text] for text in texts], device=self.device)
        return self.encode_tokens(self.tokenize(distinct), batch_size, unit=unit)[rows]

    @torch.no_grad()
    def encode_tokens(self, tokens: Mapping[str, Tensor], batch_size: int = 256, *, unit: bool = True) -> Tensor:
        """Embeddings of tokenised texts, in their order: (N, L) -> (N, d). Texts of one length go together."""
        first = next(iter(tokens.values()))
        lengths = tokens["attention_mask"].sum(dim=1) if "attention_mask" in tokens else torch.zeros(len(first))
        order = lengths.argsort(stable=True)
        rows = []
        for part in order.split(batch_size):
            batch = trimmed({name: tensor[part] for name, tensor in tokens.items()})
            rows.append(wide(self._text({name: tensor.to(self.device) for name, tensor in batch.items()})))
        found = torch.cat(rows)[order.argsort().to(self.device)]
        return normalize(found, dim=-1) if unit else found

    @torch.no_grad()
    def encode_image(self, images: Sequence[Image], batch_size: int = 64, *, unit: bool = True) -> Tensor:
        """Embeddings of images (paths, bytes or PIL images), of unit length or as they are, in their order: (N, d)."""
        if not len(images):
            raise UsageError("images: at least one is needed")
        rows = []
        for first in range(0, len(images), batch_size):
            part = images[first : first + batch_size]
            opened = [
                read_image(image, "" if isinstance(image, str | Path) else f"image {place} of those given")
                for place, image in enumerate(part, start=first)
            ]
            rows.append(wide(self._image(self.prepare_images(opened).to(self.device, self.dtype))))
        found = torch.cat(rows)
        return normalize(found, dim=-1) if unit else found


def trimmed(tokens: Mapping[str, Tensor]) -> Tokens:
    """Tokens (N, L) without the columns at the end that are padding for all."""
    if "attention_mask" not in tokens:  # the model reads its padding
        return dict(tokens)
    used = int(tokens["attention_mask"].any(dim=0).nonzero().max()) + 1
    return {name: tensor[:, :used] for name, tensor in tokens.items()}


class HuggingFaceEncoder(Encoder):
    """CLIP, SigLIP and other dual encoders of transformers with `get_text_features` and `get_image_features`."""

    has_images = True

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any = None) -> None:
        super().__init__(model)
        self.tokenizer, self.image_processor = tokenizer, image_processor
        text = model.config.text_config
        self.max_length = int(text.max_position_embeddings)
        # SigLIP was trained on texts padded to the full length, without a mask, and reads its last position.
        self.reads_padding = "siglip" in model.config.model_type

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        tokens = _tokens(self.tokenizer, texts, "max_length" if self.reads_padding else True, self.max_length)
        return {"input_ids": tokens["input_ids"]} if self.reads_padding else tokens

    def _text(self, tokens: Mapping[str, Tensor]) -> Tensor:
        return pooled_features(self.model.get_text_features(**tokens))

    def _image(self, pixels: Tensor) -> Tensor:
        return pooled_features(self.model.get_image_features(pixel_values=pixels))

    def prepare_images(self, images: Sequence[Image]) -> Tensor:
        if self.image_processor is None:
            raise DataError("the model's directory holds no preprocessor_config.json, so images cannot be prepared")
        return self.image_processor(images=list(images), return_tensors="pt")["pixel_values"]

    def is_text(self, name: str) -> bool:
        return name.startswith(("text_model.", "text_projection."))

    def save_pretrained(self, directory: str | Path) -> None:
        _save(self.model, directory)
        for part in (self.tokenizer, self.image_processor):
            if part is not None:
                part.save_pretrained(directory)


def pooled_features(output: Any) -> Tensor:
    """The embedding: transformers 5 wraps it in an output whose item 0 is the hidden states; 4 gave it bare."""
    return output if isinstance(output, Tensor) else output.pooler_output


class SentenceEncoder(Encoder):
    """A text encoder with pooled token states, as sentence-transformers saves them."""

    def __init__(self, model: Any, tokenizer: Any, pooling: str = "mean", max_length: int = 256) -> None:
        super().__init__(model)
        if pooling not in POOLING.values():
            raise UsageError(f"pooling must be {' or '.join(POOLING.values())}, got {pooling!r}")
        self.tokenizer, self.pooling, self.max_length = tokenizer, pooling, max_length

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        return _tokens(self.tokenizer, texts, True, self.max_length)

    def _text(self, tokens: Mapping[str, Tensor]) -> Tensor:
        states = self.model(**tokens).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        mask = tokens["attention_mask"].unsqueeze(-1).bool()
        if self.pooling == "max":
            return wide(states).masked_fill(~mask, -torch.inf).amax(dim=1)
        return wide(states).masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1)

    def is_text(self, name: str) -> bool:
        return not name.startswith("pooler.")  # BERT's pooler is not on the way to the embedding

    def save_pretrained(self, directory: str | Path) -> None:
        directory = Path(directory)
        _save(self.model, directory)
        self.tokenizer.save_pretrained(directory)
        kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds)
        ]
        width = {"word_embedding_dimension": self.model.config.hidden_size}
        write_json(directory / "modules.json", modules)
        write_json(directory / "sentence_bert_config.json", {"max_seq_length": self.max_length})
        write_json(
            directory / "1_Pooling" / "config.json",
            width | {key: value == self.pooling for key, value in POOLING.items()},
        )


#: sentence-transformers' flags of the ways of pooling that are known here
POOLING = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max"}


class OpenClipEncoder(Encoder):
    """A model of open_clip: its text tower (or the transformer of `CLIP`) and its image tower."""

    has_images = True

    def __init__(self, model: Any, tokenizer: Any, transform: Any, config: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.tokenizer, self.transform, self.config = tokenizer, transform, dict(config)

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        return {"text": self.tokenizer(list(texts))}

    def _text(self, tokens: Mapping[str, Tensor]) -> Tensor:
        return self.model.encode_text(tokens["text"])

    def _image(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(pixels)

    def prepare_images(self, images: Sequence[Image]) -> Tensor:
        return torch.stack([self.transform(image) for image in images])

    def is_text(self, name: str) -> bool:
        return not name.startswith(("visual.", "logit_"))

    def save_pretrained(self, directory: str | Path) -> None:
        from safetensors.torch import save_model

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(directory / OPEN_CLIP_WEIGHTS))
        write_json(directory / OPEN_CLIP_CONFIG, self.config)
        # open_clip looks for a tokenizer's files in the directory only where the model was made with one of them.
        inner: Any = getattr(self.tokenizer, "tokenizer", None)
        if hasattr(inner, "save_pretrained"):
            inner.save_pretrained(str(directory))


def load_encoder(source: str | Path) -> Encoder:
    """An encoder from a directory or a name.

    A directory of transformers (a dual encoder, or a text model, with sentence-transformers' files or without: then
    its token states are averaged), or of open_clip; a run directory with a trained model or an adapter in it, or the
    adapter itself, which is put on the base model that it names; the name of a model on the Hugging Face hub; or
    open_clip:NAME@WEIGHTS, a file or a tag, e.g. open_clip:ViT-B-32@laion2b_s34b_b79k. What lacks weights is refused:
    open_clip and transformers would go on with random ones.
    """
    text = str(source)
    if text.startswith(OPEN_CLIP):
        name, _, weights = text.removeprefix(OPEN_CLIP).partition("@")
        if not weights and ":" not in name:  # hf-hub:ORG/NAME has weights of its own
            raise _without_weights(name)
        return _load_open_clip(name, weights or None)
    folder = Path(text)
    if folder.is_dir():
        if is_run(folder):
            for part in ("model", "adapter"):
                if (folder / part).is_dir():
                    return load_encoder(folder / part)
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            return _load_adapted(folder)
        if (folder / OPEN_CLIP_CONFIG).is_file():
            return _load_open_clip(f"local-dir:{folder}", None)
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} holds no model: there is neither config.json nor {OPEN_CLIP_CONFIG} in it")
    elif folder.is_absolute() or text.startswith("."):  # else it may be a name on the hub
        raise DataError(f"there is no folder {folder}, where a model should be")
    return _load_transformers(text)


def _load_adapted(folder: Path) -> Encoder:
    """The base model that an adapter names, with the adapter on it."""
    base = read_config(folder)["base_model"]["name"]
    if not base:
        raise DataError(f"{folder / ADAPTER_CONFIG} does not name the base model of the adapter")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise DataError(
            f"the base model {base} of the adapter in {folder} is not there; where it lies elsewhere, merge the two: "
            f"leafward export {folder} --to DIR --merged --base MODEL"
        )
    encoder = load_encoder(base)
    from_pretrained(encoder.model, folder)
    return encoder


def _load_transformers(source: str) -> Encoder:
    library = require("transformers", "lm")
    with foreign(f"cannot load the model {source}"):
        check_tokenizer(Path(source) / "tokenizer.json")
        config = library.AutoConfig.from_pretrained(source, trust_remote_code=False)
        # use_safetensors: a model somebody hands us is never unpickled
        model, found = library.AutoModel.from_pretrained(
            source, use_safetensors=True, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        tokenizer = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if hasattr(config, "vision_config") or config.model_type.endswith("_text_model"):
        if not hasattr(model, "get_text_features"):
            raise DataError(f"{source} is a {config.model_type}; give a whole dual encoder, such as CLIP or SigLIP")
        processor = None
        if _read(source, "preprocessor_config.json") or _read(source, "processor_config.json"):
            processor = library.AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        refuse_missing(source, found["missing_keys"])
        return HuggingFaceEncoder(model, tokenizer, processor)
    # Many text models come without a pooler, which a sentence encoder does not use: it pools the token states.
    refuse_missing(source, (name for name in found["missing_keys"] if not name.startswith("pooler.")))
    settings = _read(source, "sentence_bert_config.json") or {}
    longest = int(getattr(config, "max_position_embeddings", 512))
    length = min(int(settings.get("max_seq_length") or longest), longest, tokenizer.model_max_length)
    return SentenceEncoder(model, tokenizer, _pooling(source), length)


def refuse_missing(source: str | Path, missing: Iterable[str]) -> None:
    """Refuse a model whose file lacks weights: transformers would fill them with random numbers."""
    names = sorted(missing)
    if names:
        raise DataError(f"{source}: {len(names)} weights of the model are not in its files, for instance {names[0]!r}")


def _without_weights(name: str) -> UsageError:
    """open_clip:NAME alone is a random model; say what there is."""
    library = require("open_clip", "vision")
    if name not in library.list_models():
        return UsageError(f"open_clip has no model {name!r}; {nearest(name, library.list_models())}")
    tags = ", ".join(library.list_pretrained_tags_by_model(name))
    known = f"a tag ({tags}) or a file" if tags else "a file (open_clip has no pretrained weights of this model)"
    return UsageError(f"open_clip:{name} names no weights: give open_clip:{name}@WEIGHTS, where WEIGHTS is {known}")


def _pooling(source: str) -> str:
    """How a sentence-transformers directory pools; a plain text model's states are averaged."""
    modules = _read(source, "modules.json")
    if modules is None:
        return "mean"
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise DataError(f"{source}: modules.json names a {kind} module, which is not supported")
    folder = next((module["path"] for module in modules if module["type"].endswith(".Pooling")), None)
    settings = _read(source, f"{folder}/config.json") if folder is not None else None
    if settings is None:
        return "mean"
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in POOLING:
        raise DataError(f"{source}: its pooling must be one of {', '.join(POOLING)}, got {', '.join(chosen) or 'none'}")
    return POOLING[chosen[0]]


def _load_open_clip(name: str, weights: str | None) -> Encoder:
    library = require("open_clip", "vision")
    with foreign(f"cannot load the open_clip model {name}"):
        model, _, transform = library.create_model_and_transforms(name, pretrained=weights, require_pretrained=True)
        tokenizer = library.get_tokenizer(name)
    folder = name.removeprefix("local-dir:")
    if folder != name:
        config = read_json(Path(folder) / OPEN_CLIP_CONFIG)
    else:
        config = {
            "model_cfg": library.get_model_config(name),
            "preprocess_cfg": library.get_model_preprocess_cfg(model),
        }
    return OpenClipEncoder(model, tokenizer, transform, config)


def _read(source: str, name: str) -> Any:
    """A JSON file of a model's directory or hub repository; None where there is none."""
    from transformers.utils import cached_file

    found = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    if found is None:
        return None
    try:
        return read_json(found)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def _tokens(tokenizer: Any, texts: Sequence[str], padding: Any, max_length: int) -> Tokens:
    found = tokenizer(list(texts), padding=padding, truncation=True, max_length=max_length, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}


def _save(model: Any, directory: str | Path) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)


def make_trainable(
    encoder: Encoder,
    how: Literal["full", "lora", "blocks"] = "full",
    *,
    rank: int = 16,
    block_size: int = 32,
    seed: int = 0,
    base_model: str | None = None,
) -> None:
    """Let the text side of `encoder` learn, and nothing else: all of it, or adapters in its attention and MLP layers.

    lora: low-rank updates of the given rank, α = 2r, drawn with `seed`; blocks: block-diagonal scalings W Sᵀ of the
    query, key and value projections. `merge_adapters` writes either into the weights. `base_model` is what a saved
    adapter calls the model.
    """
    side: Literal["text", "both"] = "text" if encoder.has_images else "both"
    if how == "full":
        for name, parameter in encoder.model.named_parameters():
            parameter.requires_grad_(encoder.is_text(name))
    elif how == "lora":
        config = LowRankConfig(rank=rank, alpha=2.0 * rank, targets=ROLES, encoder=side, seed=seed)
        attach(encoder.model, config, base_model=base_model)
    elif how == "blocks":
        attach(encoder.model, BlockScaleConfig(block_size=block_size, encoder=side), base_model=base_model)
    else:
        raise UsageError(f"how must be full, lora or blocks, got {how!r}")
    encoder.train()


def merge_adapters(encoder: Encoder) -> None:
    """Write what `make_trainable` attached into the weights; the model then has its own layout again."""
    if adapters(encoder.model):
        merge(encoder.model)
    encoder.requires_grad_(False)
