"""The examples of "With other tools" in docs/helm.md run as they stand there, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helm_toys import toy

from leafward.data.text.tokenizer import train_tokenizer
from leafward.systems.helm.hub import save_model

PAGE = Path(__file__).resolve().parents[3] / "docs" / "helm.md"
SECTION = re.search(r"### With other tools\n(.*?)\n### ", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("peft", "trl", "torchao"):
        pytest.importorskip(tool)
    assert SECTION is not None
    examples = re.findall(r"```python\n(.*?)```", SECTION[1], flags=re.DOTALL)
    assert len(examples) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_model(toy("HELM-D", vocab_size=512).float(), train_tokenizer(["one and one is two"], 300), "runs/mine/model")
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
