"""What the tests of recipes share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def evaluation_shown() -> Callable[[Path, Path], tuple[dict[str, Any], str]]:
    """Reads an evaluation's JSON and the text of its page, which must show every headline number of it, with its
    interval and its twin, the command and the environment."""

    def read(record: Path, page: Path) -> tuple[dict[str, Any], str]:
        found = json.loads(record.read_text(encoding="utf-8"))
        html = page.read_text(encoding="utf-8")
        blocks = [_text(block) for block in re.findall(r"<dt>.*?</div>", html, flags=re.DOTALL)]
        assert len(blocks) == len(found["headline"]) > 0
        for number, block in zip(found["headline"], blocks, strict=True):
            assert block.startswith(number["name"])
            for value in (
                number["value"],
                number["twin"],
                *(number["interval"] or ()),
                *(number["twin_interval"] or ()),
            ):
                assert value is None or _shown(value, block), (value, block)
        text = _text(html)
        assert "How it was run" in text
        assert re.search(r"Environment.*python", text)
        return found, text

    return read


def _text(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def _shown(value: float, text: str) -> bool:
    """Whether some number in `text` is `value`, rounded to the digits that are shown."""
    written = [each.replace("−", "-").replace(",", "") for each in re.findall(r"[−-]?\d[\d,]*(?:\.\d+)?", text)]
    return any(abs(float(each) - value) <= 0.5000001 * 10.0 ** -len(each.partition(".")[2]) for each in written)
