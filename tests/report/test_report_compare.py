"""Run directories: read whole, torn or broken, and compared on one page."""

import json
import math
import re

import pytest
import yaml

from leafward.errors import DataError, LeafwardError, UsageError
from leafward.files import LARGEST_RECORD
from leafward.report import compare, read_run
from leafward.report.figures import thinned


def make_run(path, *, config=None, env=None, metrics=(), result=None):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config or {"seed": 0}), encoding="utf-8")
    (path / "env.json").write_text(json.dumps(env or {"torch": "2.15"}), encoding="utf-8")
    lines = [json.dumps({"step": step, **line}) + "\n" for step, line in enumerate(metrics)]
    (path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if result is not None:
        (path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return path


def write(runs, out):
    compare(runs, out).write(out)


def cells(html):
    """The tables of a page as lists of rows of text."""
    tables = re.findall(r"<table>(.*?)</table>", html, re.S)
    rows = [re.findall(r"<tr>(.*?)</tr>", table, re.S) for table in tables]
    return [[re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in table] for table in rows]


@pytest.fixture
def two_runs(tmp_path):
    def metrics(scale):
        return [
            {"step": step, "loss": scale * math.exp(-step / 10), "eval": {"top1": step / 100}} for step in range(50)
        ]

    lorentz = make_run(
        tmp_path / "lorentz",
        config={"seed": 0, "geometry": "lorentz", "optim": {"lr": 0.001, "betas": [0.9, 0.95]}},
        metrics=metrics(1.0),
        result={
            "headline": [
                {"name": "top-1", "value": 0.713, "interval": [0.702, 0.724], "better": "higher", "twin": 0.7},
                {"name": "loss", "value": 0.25, "unit": "nats"},
            ],
            "other": 1,
        },
    )
    euclidean = make_run(
        tmp_path / "euclidean",
        config={"seed": 0, "geometry": "euclidean", "optim": {"lr": 0.001, "betas": [0.9, 0.95]}},
        metrics=metrics(2.0),
        result={"headline": [{"name": "top-1", "value": 0.7, "interval": [0.68, 0.72], "better": "higher"}]},
    )
    return [lorentz, euclidean]


def test_two_runs_side_by_side(two_runs, tmp_path):
    out = tmp_path / "page.html"
    write(two_runs, out)
    html = out.read_text(encoding="utf-8")
    runs, headline, differing, *_ = cells(html)
    assert [row[:3] for row in runs[1:]] == [["lorentz", "finished", "49"], ["euclidean", "finished", "49"]]
    assert headline == [
        ["run", "top-1 (higher is better)", "top-1: Euclidean twin", "loss, nats"],
        ["lorentz", "0.713 [0.702, 0.724]", "0.7", "0.25"],
        ["euclidean", "0.700 [0.680, 0.720]", "–", "–"],
    ]
    assert differing == [["key", "lorentz", "euclidean"], ["geometry", "lorentz", "euclidean"]]
    assert "The runs do not differ in environment." in html
    labels = re.findall(r'<svg [^>]*aria-label="([^"]*)"', html)
    curves = ["loss against step for lorentz, euclidean", "eval.top1 against step for lorentz, euclidean"]
    assert labels == ["top-1 of lorentz, euclidean", *curves]
    _, first, second = re.findall(r"<svg .*?</svg>", html, re.S)
    assert ">0.1<" in first  # a factor of 270: logarithmic
    assert ">0.0<" in second
    write(two_runs, tmp_path / "again.html")
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert again == html.replace("page.html", "again.html")


def test_small_differences_in_a_setting_show(tmp_path):
    configs = ({"lr": 0.100001, "betas": [0.99999], "new": None}, {"lr": 0.100002, "betas": [0.99998]})
    runs = [make_run(tmp_path / name, config=config) for name, config in zip("ab", configs, strict=True)]
    write(runs, tmp_path / "page.html")
    differing = cells((tmp_path / "page.html").read_text(encoding="utf-8"))[1]
    assert differing[0] == ["key", "a", "b"]
    assert sorted(differing[1:]) == [
        ["betas", "0.99999", "0.99998"],
        ["lr", "0.100001", "0.100002"],
        ["new", "null", "–"],
    ]


def test_a_run_keeps_its_colour_in_every_figure(tmp_path):
    first = make_run(tmp_path / "first", metrics=[{"loss": 1.0}, {"loss": 0.5}])
    second = make_run(tmp_path / "second", metrics=[{"loss": 1.0, "extra": 1.0}, {"loss": 0.9, "extra": 3.0}])
    write([first, second], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    _, extra = re.findall(r"<svg .*?</svg>", html, re.S)
    assert 'stroke="#e06a00"' in extra
    assert 'stroke="#2a4fc4"' not in extra


def test_runs_of_different_recipes_have_tables_of_their_own(two_runs, tmp_path):
    other = make_run(
        tmp_path / "tree",
        config={"dim": 2},
        env={"recipe": "taxonomy"},
        result={"headline": [{"name": "mean rank", "value": 1.5}]},
    )
    out = tmp_path / "page.html"
    write([*two_runs, other], out)
    tables = cells(out.read_text(encoding="utf-8"))
    assert [row[3] for row in tables[0][1:]] == ["–", "–", "taxonomy"]
    assert [row[0] for row in tables[1][1:]] == ["lorentz", "euclidean"]
    assert [["run", "mean rank"], ["tree", "1.5"]] in tables
    (differing,) = [table for table in tables if table[0] == ["key", "lorentz", "euclidean"]]
    assert "dim" not in [row[0] for row in differing]  # the settings of the two, which the third does not share


def test_a_run_of_members_shows_their_curves(tmp_path):
    whole = make_run(tmp_path / "whole", result={"headline": []})
    (whole / "metrics.jsonl").unlink()
    for name, loss in (("lorentz-0", 1.0), ("euclidean-0", 2.0)):
        make_run(whole / "members" / name, metrics=[{"step": 1, "loss": loss}])
    run = read_run(whole)
    assert run.series == {"loss, euclidean-0": {1: 2.0}, "loss, lorentz-0": {1: 1.0}}
    assert run.notes == ()


def test_unfinished_and_torn(two_runs, tmp_path):
    cut = make_run(tmp_path / "cut", metrics=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}])
    with open(cut / "metrics.jsonl", "ab") as file:
        file.write('{"step": 3, "note": "φ'.encode()[:-1])
    run = read_run(cut)
    assert not run.finished
    assert run.series == {"loss": {1: 2.0}}
    assert [note.partition(":")[0] for note in run.notes] == ["unfinished", "metrics.jsonl", "metrics.jsonl"]
    write([*two_runs, cut], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert ["cut", "unfinished", "1"] in [row[:3] for row in cells(html)[0]]
    assert "cut: metrics.jsonl: the last line is torn and left out" in html


def test_a_bare_run_has_a_page(tmp_path):
    run = tmp_path / "bare"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")
    write([run], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for phrase in (
        "Run bare",
        "no env.json",
        "no metrics.jsonl",
        "bare: no headline numbers",
        "No run has logged",
    ):
        assert phrase in html
    assert "differ" not in html


def test_a_resumed_run_counts_the_later_value(tmp_path):
    metrics = [{"step": s, "loss": v} for s, v in ((0, 3.0), (10, 2.0), (20, 9.0), (10, 1.9), (20, 1.5))]
    metrics += [{"step": 20, "lr": True}, {"step": 6, "lr": 0.1}, {"step": 7, "loss": "text"}]
    run = read_run(make_run(tmp_path / "run", metrics=metrics))
    assert run.series == {"loss": {0: 3.0, 10: 1.9, 20: 1.5}, "lr": {6: 0.1}}
    assert list(run.series["loss"]) == [0, 10, 20]


def test_long_curves_are_thinned_without_hiding_their_range():
    points = {float(step): float(step % 7) for step in range(10_001)}
    points[5000] = 99.0
    steps, mean, low, high = thinned(points)
    assert len(steps) == 400
    assert steps == sorted(steps)
    assert (min(low), max(high)) == (0.0, 99.0)
    assert sum(mean) / 400 == pytest.approx(sum(points.values()) / len(points), rel=1e-2)
    assert thinned({3: 5.0}) == ([3.0], [5.0], [5.0], [5.0])


def test_hostile_names_are_harmless(tmp_path):
    name = "<script>$\\bad{$"
    run = make_run(
        tmp_path / name,
        config={name: name},
        metrics=[{name: 1.0}, {name: 2.0}],
        result={"headline": [{"name": name, "value": 1, "note": name}]},
    )
    write([run, make_run(tmp_path / "b", metrics=[{name: 2.0}])], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert "&lt;script&gt;$\\bad{$" in html


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    write(runs, tmp_path / "page.html")
    rows = cells((tmp_path / "page.html").read_text(encoding="utf-8"))[0]
    assert [row[0] for row in rows[1:]] == ["a/run", "b/run"]


def test_many_series_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("leafward.report.comparison._MOST_FIGURES", 2)
    run = make_run(tmp_path / "run", metrics=[{f"m{i}": 1.0 for i in range(5)}])
    write([run], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.count("<svg ") == 2
    assert "There are 5 series; the first 2 are drawn." in html


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", b"a: 1\n  b: 2\n", r"(?s)config\.yaml is not valid YAML: .*line 2"),
        ("config.yaml", b"- 1\n", r"config\.yaml must hold a mapping of names to values, not list"),
        ("config.yaml", b"", r"config\.yaml must hold a mapping of names to values, not NoneType"),
        ("config.yaml", b"a: !!python/object/apply:os.system [id]\n", r"config\.yaml is not valid YAML"),
        ("config.yaml", b"a: \xff\n", r"config\.yaml.* UTF-8"),
        ("config.yaml", b"a: 2020-99-99\n", r"config\.yaml is not valid YAML"),
        ("env.json", b'{\n"a": 1,\n}', r"env\.json: not valid JSON .*line 3"),
        ("env.json", b"[1]", r"env\.json.*not an object|env\.json.*object"),
        ("result.json", b'{"headline": [', r"result\.json: not valid JSON .*line 1"),
        ("result.json", b"[" * 100_000, r"result\.json: not valid JSON"),
        ("result.json", b'{"headline": {}}', r"result\.json: headline must be a list, not dict"),
        ("result.json", b'{"headline": [{"name": "x"}]}', r"result\.json: headline\[0\]: .* lacks value"),
        (
            "result.json",
            b'{"headline": [{"name": "x", "value": 1}, {"name": "x", "value": 2}]}',
            r"headline\[1\]: the name 'x' occurs twice",
        ),
        ("metrics.jsonl", b'{"step": 1}\n{"a": \n{"a": 3}\n', r"cannot read .*metrics\.jsonl"),
        ("metrics.jsonl", b'{"step": 1}\n[2]\n', r"metrics\.jsonl: line 2 is not the record of a step"),
        ("metrics.jsonl", b'{"step": 1}\n\xff\n', r"cannot read .*metrics\.jsonl"),
    ],
)
def test_damage_is_named_and_nothing_is_written(tmp_path, file, content, message):
    run = make_run(tmp_path / "run")
    (run / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        write([run], tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_configurations_are_read_as_training_reads_them(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("lr: 1e-3\n")
    assert read_run(run).config == {"lr": 0.001}
    (run / "config.yaml").write_text("a: &a\n  b: *a\n  c: *a\n")  # it has no end
    with pytest.raises(DataError, match="an alias"):
        compare([run])


def test_wrong_arguments(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="one or more run directories"):
        compare([])
    with pytest.raises(UsageError, match="given twice"):
        compare([run, tmp_path / "run" / ".." / "run"])
    with pytest.raises(DataError, match="nowhere does not exist"):
        compare([tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"neither a run \(config\.yaml\)"):
        compare([run / "config.yaml"])
    with pytest.raises(DataError, match=r"empty is neither a run \(config\.yaml\)"):
        compare([tmp_path / "empty"])
    with pytest.raises(LeafwardError, match="cannot write"):
        compare([run]).write(tmp_path / "empty")
    with open(run / "result.json", "wb") as file:
        file.truncate(LARGEST_RECORD + 1)
    with pytest.raises(DataError, match=f"at most {LARGEST_RECORD:,} are read"):
        compare([run])
