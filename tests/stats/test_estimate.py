"""The one estimate and interval: what they say, what they refuse, and the one rule for verdicts."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leafward.errors import UsageError
from leafward.stats.estimate import PERCENT, SHARE, Estimate, Interval, Over, sound
from leafward.stats.intervals import mean_interval, over_samples, over_seeds, share_interval
from leafward.stats.verdict import Tolerance, judge


def test_an_interval_is_a_pair_that_says_how_it_came_about() -> None:
    interval = Interval(0.1, 0.3, Over(seeds=3), method="Student t", standard_error=0.02)
    low, high = interval
    assert (low, high) == interval == (0.1, 0.3)
    assert 0.2 in interval
    assert 0.4 not in interval
    assert json.dumps(interval) == "[0.1, 0.3]"
    for again in (pickle.loads(pickle.dumps(interval)), copy.deepcopy(interval), interval.times(1.0)):
        assert (again, again.over, again.method, again.standard_error) == (interval, Over(seeds=3), "Student t", 0.02)
    assert interval.to_dict() == {"low": 0.1, "high": 0.3, "level": 0.95, "method": "Student t", "standard_error": 0.02}


def test_what_an_interval_is_over_is_said_in_words() -> None:
    assert str(Over(seeds=3)) == "3 seeds"
    assert str(Over(samples=12_500, of="held-out images")) == "12,500 held-out images"
    assert str(Over(seeds=3, samples=40, of="documents")) == "3 seeds and 40 documents"
    assert over_seeds([1.0, 2.0, 4.0]).over == Over(seeds=3)
    assert over_samples([1.0, 2.0, 4.0], of="pairs").over == Over(samples=3, of="pairs")
    assert share_interval(3, 10, "answers").over == Over(samples=10, of="answers")


def test_one_seed_has_no_interval_over_seeds() -> None:
    with pytest.raises(UsageError, match="an interval over seeds needs two or more of them, not 1"):
        Over(seeds=1)
    assert over_seeds([0.7], SHARE).interval is None
    found = over_seeds([70.0], PERCENT, samples=50, of="test images")
    assert found.over == Over(samples=50, of="test images")
    assert found.interval == pytest.approx([100.0 * end for end in share_interval(35, 50)])


def test_values_that_are_all_the_same_give_no_interval() -> None:
    assert mean_interval([0.5, 0.5, 0.5]) == (0.5, None)
    assert over_seeds([100.0, 100.0], PERCENT) == Estimate(100.0)
    assert sound((0.5, 0.5)) is None
    with pytest.raises(UsageError, match="interval of 'gain' has no width"):
        Estimate(0.0, Interval(0.0, 0.0), "gain")


def test_intervals_beyond_what_is_possible_are_refused() -> None:
    with pytest.raises(UsageError, match=r"interval reaches beyond what is possible, 0 to 1: \[0.9, 1.1\]"):
        Estimate(0.95, Interval(0.9, 1.1), possible=SHARE)
    with pytest.raises(UsageError, match="beyond what is possible"):
        Estimate(5.0, Interval(-0.1, 10.0), possible=PERCENT)
    assert over_seeds([0.9, 0.99, 1.0], SHARE).interval is not None  # what cannot be was cut off


def test_a_missing_score_leaves_nothing_to_say() -> None:
    assert over_seeds([0.5, None]) == Estimate(None)
    assert Estimate(math.nan) == Estimate(None)
    assert math.isnan(Estimate(None).number)


CLAIM = Tolerance(0.75, 1.25)


@pytest.mark.parametrize(
    ("value", "interval", "verdict"),
    [
        (1.0, (0.75, 1.25), "holds"),
        (1.0, (0.7, 1.2), "undecided"),
        (0.7, (0.5, 0.74), "does not hold"),
        (1.3, (1.26, 1.4), "does not hold"),
        (1.3, (1.25, 1.4), "undecided"),
        (1.0, (0.0, 2.0), "undecided"),
        (1.0, None, "undecided"),
        (None, None, "not tested here"),
    ],
)
def test_the_rule(value: float | None, interval: tuple[float, float] | None, verdict: str) -> None:
    found = Estimate(value, sound(interval))
    assert judge(found, CLAIM) == verdict
    assert judge(found, CLAIM, small=True) == ("not tested here" if value is None else "needs more scale")


def test_a_number_without_uncertainty_is_its_own_interval() -> None:
    assert judge(Estimate(1.0), CLAIM, exact=True) == "holds"
    assert judge(Estimate(1.3), CLAIM, exact=True) == "does not hold"


ends = st.floats(-5, 5, allow_nan=False)


@given(ends, ends, ends, ends)
def test_the_verdict_is_about_the_whole_interval(a: float, b: float, c: float, d: float) -> None:
    """Against the definition, on points of the interval: all inside, none inside, or some."""
    (low, high), (least, most) = sorted((a, b)), sorted((c, d))
    if high - low < 1e-3:
        return
    points = [min(high, low + (high - low) * k / 1000) for k in range(1001)]
    points += [x for x in (least, most) if low <= x <= high]
    inside = [least <= point <= most for point in points]
    expected = "holds" if all(inside) else "undecided" if any(inside) else "does not hold"
    assert judge(Estimate((low + high) / 2, Interval(low, high)), Tolerance(least, most)) == expected


def test_tolerances_need_an_end() -> None:
    assert [str(each) for each in (Tolerance(low=0), Tolerance(high=2.5), CLAIM)] == [
        "at least 0",
        "at most 2.5",
        "0.75 to 1.25",
    ]
    for wrong in ({}, {"low": 2.0, "high": 1.0}, {"low": math.nan}):
        with pytest.raises(UsageError, match="a tolerance needs"):
            Tolerance(**wrong)


def test_a_share_in_per_cent() -> None:
    found = Estimate(0.5, share_interval(5, 10, "images"), "accuracy", possible=SHARE).times(100.0)
    assert found.value == 50.0
    assert found.interval == pytest.approx([100.0 * end for end in share_interval(5, 10)])
    assert found.over == Over(samples=10, of="images")
    assert found.possible == PERCENT
    assert dataclasses.asdict(found)["interval"] == found.interval
