"""``evaluate --task hierarchy`` on files as users have them: same numbers as the library, every wrong file named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from leafward.cli.dispatch import main
from leafward.errors import DataError, LeafwardError, UsageError
from leafward.hierarchy import Taxonomy, decide, metrics
from leafward.systems.taxonomy import evaluate as evaluate_hierarchy
from leafward.systems.taxonomy.evaluate import Args

CATALOGUE = """\
child,parent
animal,
dog,animal
cat,animal
poodle,dog
corgi,dog
tabby,cat
manx,cat
"""
LEAVES = ["poodle", "corgi", "tabby", "manx"]
PROBABILITIES = np.array(
    [
        [0.60, 0.30, 0.10, 0.00],
        [0.30, 0.29, 0.41, 0.00],
        [0.05, 0.00, 0.90, 0.05],
        [0.28, 0.26, 0.24, 0.22],
    ]
)
TRUE = ["poodle", "corgi", "tabby", "manx"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "catalogue.csv"
    path.write_text(CATALOGUE)
    return path


def evaluate(target: Path, tree: Path | str, **more):
    return evaluate_hierarchy.run(Args(target, str(tree), out=target.parent / "out", **more), Console(quiet=True))


def table(path: Path, header: list[str], rows: list[list]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def probabilities_csv(folder: Path, order: list[int] | None = None) -> Path:
    order = order or [0, 1, 2, 3]
    rows = [[name, *PROBABILITIES[row, order]] for row, name in enumerate(TRUE)]
    return table(folder / "probabilities.csv", ["true", *(LEAVES[i] for i in order)], rows)


def test_labels_score_as_the_library_does(tmp_path, tree):
    answers = [["corgi", "poodle"], ["corgi", "tabby"], ["cat", "tabby"], ["poodle", "manx"]]
    path = table(
        tmp_path / "labels.csv",
        ["id", "true", "predicted", "predicted_2"],
        [[f"s{i}", TRUE[i], *answers[i]] for i in range(4)],
    )
    result = evaluate(path, tree)
    tax = Taxonomy.from_csv(tree)
    expected = metrics.evaluate(tax, [row[0] for row in answers], TRUE).to_dict()
    assert result["decisions"] == {"as predicted": expected}
    assert result["ranked"] == metrics.evaluate(tax, answers, TRUE).to_dict()["distance_at_k"]
    assert json.loads((tmp_path / "out/hierarchy.json").read_text())["decisions"] == result["decisions"]
    rows = list(csv.reader((tmp_path / "out/decisions.csv").read_text().splitlines()))
    assert rows[:2] == [["id", "true", "as predicted"], ["s0", "poodle", "corgi"]]
    assert "Hierarchical distance@k" in (tmp_path / "out/report.html").read_text()


def test_an_empty_prediction_is_no_answer(tmp_path, tree):
    path = table(tmp_path / "labels.csv", ["true", "predicted"], [["poodle", ""], ["corgi", "corgi"]])
    scores = evaluate(path, tree)["decisions"]["as predicted"]
    assert (scores["coverage"], scores["accuracy"]) == (0.5, 1.0)
    path = table(tmp_path / "silent.csv", ["true", "predicted"], [["poodle", ""]])
    assert evaluate(path, tree)["decisions"]["as predicted"] == {"count": 1, "coverage": 0.0}


def test_probabilities_get_every_decision(tmp_path, tree):
    result = evaluate(probabilities_csv(tmp_path), tree, threshold=0.55, abstain=0.5)
    tax = Taxonomy.from_csv(tree)
    rows = list(csv.DictReader((tmp_path / "out/decisions.csv").read_text().splitlines()))
    answers = {name: [row[name] for row in rows] for name in rows[0] if name not in ("id", "true")}
    assert answers["most probable leaf"] == ["poodle", "tabby", "tabby", "poodle"]
    # the second sample: dogs together outweigh the tabby that is the most probable leaf
    assert answers["path, child by child"][1] == "poodle"
    assert answers["back-off at 0.55"] == ["poodle", "dog", "tabby", "animal"]
    assert answers["abstain below 0.5"] == ["poodle", "", "tabby", ""]
    for name, choose in {
        "least expected distance": lambda p: decide.expected_cost(tax, p),
        "least expected LCA height": lambda p: decide.expected_cost(tax, p, "lca_height"),
        "least expected distance, any node": lambda p: decide.expected_cost(tax, p, answers=np.arange(len(tax))),
    }.items():
        assert answers[name] == [tax.names[node] for node in choose(PROBABILITIES)]
    for name, scores in result["decisions"].items():
        given = [tax.ids(text) if text else -1 for text in answers[name]]
        assert scores == metrics.evaluate(tax, np.array(given), TRUE).to_dict()
    curve = decide.risk_coverage(PROBABILITIES.max(axis=1), [0.0, 1.0, 0.0, 1.0])
    assert result["risk_coverage"]["error"]["area"] == pytest.approx(curve.area)
    assert result["risk_coverage"]["distance"]["risk"][-1] == pytest.approx(np.mean([0, 4, 0, 4]))
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<svg") == 2


def test_every_file_format_gives_the_same(tmp_path, tree):
    expected = evaluate(probabilities_csv(tmp_path), tree)["decisions"]
    order = [2, 0, 3, 1]
    assert evaluate(probabilities_csv(tmp_path, order), tree)["decisions"] == expected
    (tmp_path / "classes.txt").write_text("\n".join(LEAVES[i] for i in order))
    (tmp_path / "true.json").write_text(json.dumps(TRUE))
    numbers = np.array([order.index(LEAVES.index(name)) for name in TRUE])
    np.save(tmp_path / "true.npy", numbers)
    np.save(tmp_path / "p.npy", PROBABILITIES[:, order])
    np.savez(tmp_path / "p.npz", probabilities=PROBABILITIES, true=np.array(TRUE), classes=np.array(LEAVES))
    logits = torch.from_numpy(PROBABILITIES[:, order]).clamp_min(1e-9).log().float() + 3
    save_file({"logits": logits.contiguous(), "true": torch.from_numpy(numbers)}, tmp_path / "p.safetensors")
    classes, true = tmp_path / "classes.txt", tmp_path / "true.json"
    for target, more in {
        "p.npy": {"classes": classes, "true": true},
        "p.npz": {},
        "p.safetensors": {"classes": classes},
    }.items():
        assert evaluate(tmp_path / target, tree, **more)["decisions"] == expected, target
    assert evaluate(tmp_path / "p.npy", tree, classes=classes, true=tmp_path / "true.npy")["decisions"] == expected
    np.save(tmp_path / "plain.npy", PROBABILITIES)  # columns in the order of the taxonomy's leaves
    assert evaluate(tmp_path / "plain.npy", tree, true=true)["decisions"] == expected


def test_classes_above_the_leaves_need_a_cut_taxonomy(tmp_path, tree):
    path = table(tmp_path / "coarse.csv", ["true", "dog", "cat"], [["dog", 0.7, 0.3], ["cat", 0.6, 0.4]])
    with pytest.raises(DataError, match=r"coarse.csv: the class 'dog' is no leaf of .*--restrict"):
        evaluate(path, tree)
    scores = evaluate(path, tree, restrict=True)["decisions"]["most probable leaf"]
    assert (scores["accuracy"], scores["tree_induced_error"]) == (0.5, 1.0)
    path = table(tmp_path / "deep.csv", ["true", "dog", "cat"], [["poodle", 0.7, 0.3]])
    with pytest.raises(DataError, match=r"deep.csv: true \(after --restrict\): 'poodle' is not a node"):
        evaluate(path, tree, restrict=True)


def test_a_dag_and_wordnet_style_sources(tmp_path):
    (tmp_path / "dag.json").write_text(
        json.dumps({"parents": {"r": [], "a": ["r"], "b": ["r"], "x": ["a", "b"], "y": ["b"]}})
    )
    path = table(tmp_path / "p.csv", ["true", "x", "y"], [["x", 0.4, 0.6], ["y", 0.2, 0.8]])
    result = evaluate(path, tmp_path / "dag.json")
    assert result["taxonomy"].startswith("Taxonomy(DAG, 5 nodes")
    assert len(result["decisions"]) == 7
    with pytest.raises(LeafwardError, match=r"WordNet|wordnet"):
        evaluate(path, "wordnet:no.such.n.01")


def bad_files(folder: Path) -> dict[str, tuple[Path, dict]]:
    """What must be said -> a file that it must be said of."""
    save = lambda name, **arrays: (np.savez(folder / name, **arrays), folder / name)[1]  # noqa: E731
    (folder / "broken.npy").write_bytes(b"\x93NUMPY nonsense")
    (folder / "latin.csv").write_bytes(b"true,predicted\n\xe9,\xe9\n")
    np.save(folder / "pickle.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (folder / "short.txt").write_text("poodle\n")
    (folder / "wrong.txt").write_text("\n".join(["poodle", "corgi", "tabby", "mnax"]))
    good = save("good.npz", probabilities=PROBABILITIES, true=np.array(TRUE))
    return {
        "no such file: .*absent.npy": (folder / "absent.npy", {}),
        "cannot read .*absent.csv": (folder / "absent.csv", {}),
        r"broken.npy cannot be read as .npy": (folder / "broken.npy", {}),
        r"pickle.npy cannot be read as .npy": (folder / "pickle.npy", {}),
        r"latin.csv: not UTF-8 text": (folder / "latin.csv", {}),
        r"p.txt: expected a file that ends in .csv": (folder / "p.txt", {}),
        r"--classes belongs to an array file.*x.csv": (folder / "x.csv", {"classes": folder / "wrong.txt"}),
        r"untrue.csv: has no column 'true'.*did you mean 'truth'": (
            table(folder / "untrue.csv", ["truth", "predicted"], [["poodle", "poodle"]]),
            {},
        ),
        r"typo.csv: .*'poodel' is not a node.*did you mean 'poodle'": (
            table(folder / "typo.csv", ["true", "predicted"], [["poodel", "corgi"]]),
            {},
        ),
        r"column.csv: expected a column 'predicted', or .*'corgy' is not a node.*did you mean 'corgi'": (
            table(folder / "column.csv", ["true", "poodle", "corgy"], [["poodle", 0.5, 0.5]]),
            {},
        ),
        r"word.csv: a probability is not a number": (
            table(folder / "word.csv", ["true", "poodle", "corgi"], [["poodle", "half", 0.5]]),
            {},
        ),
        r"sum.csv: probabilities must be ≥ 0 and add up to 1.*--logits": (
            table(folder / "sum.csv", ["true", "poodle", "corgi"], [["poodle", 0.9, 0.5]]),
            {},
        ),
        r"ragged.csv: row 3 has 1 fields for 2 columns": (
            table(folder / "ragged.csv", ["true", "predicted"], [["poodle", "corgi"], ["poodle"]]),
            {},
        ),
        r"twice.csv: the column 'true' stands 2 times": (
            table(folder / "twice.csv", ["true", "true"], [["poodle", "corgi"]]),
            {},
        ),
        r"header.csv: expected a header and at least one row": (table(folder / "header.csv", ["true"], []), {}),
        r"blind.npz: holds no array 'true'": (save("blind.npz", probabilities=PROBABILITIES), {}),
        r"narrow.npz: probabilities has 3 columns for 4 classes": (
            save("narrow.npz", probabilities=PROBABILITIES[:, :3], true=np.array(TRUE)),
            {},
        ),
        r"flat.npz: probabilities must be a matrix": (
            save("flat.npz", probabilities=PROBABILITIES[0], true=np.array(TRUE)),
            {},
        ),
        r"nan.npz: probabilities: 1 rows hold a number that is not finite, the first is row 2": (
            save("nan.npz", probabilities=PROBABILITIES + np.diag([0, 0, np.nan, 0]) * 1.0, true=np.array(TRUE)),
            {},
        ),
        r"far.npz: true: class 4 is out of range": (
            save("far.npz", probabilities=PROBABILITIES, true=np.array([0, 1, 2, 4])),
            {},
        ),
        r"square.npz: true must be one label for each row": (
            save("square.npz", probabilities=PROBABILITIES, true=np.zeros((2, 2), int)),
            {},
        ),
        r"two.npz: expected an array 'probabilities' or 'logits', found one, two": (
            save("two.npz", one=PROBABILITIES, two=PROBABILITIES),
            {},
        ),
        r"short.txt: 1 true labels for 4 rows": (good, {"true": folder / "short.txt"}),
        r"wrong.txt: class: 'mnax' is not a node.*did you mean 'manx'": (good, {"classes": folder / "wrong.txt"}),
        r"threshold must lie between 0 and 1, got 1.5": (good, {"threshold": 1.5}),
    }


def test_wrong_files_are_named(tmp_path, tree):
    for message, (path, more) in bad_files(tmp_path).items():
        with pytest.raises(LeafwardError, match=message):
            evaluate(path, tree, **more)
    good = tmp_path / "good.npz"
    with pytest.raises(DataError, match=r"cannot read .*no.csv"):
        evaluate(good, tmp_path / "no.csv")
    with pytest.raises(UsageError, match=r"path must end in"):
        evaluate(good, tmp_path / "tree.yaml")
    assert not (tmp_path / "out").exists()


def test_command_line(tmp_path, tree, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = probabilities_csv(tmp_path)
    assert main(["evaluate", str(path), "--task", "hierarchy", "--taxonomy", str(tree), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["out"] == "runs/hierarchy-probabilities"
    assert result["decisions"]["most probable leaf"]["accuracy"] == 0.5
    assert main(["evaluate", "none.csv", "--task", "hierarchy", "--taxonomy", str(tree)]) == 1
    assert "none.csv" in capsys.readouterr().err
