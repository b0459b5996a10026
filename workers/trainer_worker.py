"""The trainer worker: reads a step's canonical rows from the data plane, and steps the optimizer."""

import asyncio
import time
from pathlib import Path

import torch

from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import DataPlaneError, NotAttachedError
from kinlog.schemas.orders import TrainMetrics, TrainOrder
from kinlog.workers.data_plane import DataPlane
from kinlog.workers.determinism import be_deterministic
from kinlog.workers.grpo import TrainingRow
from kinlog.workers.model import load_policy
from kinlog.workers.rows import CanonicalRow
from kinlog.workers.trainer import Trainer

__all__ = ["TrainerWorker"]


class TrainerWorker:
    """Made a Ray actor by ``kinlog.controller.ray_parts``."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        if config.deterministic:
            be_deterministic()
        policy = load_policy(config.model)
        # What training draws is the run's, and not the process's: saved with each checkpoint, the same from the start.
        torch.manual_seed(config.seed)
        self._trainer = Trainer(policy, config.trainer, temperature=config.generation.temperature)
        self._data_plane: DataPlane | None = None

    async def attach(self) -> None:
        """Join the data plane. Called once in each life of the process."""
        if self._data_plane is None:
            self._data_plane = await DataPlane.attach(self._config.data_plane)

    async def probe(self) -> None:
        """Answer: the event loop turns."""

    async def step(self, order: TrainOrder) -> TrainMetrics:
        """Apply one optimizer step.

        Raises
        ------
        RowsMissingError, DataPlaneError
            The rows are not, or not all, what the order names.
        FloatingPointError
            A loss or gradient is not finite.
        """
        if self._data_plane is None:
            raise NotAttachedError("the trainer is not attached yet")
        started = time.perf_counter()
        rows = list((await self._data_plane.get_canonical(order.row_keys)).values())
        found = {row.group_id for row in rows}
        if found != set(order.group_ids):
            raise DataPlaneError(
                f"step {order.train_step}: expected rows of groups {sorted(order.group_ids)}, found {sorted(found)}"
            )
        # In a thread: probes are answered while it computes.
        examples = [row for row in rows if row.valid]
        metrics = await asyncio.to_thread(self._trainer.step, [_training_row(row) for row in examples])
        return TrainMetrics(
            train_step=order.train_step,
            weight_version=metrics.weight_version,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            clip_fraction=metrics.clip_fraction,
            mean_raw_reward=sum(row.raw_reward for row in examples) / len(examples),
            mean_shaped_reward=metrics.mean_reward,
            rows=metrics.rows,
            mixed_rows=metrics.mixed_rows,
            loss_tokens=metrics.loss_tokens,
            token_lag=metrics.token_lag,
            seconds=time.perf_counter() - started,
        )

    async def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by parameter name, float32."""
        return self._trainer.state_dict()

    async def save(self, directory: Path) -> None:
        """Write the trainer's part of a checkpoint."""
        await asyncio.to_thread(self._trainer.save, directory)

    async def load(self, directory: Path) -> None:
        """Restore it. Raises ``CheckpointError`` when it does not fit."""
        await asyncio.to_thread(self._trainer.load, directory)


def _training_row(row: CanonicalRow) -> TrainingRow:
    return TrainingRow(
        group_id=row.group_id,
        generation=row.generation,
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        weight_versions=row.weight_versions,
        reward=row.shaped_reward,
    )
