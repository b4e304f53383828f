"""SamplingParams: one rule for the types of its values, wherever it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.types import SamplingParams, UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.prompts import PromptWorkload

NAN, INF = float("nan"), float("inf")

WRONG: list[tuple[str, Any, str]] = [
    ("temperature", "0.5", "a number"),
    ("temperature", None, "a number"),
    ("temperature", True, "a number"),
    ("temperature", [0.5], "a number"),
    ("temperature", NAN, "a number"),
    ("temperature", -0.1, "0 \\(greedy\\) or more"),
    ("temperature", -1e-300, "0 \\(greedy\\) or more"),
    ("temperature", -INF, "0 \\(greedy\\) or more"),
    ("temperature", 10**400, "a number"),
    ("top_k", 5.0, "a whole number"),
    ("top_k", "5", "a whole number"),
    ("top_k", True, "a whole number"),
    ("top_k", -1, "0 \\(off\\) or more"),
    ("top_p", NAN, "a number"),
    ("top_p", "0.9", "a number"),
    ("top_p", 0, "in \\(0, 1\\]"),
    ("top_p", INF, "in \\(0, 1\\]"),
    ("min_p", None, "a number"),
    ("min_p", 1, "in \\[0, 1\\)"),
    ("repetition_penalty", INF, "a finite number"),
    ("repetition_penalty", NAN, "a number"),
    ("repetition_penalty", 0, "more than 0"),
    ("presence_penalty", NAN, "a number"),
    ("frequency_penalty", "1", "a number"),
    ("length_penalty", INF, "a finite number"),
    ("length_penalty", None, "a number"),
    ("seed", 1.5, "None or a whole number"),
    ("seed", "7", "None or a whole number"),
    ("seed", False, "None or a whole number"),
    ("n", 1.5, "a whole number"),
    ("n", "2", "a whole number"),
    ("n", True, "a whole number"),
    ("n", None, "a whole number"),
    ("beam_width", 2.0, "a whole number"),
    ("max_tokens", None, "a whole number"),
    ("max_tokens", 16.0, "a whole number"),
    ("max_tokens", True, "a whole number"),
    ("min_tokens", "0", "a whole number"),
    ("logprobs", 1.0, "None or a whole number"),
    ("logprobs", True, "None or a whole number"),
    ("logprobs", 65, "None or 0 to 64"),
    ("stop", 5, "a string or strings"),
    ("stop", [1], "a string or strings"),
    ("stop", ["a", None], "a string or strings"),
    ("stop", "", "non-empty strings"),
    ("stop", ["a", ""], "non-empty strings"),
    ("stop", {"a": 1}, "a string or strings"),
    ("stop_token_ids", "7", "an id or ids"),
    ("stop_token_ids", 7.0, "an id or ids"),
    ("stop_token_ids", [7.0], "an id or ids"),
    ("stop_token_ids", [True], "an id or ids"),
    ("stop_token_ids", [[7]], "an id or ids"),
    ("ignore_eos", 1, "true or false"),
    ("ignore_eos", "false", "true or false"),
    ("include_stop_str", None, "true or false"),
    ("early_stopping", 0, "true or false"),
]
OBJECTS: list[tuple[str, Any, str]] = [
    ("stop", b"a", "a string or strings"),
    ("stop_token_ids", b"ab", "an id or ids"),
    ("stop_token_ids", np.array([1.0]), "an id or ids"),
    ("top_k", np.float64(5), "a whole number"),
    ("n", np.bool_(True), "a whole number"),
    ("temperature", np.array([0.5]), "a number"),
    ("temperature", 1j, "a number"),
    ("temperature", np.float32("nan"), "a number"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG + OBJECTS)
def test_a_wrong_value_is_one_sentence(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(UserError, match=rf"^SamplingParams\.{name} = .* is not allowed: {allowed}[^\n]*\.$"):
        SamplingParams(**{name: value})


IN_JSON = [one for one in WRONG if one[1] != 10**400]


@pytest.mark.parametrize(("name", "value", "allowed"), IN_JSON)
def test_the_same_in_a_prompt_file_and_in_a_workload(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "a", name: value}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"prompts\.jsonl, line 2: {name} = .* is not allowed: {allowed}"):
        PromptWorkload(path).start(WorkloadContext(None, 300, 100, 0))
    with pytest.raises(UserError, match=rf"^workload\.sampling: {name} = .* is not allowed: {allowed}"):
        PromptWorkload(sampling={name: value})


def test_numbers_of_numpy_and_torch_become_pythons() -> None:
    given: dict[str, Any] = {
        "n": np.int64(2), "temperature": np.float32(0.5), "top_k": np.uint8(7), "top_p": np.float64(1), "seed": torch.tensor(-3),
        "ignore_eos": np.bool_(True), "max_tokens": np.array(9), "stop_token_ids": torch.tensor([3, 4]), "min_p": 0,
    }  # fmt: skip
    params = SamplingParams(**given)
    expected = SamplingParams(n=2, temperature=0.5, top_k=7, seed=-3, ignore_eos=True, max_tokens=9, stop_token_ids=(3, 4))
    assert params == expected
    kinds = [type(getattr(params, name)) for name in ("n", "temperature", "top_k", "top_p", "seed", "ignore_eos", "max_tokens", "min_p")]
    assert kinds == [int, float, int, float, int, bool, int, float]
    assert [type(token) for token in params.stop_token_ids] == [int, int]


def test_stop_and_its_ids_alone_many_none() -> None:
    stops: list[tuple[Any, tuple[str, ...]]] = [
        (None, ()), ("ab", ("ab",)), (["b", "a"], ("b", "a")), ((), ()), (iter(["x"]), ("x",)), ({"b", "a"}, ("a", "b")),
    ]  # fmt: skip
    for given, stop in stops:
        assert SamplingParams(stop=given).stop == stop
    many: list[tuple[Any, tuple[int, ...]]] = [
        (None, ()), (7, (7,)), (np.int32(7), (7,)), ([2, 1], (2, 1)), (np.array([2, 1]), (2, 1)), ({2, 1}, (1, 2)), ([], ()),
    ]  # fmt: skip
    for given, ids in many:
        assert SamplingParams(stop_token_ids=given).stop_token_ids == ids


@pytest.mark.parametrize("low", [0, 0.0, -0.0, 5e-324, 1e-308, 2.2250738585072014e-308, 1e-201])
def test_a_temperature_that_no_difference_survives_is_greedy(low: float) -> None:
    params = SamplingParams(temperature=low)
    assert str(params.temperature) == "0.0"
    assert SamplingParams(temperature=low, beam_width=2).beam_width == 2  # which takes no temperature


def test_the_lowest_temperature_that_is_one_and_the_highest() -> None:
    assert SamplingParams(temperature=1e-200).temperature == 1e-200
    assert SamplingParams(temperature=INF).temperature == INF
