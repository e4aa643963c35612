"""One result as a page, a terminal's tables, JSON and CSV: the same numbers in each."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from rich.console import Console

from leafward.errors import DataError, UsageError
from leafward.report import Estimate, Result, new_figure
from leafward.stats.estimate import Interval, Over


def made() -> Result:
    accuracy = Estimate(0.7, Interval(0.6, 0.8, Over(seeds=3)), "accuracy", better="higher", twin=Estimate(0.65))
    loss = Estimate(3.25, name="loss", unit="nats")
    result = Result("A run", "on data", [accuracy, loss], notes=["Mind this."], values={"scores": np.arange(3) / 2})
    result.section("Models")
    rows = [["a", Estimate(1.0, Interval(0.9, 1.1)), 2], ["b [red]", None, np.float32(0.1)]]
    result.table(["model", "score", "size"], rows, "All models", terminal=True)
    return result


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_the_page_says_what_an_interval_is_over() -> None:
    html = made().html()
    assert "95 % over 3 seeds" in html
    assert "Mind this." in html
    assert html.index("Mind this.") < html.index("accuracy") < html.index("All models")


def test_json_has_numbers_as_numbers_and_reads_back(tmp_path) -> None:
    made().write(tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["headline"][0]["value"] == 0.7
    assert found["headline"][0]["over"] == {"seeds": 3}
    assert found["scores"] == [0.0, 0.5, 1.0]
    again = Result.of(found, "A run", "on data")
    assert again.estimates == made().estimates
    assert again.estimates[0].over == Over(seeds=3)
    assert (again.notes, again.values) == (["Mind this."], {"scores": [0.0, 0.5, 1.0]})
    with pytest.raises(DataError, match=r"x\.json: headline\[0\]: .* lacks value"):
        Result.of({"headline": [{"name": "x"}]}, source="x.json")


def test_csv_of_the_estimates_and_of_a_table(tmp_path) -> None:
    made().write(tmp_path / "numbers.csv")
    header, accuracy, loss = read((tmp_path / "numbers.csv").read_text())
    found = dict(zip(header, accuracy, strict=True))
    assert {key: found[key] for key in ("name", "value", "low", "high", "over", "twin", "better")} == {
        "name": "accuracy",
        "value": "0.7",
        "low": "0.6",
        "high": "0.8",
        "over": "3 seeds",
        "twin": "0.65",
        "better": "higher",
    }
    assert loss[:4] == ["loss", "3.25", "", ""]
    assert read(made().to_csv("All models")) == [
        ["model", "score", "score low", "score high", "size"],
        ["a", "1.0", "0.9", "1.1", "2"],
        ["b [red]", "", "", "", str(float(np.float32(0.1)))],
    ]
    with pytest.raises(UsageError, match="there is no table 'All model'; did you mean 'All models'"):
        made().to_csv("All model")


def test_the_terminal_shows_the_same() -> None:
    console = Console(width=120, file=io.StringIO())
    made().show(console)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for words in ("0.70 [0.60, 0.80]", "0.65", "3.25 nats", "95 % over 3 seeds", "b [red]", "note: Mind this."):
        assert words in text


def test_a_result_is_one_line() -> None:
    assert repr(made()) == "Result('A run': accuracy 0.70 [0.60, 0.80]; loss 3.25 nats)"
    assert "\n" not in repr(made())
    many = Result("Many", estimates=[Estimate(float(k), name=f"n{k}") for k in range(9)])
    assert repr(many).endswith("; 5 more)")


def test_a_notebook_shows_the_page_without_its_styles_leaking() -> None:
    html = made()._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert html.count("<") == 2  # the page inside is escaped


def test_figures_are_drawn_when_a_page_is_and_not_before() -> None:
    drawn = []
    result = made()
    result.figure(lambda: drawn.append(1) or new_figure()[0], "late")
    result.to_json(), result.to_csv(), repr(result)
    assert drawn == []
    assert result.html() == result.html()
    assert len(drawn) == 2


def test_curves_are_of_what_was_logged() -> None:
    records = {
        "a": [{"step": 1, "train/loss": 2.0, "eval/loss": None}, {"step": 2, "train/loss": 1.0, "eval/loss": 1.5}],
        "b": [{"step": 1, "train/loss": 3.0}],
    }
    result = Result("t")
    result.curves(records, {"train/loss, eval/loss": "Loss", "train/lr": "Learning rate"}, ylabel="nats")
    html = result.html()
    assert html.count("<svg ") == 1
    assert "Learning rate" not in html
    assert ">nats<" in html
