"""Fixtures: one real Ray cluster, and one real data plane in it, for all tests of a session.

A test module asks for them by ``pytest_plugins = ["kinlog_data_plane"]``. Ray and TransferQueue are imported, and started, by the first test that asks.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kinlog.schemas.reasons import Partition
from kinlog.schemas.settings import DataPlaneSettings

if TYPE_CHECKING:
    from kinlog.workers.data_plane import DataPlane

SETTINGS = DataPlaneSettings(num_storage_units=2, call_timeout_s=120.0)


class DataPlaneHost:
    """Owns the session's data plane, and replaces it in a test that ruins it."""

    settings = SETTINGS

    def __init__(self) -> None:
        self.plane = asyncio.run(self._start())

    async def restart(self) -> "DataPlane":
        await self.plane.close()
        self.plane = await self._start()
        return self.plane

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Within the block, calls wait for an answer no longer than 4 seconds."""
        session = self.plane._session
        patient = session._settings
        session._settings = replace(patient, call_timeout_s=4.0)
        try:
            yield
        finally:
            session._settings = patient

    @staticmethod
    async def _start() -> "DataPlane":
        from kinlog.workers.data_plane import DataPlane

        return await DataPlane.start(SETTINGS)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster with just the logical CPUs that the data plane and one attached process need."""
    import ray

    from kinlog.workers.data_plane import TQ_ENVIRONMENT, required_cpus

    ray.init(
        num_cpus=required_cpus(SETTINGS) + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": dict(TQ_ENVIRONMENT)},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def data_plane_host(ray_cluster: None) -> Iterator[DataPlaneHost]:
    host = DataPlaneHost()
    yield host
    asyncio.run(host.plane.close())


@pytest.fixture
async def data_plane(data_plane_host: DataPlaneHost) -> "DataPlane":
    """The session's data plane, with no rows in it."""
    plane = data_plane_host.plane
    for partition in Partition:
        await plane.clear(partition, await plane.list_rows(partition), cut=None)
    return plane
