"""Every format, read and refused."""

import json

import networkx
import numpy as np
import pytest

from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy, readers

from . import hierarchy_oracles as oracles

ZOO = {"animal": {"dog": {"poodle": None, "corgi": None}, "cat": ["tabby"]}}
ZOO_EDGES = {
    ("dog", "animal"),
    ("cat", "animal"),
    ("poodle", "dog"),
    ("corgi", "dog"),
    ("tabby", "cat"),
    ("animal", ""),
}


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_all_formats_agree(tmp_path):
    rows = "dog,animal\ncat,animal\npoodle,dog\ncorgi,dog\ntabby,cat\n"
    turned = "\n".join(",".join(reversed(row.split(","))) for row in rows.split())
    d3 = {"name": "animal", "children": [{"name": "dog", "children": [{"name": "poodle"}, {"name": "corgi"}]}]}
    d3["children"].append({"name": "cat", "children": ["tabby"]})
    text = "animal\n\n  dog\n    poodle\n    corgi\n  cat\n     tabby\n"
    graph = networkx.DiGraph([(parent, child) for child, parent in ZOO_EDGES if parent])
    found = [
        Taxonomy.from_csv(write(tmp_path, "plain.csv", rows)),
        Taxonomy.from_csv(write(tmp_path, "declared.csv", "\ufeffchild,parent\nanimal,\n" + rows)),
        Taxonomy.from_csv(write(tmp_path, "turned.csv", "Parent,Child\n" + turned)),
        Taxonomy.from_json(write(tmp_path, "nested.json", json.dumps(ZOO))),
        Taxonomy.from_json(write(tmp_path, "d3.json", json.dumps(d3))),
        Taxonomy.from_text(write(tmp_path, "zoo.txt", text)),
        Taxonomy.from_text(
            write(tmp_path, "tabs.txt", text.replace("     ", "\t\t").replace("    ", "\t\t").replace("  ", "\t"))
        ),
        Taxonomy.from_nested(ZOO),
        Taxonomy.from_networkx(graph),
        Taxonomy.load(write(tmp_path, "again.csv", rows)),
    ]
    assert all(set(tax.edges()) == ZOO_EDGES for tax in found)


def test_superclasses(tmp_path):
    groups = {"fish": ["ray", "shark"], "flowers": ["rose", "tulip"]}
    for source in (groups, write(tmp_path, "groups.json", json.dumps(groups))):
        tax = Taxonomy.from_superclasses(source)
        assert tax.names[tax.root] == "root"
        assert tax.leaf_names == ["ray", "shark", "rose", "tulip"]
        assert tax.depth[tax.leaves].tolist() == [2, 2, 2, 2]
    with pytest.raises(DataError, match="'fish' must be a list"):
        Taxonomy.from_superclasses({"fish": "ray"})
    with pytest.raises(DataError, match="'ray' stands here a second time"):
        Taxonomy.from_superclasses({"fish": ["ray"], "light": ["ray"]})


@pytest.mark.parametrize("ending", ["csv", "json"])
@pytest.mark.parametrize("dag", [False, True])
def test_saved_and_loaded_with_the_same_numbers(tmp_path, ending, dag):
    tax = oracles.random_taxonomy(np.random.default_rng(3), 60, dag)
    odd = Taxonomy.from_edges(
        [('a "quoted", name', None), ("ünïcode\nline", 'a "quoted", name'), ("null", "ünïcode\nline")]
    )
    for one in (tax, odd):
        path = tmp_path / f"saved.{ending}"
        one.save(path)
        back = Taxonomy.load(path)
        assert back.names == one.names
        assert list(back.edges()) == list(one.edges())
    with pytest.raises(UsageError, match="must end in"):
        tax.save(tmp_path / "saved.pkl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("animal,\ndog,animal\ncat,feline\n", r"line 3: orphan 'cat': its parent 'feline' is unknown"),
        ("dog,animal\nanimal,thing\nthing,dog\n", r"cycle: .*'dog'.* under .* \(lines [123], [123], [123]\)"),
        ("dog,dog\n", r"cycle: 'dog' under 'dog' \(lines 1\)"),
        ("animal,\ndog,animal\nanimal,\n", r"line 3: duplicate row: the root 'animal', first on line 1"),
        ("dog,animal\ncat,animal\ndog,animal\n", r"line 3: duplicate row: 'dog' under 'animal', first on line 1"),
        ("dog,animal\noak,tree\n", r"2 roots: 'animal', 'tree'.*root='NAME'"),
        ("dog,animal\ncat\n", r"line 2: expected two fields"),
        ("dog,animal,4\n", r"line 1: expected two fields.*got 3"),
        ("dog,animal\n,animal\n", r"line 2: a node's name is empty"),
        ("animal,\ndog,animal\nanimal,dog\n", r"line 3: 'animal' stands under 'dog', but is declared a root"),
        ('dog,animal\n"cat,animal\n', r"not readable as CSV"),
        ("", "holds no node"),
        ("child,parent\n", "holds no node"),
    ],
)
def test_bad_csv_is_refused_by_name_and_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        Taxonomy.from_csv(write(tmp_path, "bad.csv", text))


def test_a_cycle_off_the_main_path_is_found(tmp_path):
    """The cycle hangs below good nodes and has good nodes below it; the message names its members alone."""
    path = write(tmp_path, "bad.csv", "a,\nb,a\nx,b\ny,x\nz,y\nx,z\nleaf,z\n")
    with pytest.raises(DataError) as caught:
        Taxonomy.from_csv(path)
    assert set("xyz") == {word for word in str(caught.value).split("'")[1::2] if word != "under"}


def test_several_roots_only_when_asked(tmp_path):
    path = write(tmp_path, "two.csv", "dog,animal\noak,tree\n")
    tax = Taxonomy.from_csv(path, root="thing")
    assert tax.names[tax.root] == "thing"
    assert tax.depth[tax.ids("oak")] == 2
    with pytest.raises(DataError, match="'oak' is already the name"):
        Taxonomy.from_csv(path, root="oak")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n    b\n  c\n", "line 3: the indentation of 'c' fits no line above it"),
        ("a\n  b\n\tc\n", "line 3: the indentation of 'c'"),
        ("a\n  b\n  b\n", "line 3: the name 'b' stands here a second time, first on line 2"),
        ("a\nb\n", "2 roots: 'a', 'b'"),
    ],
)
def test_bad_text_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        Taxonomy.from_text(write(tmp_path, "bad.txt", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": {}, "b": {}}}', "'b' stands twice in one object"),
        ('{"a": {"b": {"c": {}}, "c": {}}}', "'c' stands here a second time"),
        ('{"a": 3}', "expected a mapping or a list of names under 'a', got 3"),
        ('{"a": [3]}', "name must be text, got 3"),
        ("[1", "not readable as JSON"),
        ("{}", "holds no node"),
        ('{"parents": {"a": "b"}}', "parents of 'a' must be a list"),
        ('{"parents": {"r": [], "a": ["q"]}}', "orphan 'a': its parent 'q'"),
    ],
)
def test_bad_json_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        Taxonomy.from_json(write(tmp_path, "bad.json", text))


def test_other_refusals(tmp_path):
    with pytest.raises(UsageError, match="directed"):
        Taxonomy.from_networkx(networkx.Graph([("a", "b")]))
    with pytest.raises(DataError, match="must be text, got 1"):
        Taxonomy.from_networkx(networkx.DiGraph([(1, 2)]))
    with pytest.raises(DataError, match="cannot read"):
        Taxonomy.from_csv(tmp_path / "absent.csv")
    (tmp_path / "latin.csv").write_bytes("é,b".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        Taxonomy.from_csv(tmp_path / "latin.csv")
    with pytest.raises(UsageError, match=r"\.csv or \.json or \.txt"):
        Taxonomy.load(tmp_path / "tree.xml")


# Three synsets of WordNet 3.0 in its own layout (wndb(5)), shortened: a cycle-free piece with an instance and with
# one word ("cat") whose second sense comes first in the data file.
DATA = """\
  1 This software and database is being provided to you, the LICENSEE
00001740 03 n 01 entity 0 000 | that which is perceived
02083346 05 n 02 Canine 0 canid 0 001 @ 00001740 n 0000 | any of various fissiped mammals
09900153 18 n 01 cat 1 001 @ 00001740 n 0000 | a spiteful woman gossip
02121620 05 n 02 cat 0 true_cat 0 002 @ 02083346 n 0000 @ 00001740 n 0000 | feline mammal
09999999 05 n 01 Felix 0 001 @i 02121620 n 0000 | a cat of the films
"""
INDEX = """\
  1 This software and database is being provided to you, the LICENSEE
cat n 2 1 @ 2 1 02121620 09900153
canine n 1 1 @ 1 0 02083346
entity n 1 1 ~ 1 1 00001740
felix n 1 1 @ 1 0 09999999
"""


def test_wordnet_files(tmp_path):
    write(tmp_path, "data.noun", DATA)
    write(tmp_path, "index.noun", INDEX)
    tax = Taxonomy.from_wordnet(tmp_path)
    assert set(tax.names) == {"entity.n.01", "canine.n.01", "cat.n.02", "cat.n.01", "felix.n.01"}
    assert {tax.names[i] for i in tax.parents.of(int(tax.ids("cat.n.01")))} == {"canine.n.01", "entity.n.01"}
    assert tax.entails("cat.n.01", "felix.n.01")
    assert "n02121620" in Taxonomy.from_wordnet(tmp_path, names="wnid")
    with pytest.raises(DataError, match=r"cannot read .*data\.verb"):
        Taxonomy.from_wordnet(tmp_path, pos="verb", names="wnid")
    with pytest.raises(UsageError, match="pos must be"):
        Taxonomy.from_wordnet(tmp_path, pos="adjective")  # type: ignore[arg-type]
    write(tmp_path, "data.noun", DATA.replace("@i 02121620", "@i 02121621"))
    with pytest.raises(DataError, match=r"line 6: orphan 'felix.n.01': its hypernym 02121621"):
        Taxonomy.from_wordnet(tmp_path)
    write(tmp_path, "data.noun", "nonsense\n")
    with pytest.raises(DataError, match="line 1: not a line of WordNet"):
        Taxonomy.from_wordnet(tmp_path)


def test_whole_wordnet():
    if not (readers.DEBIAN_WORDNET / "data.noun").is_file():
        pytest.skip("WordNet (Debian's wordnet-base) is not installed")
    tax = Taxonomy.from_wordnet(readers.DEBIAN_WORDNET)
    assert len(tax) == 82_115
    assert tax.names[tax.root] == "entity.n.01"
    assert tax.names[int(tax.lca("dog.n.01", "cat.n.01"))] == "carnivore.n.01"
    assert tax.distance("dog.n.01", "cat.n.01") == 4


def test_breeds_hierarchy(shared_data):
    """BREEDS' own edge list, parent first: a tree, whose leaves are 890 of the ImageNet classes."""
    folder = shared_data / "breeds_hierarchy"
    lines = (folder / "class_hierarchy.txt").read_text().splitlines()
    tax = Taxonomy.from_edges((line.split()[1], line.split()[0]) for line in lines)
    classes = {wnid for _, wnid, _ in json.loads((folder / "dataset_class_info.json").read_text())}
    assert tax.is_tree
    assert len(tax.leaves) == 890
    assert set(tax.leaf_names) < classes
