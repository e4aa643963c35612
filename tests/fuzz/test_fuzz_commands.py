"""Command lines with words that are unknown, missing, or do not go together."""

from __future__ import annotations

import pytest

from leafward.cli.commands import COMMANDS
from leafward.cli.train import CONFIGS
from leafward.data.samples import embedded
from leafward.engine.run import RunDirectory
from leafward.systems import EVALUATIONS, EXPLANATIONS, PREPARATIONS

MATRIX = str(embedded("stories260k_embedding.npy"))

WORDS: list[tuple[str, str]] = [
    # a whole command line -> what its message must name
    ("trian", "did you mean 'train'"),
    ("TRAIN", "TRAIN"),
    ("--train", "--train"),
    ("train\x00", "train"),
    ("ünïcode", "ünïcode"),
    ("train nothing", "nothing"),
    ("train superpositon", "did you mean 'superposition'"),
    ("train superposition extra", "extra"),
    ("train superposition --preset quik", "did you mean 'quick'"),
    ("train superposition --preset", "--preset"),
    ("train superposition --preset=", "--preset"),
    ("train superposition --preset quick --config c.yaml", "not both"),
    ("train superposition --config", "--config"),
    ("train superposition --config gone.yaml", "gone.yaml"),
    ("train superposition --stepz 3", "--stepz"),
    ("train superposition --steps", "loop.steps"),
    ("train superposition --steps 3 4", "4"),
    ("train superposition --widths", "widths"),
    ("train superposition --widths 4,x", "widths"),
    ("train superposition --widths 4,,8", "widths"),
    ("train superposition --widths 4 4", "widths"),
    ("train superposition --widths 500", "widths"),
    ("train superposition --decays 200", "decays"),
    ("train superposition --axis steps,dta", "dta"),
    ("train superposition --axis data --data-rows 0", "data_rows"),
    ("train superposition --laws powr:1", "powr"),
    ("train superposition --laws power:nan", "power:nan"),
    ("train superposition --laws counts:gone.txt", "gone.txt"),
    ("train superposition --corr block:2", "block:2"),
    ("train superposition --corr block:0:0.5", "block:0"),
    ("train superposition --corr block:2:7", "block:2:7"),
    ("train superposition --executor slurm", "slurm"),
    ("train superposition --executor ray --processes 0", "processes"),
    ("train superposition --precision tf32 --device cpu", "tf32"),
    ("train superposition --warmup 2", "warmup"),
    ("train superposition --snapshots 1", "snapshots"),
    ("train superposition --resume --overwrite", "overwrite"),
    ("train superposition --features 1", "features"),
    ("train superposition --out", "--out"),
    ("train helm", "data"),
    ("train helm --data . --vocab-size 1", "vocab_size"),
    ("train helm --context 1", "context"),
    ("train helm --validation 0", "validation"),
    ("train helm --preset helm", "helm"),
    ("train helm --model gpt", "gpt"),
    ("train helm --optim.betas 0.9", "betas"),
    ("train helm --optim.betas 0.9 2", "betas"),
    ("train helm --loop.steps 0", "steps"),
    ("train helm --loop.ema 1", "ema"),
    ("train helm --loop.batch-size 0", "batch_size"),
    ("train hcformer", "data"),
    ("train hcformer --data gone", "gone"),
    ("train hcformer --data torchvision:MNIST", "torchvision:MNIST"),
    ("train hcformer --data torchvision:MNITS:.", "MNITS"),
    ("train hcformer --data torchvision:MNIST:gone", "gone"),
    ("train hcformer --size 16", "size"),
    ("train hcformer --held-out 1", "held_out"),
    ("train hcformer --drop-path 1", "drop_path"),
    ("train hcformer --model resnet18 --twin", "twin"),
    ("train hcformer --decoder fpn", "decoder"),
    ("train hcformer --augment.mixup -1", "mixup"),
    ("train himapper", "data"),
    ("train himapper --leaves 7", "leaves"),
    ("train himapper --levels 1", "levels"),
    ("train himapper --levels 60", "levels"),
    ("train himapper --dim 6", "dim"),
    ("train himapper --weights w.bin", "weights"),
    ("train himapper --deterministic --ablation", "ablation"),
    ("train himapper --plain --ablation", "plain"),
    ("train hyperclip", "--data"),
    ("train hyperclip --images gone --model m", "gone"),
    ("train hyperclip --template photo", "template"),
    ("train hyperclip --rank 0", "rank"),
    ("train lathadapter", "features"),
    ("train lathadapter --features gone.npz", "gone.npz"),
    ("train lathadapter --features gone.csv", "gone.csv"),
    ("train lathadapter --shots 0", "shots"),
    ("train lathadapter --shots 4 4", "shots"),
    ("train lathadapter --attributes 1", "attributes"),
    ("train lathadapter --queue -1", "queue"),
    ("train lathadapter --refinement -1", "refinement"),
    ("train radial", "--model"),
    ("train radial --epochs 0", "epochs"),
    ("train radial --objective.aperture 0", "aperture"),
    ("train radial --objective.pull -1", "pull"),
    ("train hyperclip --task segment", "data"),
    ("train taxonomy", "data"),
    ("train taxonomy --data gone.csv", "gone.csv"),
    ("train taxonomy --dim 0", "dim"),
    ("train taxonomy --temperature 0", "temperature"),
    ("evaluate gone", "gone"),
    ("evaluate .", "--task"),
    ("evaluate gone --task", "--task"),
    ("evaluate gone --task scor", "scor"),
    ("evaluate gone --task hierarchy", "taxonomy"),
    ("evaluate gone.csv --task hierarchy --taxonomy gone-too.csv", "gone"),
    ("evaluate gone --task search", "--like"),
    ("evaluate gone --task language", "gone"),
    ("evaluate gone --task sample", "gone"),
    ("evaluate gone --task vision", "gone"),
    ("evaluate gone --task himapper", "gone"),
    ("evaluate gone --task fewshot", "gone"),
    ("evaluate gone --task fewshot --features gone.npz", "gone"),
    ("evaluate --task hierarcaps", "data"),
    ("evaluate --task hierarcaps --data gone.csv", "TARGET"),
    ("evaluate --task hierarcaps --data gone.csv --features gone.npz", "gone"),
    ("evaluate --task hyperlex --data gone.zip --features gone.npz", "gone"),
    ("evaluate --task hyperlex --data . --features gone.npz", "."),
    ("evaluate --task breeds --tree gone --features gone.npz", "gone"),
    ("evaluate --task retrieval --features gone.npz", "gone.npz"),
    ("evaluate --task retrieval", "features"),
    ("evaluate --task zeroshot --features gone.npz", "gone.npz"),
    ("evaluate --task zeroshot", "features"),
    ("evaluate gone --task open-vocabulary", "gone"),
    ("explain gone", "gone"),
    ("explain gone picture.png", "gone"),
    ("explain gone picture.png --system resnet", "resnet"),
    ("explain hcformer_nano", "image"),
    ("explain hcformer_nano gone.png", "gone.png"),
    ("explain hcformer_nano . --size 4", "size"),
    ("explain gone picture.png --system himapper", "gone"),
    ("explain gone picture.png --system segmenter", "--words"),
    ("data indx", "did you mean 'index'"),
    ("data index", "out"),
    ("data index gone.npy --out i", "gone.npy"),
    ("data index gone.npy --out i --radius 0", "radius"),
    ("data index gone.npy --out i --c -1", "c must"),
    ("data index gone.npy --out i --labels l.txt", "taxonomy"),
    ("data chains", "out"),
    ("data chains --out c.csv", "--taxonomy"),
    ("data chains --out c.csv --taxonomy t.csv --captions c.txt", "--taxonomy"),
    ("data chains --out c.csv --captions c.txt", "--generator"),
    ("data chains --out c.csv --captions gone.txt --generator g --nli n", "gone.txt"),
    ("data tokenise --cache c", "data"),
    ("data tokenise --data gone.txt --cache c", "gone.txt"),
    ("data tokenise --data gone.txt --cache c --validation 2", "validation"),
    ("data tokenise --data x.txt --cache c --tokenizer t --vocab-size 300", "--tokenizer"),
    ("data features gone --model m --out f.npz", "gone"),
    ("data features . --model m --out f.npz --template photo", "template"),
    ("data features . --model m --out f.npz --batch 0", "batch"),
    ("data features . --model m --out f.csv", "f.csv"),
    ("audit", "TARGET"),
    ("audit gone.npy", "gone.npy"),
    ("audit gone", "gone"),
    ("audit .", "."),
    ("audit /dev/null", "/dev/null"),
    ("audit timm:no_such_model", "no_such_model"),
    ("audit timm:resnet18@gone.safetensors", "gone.safetensors"),
    ("audit timm:resnet18@weights.pth", "weights.pth"),
    ("audit open_clip:no-such-model", "no-such-model"),
    ("audit model.bin", "model.bin"),
    ("audit model.pt", "model.pt"),
    ("audit model.ckpt", "model.ckpt"),
    ("audit model.pkl", "model.pkl"),
    ("audit MATRIX MATRIX", "twice"),
    ("audit MATRIX --tensor x", "tensor"),
    ("audit MATRIX --fold-norm", "fold_norm"),
    ("audit MATRIX --sample 1", "sample"),
    ("audit MATRIX --sample -5", "sample"),
    ("audit MATRIX --device tpu", "device"),
    ("audit MATRIX --losses l.csv", "two or more"),
    ("audit MATRIX timm:x --losses gone.csv", "gone.csv"),
    ("audit MATRIX --token-counts gone.npy", "gone.npy"),
    ("audit MATRIX --token-counts counts.pkl", "counts.pkl"),
    ("audit MATRIX --out MATRIX", "stories260k"),
    ("audit MATRIX --out MATRIX/below", "stories260k"),
    ("audit MATRIX --out /proc/nothing", "/proc/nothing"),
    ("export", "to"),
    ("export gone --to d", "gone"),
    ("export . --to d", "adapter_config.json"),
    ("export . --to", "--to"),
    ("report", "RUN"),
    ("report gone --out r.html", "gone"),
    ("report . --out r.html", "neither a run"),
    ("report gone gone --out r.html", "gone"),
    ("demo --only bogus", "--only 'bogus' is not one of its choices; allowed: adapt, all, build, measure"),
    ("train taxonomy --geometry sphere", "geometry must be one of"),
    ("report --out", "--out"),
    ("bench geometri", "did you mean 'geometry'"),
    ("bench ../setup", "../setup"),
    ("completion", "shell"),
    ("completion fish", "fish"),
    ("list everything", "everything"),
    ("demo --only nothing", "only"),
    ("demo surplus", "surplus"),
]


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    """A recipe that takes the words is stopped as soon as it has its run directory, and the test fails."""
    create = RunDirectory.create

    def stopped(*args, **options):
        create(*args, **options)
        raise AssertionError("a run has begun")

    monkeypatch.setattr(RunDirectory, "create", stopped)


@pytest.mark.parametrize(("words", "named"), WORDS, ids=[words.replace("\x00", "-NUL")[:60] for words, _ in WORDS])
def test_words_that_cannot_work(words, named, refuses):
    refuses([MATRIX if word == "MATRIX" else word.replace("MATRIX/", MATRIX + "/") for word in words.split(" ")], named)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_flag(command, refuses):
    first = {"train": ["taxonomy"], "evaluate": ["x", "--task", "search"], "data": ["index", "x"], "bench": []}
    rest = {"explain": ["hcformer_nano", "x.png"], "completion": ["bash"], "export": ["x"], "explore": ["x"]}
    words = (first | rest).get(command, [])
    refuses([command, *words, "--no-such-flag"], "no-such-flag")


@pytest.mark.parametrize(
    ("command", "table", "before"),
    [("train", CONFIGS, ()), ("data", PREPARATIONS, ()), ("evaluate", EVALUATIONS, ("x", "--task"))],
)
def test_every_tool_refuses_an_unknown_flag(command, table, before, refuses):
    for name in table:
        words = ["x"] if name in ("features", "index") else []
        refuses([command, *before, *name.split(), *words, "--no-such-flag", "3"], "no-such-flag")


def test_every_explanation_refuses_an_unknown_flag(refuses):
    for name in EXPLANATIONS:
        refuses(["explain", "x", "y.png", "--system", name, "--no-such-flag", "3"], "no-such-flag")
