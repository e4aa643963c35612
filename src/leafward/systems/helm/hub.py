"""A trained model as a Hugging Face folder, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.utils import logging

from leafward.data.text.folders import replacing_folder
from leafward.data.text.tokenizer import load_tokenizer, size
from leafward.engine import Cluster
from leafward.engine.hashes import check_sums, write_sums
from leafward.errors import DataError
from leafward.files import read_record
from leafward.systems.helm import HelmConfig, HelmForCausalLM

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Roles as words between bars, for tokenizers that bring no template; what the assistant says is marked, so that a
trainer can learn from that alone."""


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers shows a bar for every file; ours says what is going on."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_model(model: HelmForCausalLM, tokenizer: Any, folder: str | Path, cluster: Cluster | None = None) -> None:
    """Write weights, configuration and tokenizer to `folder` in one step; call it on every rank."""
    cluster = cluster or Cluster()
    # Sharded parameters are gathered, on all ranks together; the full tensors arrive on the first.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options) if cluster.world > 1 else model.state_dict()

    def write() -> None:
        with replacing_folder(folder) as partial, _without_bars():
            model.save_pretrained(partial, state_dict=state)
            tokenizer.model_max_length = model.config.max_position_embeddings
            # So that `generate` goes on from the end of every text of a batch; only what is in init_kwargs is saved.
            tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            if tokenizer.chat_template is None:
                tokenizer.chat_template = CHAT_TEMPLATE
            tokenizer.save_pretrained(partial)
            write_sums(partial, "*.safetensors")  # the rest may be edited, as people do

    cluster.on_main(write)


def load_model(folder: str | Path, device: torch.device | str = "cpu") -> tuple[HelmForCausalLM, Any]:
    """The model of a folder, ready to be used, and its tokenizer."""
    folder = Path(folder)
    try:
        kind = read_record(folder / "config.json").get("model_type")
    except DataError as error:
        raise DataError(f"{folder} does not hold a model: {error}") from error
    if kind != HelmConfig.model_type:
        raise DataError(f"{folder} holds a model of type {kind!r}, not {HelmConfig.model_type!r}")
    check_sums(folder)
    try:
        with _without_bars():  # safetensors: never a pickle
            loaded = HelmForCausalLM.from_pretrained(folder, use_safetensors=True, output_loading_info=True)
        model, found = loaded  # pyright: ignore[reportGeneralTypeIssues]
    except Exception as error:  # transformers raises all kinds
        raise DataError(f"cannot load the model in {folder}: {error}") from error
    for names, wrong in (("missing_keys", "misses"), ("unexpected_keys", "has too much, for instance")):
        if found[names]:  # transformers goes on with random weights, and only writes a warning
            first = min(found[names])
            raise DataError(f"{folder} does not hold the weights that its config.json describes: it {wrong} {first!r}")
    tokenizer = load_tokenizer(folder)
    if size(tokenizer) > model.config.vocab_size:
        raise DataError(
            f"the tokenizer in {folder} has {size(tokenizer)} tokens, more than the model's {model.config.vocab_size}"
        )
    return model.to(device).eval(), tokenizer
