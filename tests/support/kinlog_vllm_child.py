"""A process that starts a vLLM engine, has it generate, and waits to be killed: ``python kinlog_vllm_child.py``."""

import asyncio

from kinlog_vllm import request, vllm_config

from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.open_engine import prepare_engine

#: What it prints when it generates.
GENERATING = "generating"


async def generate_for_ever() -> None:
    engine = await prepare_engine(vllm_config()).start()
    print(GENERATING, flush=True)  # noqa: T201
    while True:
        await engine.generate(request(max_new_tokens=150), GeneratedTokens())


if __name__ == "__main__":
    asyncio.run(generate_for_ever())
