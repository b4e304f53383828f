"""Every workload configuration: composes, builds, shows a command that uses it, and starts."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from workload_helpers import context

from kvlab.building import build, find_class
from kvlab.composition import compose
from kvlab.config import to_plain
from kvlab.types import UserError
from kvlab.workload import Workload

FOLDER = Path(__file__).resolve().parents[1] / "conf" / "workload"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Small files in place of those that some configurations name, and the overrides that go with them."""
    rows = [{"timestamp": 10 * i, "input_length": 600, "output_length": 40, "hash_ids": [0, i + 1]} for i in range(3)]
    (tmp_path / "mooncake_conversation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "azure_2023_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,37,4\n",
        encoding="utf-8",
    )
    qwen = [{"chat_id": i, "parent_chat_id": -1, "timestamp": 0.5 * i, "input_length": 40, "output_length": 9, "hash_ids": [0, i, 9]}
            for i in range(2)]  # fmt: skip
    (tmp_path / "qwen_bailian_a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in qwen), encoding="utf-8")
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    (tmp_path / "burstgpt_1.csv").write_text(header + "5,ChatGPT,472,18,490,Conversation log\n", encoding="utf-8")
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]
    (tmp_path / "sharegpt_v3.json").write_text(json.dumps([{"id": "a", "conversations": turns}]), encoding="utf-8")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    monkeypatch.setenv("KVLAB_TRACES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return {"prompts": ["workload.path=mine.jsonl"]}


def test_the_workloads_there_are() -> None:
    assert NAMES == [
        "azure", "burstgpt", "chat", "mooncake", "multi_turn", "prompts", "qwen_bailian", "shared_prefix", "sharegpt", "synthetic",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_builds_and_its_workload_starts(name: str, files: dict[str, list[str]]) -> None:
    workload = build(to_plain(compose(f"workload={name}", *files.get(name, [])))["workload"])
    assert isinstance(workload, Workload)
    workload.start(context(max_model_len=8192))
    counts = {"azure": 1, "burstgpt": 1, "chat": 32, "mooncake": 3, "multi_turn": 48, "prompts": 1, "qwen_bailian": 2, "sharegpt": 1}
    assert workload.num_requests == counts.get(name, 64)
    first = workload.next_arrival_s()
    assert first == 0.0
    request = workload.due(0.0)[0]
    assert len(request.prompt_token_ids) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_lists_every_parameter_and_shows_a_command(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert re.match(r"# (KVLAB_TRACES=traces )?python -m kvlab\.experiment .*workload=" + name, text)
    keys = re.findall(r"^(\w+):", text, flags=re.MULTILINE)
    target = re.search(r"^_target_: (\S+)", text, flags=re.MULTILINE)
    assert target is not None
    assert sorted(keys) == sorted(["_target_", *inspect.signature(find_class(target[1])).parameters])
    lines = [line for line in text.splitlines() if re.match(r"^\w+: \S", line) and "#" not in line]
    plain = {"_target_", "num_requests", "num_sessions", "ignore_eos"}  # whose names say all
    assert {line.split(":")[0] for line in lines} <= plain


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload=synthetic", "workload.prompt_len=32", "workload.output_len.kind=fixed", "+workload.output_len.value=8"],
        ["workload=synthetic", "workload.arrivals.kind=gamma", "workload.arrivals.cv=4", "workload.concurrency=8"],
        ["workload=synthetic", "workload.prefix={depth:1,branching:2,tokens_per_node:8}", "workload.priorities={0:0.5,1:0.5}"],
        ["workload=multi_turn", "workload.turns={kind:uniform,min:1,max:4}", "workload.abort={fraction:0.5,after_s:1}"],
        ["workload=chat", "workload.limit=8", "workload.sampling.temperature=0.7", "workload.arrivals={kind:poisson,rate:2}"],
    ],
)
def test_parameters_can_be_changed_on_the_command_line(overrides: list[str]) -> None:
    workload = build(to_plain(compose(*overrides))["workload"])
    workload.start(context())
    assert len(workload.due(0.0)) >= 1


def test_the_kind_of_prompts_file_that_is_missing_is_named(files: dict[str, list[str]]) -> None:
    with pytest.raises(UserError, match=r"There is no file of prompts 'other\.jsonl'"):
        build(to_plain(compose("workload=prompts", "workload.path=other.jsonl"))["workload"]).start(context())
