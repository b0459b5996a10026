"""The data plane against the real TransferQueue: one test for each way in which that one fails without a word."""

import asyncio
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import ray
import torch
from kinlog_rows import make_canonical_row, make_staged_row
from tensordict import TensorDict
from transfer_queue.utils.common import DEFAULT_TORCH_NUM_THREADS

from kinlog.schemas.errors import ConfigError, DataPlaneError, RowsMissingError
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import inventory_digest
from kinlog.schemas.settings import DataPlaneSettings
from kinlog.workers import data_plane as data_plane_module
from kinlog.workers import tq_session
from kinlog.workers.data_plane import DataPlane, required_cpus
from kinlog.workers.row_columns import rows_to_columns
from kinlog.workers.row_tags import write_tag
from kinlog.workers.rows import StagedRow, row_digest
from kinlog.workers.tq_native import RowsMeta, TqClient
from kinlog.workers.tq_session import TqCall

if (
    TYPE_CHECKING
):  # the module is a plugin: importing it before pytest does would leave its asserts as they are
    from kinlog_data_plane import DataPlaneHost

pytest_plugins = ["kinlog_data_plane"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("the data plane")]

CUT = object()
STAGING, TRAINING = Partition.STAGING, Partition.TRAINING
#: It only ends what hangs.
PATIENCE_S = 600.0


def digests(rows: Sequence[StagedRow]) -> dict[str, bytes]:
    return {row.key: row_digest(row) for row in rows}


async def digests_of(plane: DataPlane, keys: Sequence[str]) -> dict[str, bytes]:
    return {key: row_digest(row) for key, row in (await plane.get_staged(keys)).items()}


async def raw(plane: DataPlane, body: Callable[[TqClient], Any]) -> Any:
    """Do something to TransferQueue that the data plane itself never does."""
    return await plane._session.run(TqCall("raw"), body)


async def make_keys_only(plane: DataPlane, keys: list[str]) -> RowsMeta:
    return await raw(
        plane,
        lambda client: client.async_kv_retrieve_meta(keys=keys, partition_id=STAGING.value, create=True),
    )


async def store_columns(plane: DataPlane, keys: list[str], columns: dict[str, torch.Tensor]) -> None:
    """Store columns under keys, bypassing every check and leaving the tags alone."""
    meta = await make_keys_only(plane, keys)
    payload = TensorDict(columns, batch_size=[len(keys)])
    await raw(plane, lambda client: client.storage_manager.put_data(payload, meta))


def copied(saved: Path) -> Path:
    """Copy a saved data plane, to damage the copy."""
    return Path(shutil.copytree(saved, saved.with_name("copied")))


def actor_process(name: str) -> psutil.Process:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it just ends
            if f"ray::{name}" in " ".join(child.cmdline()):
                return child
    pytest.fail(f"there is no process of {name}")


@contextmanager
def stopped_storage_unit() -> Iterator[None]:
    """Stop a storage unit's process, as a machine that is out of memory does. Ray does not notice."""
    unit = actor_process("SimpleStorageUnit")
    unit.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        unit.send_signal(signal.SIGCONT)


async def test_rows_come_back_bit_for_bit_in_the_order_of_the_keys(data_plane: DataPlane):
    rows = [make_staged_row(generation=n, prompt=n + 1, completion=7 - n) for n in range(8)]
    await data_plane.put_staged(rows)
    keys = [row.key for row in reversed(rows)]
    found = await data_plane.get_staged(keys)
    assert list(found) == keys
    assert {key: row_digest(row) for key, row in found.items()} == digests(rows)


async def test_canonical_rows_and_rewards_that_are_not_finite_come_back_bit_for_bit(data_plane: DataPlane):
    rows = [
        make_canonical_row(generation=n, raw_reward=reward)
        for n, reward in enumerate((float("nan"), float("inf"), -0.0, 2.0))
    ]
    await data_plane.put_canonical(rows)
    found = await data_plane.get_canonical([row.key for row in rows])
    assert [row_digest(row) for row in found.values()] == [row_digest(row) for row in rows]


async def test_a_batch_of_zero_token_completions_is_put_and_read(data_plane: DataPlane):
    rows = [make_staged_row(generation=n, completion=0) for n in range(2)]
    await data_plane.put_staged(rows)
    assert await digests_of(data_plane, [row.key for row in rows]) == digests(rows)


async def test_missing_keys_are_named_and_not_left_out(data_plane: DataPlane):
    rows = [make_staged_row(generation=n) for n in range(3)]
    await data_plane.put_staged([rows[0], rows[2]])
    with pytest.raises(RowsMissingError, match=r"1 of 3 rows are absent.*'g0\.s1\.a0\.c0'"):
        await data_plane.get_staged([row.key for row in rows])
    with pytest.raises(RowsMissingError, match=r"1 of 1 rows are absent in partition 'training'"):
        await data_plane.get_canonical(["g0.s0.a0"])


async def test_a_missing_column_is_an_error_and_not_left_out(data_plane: DataPlane):
    whole, partial = make_staged_row(generation=0), make_staged_row(generation=1)
    await data_plane.put_staged([whole])
    columns = rows_to_columns(STAGING, [partial])
    del columns["logprobs"]
    await store_columns(data_plane, [partial.key], columns)
    meta = await make_keys_only(data_plane, [partial.key])
    meta.update_custom_meta([write_tag(partial)])
    await raw(data_plane, lambda client: client.async_set_custom_meta(meta))
    with pytest.raises(DataPlaneError, match=r"at least one row has no \['logprobs'\]"):
        await data_plane.get_staged([whole.key, partial.key])


async def test_a_key_whose_put_has_not_completed_is_listed_as_such_and_not_read(data_plane: DataPlane):
    row = make_staged_row()
    await make_keys_only(data_plane, [row.key])
    listed = await data_plane.list_rows(STAGING)
    assert {key: tag.done for key, tag in listed.items()} == {row.key: False}
    with pytest.raises(RowsMissingError, match="have not been put completely"):
        await data_plane.get_staged([row.key])
    await store_columns(data_plane, [row.key], rows_to_columns(STAGING, [row]))
    with pytest.raises(RowsMissingError, match="have not been put completely"):
        await data_plane.get_staged([row.key])
    await data_plane.put_staged([row])
    assert await digests_of(data_plane, [row.key]) == digests([row])


async def test_listing_gives_typed_identity_and_digest(data_plane: DataPlane):
    staged, canonical = make_staged_row(4, 3, 2, 1), make_canonical_row(5, 6)
    await data_plane.put_staged([staged])
    await data_plane.put_canonical([canonical])
    tag = (await data_plane.list_rows(STAGING))[staged.key]
    assert (tag.done, tag.group_id, tag.generation, tag.attempt, tag.call) == (True, 4, 3, 2, 1)
    assert tag.digest == row_digest(staged)
    tag = (await data_plane.list_rows(TRAINING))[canonical.key]
    assert (tag.group_id, tag.generation, tag.attempt, tag.call) == (5, 6, 0, -1)


async def test_duplicate_keys_are_refused_before_anything_is_written(data_plane: DataPlane):
    rows = [make_staged_row(generation=0), make_staged_row(generation=1), make_staged_row(generation=0)]
    with pytest.raises(ValueError, match=r"every key may be given once, found \['g0\.s0\.a0\.c0'\]"):
        await data_plane.put_staged(rows)
    assert await data_plane.list_rows(STAGING) == {}


async def test_putting_the_same_row_again_changes_nothing(data_plane: DataPlane):
    rows = [make_staged_row(generation=n) for n in range(3)]
    await data_plane.put_staged(rows[:2])
    await data_plane.put_staged(rows)
    assert await digests_of(data_plane, [row.key for row in rows]) == digests(rows)


async def test_another_row_under_a_visible_key_is_refused_and_the_first_one_stays(data_plane: DataPlane):
    first, fresh = make_staged_row(seed=1), make_staged_row(generation=1)
    await data_plane.put_staged([first])
    with pytest.raises(DataPlaneError, match=r"key g0\.s0\.a0\.c0 already holds another row"):
        await data_plane.put_staged([fresh, make_staged_row(seed=2)])
    assert await digests_of(data_plane, [first.key]) == digests([first])
    assert list(await data_plane.list_rows(STAGING)) == [first.key]


async def test_a_failed_put_clears_its_keys(data_plane: DataPlane, monkeypatch: pytest.MonkeyPatch):
    async def fails(data: TensorDict, metadata: RowsMeta) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(data_plane._session._client.storage_manager, "put_data", fails)
    with pytest.raises(
        DataPlaneError, match=r"put_staged in partition 'staging' of 1 keys \(g0\.s0.*disk on fire"
    ):
        await data_plane.put_staged([make_staged_row()])
    assert await data_plane.list_rows(STAGING) == {}


async def test_a_cancelled_put_clears_its_keys_before_it_returns(
    data_plane: DataPlane, monkeypatch: pytest.MonkeyPatch
):
    storage = data_plane._session._client.storage_manager
    put_data, stored = storage.put_data, threading.Event()

    async def stores_and_never_returns(data: TensorDict, metadata: RowsMeta) -> None:
        await put_data(data, metadata)
        stored.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(storage, "put_data", stores_and_never_returns)
    put = asyncio.create_task(data_plane.put_staged([make_staged_row(generation=n) for n in range(3)]))
    await asyncio.to_thread(stored.wait)
    assert len(await data_plane.list_rows(STAGING)) == 3
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await data_plane.list_rows(STAGING) == {}


async def test_a_put_whose_confirmation_was_lost_fails_and_clears_its_keys(
    data_plane: DataPlane, monkeypatch: pytest.MonkeyPatch
):
    async def lost(*arguments: object) -> None:
        """TransferQueue logs a notice that the controller did not acknowledge, and goes on."""

    monkeypatch.setattr(data_plane._session._client.storage_manager, "notify_data_update", lost)
    with pytest.raises(DataPlaneError, match="confirmation was lost"):
        await data_plane.put_staged([make_staged_row()])
    assert await data_plane.list_rows(STAGING) == {}


async def test_data_of_another_key_under_a_reused_index_is_noticed(data_plane: DataPlane):
    row, other = make_staged_row(seed=1), make_staged_row(seed=2)
    await data_plane.put_staged([row])
    await store_columns(data_plane, [row.key], rows_to_columns(STAGING, [other]))
    with pytest.raises(
        DataPlaneError, match=r"g0\.s0\.a0\.c0 does not hold what was put there: expected digest"
    ):
        await data_plane.get_staged([row.key])


async def test_clearing_skips_absent_keys_and_leaves_the_others_alone(
    data_plane: DataPlane, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data_plane_module, "_CLEAR_BATCH_ROWS", 3)
    rows = [make_staged_row(generation=n) for n in range(10)]
    await data_plane.put_staged(rows)
    gone = [row.key for row in rows[:8]]
    assert await data_plane.clear(STAGING, [*gone, "g9.s9.a9.c9", gone[0]], CUT) == 8
    assert await data_plane.clear(STAGING, gone, CUT) == 0
    fresh = [make_staged_row(group_id=1, generation=n) for n in range(8)]  # takes the freed indexes
    await data_plane.put_staged(fresh)
    kept = [*rows[8:], *fresh]
    assert {key: tag.digest for key, tag in (await data_plane.list_rows(STAGING)).items()} == digests(kept)
    assert await digests_of(data_plane, [row.key for row in kept]) == digests(kept)


async def test_second_clear_of_a_row_does_not_take_the_row_that_has_its_index_by_now(
    data_plane: DataPlane, monkeypatch: pytest.MonkeyPatch
):
    # A clear looks indexes up, and frees them later; freed ones are reused at once.
    client = data_plane._session._client
    clear_samples = client.async_clear_samples
    indexes_reused = threading.Event()
    clears: list[RowsMeta] = []

    async def second_one_is_late(meta: RowsMeta) -> None:
        clears.append(meta)
        while len(clears) > 1 and not indexes_reused.is_set():  # noqa: ASYNC110 - set from another event loop
            await asyncio.sleep(0.01)
        await clear_samples(meta)

    monkeypatch.setattr(client, "async_clear_samples", second_one_is_late)
    old, new = make_staged_row(group_id=1), make_staged_row(group_id=2)
    await data_plane.put_staged([old])
    cleared = [asyncio.create_task(data_plane.clear(STAGING, [old.key], CUT)) for _ in range(2)]
    await asyncio.wait(cleared, return_when=asyncio.FIRST_COMPLETED)
    await data_plane.put_staged([new])
    indexes_reused.set()
    assert sorted(await asyncio.gather(*cleared)) == [0, 1]
    assert await digests_of(data_plane, [new.key]) == digests([new])


async def test_putting_and_getting_leave_torch_threads_alone(data_plane: DataPlane):
    before, ours = torch.get_num_threads(), DEFAULT_TORCH_NUM_THREADS + 1
    row = make_staged_row()
    torch.set_num_threads(ours)
    try:
        await data_plane.put_staged([row])
        await data_plane.get_staged([row.key])
        here = torch.get_num_threads()
        in_a_new_thread = await asyncio.wrap_future(tq_session.start_blocking("probe", torch.get_num_threads))
    finally:
        torch.set_num_threads(before)
    assert (here, in_a_new_thread) == (ours, ours)


async def test_a_checkpoint_of_equally_long_rows_is_as_large_as_the_rows(
    data_plane: DataPlane, tmp_path: Path
):
    rows = [make_staged_row(generation=n, prompt=512, completion=512) for n in range(64)]
    payload_bytes = sum(
        column.nbytes for row in rows for column in (row.token_ids, row.logprobs, row.weight_versions)
    )
    await data_plane.put_staged(rows)
    await data_plane.save(tmp_path / "saved", {"step": 1}, timeout_s=PATIENCE_S)
    saved_bytes = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*") if file.is_file())
    assert payload_bytes < saved_bytes < 1.3 * payload_bytes
    content = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    assert content["user_metadata"] == {"step": 1, "num_storage_units": 2}
    with pytest.raises(DataPlaneError, match="must not exist yet"):
        await data_plane.save(tmp_path / "saved", {}, timeout_s=PATIENCE_S)


async def test_a_load_into_other_units_or_over_live_keys_or_of_missing_files_changes_nothing(
    data_plane: DataPlane, tmp_path: Path
):
    row = make_staged_row()
    await data_plane.put_staged([row])
    await data_plane.save(tmp_path / "saved", {}, timeout_s=PATIENCE_S)
    with pytest.raises(DataPlaneError, match=r"already holds 1 keys, the first of them \['g0\.s0\.a0\.c0'\]"):
        await data_plane.load(tmp_path / "saved", timeout_s=PATIENCE_S)
    copy = copied(tmp_path / "saved")
    units_file = copy / "simple_storage" / "storage_unit_info.json"
    units_file.write_text(
        json.dumps([*json.loads(units_file.read_text()), {"position": 2, "storage_unit_id": "x"}])
    )
    with pytest.raises(DataPlaneError, match="saved from 3 storage units, and this TransferQueue has 2"):
        await data_plane.load(copy, timeout_s=PATIENCE_S)
    (copy / "controller_state.pkl").unlink()
    with pytest.raises(DataPlaneError, match=r"controller_state\.pkl is missing"):
        await data_plane.load(copy, timeout_s=PATIENCE_S)
    assert await digests_of(data_plane, [row.key]) == digests([row])


async def test_a_second_data_plane_too_few_cpus_and_a_too_long_timeout_are_refused(
    data_plane: DataPlane, data_plane_host: "DataPlaneHost", monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tq_session, "_SETTLE_TIMEOUT_S", 0.0)
    with pytest.raises(DataPlaneError, match="already running in this Ray cluster"):
        await DataPlane.start(data_plane_host.settings)
    monkeypatch.setattr(tq_session.tq_native, "controller_exists", lambda: False)
    with pytest.raises(DataPlaneError, match=r"need 9 logical CPUs, and the Ray cluster has 4"):
        await DataPlane.start(DataPlaneSettings(num_storage_units=8))
    with pytest.raises(DataPlaneError, match=r"need 3 logical CPUs, .* but fewer are free"):
        await DataPlane.start(data_plane_host.settings)  # those of the first one are taken
    with pytest.raises(ConfigError, match=r"data_plane\.call_timeout_s must be below 200, found 200"):
        await DataPlane.start(DataPlaneSettings(call_timeout_s=200.0))


async def test_an_attached_process_reads_and_writes_cannot_close_and_detaches_alone(
    data_plane: DataPlane, data_plane_host: "DataPlaneHost"
):
    settings = data_plane_host.settings

    @ray.remote(num_cpus=1)
    class Attached:
        async def attach(self) -> None:
            self.plane = await DataPlane.attach(settings)

        async def put(self, rows: list[StagedRow]) -> None:
            await self.plane.put_staged(rows)

        async def digest(self, key: str) -> bytes:
            return row_digest((await self.plane.get_staged([key]))[key])

        async def close(self) -> None:
            await self.plane.close()

        async def detach(self) -> None:
            await self.plane.detach()

        async def ping(self) -> None:
            await self.plane.ping()

    ours, theirs = make_staged_row(generation=0), make_staged_row(generation=1)
    await data_plane.put_staged([ours])
    worker = Attached.remote()
    try:
        await worker.attach.remote()
        await worker.put.remote([theirs])
        assert await worker.digest.remote(ours.key) == row_digest(ours)
        with pytest.raises(DataPlaneError, match="this one may only detach"):
            await worker.close.remote()
        await worker.detach.remote()
        with pytest.raises(DataPlaneError, match="has closed its connection"):
            await worker.ping.remote()
        assert await digests_of(data_plane, [theirs.key]) == digests([theirs])
        with pytest.raises(DataPlaneError, match="close it instead"):
            await data_plane.detach()
        await worker.attach.remote()
        assert await worker.digest.remote(theirs.key) == row_digest(theirs)
    finally:
        ray.kill(worker)


async def test_every_call_ends_while_a_storage_unit_hangs_and_saves_resume_after_it(
    data_plane: DataPlane, data_plane_host: "DataPlaneHost", tmp_path: Path
):
    there = [make_staged_row(generation=n) for n in range(4)]
    fresh = [make_staged_row(group_id=1, generation=n) for n in range(4)]
    await data_plane.put_staged(there)
    with stopped_storage_unit():
        with data_plane_host.impatient():
            outcomes = await asyncio.gather(
                data_plane.put_staged(fresh),
                data_plane.get_staged([row.key for row in there]),
                data_plane.ping(),
                data_plane.save(tmp_path / "given_up", {}, timeout_s=1.0),
                return_exceptions=True,
            )
        with pytest.raises(DataPlaneError, match="an earlier save was given up and is still running"):
            await data_plane.save(tmp_path / "refused", {}, timeout_s=1.0)
        assert (
            len(await data_plane.list_rows(STAGING)) == 8
        )  # the controller answers; the put could not clean up
    put, get, ping, save = map(str, outcomes)
    assert all(isinstance(outcome, DataPlaneError) for outcome in outcomes)
    assert put.startswith("put_staged in partition 'staging' of 4 keys (g1.s0.a0.c0, g1.s1.a0.c0, ")
    assert "no answer in 4 s" in put
    assert get.startswith("get_staged in partition 'staging' of 4 keys (g0.s0.a0.c0, ")
    assert ping.startswith("ping: no answer in 4 s")
    assert "given_up: no answer in 1 s" in save
    late_save = data_plane._session._last_save
    assert late_save is not None
    await asyncio.wrap_future(late_save)
    await data_plane.put_staged(fresh)
    assert await digests_of(data_plane, [row.key for row in fresh]) == digests(fresh)
    await data_plane.save(tmp_path / "saved", {}, timeout_s=PATIENCE_S)


async def test_the_owner_recovers_in_place_from_a_dead_controller_and_from_a_failed_load(
    data_plane: DataPlane,
    data_plane_host: "DataPlaneHost",
    tmp_path: Path,
):
    staged = [make_staged_row(generation=n, prompt=n + 1, completion=n) for n in range(5)]
    await data_plane.put_staged(staged)
    await data_plane.put_canonical([make_canonical_row(generation=n) for n in range(3)])
    await data_plane.clear(STAGING, [staged[0].key], CUT)
    before = {partition: await data_plane.list_rows(partition) for partition in Partition}
    await data_plane.save(tmp_path / "saved", {"step": 4}, timeout_s=PATIENCE_S)

    controller = actor_process("TransferQueueController")
    controller.kill()
    controller.wait()
    no_answer = r"list_rows in partition 'staging': no answer in 4 s"
    with data_plane_host.impatient(), pytest.raises(DataPlaneError, match=no_answer):
        await data_plane.list_rows(STAGING)

    fresh = await data_plane_host.restart()
    with pytest.raises(DataPlaneError, match="has closed its connection"):
        await data_plane.list_rows(STAGING)
    damaged = copied(tmp_path / "saved")
    controller_file = damaged / "controller_state.pkl"
    controller_file.write_bytes(controller_file.read_bytes()[:100])
    with pytest.raises(DataPlaneError, match=r"load from .*: failed: RuntimeError"):
        await fresh.load(damaged, timeout_s=PATIENCE_S)
    with pytest.raises(DataPlaneError, match="did not complete, and its state is undefined"):
        await fresh.list_rows(STAGING)

    fresh = await data_plane_host.restart()
    await fresh.load(tmp_path / "saved", timeout_s=PATIENCE_S)
    after = {partition: await fresh.list_rows(partition) for partition in Partition}
    assert after == before
    assert {p: inventory_digest(tags) for p, tags in after.items()} == {
        p: inventory_digest(tags) for p, tags in before.items()
    }
    assert await digests_of(fresh, [row.key for row in staged[1:]]) == digests(staged[1:])
    await fresh.get_canonical(list(before[TRAINING]))
    await fresh.put_staged([staged[0]])
    assert len(await fresh.list_rows(STAGING)) == 5


def test_a_data_plane_needs_one_cpu_and_one_for_each_unit():
    assert required_cpus(DataPlaneSettings(num_storage_units=2)) == 3
