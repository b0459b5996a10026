"""What is left when a process is killed: of the engine an error for everybody, of the worker no process at all."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("vllm", reason="the tests of vLLM's engine run in its own environment: make test-vllm")

import kinlog_vllm_child
from kinlog_vllm import Weights, core_of, engine_processes, request, until

from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.vllm_engine import VllmEngine

pytest_plugins = ["kinlog_vllm_fixtures"]
pytestmark = pytest.mark.vllm

_END_TIMEOUT_S = 60.0


def test_model_that_is_split_takes_new_weights_and_no_process_of_it_outlives_a_kill():
    # One start for both: it takes some ten seconds. Two cores are fewer than vLLM binds that many threads to.
    with subprocess.Popen(
        [sys.executable, kinlog_vllm_child.__file__],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ) as child:
        assert child.stdout is not None
        try:
            said = next((line for line in child.stdout if kinlog_vllm_child.DIFFERENCE in line), "")
            assert said, "it ended too soon"
            processes = engine_processes(psutil.Process(child.pid))
            assert len(processes) == 3  # the engine, and the two that compute
        finally:
            child.kill()
    _, alive = psutil.wait_procs(processes, _END_TIMEOUT_S)
    assert alive == []
    assert float(said.split()[-1]) < 1e-4


@pytest.mark.asyncio(loop_scope="session")
async def test_calls_fail_for_good_when_vllms_engine_is_killed(
    engine: VllmEngine, weights: Weights, versions: Iterator[int]
):
    tokens = GeneratedTokens()
    call = asyncio.create_task(engine.generate(request(seed=5, max_new_tokens=150), tokens))
    await until(lambda: len(tokens) > 0)
    core = core_of(psutil.Process())
    core.suspend()  # an update that it will never answer
    version = next(versions)
    update = asyncio.create_task(engine.update_weights(weights.state_dict(version), version))
    await asyncio.sleep(0)
    core.kill()
    with pytest.raises(Exception, match="EngineCore"):
        await call
    with pytest.raises(Exception, match="EngineCore"):
        await update
    assert engine.failure is not None
    with pytest.raises(type(engine.failure)):
        await engine.generate(request())
    with pytest.raises(type(engine.failure)):
        await engine.update_weights(weights.state_dict(version), version)
