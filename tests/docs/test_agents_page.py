"""The page about agents: its agent runs, its configuration names it, and its tables say what the endpoint says."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from kinlog.schemas.config import parse_config
from kinlog.schemas.receipts import MAX_MODEL_CALLS
from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers import openai_requests
from kinlog.workers.agent_rollout import run_agent
from kinlog.workers.agents import build_agent
from kinlog.workers.model_calls import ModelCalls
from kinlog.workers.openai_endpoint import OpenAIEndpoint

pytest_plugins = ["kinlog_policy_fixtures"]

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
GENERATION = GenerationSettings()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page's agent, where its user has put it."""
    (tmp_path / "my_agents.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_agents", None)


async def test_agent_of_the_page_is_captured_as_one_conversation(module, scripted_engine, mixture, tokenizer):
    config = parse_config(yaml.safe_dump({"run_dir": "run", **yaml.safe_load(block("yaml"))}))
    agent = build_agent(config.dataset.tasks[0].agent, mixture, RolloutSettings())
    item = mixture[2]
    right = str(int(item.prompt.removeprefix("b").removesuffix("=")).bit_count())
    endpoint = OpenAIEndpoint(tokenizer, GENERATION)
    calls = ModelCalls(scripted_engine(["-", right]), GENERATION, seed=1)
    rollout = await run_agent(calls, endpoint, agent, item, settings=RolloutSettings())
    await agent.client.close()
    await endpoint.close()
    assert [call.parent for call in rollout.calls] == [-1, 0]
    assert rollout.raw_reward == 1.0


def test_parameters_that_are_ignored_and_the_number_of_calls_are_those_of_the_code():
    (row,) = [line for line in PAGE.splitlines() if "ignored: they change nothing" in line]
    assert set(re.findall(r"`(\w+)`", row)) == openai_requests._IGNORED
    assert f"a rollout has at most {MAX_MODEL_CALLS}" in PAGE


def test_codes_of_errors_are_those_of_the_code():
    workers = Path(openai_requests.__file__).parent
    code = (workers / "openai_endpoint.py").read_text() + (workers / "openai_requests.py").read_text()
    table = set(re.findall(r"^\| \d{3} \| `(\w+)` \|", PAGE, re.MULTILINE))
    assert table == set(re.findall(r'code="(\w+)"', code))
