"""A process that splits a model over two processes of vLLM, gives it new weights, and generates until it is killed.

It prints by how much its log-probabilities differ from torch's, before and after the new weights.
"""

import asyncio

from kinlog_vllm import Weights, logprobs_by_torch, request, vllm_config

from kinlog.workers.open_engine import prepare_engine

#: Comes before the largest difference.
DIFFERENCE = "difference"


async def generate_until_killed() -> None:
    engine = await prepare_engine(vllm_config(tensor_parallel_size=2)).start()
    weights = Weights()
    differences = []
    for version in (0, 1):
        if version:
            await engine.update_weights(weights.state_dict(version), version)
        completion = await engine.generate(request(seed=5))
        difference = completion.logprobs - logprobs_by_torch(weights, completion)
        differences.append(float(difference.abs().max()))
    print(DIFFERENCE, max(differences), flush=True)  # noqa: T201
    while True:
        await engine.generate(request(seed=5, max_new_tokens=150))


if __name__ == "__main__":
    asyncio.run(generate_until_killed())
