"""The story of a group leaves nothing out, and ends with how the group stands."""

from pathlib import Path

import pytest
from kinlog_builders import Story as Told
from kinlog_run_fixtures import DiskRun, small_run
from kinlog_two_lives import compact_two_lives, two_lives

from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.state import GroupPhase
from kinlog.replay.projection import project
from kinlog.replay.selection import EventFilter, select_events
from kinlog.replay.story.story import Story, tell_story
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason
from kinlog.schemas.settings import RolloutRecoverySettings


def _texts(story: Story) -> list[str]:
    return [line.text for line in story.lines]


def _scan(run: DiskRun) -> LogScan:
    run.position()
    return scan_log(run.directory.log)


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> LogScan:
    """Two lives by chance, with everything that happens to groups."""
    run = two_lives(tmp_path_factory.mktemp("story") / "run", through_step=10)
    run.kill()
    return scan_log(run.directory.log)


def test_every_event_of_a_group_is_told_once_and_in_order(lived: LogScan):
    for group_id in range(project(lived).drawn_total):
        story = tell_story(lived, group_id)
        own = {record.seq for record in select_events(lived, EventFilter(group_id=group_id))}
        seqs = [line.seq for line in story.lines]
        assert seqs == sorted(set(seqs))
        assert own <= set(seqs)
        assert story.lines[0].kind == "group_reserved"


def test_the_end_of_a_story_is_where_the_group_stands(lived: LogScan):
    p = project(lived)
    phases = set()
    for group_id in range(p.drawn_total):
        story = tell_story(lived, group_id)
        group = p.groups.get(group_id)
        phases.add(story.phase)
        if group is None:
            assert story.phase in ("dropped", "durable")
        else:
            assert (story.phase, story.alive) == (group.phase.value, group.live)
    assert {"durable", "applied", "generating"} <= phases


def test_a_sibling_is_told_without_the_others(lived: LogScan):
    story = tell_story(lived, 3, 1)
    assert story.generation == 1
    assert not any(text.startswith(("Sibling 0", "Sibling 2", "Sibling 3")) for text in _texts(story))
    assert any(text.startswith("Sibling 1, attempt 1: sent to") for text in _texts(story))
    with pytest.raises(LookupError, match="group 3 has no sibling 4: it has 0 to 3"):
        tell_story(lived, 3, 4)


def test_what_a_restart_undoes_is_told_and_that_it_is_trained_on_again(tmp_path: Path):
    run = small_run(tmp_path / "run")
    told = run.story
    told.train(3)
    run.kill()
    run.restart()
    run.story.train(3)
    texts = _texts(tell_story(_scan(run), 3))
    assert sum("The run was started again" in text for text in texts) == 2
    assert any("that step 2 of this group is undone" in text for text in texts)
    assert any(text == "Claimed again by step 2." for text in texts)
    assert sum(text.startswith("Step 2 was applied to 1 group") for text in texts) == 2
    run.close()


def test_redone_and_late_results_are_told_with_their_reasons(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    told: Told = run.story
    group_id = told.generating(siblings=3)
    told.seal(group_id, 0)
    told.supersede(group_id, 1, Reason.TIMEOUT)
    told.commit(
        e.LateResultRejected(
            group_id=group_id, generation=1, attempt=1, reason=Reason.SUPERSEDED_ATTEMPT, completion_tokens=9
        )
    )
    told.dispatch(group_id, 1)
    story = tell_story(_scan(run), group_id)
    texts = _texts(story)
    assert (
        "Sibling 1, attempt 1: given up, because it took longer than the configuration allows (timeout: told so)."
        in texts
    )
    assert any(
        text.startswith("Sibling 1, attempt 1: a late result of 9 tokens was rejected") for text in texts
    )
    assert story.present == "Alive: 1 of 3 siblings sealed, 2 in flight."
    assert tell_story(_scan(run), group_id, 1).present.startswith(
        "Sibling 1: attempt 2 is in flight. Its group is alive"
    )
    run.close()


@pytest.mark.parametrize(
    ("end", "phase", "words"),
    [
        (e.GroupDropped(group_id=0, reason=Reason.STALE), "dropped", "Gone: dropped at seq "),
        (e.GroupParked(group_id=0, reason=Reason.RETRY_BUDGET), "parked", "Parked, because its retry budget"),
    ],
)
def test_a_group_that_left_says_why(tmp_path: Path, end: e.Event, phase: str, words: str):
    run = DiskRun(tmp_path / "run")
    run.story.ready()
    run.story.commit(end)
    story = tell_story(_scan(run), 0)
    assert (story.phase, story.alive) == (phase, False)
    assert story.present.startswith(words)
    run.close()


def test_who_resolved_the_granularity_is_told_from_the_configuration(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    run.story.reserve(granularity=Granularity.SIBLING)
    scan = _scan(run)
    prompt = project(scan).groups[0].prompt

    def drawn(recovery: RolloutRecoverySettings | None) -> str:
        return _texts(tell_story(scan, 0, recovery=recovery))[0]

    assert "the granularity is" not in drawn(None)
    assert "the granularity is the default" in drawn(RolloutRecoverySettings())
    by_task = RolloutRecoverySettings(task_granularity_overrides={prompt.task_name: Granularity.SIBLING})
    assert f"the granularity is that of task {prompt.task_name}" in drawn(by_task)
    by_agent = RolloutRecoverySettings(agent_granularity_overrides={prompt.agent_name: Granularity.SIBLING})
    assert f"the granularity is that of agent {prompt.agent_name}" in drawn(by_agent)
    changed = RolloutRecoverySettings(default_granularity=Granularity.PROMPT_GROUP)
    assert "another granularity by now" in drawn(changed)
    run.close()


def test_a_compacted_log_tells_the_same_and_a_dropped_one_what_is_left(tmp_path: Path):
    run = two_lives(tmp_path / "run")
    scan = _scan(run)
    groups = range(project(scan).drawn_total)
    before = {group_id: tell_story(scan, group_id) for group_id in groups}
    compact_two_lives(run, drop=False)
    assert {group_id: tell_story(_scan(run), group_id) for group_id in groups} == before

    compact_two_lives(run, drop=True)
    scan = _scan(run)
    assert scan.base is not None
    beginning = scan.beginning()
    gone = [
        group_id
        for group_id in groups
        if group_id < beginning.next_group_id and group_id not in beginning.groups
    ]
    assert gone
    for group_id in gone:
        with pytest.raises(LookupError, match="had left for good by seq"):
            tell_story(scan, group_id)
    for group_id in set(groups) - set(gone):
        after = tell_story(scan, group_id)
        assert (after.phase, after.present) == (before[group_id].phase, before[group_id].present)
        left = [line.seq for line in before[group_id].lines if line.seq >= scan.first_seq]
        # That the step is covered may have been told before, of a checkpoint that is not told of any more.
        assert set(left) <= {line.seq for line in after.lines}
    run.close()


def test_a_group_that_was_never_drawn_is_said_to_be(lived: LogScan):
    drawn = project(lived).drawn_total
    with pytest.raises(LookupError, match=f"group {drawn} was never drawn: the run has drawn {drawn} groups"):
        tell_story(lived, drawn)


def test_every_phase_of_a_live_group_has_its_words(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    told = run.story
    by_phase = {GroupPhase.RESERVED: told.reserve()}
    told.admit(admitted := told.reserve())
    by_phase[GroupPhase.ADMITTED] = admitted
    by_phase[GroupPhase.GENERATING] = told.generating()
    by_phase[GroupPhase.READY] = told.ready()
    told.start_finalize(finalizing := told.ready())
    by_phase[GroupPhase.FINALIZING] = finalizing
    by_phase[GroupPhase.FINALIZED] = told.finalized()
    told.train(applied := told.finalized())
    by_phase[GroupPhase.APPLIED] = applied
    told.claim(claimed := told.finalized())
    by_phase[GroupPhase.CLAIMED] = claimed
    scan = _scan(run)
    stories = {phase: tell_story(scan, group_id) for phase, group_id in by_phase.items()}
    assert all(story.phase == phase for phase, story in stories.items())
    assert len({story.present for story in stories.values()}) == len(by_phase)
    run.close()
