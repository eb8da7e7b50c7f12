"""The HTML report."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from outrider.errors import MissingExtra
from outrider.measure import charts
from outrider.measure.charts import figures, series_names
from outrider.measure.page import page_html, write_page
from outrider.measure.record import MeasureResult, Piece, SkippedRow
from outrider.measure.report import summarise
from tests.measure.output_support import chain, made_up, tree

EVIL = "<script>alert('x')</script><img src=http://evil.example/x>"
STYLE = resources.files("outrider.measure").joinpath("page.css").read_text()


class Reader(HTMLParser):
    """Every tag that opens, and whether all of them close in order."""

    VOID = ("meta", "img", "link", "br", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(page)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data


def evil() -> MeasureResult:
    """Every word that comes from outside tries to be code."""
    arm = chain(EVIL, 4)
    result = made_up(30, arms=((arm, 1.0, 1.0, None),), settings={"target": EVIL, "notes": {EVIL: EVIL}})
    records = tuple(replace(each, labels={EVIL: EVIL + str(each.line % 2)}) for each in result.records)
    sample = replace(
        result.samples[0], id=EVIL, pieces=(Piece(text=EVIL, kind="kept"), Piece(text="</pre>", kind="refused"))
    )
    return replace(
        result, records=records, samples=(sample,), skipped=(SkippedRow(line=1, reason=EVIL),), warnings=(EVIL,)
    )


@pytest.fixture(scope="module")
def page() -> str:
    result = made_up(60)
    summary = summarise(result)
    return page_html(result, summary, figures(summary))


def test_the_page_needs_no_script_and_no_network(page: str) -> None:
    pytest.importorskip("vl_convert")
    read = Reader(page)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in read.tags}
    for tag, attributes in read.tags:
        assert not {"src", "href", "action", "xlink:href"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert {found.rstrip("/") for found in re.findall(r"https?://[^\s\"'<)]+", page)} == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page and "@import" not in page
    assert any(attributes.get("http-equiv") == "Content-Security-Policy" for _, attributes in read.tags)
    assert len(page) < 400_000


def test_the_page_says_what_was_found(page: str) -> None:
    pytest.importorskip("vl_convert")
    words = Reader(page).words
    for expected in ("Use ", "▲ pays", "▼ does not pay", "break-even", "Tokens a pass by draft tokens", "By category"):
        assert expected in words, expected
    for expected in ("not JSON", "0123456789abcdef", "versions.torch", "62 lines", "ceiling", "rag (n=20)"):
        assert expected in words, expected
    assert 'class="k"' in page and '<del class="r">c</del><b class="c">a</b>' in page


def test_words_from_outside_are_never_code() -> None:
    pytest.importorskip("vl_convert")
    result = evil()
    summary = summarise(result)
    read = Reader(page_html(result, summary, figures(summary)))
    assert not {"script", "img"} & {tag for tag, _ in read.tags}
    assert "alert('x')" in read.words


def test_drawings_are_whole_and_every_colour_has_a_dark_twin() -> None:
    pytest.importorskip("vl_convert")
    names = [chain(f"drafter-{index}", k) for index in range(9) for k in (1, 2)]
    summary = summarise(made_up(20, arms=tuple((arm, 0.9, 1.0, None) for arm in names)))
    found = figures(summary)
    assert [figure.title for figure in found] == [
        "Tokens a pass by draft tokens",
        "Forecast speed-up by draft tokens",
        "Kept at each position",
        "Kept where reached",
        "By category",
        "By context",
        "By turn",
    ]
    dark = STYLE[STYLE.index("prefers-color-scheme: dark") :]
    for figure in found:
        root = ElementTree.fromstring(figure.svg)
        colours = {element.get(name) for element in root.iter() for name in ("fill", "stroke")} - {None, "none"}
        for colour in colours - {"transparent"}:
            assert f'="{colour}"]' in dark, (figure.title, colour)
        assert not [element.get("id") for element in root.iter() if element.get("id")], "names could clash"
    assert {colour for colour in charts.PALETTE if f'"{colour}"' in found[0].svg} == {*charts.PALETTE}


def test_without_times_bars_are_tokens_a_pass_and_there_is_no_verdict() -> None:
    pytest.importorskip("vl_convert")
    result = replace(made_up(30), costs=None)
    summary = summarise(result)
    found = figures(summary)
    assert "Forecast speed-up by draft tokens" not in [figure.title for figure in found]
    assert any("Tokens a pass of the best arm" in figure.caption for figure in found)
    words = Reader(page_html(result, summary, found)).words
    assert "pass times were not measured" in words and "▲ pays" not in words


def test_without_the_extra_the_rest_of_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    result = made_up(30)
    summary = summarise(result)
    with pytest.raises(MissingExtra, match=r"outrider\[report\]"):
        figures(summary)
    note = write_page(result, summary, tmp_path / "report.html")
    assert "outrider[report]" in note
    read = Reader((tmp_path / "report.html").read_text())
    assert "svg" not in {tag for tag, _ in read.tags}
    assert "outrider[report]" in read.words and "▲ pays" in read.words


def test_without_texts_the_page_says_so() -> None:
    result = made_up(20)
    bare = replace(result, samples=tuple(replace(each, pieces=()) for each in result.samples))
    assert "Texts were left out, as asked." in Reader(page_html(bare, summarise(bare), ())).words
    none = replace(result, samples=())
    assert "Samples" not in Reader(page_html(none, summarise(none), ())).words


def test_a_measurement_of_nothing_has_a_page_too() -> None:
    result = MeasureResult(arms=(), records=(), skipped=(SkippedRow(line=1, reason="empty"),), num_rows=1)
    summary = summarise(result)
    words = Reader(page_html(result, summary, figures(summary))).words
    assert "no request here may be judged by" in words and "0 of 1 lines measured" in words


def test_series_are_called_by_their_last_name_unless_it_is_shared() -> None:
    arms = [chain("heads/a", 4), chain("other/a", 4), chain("heads/b", 4), tree("suffix", 4)]
    assert list(series_names(arms).values()) == ["heads/a", "other/a", "b", "suffix"]
    shaped = [chain("merged:heads/a:depth=2,width=3", 4), chain("heads/b:depth=2", 4), chain("heads/b:depth=3", 4)]
    assert list(series_names(shaped).values()) == ["merged:a", "b:depth=2", "b:depth=3"]
    hot = [chain("suffix", 4), chain("suffix", 4, temperature=0.8)]
    assert list(series_names(hot).values()) == ["suffix, T 0", "suffix, T 0.8"]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read_on_both_pages() -> None:
    """WCAG 2.2 AA: 4.5 to 1 for words."""
    light, dark = ({}, {})
    start = STYLE.index("prefers-color-scheme: dark")
    for found, part in ((light, STYLE[:start]), (dark, STYLE[start:])):
        found.update(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
    assert light.keys() == dark.keys()
    for scheme in (light, dark):
        for ink in ("ink", "muted", "good", "bad", "unsure", "fix", "link"):
            assert contrast(scheme[ink], scheme["card"]) >= 4.5, ink
        for ink in ("good", "bad", "unsure", "fix"):
            assert contrast(scheme[ink], scheme[f"{ink}-soft"]) >= 4.5, ink
    twins = dict(re.findall(r'svg \[fill="(#[0-9a-f]{6})"\] \{ fill: (#[0-9a-f]{6})', STYLE))
    for colour in charts.PALETTE:
        assert contrast(colour, light["card"]) >= 4.5 and contrast(colour, light["loss"]) >= 3
        assert contrast(twins[colour], dark["card"]) >= 4.5 and contrast(twins[colour], dark["loss"]) >= 3
