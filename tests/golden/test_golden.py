"""Presets and tiny trainings give the numbers that they gave; those change only in a commit that says why."""

import copy

import golden_data
import golden_presets
import golden_runs
import pytest
from golden_cases import STEPS, SYSTEMS

REWRITE = "if that is meant, run python tests/golden/write.py and say why in the commit"
CASES = [(system, name) for system, each in SYSTEMS.items() for name in each.cases]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return golden_data.make_all(tmp_path_factory.mktemp("golden"))


@pytest.mark.slow
@pytest.mark.parametrize(("system", "name"), CASES)
def test_trainings_give_the_numbers_that_they_gave(system, name, data):
    if reason := golden_runs.elsewhere(system):
        pytest.skip(reason)
    changed = golden_runs.changes(golden_runs.recorded(system)[name], golden_runs.run(system, name, data))
    assert not changed, "\n".join([f"numbers of {system}, {name} changed; {REWRITE}", *changed])


@pytest.mark.parametrize("system", SYSTEMS)
def test_presets_are_what_they_were(system):
    changed = golden_presets.changes(golden_presets.recorded(system), golden_presets.resolved(system))
    assert not changed, "\n".join([f"presets of {system} changed; {REWRITE}", *changed])


def test_nothing_is_left_out_of_the_golden_numbers():
    assert set(SYSTEMS) == set(golden_presets.SYSTEMS)
    assert sum(len(golden_presets.recorded(system)) for system in SYSTEMS) == 40
    assert {path.stem for path in golden_presets.FOLDER.rglob("*.*")} == set(SYSTEMS)
    for system, each in SYSTEMS.items():
        held = golden_runs.recorded(system)
        assert held.keys() == each.cases.keys()
        for name, case in each.cases.items():
            assert held[name]["losses"].keys() == case.arms.keys()
            assert all(len(found) == STEPS for arm in held[name]["losses"].values() for found in arm.values())
            assert held[name]["scores"]


@pytest.mark.parametrize("change", [lambda old: old * (1 + 2e-9), lambda old: None, lambda old: old + 1e-6])
def test_a_number_that_moved_is_named(change):
    held = golden_runs.recorded("taxonomy")["distance"]
    moved = copy.deepcopy(held)
    moved["losses"]["lorentz"]["loss"][3] = change(held["losses"]["lorentz"]["loss"][3])
    (found,) = golden_runs.changes(held, moved)
    assert found.startswith("losses > lorentz > loss > 4: ")
    del moved["scores"]["lorentz/distortion"]
    assert len(golden_runs.changes(held, moved)) == 2


def test_rounding_of_the_last_digits_is_no_change():
    held = golden_runs.recorded("taxonomy")["distance"]
    near = copy.deepcopy(held)
    near["losses"]["lorentz"]["loss"] = [loss * (1 + 1e-12) for loss in held["losses"]["lorentz"]["loss"]]
    assert golden_runs.changes(held, near) == []
