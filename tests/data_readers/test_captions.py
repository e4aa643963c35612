"""Reading and writing captions, HierarCaps's own file, and chains and trees from taxonomies."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from leafward.data.captions import Captions, read_captions, readable, second_captions, without_images_of, write_captions
from leafward.errors import DataError, UsageError
from leafward.hierarchy import Taxonomy
from leafward.systems.radial.taxonomy_captions import taxonomy_chains, taxonomy_trees, unrelated

CHAIN = Captions.chain(["animal", "dog", "a dog, sitting"], ["car", "cat", None], "http://x/1.jpg")
TREE = Captions(("animal", "dog", "cat", "puppy"), (-1, 0, 0, 1), ("car", None, "bus", None), root="a thing")
CHAINS_BEFORE = [
    ("vehicle", "dog"),
    ("animal", "dog"),
    ("vehicle", "bus", "van"),
    ("vehicle", "cat", "puppy"),
    ("animal", "cat", "hound"),
]
TREES_BEFORE = ["vehicle", "animal", "bus", "dog"]
NESTED = {"animal": {"dog": {"puppy": {}, "hound": {}}, "cat": {}}, "vehicle": {"car": {}, "bus": {}}}


def test_edges_go_from_parent_to_child():
    assert CHAIN.edges() == [(0, 1), (1, 2)]
    assert TREE.edges() == [(0, 1), (0, 2), (1, 3)]
    assert CHAIN.is_chain
    assert not TREE.is_chain


@pytest.mark.parametrize("name", ["c.csv", "c.jsonl"])
def test_chains_round_trip(tmp_path, name):
    plain = Captions.chain(["thing", "stone"])
    assert write_captions(tmp_path / name, [CHAIN, plain]) == 2
    assert read_captions(tmp_path / name) == [CHAIN, plain]


def test_trees_and_roots_round_trip_in_jsonl(tmp_path):
    write_captions(tmp_path / "t.jsonl", [TREE, CHAIN])
    found = read_captions(tmp_path / "t.jsonl")
    assert found == [TREE, CHAIN]
    with pytest.raises(UsageError, match="jsonl"):
        write_captions(tmp_path / "t.csv", [TREE])


def test_an_arrow_in_a_caption_needs_jsonl(tmp_path):
    odd = Captions.chain(["a", "a => b"])
    with pytest.raises(UsageError, match="=>"):
        write_captions(tmp_path / "t.csv", [odd])
    assert not (tmp_path / "t.csv").exists()
    write_captions(tmp_path / "t.jsonl", [odd])
    assert read_captions(tmp_path / "t.jsonl") == [odd]


def test_hierarcaps_layout(tmp_path):
    """Its columns, gzipped, with commas in quoted captions."""
    text = 'positive,negative,image_url\n"a => b => c, d => e","f => g => h => i",http://x/COCO_1.jpg\n'
    (tmp_path / "h.csv.gz").write_bytes(gzip.compress(text.encode()))
    expected = Captions.chain(["a", "b", "c, d", "e"], ["f", "g", "h", "i"], "http://x/COCO_1.jpg")
    assert read_captions(tmp_path / "h.csv.gz") == [expected]
    (tmp_path / "t.csv").write_text("id,captions,image_url\n0,a => b,http://x/2.jpg\n")
    assert read_captions(tmp_path / "t.csv") == [Captions.chain(["a", "b"], image="http://x/2.jpg")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("positive,negative\na => b,c\n", "2 positive texts, but 1 negative"),
        ("text\na\n", "positive, captions or tree"),
        ("positive\na =>  => c\n", "text 1 is empty"),
        ("positive\n", "holds no captions"),
        ("positive,negative\na => b,c => d,e\n", "row 1: more fields"),
    ],
)
def test_bad_rows_are_refused_by_number(tmp_path, text, said):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(DataError, match=said):
        read_captions(tmp_path / "c.csv")


def test_bad_json_and_bad_endings_are_refused(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"positive": ["a", "b"]}\n{"tree": {"text": "a", "kids": []}}\n')
    with pytest.raises(DataError, match=r"row 2.*'kids'"):
        read_captions(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="expected an object"):
        read_captions(tmp_path / "d.jsonl")
    with pytest.raises(UsageError, match="must end in"):
        read_captions(tmp_path / "c.txt")


def test_parents_must_stand_before_their_children():
    with pytest.raises(UsageError, match="text 1 has 1"):
        Captions(("a", "b"), (-1, 1), (None, None))
    with pytest.raises(UsageError, match="text 1 has -1"):
        Captions(("a", "b"), (-1, -1), (None, None))


def test_images_of_the_test_set_are_left_out_by_their_name():
    captions = [Captions.chain(["a", "b"], image=f"http://{site}/{i}.jpg") for site in "xy" for i in range(3)]
    held = [Captions.chain(["c", "d"], image="folder/1.jpg")]
    assert [each.image for each in without_images_of(captions, held)] == [
        "http://x/0.jpg",
        "http://x/2.jpg",
        "http://y/0.jpg",
        "http://y/2.jpg",
    ]
    assert without_images_of([Captions.chain(["a", "b"])], held) == [Captions.chain(["a", "b"])]


def test_second_captions_are_of_the_same_image_and_not_in_its_chain():
    chains = [Captions.chain(["dog", "a dog"], image="x/1.jpg"), Captions.chain(["cat", "a cat"], image="x/2.jpg")]
    others = [
        Captions.chain(["dog", "a dog"], image="y/1.jpg"),
        Captions.chain(["pet", "a pet"], image="y/1.jpg"),
        Captions.chain(["cat", "a cat"], image="y/2.jpg"),
    ]
    assert second_captions(chains, others) == {"1.jpg": "a pet"}


def test_the_18770_chains_that_share_no_image_with_the_test_set(shared_data):
    folder = shared_data / "hierarcaps"
    test = read_captions(folder / "hierarcaps_test.parquet")
    expanded = read_captions(folder / "hierarcaps_test_expanded.csv.gz")
    assert len(test) == 1000
    assert [len({each.texts[level] for each in test}) for level in range(4)] == [491, 717, 999, 1000]
    assert len(expanded) == 23_479
    assert len(without_images_of(expanded, test)) == 18_770
    assert {len(each.texts) for each in expanded} == {4}


def test_chains_of_a_taxonomy():
    tax = Taxonomy.from_nested(NESTED, root="thing")
    chains = taxonomy_chains(tax)
    assert sorted(each.texts for each in chains) == [
        ("animal", "cat"),
        ("animal", "dog", "hound"),
        ("animal", "dog", "puppy"),
        ("vehicle", "bus"),
        ("vehicle", "car"),
    ]
    for each in chains:
        for text, wrong in zip(each.texts, each.negatives, strict=True):
            assert wrong is not None
            assert not tax.entails(text, wrong)
            assert not tax.entails(wrong, text)
    assert taxonomy_chains(tax) == chains
    assert taxonomy_chains(tax, seed=1) != chains
    assert taxonomy_chains(tax, keep_root=True)[0].texts[0] == "thing"
    assert taxonomy_chains(tax, root="a photo")[0].root == "a photo"


def test_trees_hold_every_edge_once_also_of_a_dag():
    pairs = [("a", "r"), ("b", "r"), ("c", "a"), ("c", "b"), ("d", "c"), ("e", "b"), ("r", None)]
    tax = Taxonomy.from_edges(pairs)
    trees = taxonomy_trees(tax, keep_root=True)
    edges = [(each.texts[down], each.texts[up]) for each in trees for up, down in each.edges()]
    assert sorted(edges) == sorted((child, parent) for child, parent in pairs if parent)


def test_negatives_on_random_dags_are_unrelated():
    rng = np.random.default_rng(0)
    for trial in range(100):
        size = int(rng.integers(3, 30))
        pairs = {(f"n{i}", f"n{int(p)}") for i in range(1, size) for p in rng.integers(0, i, rng.integers(1, 3))}
        tax = Taxonomy.from_edges(sorted(pairs))
        nodes = np.arange(len(tax))
        found = unrelated(tax, nodes, np.random.default_rng(trial))
        free = ~(tax.entails(nodes[:, None], nodes[None]) | tax.entails(nodes[None], nodes[:, None]))
        for node, other in zip(nodes, found, strict=True):
            same = free[node] & (tax.depth == tax.depth[node])
            allowed = same if same.any() else free[node]
            assert allowed[other] if other >= 0 else not allowed.any()


def ancestors_by_hand(pairs: set[tuple[str, str]], node: str) -> set[str]:
    """The node and all above it, climbing edge by edge."""
    return {node}.union(*(ancestors_by_hand(pairs, parent) for child, parent in pairs if child == node))


def random_dag(rng: np.random.Generator) -> set[tuple[str, str]]:
    size = int(rng.integers(6, 20))
    return {(f"n{i}", f"n{int(p)}") for i in range(1, size) for p in rng.integers(0, i, rng.integers(1, 3))}


@pytest.mark.parametrize("make", [taxonomy_chains, taxonomy_trees])
def test_no_negative_of_a_dag_is_an_ancestor_of_a_more_specific_text(make):
    """Nor does one follow from its own text; it is missing only where every node is one or the other."""
    rng = np.random.default_rng(7)
    triples = missing = 0
    for trial in range(150):
        pairs = random_dag(rng)
        tax = Taxonomy.from_edges(sorted(pairs))
        above = {name: ancestors_by_hand(pairs, name) for name in tax.names}
        for each in make(tax, seed=trial, caption=str, keep_root=True):
            # Every text of a chain has a negative, false of its leaf; of a tree the top alone, false of every child.
            ends, general = (each.texts[1:], 1) if make is taxonomy_trees else (each.texts[-1:], len(each.texts))
            true = set().union(*(above[end] for end in ends))
            for place, text in enumerate(each.texts[:general]):
                allowed = {name for name in tax.names if name not in true and text not in above[name]}
                wrong = each.negatives[place]
                assert wrong in allowed or (wrong is None and not allowed), (sorted(pairs), each, text)
                triples, missing = triples + 1, missing + (wrong is None)
    assert triples - missing > 500


def test_negatives_of_a_tree_are_what_they_were():
    """Drawn before negatives were compared with the specific texts, which changes nothing without second parents."""
    tax = Taxonomy.from_nested(
        {"animal": {"dog": {"puppy": {}, "hound": {}}, "cat": {}}, "vehicle": {"car": {"van": {}}, "bus": {}}}, "thing"
    )
    assert [each.negatives for each in taxonomy_chains(tax, seed=3, caption=str)] == CHAINS_BEFORE
    assert [each.negatives[0] for each in taxonomy_trees(tax, seed=3, caption=str)] == TREES_BEFORE


def test_names_become_words():
    assert readable("golden_retriever.n.01") == "golden retriever"
    assert readable("St. Bernard") == "St. Bernard"


def test_json_lines_hold_what_was_written(tmp_path):
    write_captions(tmp_path / "t.jsonl", [TREE])
    row = json.loads((tmp_path / "t.jsonl").read_text())
    assert row["tree"]["children"][0] == {"text": "dog", "children": [{"text": "puppy"}]}
    assert row["root"] == "a thing"
