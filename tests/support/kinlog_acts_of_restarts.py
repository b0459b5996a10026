"""Acts of a scenario: checkpoints, kills and restarts."""

from collections.abc import Iterable, Mapping

from kinlog_bench import Bench
from kinlog_scenario import Act, bench_of, changed, copied_rows, put_expected, saved_rows
from msgspec.structs import replace

from kinlog.controller.recovery import carry_out
from kinlog.controller.samplers import evictions
from kinlog.lineage.fold import fold
from kinlog.lineage.state import decode_projection, encode_projection
from kinlog.replay.recovery.inventory import Inventory
from kinlog.replay.recovery.larger_steps import refuse_unfillable_step
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import RowTag


def checkpointed() -> Act:
    """A trainer checkpoint, with all rows that lineage relies on."""

    def act(bench: Bench) -> None:
        put_expected(bench)
        saved_rows(bench)[bench.p.train_step] = copied_rows(bench.data_plane.rows)
        bench.story.checkpoint()

    return act


def restarted(
    *,
    lose: Iterable[str] = (),
    alter: Iterable[str] = (),
    add: Mapping[str, RowTag] | None = None,
    tail_rows: bool = False,
    from_start: bool = False,
    discard_rollouts: bool = False,
    **config: object,
) -> Act:
    """The controller is killed, and the next life begins: from the last checkpoint, or from the start.

    Parameters
    ----------
    lose, alter, add:
        Keys of rows that the data plane has lost, or holds with another content; staged rows that nobody wrote.
    tail_rows:
        The data plane still has what was put after the checkpoint.
    from_start:
        Go back to the start of the run, by choice.
    discard_rollouts:
        Have everything that was not trained on generated again, by choice.
    config:
        What the configuration changes to.
    """

    async def act(bench: Bench) -> Bench:
        p = decode_projection(encode_projection(bench.p))
        found = p.checkpoints[-1] if p.checkpoints and not from_start else None
        data_plane = bench.data_plane
        rows = saved_rows(bench).get(found.train_step) if found is not None else None
        rows = copied_rows(data_plane.rows if tail_rows else rows or {part: {} for part in Partition})
        for key in lose:
            assert sum(rows[part].pop(key, None) is not None for part in Partition) == 1, key
        for key in alter:
            part = next(part for part in Partition if key in rows[part])
            rows[part][key] = replace(rows[part][key], digest=b"another content.")
        rows[Partition.STAGING].update(add or {})
        config_now = changed(bench.config, **config)
        life = bench_of(config_now, bench.dataset, projection=p, data_plane=data_plane)  # type: ignore[attr-defined]
        restored = e.RunRestored(
            checkpoint=found.name if found is not None else None,
            position=found.position if found is not None else None,
            train_step=found.train_step if found is not None else 0,
            weight_version=found.train_step if found is not None else 0,
        )
        rolled_back = decode_projection(encode_projection(life.p))
        fold(rolled_back, e.RecordedEvent(rolled_back.last_seq + 1, 1, 0, restored))
        sampler = life.runtime.sampler
        refuse_unfillable_step(
            rolled_back,
            groups_per_step=config_now.trainer.groups_per_step,
            max_live_groups=config_now.rollout.max_live_groups,
            is_stale=lambda group: sampler.is_stale(rolled_back, group),
        )
        plan = plan_recovery(
            rolled_back,
            Inventory(dict(rows[Partition.STAGING]), dict(rows[Partition.TRAINING])),
            checkpoint=restored.checkpoint,
            promised=restored.position,
            policy=RecoveryPolicy.of(life.config, discard_rollouts=discard_rollouts),
            is_stale=lambda group: sampler.is_stale(rolled_back, group),
            evict=lambda ready: [] if life.runtime.exhausted else evictions(sampler, rolled_back, ready),
        )
        data_plane.rows = rows
        async with life.runtime.barrier.exclusive("restore") as cut:
            life.runtime.ledger.commit(cut, restored)
            await carry_out(life.runtime, cut, plan)
        life.pool.answers, life.pool.gates = bench.pool.answers, bench.pool.gates
        life.pool.weight_version = life.p.weight_version
        life.trainer.step_number = life.p.train_step
        return life

    return act
