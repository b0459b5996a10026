"""A generation worker in this process, with an engine of its own; its rows stay here."""

import asyncio
from collections.abc import Sequence

from kinlog_lives import run_config
from msgspec.structs import replace

from kinlog.schemas.config import RunConfig
from kinlog.schemas.orders import RolloutOrder
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.settings import DatasetSettings, ModelSettings, TaskSettings
from kinlog.workers.engines import Engine
from kinlog.workers.model import load_policy
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.rows import StagedRow
from kinlog.workers.staging import StagingQueue
from kinlog.workers.torch_engine import TorchEngine


def tiny_config(*agents: str, max_new_tokens: int, max_batch_size: int = 1) -> RunConfig:
    """A configuration that one process is enough for: a task for each agent, whose rows take turns."""
    tasks = tuple(
        TaskSettings(name=agent, generator="gcd", agent=agent, options={"min_value": 1, "max_value": 6})
        for agent in agents
    )
    return replace(
        run_config(generation__max_batch_size=max_batch_size, generation__max_new_tokens=max_new_tokens),
        model=ModelSettings(hidden_size=16, num_layers=1, num_heads=2, max_positions=96),
        dataset=DatasetSettings(size=8, tasks=tasks),
    )


class AttachedWorker:
    """The worker, what it staged, and orders for it."""

    def __init__(self, config: RunConfig, engine: Engine | None = None) -> None:
        self.worker = RolloutWorker(config)
        self.engine = engine or TorchEngine(
            load_policy(config.model), max_batch_size=config.generation.max_batch_size
        )
        self.staged: list[StagedRow] = []
        self.may_put = asyncio.Event()
        self.may_put.set()
        self.putting = asyncio.Event()
        self.worker._engine = self.engine
        self.worker._staging = StagingQueue(self._put)

    async def _put(self, rows: Sequence[StagedRow]) -> None:
        self.putting.set()
        await self.may_put.wait()
        self.staged += rows

    def order(self, generation: int = 0, *, sample_index: int = 0) -> RolloutOrder:
        item = self.worker._tasks[sample_index]
        prompt = PromptRef(
            dataset_fingerprint="",
            sample_id=item.sample_id,
            draw_index=sample_index,
            dataset_epoch=0,
            task_name=item.task_name,
            agent_name=item.agent_name,
            content_digest=item.content_digest,
        )
        return RolloutOrder(
            group_id=sample_index, generation=generation, attempt=1, prompt=prompt, seed=generation
        )

    async def close(self) -> None:
        await self.worker._endpoint.close()
        await self.engine.close()
