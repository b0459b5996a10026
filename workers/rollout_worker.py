"""The generation worker: runs rollouts on its engine, and stages every model call before it reports."""

import asyncio
import logging
import os
from collections.abc import Mapping

import torch

from kinlog.lineage.journal import Attempt
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import ConfigError, DatasetError, NotAttachedError
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import RolloutFailed, RolloutOrder
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import ModelCall, Receipt
from kinlog.workers.agent_rollout import run_agent
from kinlog.workers.agents import Agent, build_agent
from kinlog.workers.data_plane import DataPlane
from kinlog.workers.determinism import be_deterministic
from kinlog.workers.engines import Engine
from kinlog.workers.environments import Environment
from kinlog.workers.failures import classify_failure
from kinlog.workers.model_calls import CapturedCall, EarlierCall, ModelCalls
from kinlog.workers.open_engine import prepare_engine
from kinlog.workers.openai_endpoint import OpenAIEndpoint
from kinlog.workers.progress_journal import ProgressJournal, open_progress_journal
from kinlog.workers.progress_reading import ProgressReader, usable_calls
from kinlog.workers.rollout import Rollout, run_rollout
from kinlog.workers.row_journalling import PutStaged, journalled, open_journal
from kinlog.workers.rows import StagedRow, row_digest
from kinlog.workers.staging import StagingQueue
from kinlog.workers.tasks import TaskMixture

__all__ = ["RolloutWorker"]

_logger = logging.getLogger(__name__)


class RolloutWorker:
    """Made a Ray actor by ``kinlog.controller.ray_parts``. Its methods run on the actor's event loop.

    Parameters
    ----------
    directory:
        The run's, for the journals that the configuration asks for. ``None``: none is kept.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory | None = None) -> None:
        self._config = config
        self._directory = directory if config.row_journal.enabled else None
        if config.deterministic:
            be_deterministic()
        self._tasks = TaskMixture(config.dataset)
        self._prepared = prepare_engine(config)
        self._endpoint = OpenAIEndpoint(self._prepared.tokenizer, config.generation)
        self._agents: dict[str, Environment | Agent] = {}
        self._attaching = asyncio.Lock()
        self._engine: Engine | None = None
        self._staging: StagingQueue | None = None
        self._progress: ProgressJournal | None = None
        self._earlier: ProgressReader | None = None
        if self._directory is not None and config.rollout_recovery.resumes:
            self._progress = open_progress_journal(
                self._directory.progress, config.row_journal, config.rollout_recovery
            )
            self._earlier = ProgressReader(LocalStore(), self._directory.progress)
        self._generating: dict[Attempt, asyncio.Task[Rollout]] = {}
        """By group, generation and attempt. Staging is not part of it: rows that were begun to be put are reported."""

    async def attach(self) -> None:
        """Join the data plane, and start the engine, once in each life of the process."""
        # Who waited in vain for an engine that starts slowly asks again while it does.
        async with self._attaching:
            if self._staging is None:
                data_plane = await DataPlane.attach(self._config.data_plane)
                put: PutStaged = data_plane.put_staged
                if self._directory is not None:
                    put = journalled(put, open_journal(self._directory.journal, self._config.row_journal))
                self._staging = StagingQueue(put)
            if self._engine is None:
                self._engine = await self._prepared.start()

    async def probe(self) -> None:
        """Answer: the event loop turns, this life is attached, and its engine works."""
        engine, _ = self._attached()
        _end_if_failed(engine)

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        """Take new weights, between two tokens."""
        engine, _ = self._attached()
        try:
            await engine.update_weights(state_dict, version)
        except Exception:
            _end_if_failed(engine)
            raise

    async def run(self, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        """Run one attempt of a sibling. When this returns its rows are in the data plane, acknowledged, and durable in
        the row journal."""
        engine, staging = self._attached()
        identity = _attempt_of(order)
        try:
            return await self._run(engine, staging, order, identity)
        finally:
            # Not before its rows are staged: until then, they are all that another attempt could go on from.
            if self._progress is not None:
                self._progress.end(identity)

    async def _run(
        self, engine: Engine, staging: StagingQueue, order: RolloutOrder, identity: Attempt
    ) -> SiblingSealed | RolloutFailed:
        generating = asyncio.create_task(self._roll_out(engine, order))
        self._generating[identity] = generating
        try:
            # Waited for, and not awaited: that would take an abort for the end of this very call.
            await asyncio.wait({generating})
            if generating.cancelled():
                return _failed(order, Reason.SUPERSEDED_ATTEMPT, "it was given up, and aborted")
            rollout = generating.result()
            rows = [_staged_row(order, call) for call in rollout.calls]
            sealed = _sealed(order, rollout, rows, engine.weight_version)
        except ConfigError:
            raise  # every other attempt would fail the same way
        except Exception as error:
            if engine.failure is not None:
                _logger.exception("a rollout met the engine's failure")
                _end_if_failed(engine)
            return _failed(order, classify_failure(error), f"{type(error).__name__}: {error}")
        finally:
            generating.cancel()
            del self._generating[identity]
        await staging.stage(rows)
        return sealed

    async def abort(self, group_id: int, generation: int, attempt: int) -> None:
        """Stop generating for an attempt, between two tokens. Harmless when it has ended, or was never begun."""
        generating = self._generating.get((group_id, generation, attempt))
        if generating is not None:
            generating.cancel()

    def _attached(self) -> tuple[Engine, StagingQueue]:
        if self._engine is None or self._staging is None:
            raise NotAttachedError("the generation worker was restarted, and is not attached yet")
        return self._engine, self._staging

    async def _roll_out(self, engine: Engine, order: RolloutOrder) -> Rollout:
        item = self._tasks.resolve(order.prompt.sample_id)
        if item.content_digest != order.prompt.content_digest:
            raise DatasetError(f"sample {item.sample_id!r} is not what was drawn: its content digest differs")
        if item.agent_name not in self._agents:
            self._agents[item.agent_name] = build_agent(item.agent_name, self._tasks, self._config.rollout)
        agent = self._agents[item.agent_name]
        calls = ModelCalls(
            engine,
            self._config.generation,
            seed=order.seed,
            progress=self._progress.begin(_attempt_of(order)) if self._progress is not None else None,
            earlier=await self._earlier_calls(order),
        )
        settings = self._config.rollout
        if isinstance(agent, Agent):
            return await run_agent(calls, self._endpoint, agent, item, settings=settings)
        return await run_rollout(calls, self._prepared.tokenizer, agent, item, settings=settings)

    async def _earlier_calls(self, order: RolloutOrder) -> tuple[EarlierCall, ...]:
        """Return what the order goes on from."""
        if self._earlier is None or not order.resumable_attempts:
            return ()
        attempts = [(order.group_id, order.generation, attempt) for attempt in order.resumable_attempts]
        calls = await self._earlier.newest(attempts)
        return usable_calls(
            calls, self._config.rollout_recovery, newest_weight_version=order.newest_weight_version
        )


def _end_if_failed(engine: Engine) -> None:
    """Let the process be started anew when its engine has failed: nothing that comes after would go better here."""
    if engine.failure is not None:
        _logger.error("the engine has failed, and this worker with it", exc_info=engine.failure)
        os._exit(1)


def _attempt_of(order: RolloutOrder) -> Attempt:
    return order.group_id, order.generation, order.attempt


def _failed(order: RolloutOrder, reason: Reason, detail: str) -> RolloutFailed:
    return RolloutFailed(
        group_id=order.group_id,
        generation=order.generation,
        attempt=order.attempt,
        reason=reason,
        detail=detail,
    )


def _staged_row(order: RolloutOrder, call: CapturedCall) -> StagedRow:
    return StagedRow(
        group_id=order.group_id,
        generation=order.generation,
        attempt=order.attempt,
        call=call.call,
        token_ids=torch.cat([call.prompt_token_ids, call.completion.token_ids]),
        prompt_tokens=len(call.prompt_token_ids),
        logprobs=call.completion.logprobs,
        weight_versions=call.completion.weight_versions,
    )


def _sealed(
    order: RolloutOrder, rollout: Rollout, rows: list[StagedRow], weight_version: int
) -> SiblingSealed:
    """Propose a seal. ``weight_version`` stands for calls without a single token."""
    calls = tuple(
        ModelCall(
            call=call.call,
            parent=call.parent,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            min_weight_version=min(row.weight_versions.tolist(), default=weight_version),
            max_weight_version=max(row.weight_versions.tolist(), default=weight_version),
            row_digest=row_digest(row),
        )
        for call, row in zip(rollout.calls, rows, strict=True)
    )
    return SiblingSealed(
        group_id=order.group_id,
        generation=order.generation,
        attempt=order.attempt,
        weight_version=min(call.min_weight_version for call in calls),
        max_weight_version=max(call.max_weight_version for call in calls),
        receipt=Receipt(calls),
        raw_reward=rollout.raw_reward,
        shaped_reward=rollout.shaped_reward,
        prompt_tokens=calls[0].prompt_tokens,
        completion_tokens=rollout.completion_tokens,
        resumed_tokens=rollout.resumed_tokens,
        finish_reason=rollout.finish_reason,
        validity=rollout.validity,
    )
