"""How numbers, intervals and columns are written."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from leafward.errors import UsageError
from leafward.report.render import is_numeric
from leafward.stats.digits import format_column, format_value
from leafward.stats.estimate import Estimate, Interval, Over


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (np.float32("nan"), "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (True, "yes"),
        (np.False_, "no"),
        (2048, "2048"),
        (20000, "20,000"),
        (-152064, "−152,064"),
        (10**40, f"{10**40:,}"),
        (0.5, "0.5"),
        (np.float32(0.1), "0.1"),
        (torch.tensor(0.25), "0.25"),
        (1.23456, "1.235"),
        (0.99996, "1.0000"),
        (1234567.0, "1.235×10⁶"),
        (-1.07e-7, "−1.07×10⁻⁷"),
        (5e-324, "4.941×10⁻³²⁴"),
        (0.0, "0"),
        (-0.0, "0"),
        ("<b>", "<b>"),
    ],
)
def test_single_values(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (1.0712, (0.951, 1.193), "1.07 [0.95, 1.19]"),
        (71.323, (70.21, 72.44), "71.3 [70.2, 72.4]"),
        (3, (1, 5), "3.0 [1.0, 5.0]"),
        (1.07, (-50, 50), "1 [−50, 50]"),
        (123456, (120000, 130000), "123,456 [120,000, 130,000]"),
        (1.07e-7, (0.95e-7, 1.19e-7), "1.07×10⁻⁷ [0.95, 1.19]×10⁻⁷"),
        (-0.0001, (-0.02, 0.02), "0.000 [−0.020, 0.020]"),
        (3.0, (1.0, math.inf), "3.000 [1.000, ∞]"),
        (None, (1.0, 2.0), "– [1.00, 2.00]"),
        (1.5, None, "1.5"),
        (1.5, (math.nan, 2.0), "1.5"),
    ],
)
def test_values_with_intervals(value, interval, text):
    assert str(Estimate(value, interval)) == text


@given(
    st.floats(-1e12, 1e12),
    st.floats(1e-9, 1e9),
    st.floats(-3, 3),
)
def test_value_and_ends_have_the_same_decimals(centre, half, shift):
    low, high = centre - half, centre + half
    assume(low < high)
    value, interval = Estimate(centre + shift * half, (low, high)).texts
    decimals = {len(fraction) for fraction in re.findall(r"\d(?:\.(\d+))?(?=[,\]×]|$)", f"{value}, {interval}")}
    assert len(decimals - {0}) <= 1


@given(st.floats(-1e300, 1e300))
def test_four_digits_are_right(value):
    text = format_value(value).replace("−", "-").replace(",", "")
    digits, _, power = text.partition("×10")
    power = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or "0"
    assert float(f"{digits}e{power}") == pytest.approx(value, rel=5.1e-4, abs=5e-324)


def test_columns_share_decimals_unless_digits_would_be_lost():
    assert format_column([0.95, 1.0712, None]) == ["0.950", "1.071", "–"]
    assert format_column([1.304, 0.04905, -0.1321]) == ["1.304", "0.049", "−0.132"]
    assert format_column([100.0, 0.5]) == ["100.0", "0.5"]
    assert format_column([123.4, 0.01234]) == ["123.4", "0.01234"]
    assert format_column([8, 16, 1024]) == ["8", "16", "1024"]
    assert format_column([1.5, math.inf, 1e-9]) == ["1.5", "∞", "1×10⁻⁹"]
    assert format_column([]) == []


def test_numeric_columns():
    assert is_numeric([1, None, 2.5, Estimate(1.0, (0.5, 2.0))])
    assert not is_numeric([1, "two"])
    assert not is_numeric([None, math.nan])
    assert not is_numeric([True, False])


def test_number_survives_json():
    interval = Interval(0.6, 0.8, Over(seeds=5))
    number = Estimate(0.7, interval, "top-1", unit="%", better="higher", note="tuned", twin=Estimate(0.65))
    again = Estimate.from_json(json.loads(json.dumps(number.to_json())))
    assert again == number
    assert again.over == Over(seeds=5)
    assert Estimate.from_json({"name": "x", "value": None}) == Estimate(None, name="x")
    old = {"name": "x", "value": 1.0, "interval": [1.0, 1.0], "twin": 2.0, "twin_interval": [None, 3.0]}
    assert Estimate.from_json(old) == Estimate(1.0, name="x", twin=Estimate(2.0))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "must be an object"),
        ({"name": "x"}, "lacks value"),
        ({"name": "", "value": 1}, "needs a name"),
        ({"name": 3, "value": 1}, "name of a headline number must be text, not 3"),
        ({"name": "x", "value": "1"}, "value of 'x' must be a number or null, not '1'"),
        ({"name": "x", "value": True}, "not True"),
        ({"name": "x", "value": 10**400}, "value of 'x'"),
        ({"name": "x", "value": 1, "intervall": [0, 1]}, "did you mean 'interval'"),
        ({"name": "x", "value": 1, "interval": 0.5}, "two numbers"),
        ({"name": "x", "value": 1, "interval": "ab"}, "two numbers"),
        ({"name": "x", "value": 1, "interval": [2, 1]}, "low ≤ high"),
        ({"name": "x", "value": 1, "twin_interval": [2]}, "twin_interval of 'x'"),
        ({"name": "x", "value": 1, "better": "up"}, "better of 'x' must be 'higher', 'lower' or null"),
    ],
)
def test_bad_records_are_named(record, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Estimate.from_json(record)
