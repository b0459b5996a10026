"""A run in which all text that people or programs choose is an attack on a page that shows it."""

from kinlog_builders import BUDGET, Story, prompt_ref
from msgspec.structs import replace

from kinlog.lineage.state import Projection
from kinlog.replay.timeline.building import timeline_of
from kinlog.replay.timeline.timeline import Timeline
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason

EVIL = "</script><script>alert('kinlog')</script><img src=x onerror=alert(1)>&\"'"


def evil_timeline() -> Timeline:
    """Everything in a log that people or programs name freely is an attack."""
    story = Story()
    prompt = replace(prompt_ref(0, task_name=EVIL, agent_name=EVIL), sample_id=EVIL)
    story.commit(
        e.GroupReserved(
            group_id=0,
            prompt=prompt,
            num_generations=1,
            granularity=Granularity.SIBLING,
            retry_budget=BUDGET,
            weight_version=0,
            draw_cursor=1,
        )
    )
    story.admit(0)
    story.commit(
        e.SiblingDispatched(group_id=0, generation=0, attempt=1, weight_version=0, worker=EVIL, seed=1)
    )
    story.commit(e.AttemptSuperseded(group_id=0, generation=0, attempt=1, reason=Reason.TIMEOUT, detail=EVIL))
    story.commit(e.GroupDropped(group_id=0, reason=Reason.EVICTED, detail=EVIL))
    story.commit(e.CheckpointFailed(name=EVIL, reason=Reason.TIMEOUT, detail=EVIL))
    story.commit(e.WriterOpened(host=EVIL, pid=1))
    return timeline_of(story.records, run_id=EVIL, beginning=Projection())
