"""The page of a timeline stands alone, holds what the timeline holds, and takes no text of the log for HTML."""

import base64
import json
import re
import zlib
from array import array
from html.parser import HTMLParser
from itertools import accumulate

import pytest
from kinlog_builders import Story
from kinlog_evil_text import EVIL, evil_timeline
from kinlog_long_run import LongRun

from kinlog.lineage.state import Projection
from kinlog.replay.timeline.building import timeline_of
from kinlog.replay.timeline.html_page import render_page
from kinlog.replay.timeline.page_data import pack_timeline
from kinlog.replay.timeline.timeline import Timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return timeline_of(LongRun(groups=80, kill_every=2).events(), run_id="run-1", beginning=Projection())


class Outline(HTMLParser):
    """The tags of a page, what they refer to, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open[: max((i for i, name in enumerate(self._open) if name == tag), default=0)]

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text += data


def unpacked(packed: str) -> tuple[dict, dict[str, dict[str, list[int]]]]:
    """What ``decode.js`` decodes, decoded by other means."""
    block = zlib.decompress(base64.b64decode(packed))
    head_bytes = int.from_bytes(block[:4], "little")
    head, at = json.loads(block[4 : 4 + head_bytes]), 4 + head_bytes
    tables: dict[str, dict[str, list[int]]] = {}
    for name, table in head["tables"].items():
        for column in table["columns"]:
            planes, rows = block[at : at + 8 * table["rows"]], table["rows"]
            values = array("q", b"".join(planes[row::rows] for row in range(rows)))
            tables.setdefault(name, {})[column] = list(accumulate(values))
            at += 8 * rows
    assert at == len(block)
    return head, tables


def test_page_needs_nothing_but_itself(timeline: Timeline):
    outline = Outline(render_page(timeline))
    assert {tag for tag, _ in outline.tags}.isdisjoint({"iframe", "object", "embed", "base", "form"})
    referring = [
        value for _, attributes in outline.tags for name in ("src", "href") if (value := attributes.get(name))
    ]
    assert referring == ["data:,"]
    policy = next(a["content"] for tag, a in outline.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    code = render_page(timeline)
    assert not re.search(r"https?://|@import|url\((?!data)|fetch\(|XMLHttpRequest|WebSocket", code)


def test_page_holds_every_attempt_as_it_is_in_the_timeline(timeline: Timeline):
    head, tables = unpacked(pack_timeline(timeline))
    a, shown = timeline.attempts, tables["attempts"]
    for column in ("group_id", "generation", "attempt", "worker", "slot", "outcome", "reason", "tokens"):
        assert shown[column] == list(getattr(a, column)), column
    assert [timeline.begin_us + time for time in shown["begin"]] == list(a.begin_us)
    assert [time < 0 for time in shown["verdict"]] == [time == 0 for time in a.verdict_us]
    assert head["workers"] == list(timeline.workers)
    assert head["samples"] == [group.sample_id for group in timeline.groups]
    assert tables["steps"]["train_step"] == [step.train_step for step in timeline.steps]
    assert [life["how"] for life in head["lives"]] == [life.end.value for life in timeline.lives]
    assert [c["name"] for c in head["checkpoints"]] == [c.name for c in timeline.checkpoints]


def test_page_of_an_empty_history_is_a_page():
    page = render_page(timeline_of(Story().records, run_id="r", beginning=Projection()))
    _, tables = unpacked(re.search(r'id="data"[^>]*>([^<]*)<', page)[1])
    assert tables["attempts"]["begin"] == []


def test_figures_are_in_the_page_without_its_script(timeline: Timeline):
    text = " ".join(Outline(render_page(timeline)).text.split())
    s, a = timeline.summary, timeline.summary.attempts
    for words in (
        f"{a.tokens_trained:,} tokens trained on",
        f"{s.tokens_saved:,} saved at restarts",
        f"{s.tokens_resumed:,} of cut off attempts, gone on from",
        f"{a.tokens_redone:,} tokens redone",
        f"{s.kills:,} kills",
    ):
        assert words in text
    for reason in a.superseded:
        assert reason in text
    assert text.count("killed") == s.kills


def test_text_of_the_log_is_never_taken_for_html():
    evil, harmless = (
        render_page(evil_timeline()),
        render_page(timeline_of(Story().records, run_id="r", beginning=Projection())),
    )
    assert "</script><script>alert" not in evil
    assert "<img" not in evil
    for tag in ("script", "style", "meta"):
        assert sum(name == tag for name, _ in Outline(evil).tags) == sum(
            name == tag for name, _ in Outline(harmless).tags
        )
    assert EVIL in Outline(evil).text
    head, _ = unpacked(re.search(r'id="data"[^>]*>([^<]*)<', evil)[1])
    assert (head["workers"], head["samples"], head["details"][1]) == ([EVIL], [EVIL], EVIL)


def test_text_that_looks_like_a_place_holder_stays_text():
    page = render_page(timeline_of(Story().records, run_id="$data $script", beginning=Projection()))
    assert "<code>$data $script</code>" in page


def test_page_of_many_attempts_is_small():
    timeline = timeline_of(LongRun(groups=600).events(), run_id="r", beginning=Projection())
    assert len(pack_timeline(timeline)) < 32 * len(timeline.attempts)
