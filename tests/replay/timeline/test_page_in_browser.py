"""The page of a timeline in a real browser: 100,000 attempts are drawn, found, hovered over, zoomed into and selected."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kinlog_browser import Browser, started_browser
from kinlog_builders import Story
from kinlog_evil_text import EVIL, evil_timeline
from kinlog_long_run import LongRun

from kinlog.lineage.state import Projection
from kinlog.replay.timeline.attempts import Outcome
from kinlog.replay.timeline.building import timeline_of
from kinlog.replay.timeline.html_page import render_page
from kinlog.replay.timeline.timeline import Timeline

_READY = "document.documentElement.dataset.ready"
_ESCAPE = "\ue00c"
_ENTER = "\ue007"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def long_run() -> Timeline:
    return timeline_of(LongRun(groups=12_200).events(), run_id="long", beginning=Projection())


@pytest.fixture(scope="module")
def long_page(long_run: Timeline, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pages") / "long.html"
    path.write_text(render_page(long_run), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: Browser, long_page: str) -> Iterator[Browser]:
    """The page of the long run, opened anew. However it is used: no complaint, and nothing asked of any network."""
    browser.open(long_page)
    browser.wait_until(_READY)
    yield browser
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [long_page]


def shown_range(page: Browser) -> str:
    page.run("return new Promise(requestAnimationFrame)")
    return page.text("#range")


def drawn(page: Browser) -> str:
    page.run("return new Promise(requestAnimationFrame)")
    return str(page.run("return document.getElementById('picture').toDataURL()"))


def middle_of(page: Browser, selector: str) -> tuple[float, float]:
    code = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
    x, y = page.run(code, selector)
    return x, y


def colours_on(page: Browser) -> int:
    """How many colours the picture has: an empty one has a few."""
    code = """
        const picture = document.getElementById("picture");
        const copy = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
        copy.drawImage(picture, 0, 0);
        const { data } = copy.getImageData(0, 0, picture.width, picture.height);
        return new Set(new Uint32Array(data.buffer)).size;
    """
    return int(page.run(code))


def first_with(timeline: Timeline, outcome: Outcome) -> int:
    return list(timeline.attempts.outcome).index(outcome)


def test_run_of_100_000_attempts_is_drawn_by_worker_and_by_group(page: Browser, long_run: Timeline):
    assert len(long_run.attempts) > 100_000
    shown = page.run(
        "return [...document.querySelectorAll('#legend b')].map(b => Number(b.textContent.replaceAll(',', '')))"
    )
    assert sum(shown) == len(long_run.attempts)
    assert colours_on(page) > 20
    page.click("#by-group")
    assert page.run("return document.getElementById('by-group').ariaPressed") == "true"
    assert colours_on(page) > 20


def test_attempt_that_is_searched_for_says_under_the_pointer_why_it_was_given_up(
    page: Browser, long_run: Timeline
):
    a, place = long_run.attempts, first_with(long_run, Outcome.SUPERSEDED)
    page.type("#search", f"{a.group_id[place]}/{a.generation[place]}")
    assert int(page.text("#found")) >= 2
    page.type("#search", _ENTER)
    page.wait_until("!document.getElementById('ring').hidden")
    page.move_to(*middle_of(page, "#ring"))
    assert page.visible("#tip")
    reason = long_run.attempts.reason_of(place)
    assert reason is not None
    assert f"{a.group_id[place]}/{a.generation[place]}" in page.text("#tip h2")
    assert reason.value in page.text("#tip .why")
    assert reason.value in page.text("#details .why")
    page.move_to(5, 5)


def test_search_finds_groups_samples_reasons_and_workers(page: Browser, long_run: Timeline):
    a = long_run.attempts
    wanted = {
        "7": sum(group == 7 for group in a.group_id),
        "sample:row/7": sum(f"row/{group}".startswith("row/7") for group in a.group_id),
        "rows_missing": sum(code == Outcome.REDONE for code in a.outcome),
        "worker:generation-15": sum(long_run.workers[w] == "generation-15" for w in a.worker),
        "nothing has this name": 0,
    }
    for words, count in wanted.items():
        page.run("document.getElementById('search').value = ''")
        page.type("#search", words)
        assert page.text("#found") == f"{count:,}", words


def test_wheel_drag_and_keys_change_what_is_shown(page: Browser):
    whole = shown_range(page)
    x, y = middle_of(page, "#picture")
    page.wheel(x, y, -400)
    zoomed = shown_range(page)
    assert zoomed != whole
    page.drag((x, y), (x - 200, y))
    moved = shown_range(page)
    assert moved != zoomed
    page.press("+")
    assert shown_range(page) != moved
    page.press("0")
    assert shown_range(page) == whole
    page.drag((x - 150, y), (x + 150, y), shift=True)
    assert shown_range(page) != whole
    page.press("k")
    page.press("0")
    assert shown_range(page) == whole


def test_everything_can_be_done_with_keys(page: Browser):
    assert not page.visible("#details")
    page.press("n")
    assert page.visible("#details")
    first = page.text("#details h2")
    page.press("n")
    assert page.text("#details h2") != first
    page.press("p")
    assert page.text("#details h2") == first
    page.press(_ESCAPE)
    assert not page.visible("#details")
    page.press("/")
    assert page.run("return document.activeElement.id") == "search"
    page.press(_ESCAPE)
    assert page.run("return document.activeElement.id") == "picture"
    page.press("?")
    assert page.visible("#keys")


def test_outcome_can_be_hidden_and_the_time_between_lives_stretched(page: Browser):
    whole = drawn(page)
    page.click("#legend button")
    assert len(drawn(page)) < 0.9 * len(whole)
    page.click("#legend button")
    assert len(drawn(page)) > 0.95 * len(whole)
    page.click("#gaps")
    assert page.run("return document.getElementById('gaps').ariaPressed") == "false"


def test_theme_follows_the_system_and_print_is_light(browser: Browser, long_page: str):
    browser.devtools(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    browser.open(long_page)
    browser.wait_until(_READY)
    theme = "return document.documentElement.dataset.theme"
    assert browser.run(theme) == "dark"
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(theme) == "light"
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(theme) == "dark"
    browser.click("#theme")
    assert browser.run(theme) == "light"
    browser.devtools("Emulation.setEmulatedMedia", features=[])


def test_text_of_the_log_stays_text_in_the_browser(browser: Browser, tmp_path: Path):
    path = tmp_path / "evil.html"
    path.write_text(render_page(evil_timeline()), encoding="utf-8")
    browser.open(path.as_uri())
    browser.wait_until(_READY)
    browser.press("n")
    assert EVIL in browser.text("#details")
    browser.type("#search", "onerror")
    assert browser.text("#found") == "1"
    assert browser.run("return document.images.length") == 0
    assert browser.complaints() == []


def test_run_in_which_nothing_happened_yet_is_a_page(browser: Browser, tmp_path: Path):
    path = tmp_path / "empty.html"
    timeline = timeline_of(Story().records, run_id="empty", beginning=Projection())
    path.write_text(render_page(timeline), encoding="utf-8")
    browser.open(path.as_uri())
    browser.wait_until(_READY)
    for key in ("g", "n", "k", "+", "0"):
        browser.press(key)
    assert browser.complaints() == []
