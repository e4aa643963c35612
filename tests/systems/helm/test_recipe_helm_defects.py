"""What goes wrong in HELM's published training and scoring scripts, beside the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leafward.cli import train
from leafward.engine import parameter_groups
from leafward.errors import UsageError
from leafward.systems.helm import HelmConfig, HelmForCausalLM


def test_the_word_false_does_not_switch_a_flag_on() -> None:
    """Published: flags are read by bool(), and bool("False") is true."""
    assert bool("False")
    words = ["helm", "--data", "my.txt"]
    assert train.parse(words).config.learn_curvatures is False
    assert train.parse([*words, "--learn-curvatures"]).config.learn_curvatures is True
    for value in (["--learn-curvatures", "False"], ["--learn-curvatures=False"]):
        with pytest.raises(UsageError):
            train.parse([*words, *value])


class ManifoldParameter(nn.Parameter):
    """A parameter with a type of its own, by which the published script chooses what an optimiser gets."""


@pytest.mark.parametrize("preset", ["helm-d-tiny", "helm-mice-tiny"])
def test_every_trainable_parameter_is_in_the_optimiser_once(preset: str) -> None:
    """Published: with that flag on, parameters of the manifold, the token embedding, are in no optimiser."""
    model = HelmForCausalLM(HelmConfig.preset(preset, learn_curvatures="mice" in preset))
    model.model.embed.weight = ManifoldParameter(model.model.embed.weight.detach())  # pyright: ignore
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = [id(parameter) for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert sorted(held) == sorted(names)
    left = {name for name, p in model.named_parameters() if not isinstance(p, ManifoldParameter)}
    assert set(names.values()) - left == {"model.embed.weight"}


def test_decay_spares_temperatures_residual_weights_and_curvatures() -> None:
    """Published: a filter of names that knows none of the three, so that decay pulls each of them to zero."""
    model = HelmForCausalLM(HelmConfig.preset("helm-mice-tiny", learn_curvatures=True))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1))
    for end in ("log_scale", "log_weight", "curvature.theta"):
        assert any(name.endswith(end) for name in plain), end
        assert not any(name.endswith(end) for name in decayed), end


def test_the_harness_shows_the_model_the_prompt_as_it_is(tmp_path: Path) -> None:
    """Published: a full stop is appended to every context that does not end in one, so that "Answer:" is "Answer:."."""
    pytest.importorskip("lm_eval")
    from leafward.data.text import prepare
    from leafward.systems.helm import run_tasks

    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n + 1}."}) + "\n" for n in range(20)))
    corpus = prepare(tmp_path / "data.jsonl", tmp_path / "cache", vocab_size=280, validation=0.2)
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps({"question": "2 and 2? Answer:", "choices": [" 4", " 5"]}) + "\n")
    (folder / "sum.yaml").write_text(
        f"""task: sum
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder / "rows.jsonl"}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: 0
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), corpus.tokenizer.eos_token_id)
    model = HelmForCausalLM(HelmConfig.preset("helm-d-tiny", vocab_size=320, **ends)).eval()
    seen: list[str] = []

    def read(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        assert isinstance(tokens, torch.Tensor)
        seen.extend(corpus.tokenizer.decode(row, skip_special_tokens=True) for row in tokens)

    model.register_forward_pre_hook(read, with_kwargs=True)
    run_tasks(model, corpus.tokenizer, folder=folder)
    assert seen
    assert all(text.startswith("2 and 2? Answer:") for text in seen)
    assert not any("Answer:." in text for text in seen)
