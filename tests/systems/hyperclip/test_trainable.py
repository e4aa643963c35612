"""A trainable adapter is one file and one line of the registry: the rest follows from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from leafward.adapters import adapters
from leafward.adapters.registry import METHODS, load
from leafward.adapters.surface import AdapterConfig
from leafward.encoders import load_encoder
from leafward.errors import UsageError
from leafward.systems.hyperclip.config import Adapt, MethodName, trainable
from leafward.systems.hyperclip.methods import adapt

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "adapters"))
from radial_toys import make

ADAPTER = '''
"""W + a b: a change of rank one."""
from typing import ClassVar

import torch

from leafward.adapters.layouts import Encoder, find_sites
from leafward.adapters.surface import AdapterConfig, WeightAdapter


class RankOneConfig(AdapterConfig, frozen=True):
    method: ClassVar[str] = "rank_one"
    encoder: Encoder = "both"
    seed: int = 0

    def build(self, model):
        return RankOne(self, find_sites(model, ("v",), self.encoder))


class RankOne(WeightAdapter):
    def __init__(self, config, sites):
        super().__init__(config, sites)
        generator = torch.Generator().manual_seed(config.seed)
        self.a, self.b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for site in sites:
            self.a[self.key(site)] = torch.nn.Parameter(torch.zeros(site.stop - site.start, 1))
            self.b[self.key(site)] = torch.nn.Parameter(torch.randn(1, site.width, generator=generator))

    def key(self, site):
        return site.name.replace(".", "/")

    def effective(self, site, weight):
        a, b = self.a[self.key(site)], self.b[self.key(site)]
        return weight + a.to(weight.dtype) @ b.to(weight.dtype)
'''
LINE = 'METHODS["rank_one"] = Method("rank_one:RankOneConfig", ("rank-one",))'
PROGRAM = f"""
import sys

from leafward.adapters.registry import METHODS, Method

{LINE}
from leafward.cli.dispatch import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("clip", tmp_path_factory.mktemp("trainable"))


def test_the_registry_says_what_trainings_offer() -> None:
    assert get_args(MethodName) == trainable()
    assert trainable() == ("frozen", "block-scale", "orthogonal", "lora", "attention", "full")
    for name, method in METHODS.items():
        kind = load(method.settings)
        assert issubclass(kind, AdapterConfig)
        assert kind.method == name


def test_config_imports_no_torch() -> None:
    code = "import sys, leafward.systems.hyperclip.segment.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", trainable())
def test_every_name_leaves_the_function_and_trains_its_own(clip: Path, name: str) -> None:
    encoder = load_encoder(clip)
    before = encoder.encode_text(["a small dog"])
    adapt(encoder.model, Adapt(method=name, block_size=8), seed=0)
    torch.testing.assert_close(encoder.encode_text(["a small dog"]), before, rtol=1e-6, atol=1e-6)
    own = {key for key, parameter in encoder.model.named_parameters() if parameter.requires_grad}
    assert bool(own) == (name != "frozen")
    assert bool(adapters(encoder.model)) == (name in ("block-scale", "orthogonal", "lora"))
    if name == "full":
        assert own == {key for key, _ in encoder.model.named_parameters()}


def test_an_adapter_is_not_trained_on_top_of_another(clip: Path) -> None:
    model = load_encoder(clip).model
    adapt(model, Adapt(method="lora", block_size=8), seed=0)
    with pytest.raises(UsageError, match="model other holds an adapter already"):
        adapt(model, Adapt(method="lora", block_size=8), seed=0, base_model="other")


def test_an_adapter_is_one_file_and_one_line(clip: Path, tmp_path: Path) -> None:
    """Written here, it is trained by its name, compared with the others, saved, and opened again."""
    from PIL import Image

    (tmp_path / "rank_one.py").write_text(ADAPTER)
    (tmp_path / "program.py").write_text(PROGRAM)
    for number, name in enumerate(("dog", "car", "pizza")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for place in range(6):
            colour = tuple(200 if channel == number else 10 * place for channel in range(3))
            Image.new("RGB", (16, 16), colour).save(tmp_path / "images" / name / f"{place}.png")
    words = ["--data", "images", "--model", str(clip), "--block-size", "8", "--steps", "2", "--batch-size", "4"]

    def run(*words: str) -> dict:
        done = subprocess.run(
            [sys.executable, "program.py", *words, "--json"], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    result = run("train", "hyperclip", *words, "--method", "rank-one", "--compare", "--out", "run")
    rows = {row["method"]: row for row in result["methods"]}
    assert list(rows) == ["frozen", "block-scale", "orthogonal", "lora", "rank-one", "attention", "full"]
    assert rows["rank-one"]["trainable"] == 2 * 2 * (32 + 32)  # encoders, layers, a and b
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["method"] == "rank_one"
    assert 100 * run("evaluate", "run")["top1"] == pytest.approx(rows["rank-one"]["accuracy"])
