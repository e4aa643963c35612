"""HELM-D, HELM-MiCE and their Euclidean twins at equal parameters and tokens, over seeds: held-out loss, paired.

    python benchmarks/helm_evidence.py --data TEXT --seconds 1500 --out evidence.json
    python benchmarks/helm_evidence.py --data TEXT --models "helm-d lorentz" --steps 400 --out d.json   # a part
    python benchmarks/helm_evidence.py --summarise evidence.json                                    # or all the parts

Measures the step of each model first and chooses as many steps as the time allows (and as the text bears: `--epochs`).
A seed of its own tries every learning rate of `--lr` with every model, and each model keeps its best: one rate for all
would favour the geometry that it happens to suit. That seed does not count in the comparison. The others take turns, so
that whatever is complete when the time is over is complete for all four models; the file of `--out` is written after
every model, and what stands in it already is not trained again. The text is cut into passages, a part of which is held
out. "helm-mice one curvature" has experts that all live at c = 1. Prints one JSON line; `--summarise` prints the tables
of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from leafward.data.text import Corpus, find_files, prepare, read_documents
from leafward.engine import Cluster, LoopConfig, OptimConfig, RunDirectory, session, train_loop
from leafward.files import finite, write_json
from leafward.stats.intervals import mean_interval
from leafward.systems.helm import HelmConfig, HelmForCausalLM, LanguageTask, score

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "helm-d lorentz": ("helm-d", {}),
    "helm-d euclidean": ("helm-d", {"geometry": "euclidean"}),
    "helm-mice lorentz": ("helm-mice", {}),
    "helm-mice euclidean": ("helm-mice", {"geometry": "euclidean"}),
    "helm-mice one curvature": ("helm-mice", {"expert_curvatures": (1.0, 1.0)}),
}
"""Every model that is trained: its shape, and what is different from HELM's defaults."""
PAIRS = (
    ("helm-d lorentz", "helm-d euclidean"),
    ("helm-mice lorentz", "helm-mice euclidean"),
    ("helm-mice lorentz", "helm-mice one curvature"),
    ("helm-mice lorentz", "helm-d lorentz"),
)
MEASURED = 30
"""Steps of the run that measures the time of a step."""
TUNING = 0
"""The seed that tries the learning rates."""
PASSAGE = 20_000
"""Characters of a document."""


def passages(data: Path, folder: Path) -> Path:
    """The text of `data` as one JSONL file of passages, cut at ends of lines."""
    path = folder / "passages.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for text in read_documents(find_files(data)):
            start = 0
            while start < len(text):
                line_end = text.find("\n", start + PASSAGE)
                end = len(text) if line_end < 0 else line_end + 1
                file.write(json.dumps({"text": text[start:end]}) + "\n")
                start = end
    return path


def shapes(arguments: argparse.Namespace, vocabulary: int) -> dict[str, dict[str, Any]]:
    """HELM-MiCE, and HELM-D with a feed-forward width that gives it as many weights in all."""
    width = arguments.width
    common: dict[str, Any] = {
        "vocab_size": -(-vocabulary // 64) * 64,
        "hidden_size": width,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "max_position_embeddings": arguments.context,
        "tie_word_embeddings": False,
    }
    head = width // arguments.heads
    mice: dict[str, Any] = common | {
        "intermediate_size": 4 * width,
        "kv_latent": width // 2,
        "nope_width": head,
        "rope_width": head // 2,
        "value_width": head,
        "num_experts": 4,
        "num_active_experts": 2,
        "num_shared_experts": 1,
        "expert_size": 2 * width,
    }
    # The count is linear in the width of the feed-forward layers.
    low, high = (parameters(HelmConfig(**common, intermediate_size=size)) for size in (32, 64))
    size = 32 + 32 * round((parameters(HelmConfig(**mice)) - low) / (high - low))
    return {"helm-d": common | {"intermediate_size": size}, "helm-mice": mice}


def parameters(config: HelmConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in HelmForCausalLM(config).parameters())


def precision(cluster: Cluster) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if cluster.device.type == "cuda" else "float32"


def train(
    config: HelmConfig,
    corpus: Corpus,
    arguments: argparse.Namespace,
    cluster: Cluster,
    steps: int,
    seed: int,
    rate: float,
) -> tuple[HelmForCausalLM, float, float]:
    """A trained model, the seconds of one of its steps, and the seconds of all else (compilation, evaluation)."""
    fast = cluster.device.type == "cuda"
    loop = LoopConfig(
        steps=steps,
        batch_size=arguments.batch,
        seed=seed,
        precision=precision(cluster),
        compile=fast and not arguments.eager,
        log_every=max(1, min(10, steps // 3)),
        checkpoint_every=steps,
        device=arguments.device,
    )
    began = time.perf_counter()
    if len(arguments.models) > 1:
        torch._dynamo.reset()  # what was compiled for another model counts against the limit of versions
    torch.manual_seed(seed)
    model = HelmForCausalLM(config)
    task = LanguageTask(corpus, arguments.context, cluster=cluster, eval_batch=arguments.batch, eval_tokens=200_000)
    folder = Path(tempfile.mkdtemp(prefix="helm-evidence-"))
    try:
        run = RunDirectory.create(folder / "run", loop)
        optim = OptimConfig(lr=rate, weight_decay=0.01, warmup_steps=max(1, steps // 20))
        with task.balancing(model, 1e-3):
            train_loop(model, task, loop, optim, run, cluster)
        times = [record["time"]["samples_per_second"] for record in run.metrics() if "time" in record]
    finally:
        shutil.rmtree(folder)
    step = arguments.batch / statistics.median(times[1:] or times)
    return model, step, time.perf_counter() - began - steps * step


def measure(arguments: argparse.Namespace, cluster: Cluster, corpus: Corpus) -> dict[str, Any]:
    """Train all, and put the results together."""
    deadline = time.perf_counter() + arguments.seconds
    made = shapes(arguments, len(corpus.tokenizer))
    kinds = {name: MODELS[name] for name in arguments.models}
    configs = {name: HelmConfig(**made[shape], **changes) for name, (shape, changes) in kinds.items()}
    costs: dict[str, tuple[float, float]] = {}
    for name, config in configs.items() if arguments.steps is None else ():
        costs[name] = train(config, corpus, arguments, cluster, MEASURED, 0, arguments.lr[0])[1:]
        say(f"{name}: {1e3 * costs[name][0]:.1f} ms per step, {costs[name][1]:.1f} s besides")
    steps = arguments.steps or choose_steps(arguments, corpus, costs, deadline - time.perf_counter())
    rows: list[dict[str, Any]] = []
    result = {
        "device": torch.cuda.get_device_name() if cluster.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
        "data": corpus.counts,
        "parameters": {name: parameters(config) for name, config in configs.items()},
        "feed_forward": {name: shape["intermediate_size"] for name, shape in made.items()},
        "steps": steps,
        "tokens": steps * arguments.batch * arguments.context,
        "rows": rows,
    }
    if arguments.out is not None and arguments.out.exists():
        rows += joined([json.loads(arguments.out.read_text(encoding="utf-8")), result])["rows"]
    for seed in range(TUNING, TUNING + 1 + arguments.seeds):
        needed = sum(steps * step + besides for step, besides in costs.values())
        if seed > TUNING + 1 and arguments.steps is None and time.perf_counter() + needed > deadline:
            say(f"no time for seed {seed}")
            break
        for name, config in configs.items():
            for rate in arguments.lr if seed == TUNING else [best_rate(rows, name)]:
                if any((row["model"], row["seed"], row["lr"]) == (name, seed, rate) for row in rows):
                    continue
                model, step, _ = train(config, corpus, arguments, cluster, steps, seed, rate)
                values = held_out(model, corpus, arguments, cluster)
                rows.append({"model": name, "seed": seed, "lr": rate, "step_ms": 1e3 * step, **values})
                say(f"seed {seed}, {name}, lr {rate:g}: held-out loss {values['loss']:.4f}")
                if arguments.out is not None:
                    write_json(arguments.out, finite(result))
    return result


def held_out(
    model: HelmForCausalLM, corpus: Corpus, arguments: argparse.Namespace, cluster: Cluster
) -> dict[str, float]:
    scores = score(model, corpus.held_out, arguments.context, batch_size=arguments.batch, precision=precision(cluster))
    return {key: found.value for key, found in scores.headline().items() if found.value is not None}


def best_rate(rows: list[dict[str, Any]], name: str) -> float:
    """The learning rate with the lowest held-out loss of the seed that tries them."""
    tried = [row for row in rows if row["model"] == name and row["seed"] == TUNING]
    return min(tried, key=lambda row: row["loss"])["lr"]


def counted(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of a model that the comparison is about: one for each seed, at its own best learning rate."""
    return [row for row in rows if row["model"] == name and row["seed"] != TUNING]


def choose_steps(
    arguments: argparse.Namespace, corpus: Corpus, costs: dict[str, tuple[float, float]], seconds: float
) -> int:
    """As many steps as fit the time for all seeds and the text for the epochs."""
    step, besides = (sum(cost[index] for cost in costs.values()) for index in (0, 1))
    by_time = (0.9 * seconds / (len(arguments.lr) + arguments.seeds) - besides) / step
    by_text = arguments.epochs * len(corpus.train.tokens) / (arguments.batch * arguments.context)
    say(f"{by_time:.0f} steps fit the time, {by_text:.0f} the text")
    return max(1, int(min(by_time, by_text)))


def differences(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Paired differences in held-out loss over seeds with 95 % intervals (Student's t), each model at its best rate."""
    found = {}
    for one, other in PAIRS:
        losses = [{row["seed"]: row["loss"] for row in counted(rows, name)} for name in (one, other)]
        values = [float(losses[0][seed] - losses[1][seed]) for seed in sorted(losses[0].keys() & losses[1].keys())]
        if not values:
            continue
        try:
            centre, interval = mean_interval(values)
        except ImportError:  # no scipy on this machine; --summarise works it out where there is one
            centre, interval = float(np.mean(values)), None
        found[f"{one} − {other}"] = {"values": values, "mean": centre, "interval": interval}
    return found


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of one comparison, measured apart, as one result."""
    for key in ("steps", "tokens", "data"):
        if any(result[key] != results[0][key] for result in results):
            raise SystemExit(f"these are not parts of one comparison: {key} differs")
    together = dict(results[0])
    together["rows"] = [row for result in results for row in result["rows"]]
    for key in ("parameters", "feed_forward"):
        together[key] = {name: value for result in results for name, value in result[key].items()}
    return together


def summary(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rates = sorted({row["lr"] for row in result["rows"] if row["seed"] == TUNING})
    lines = [
        f"{result['device']}, torch {result['torch']}, {result['steps']} steps, {result['tokens']:,} tokens, "
        f"{result['data']['train']['tokens']:,} in the training text",
        "",
        "| model | weights | best lr | held-out loss, by seed | mean | bits per byte | ms per step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, size in result["parameters"].items():
        rows = counted(result["rows"], name)
        if not rows:
            continue
        losses = [row["loss"] for row in rows]
        by_seed = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(
            f"| {name} | {size:,} | {rows[0]['lr']:g} | {by_seed} | {np.mean(losses):.4f} "
            f"| {np.mean([row['bits_per_byte'] for row in rows]):.4f} "
            f"| {statistics.median(row['step_ms'] for row in rows):.1f} |"
        )
    lines += ["", "| held-out loss, tuning seed | " + " | ".join(f"lr {rate:g}" for rate in rates) + " |"]
    lines.append("|---" * (1 + len(rates)) + "|")
    for name in result["parameters"]:
        found = {row["lr"]: row["loss"] for row in result["rows"] if row["model"] == name and row["seed"] == TUNING}
        tried = (f"{found[rate]:.4f}" if rate in found else "–" for rate in rates)
        lines.append(f"| {name} | " + " | ".join(tried) + " |")
    lines += ["", "| paired difference in held-out loss | mean | 95 % interval over seeds |", "|---|---|---|"]
    for title, each in differences(result["rows"]).items():
        ends = "–" if each["interval"] is None else "[{:+.4f}, {:+.4f}]".format(*each["interval"])
        lines.append(f"| {title} | {each['mean']:+.4f} | {ends} |")
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="text: a file, a folder or a data set on disk")
    parser.add_argument("--seconds", type=float, default=1500.0, help="time for everything")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS)[:4], help="by default the first four"
    )
    parser.add_argument("--steps", type=int, help="this many, whatever the time")
    parser.add_argument("--epochs", type=float, default=6.0, help="at most this often over the text")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="peak learning rates to try")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--out", type=Path, help="keep the result in this file")
    parser.add_argument("--summarise", type=Path, nargs="+", help="print the tables of earlier results, nothing else")
    arguments = parser.parse_args()
    if arguments.summarise is not None:
        print(summary(joined([json.loads(path.read_text(encoding="utf-8")) for path in arguments.summarise])))
        return
    if arguments.data is None:
        parser.error("--data is missing")
    with session(arguments.device) as cluster, tempfile.TemporaryDirectory() as folder:
        text = passages(arguments.data, Path(folder))
        corpus = prepare(text, Path(folder) / "tokens", vocab_size=arguments.vocab, validation=0.1)
        result = finite(measure(arguments, cluster, corpus))
    result["differences"] = differences(result["rows"])
    if arguments.out is not None:
        write_json(arguments.out, result)
    print(json.dumps(finite(result), ensure_ascii=False))


if __name__ == "__main__":
    main()
