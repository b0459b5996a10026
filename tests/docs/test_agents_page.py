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
from kinlog.workers.environments import StateNotUsableError
from kinlog.workers.model_calls import ModelCalls
from kinlog.workers.openai_endpoint import OpenAIEndpoint
from kinlog.workers.rollout import run_rollout

pytest_plugins = ["kinlog_policy_fixtures"]

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
GENERATION = GenerationSettings()
SETTINGS = RolloutSettings()


def block(language: str, about: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if about in block]
    return found


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page's modules, where their user has put them."""
    names = ("my_agents", "my_environments")
    for name in names:
        (tmp_path / f"{name}.py").write_text(block("python", f"# {name}.py"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def item(mixture):
    return mixture[2]


@pytest.fixture
def right_answer(item):
    return str(int(item.prompt.removeprefix("b").removesuffix("=")).bit_count())


async def test_agent_of_the_page_is_captured_as_one_conversation(
    modules, scripted_engine, mixture, tokenizer, item, right_answer
):
    section = yaml.safe_load(block("yaml", "my_agents"))
    config = parse_config(yaml.safe_dump({"run_dir": "run", **section}))
    agent = build_agent(config.dataset.tasks[0].agent, mixture, SETTINGS)
    endpoint = OpenAIEndpoint(tokenizer, GENERATION)
    calls = ModelCalls(scripted_engine(["-", right_answer]), GENERATION, seed=1)
    rollout = await run_agent(calls, endpoint, agent, item, settings=SETTINGS)
    await agent.client.close()
    await endpoint.close()
    assert [call.parent for call in rollout.calls] == [-1, 0]
    assert rollout.raw_reward == 1.0


async def test_environment_of_the_page_goes_on_from_its_state(
    modules, scripted_engine, mixture, tokenizer, item, right_answer
):
    environment = build_agent("my_environments:Counting", mixture, SETTINGS)
    engine = scripted_engine(["-", ",", right_answer])
    calls = ModelCalls(engine, GENERATION, seed=1)
    rollout = await run_rollout(calls, tokenizer, environment, item, settings=SETTINGS)
    assert rollout.raw_reward == 1.0
    assert rollout.calls[-1].prompt_token_ids.tolist()[-2:] == tokenizer.encode("2?")
    first, other = environment.begin(item), environment.begin(item)
    await first.judge("-", call=0)
    other.restore_state(first.save_state(), first.state_version)
    assert (await other.judge("-", call=1)).feedback == "2?"
    with pytest.raises(StateNotUsableError):
        other.restore_state(first.save_state(), 2)


def test_parameters_that_are_ignored_and_the_number_of_calls_are_those_of_the_code():
    (row,) = [line for line in PAGE.splitlines() if "ignored: they change nothing" in line]
    assert set(re.findall(r"`(\w+)`", row)) == openai_requests._IGNORED
    assert f"a rollout has at most {MAX_MODEL_CALLS}" in PAGE


def test_codes_of_errors_are_those_of_the_code():
    workers = Path(openai_requests.__file__).parent
    code = (workers / "openai_endpoint.py").read_text() + (workers / "openai_requests.py").read_text()
    table = set(re.findall(r"^\| \d{3} \| `(\w+)` \|", PAGE, re.MULTILINE))
    assert table == set(re.findall(r'code="(\w+)"', code))
