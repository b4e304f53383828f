"""policy_lab without a front end: templates keep their contracts, faults are said with their line, races have belady as their bound."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import kvlab
from kvlab.notebook.lab import MAX_RIVALS, _share, policy_lab
from kvlab.notebook.lab_cell import SHOWN_CHARS, SHOWN_LINES, run_cell, shortened
from kvlab.notebook.lab_race import conversations, replay_arena
from kvlab.notebook.lab_templates import RIVALS, TEMPLATES
from kvlab.policies.registry import SEAMS, list_policies
from kvlab.types import UserError

TRACE = {"tiny": [[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 3], [8, 9], [1, 2, 4], [5, 6, 7]] * 6}
WORKLOADS = {"small": ("workload=synthetic", "workload.num_requests=20", "workload.arrivals.rate=100", "workload.prompt_len=64",
                       "workload.output_len=32")}  # fmt: skip

HEAD = "from kvlab.policies.base import EvictionPolicy, KeyEviction\n"


def lab_with(source: str, **more):
    return policy_lab(source=HEAD + textwrap.dedent(source), traces=TRACE, workloads=WORKLOADS, namespace={}, **more)


QUICK = ("eviction", "scheduling", "preemption/mode")


@pytest.mark.parametrize("template", [pytest.param(t, marks=() if t in QUICK else pytest.mark.full) for t in TEMPLATES])
def test_every_template_keeps_its_contract_and_finishes_a_race(template):
    lab = policy_lab(template, traces=TRACE, workloads=WORKLOADS, namespace={})
    assert lab.check(), lab.message.text
    assert "keeps the contract of" in lab.message.text
    assert lab.race(), lab.message.text
    rivals = RIVALS[template.partition(",")[0]]
    expected = ["Mine", *rivals, *(["belady"] if template.startswith("eviction") else [])]
    assert list(lab.results["policy"]) == expected
    assert [trace.name for trace in lab.figure().data] == expected
    assert all(len(trace.y) > 0 for trace in lab.figure().data)
    assert lab.table.value.count("<tr>") > len(rivals) if template.startswith("eviction") else "Output token" in lab.table.value


def test_rivals_are_policies_of_their_seams():
    assert set(RIVALS) == {name.partition(",")[0] for name in TEMPLATES} <= set(SEAMS)
    for seam, names in RIVALS.items():
        assert {*names} <= {row.name for row in list_policies(seam)}


def test_belady_is_the_bound_of_what_is_drawn():
    lab = policy_lab(traces={"here": conversations()}, namespace={})
    assert lab.race(), lab.message.text
    lines = {trace.name: np.asarray(trace.y) for trace in lab.figure().data}
    for name, line in lines.items():
        assert np.all(line <= lines["belady"] + 1e-9), name
        assert np.all(np.diff(line) >= 0), name
    assert lines["belady"][0] > max(line[0] for name, line in lines.items() if name != "belady") + 5
    shares = [column for column in lab.results if column.endswith("any")]
    assert np.allclose(100 * lab.results.set_index("policy").loc["lru", shares].to_numpy(dtype=float), lines["lru"])
    trace = lab._traces["here"]
    again = kvlab.replay(trace, lab.policy_class, 0.1)
    assert lab.results.loc[0, f"{again.capacity:,} blocks, any"] == again.object_hit_rate


def test_the_trace_made_here_is_the_same_every_time_and_shares_prefixes():
    one, two = conversations(), conversations()
    assert one == two
    first = [request[0] for request in one]
    assert len(one) > 200
    assert max(first.count(block) for block in set(first)) > 20  # the most popular system prompt


FAULTS = {
    "syntax": ("class Mine(KeyEviction)\n    pass\n", 2, "expected ':'"),
    "raises at once": ("x = 1\n1 / 0\n", 3, "ZeroDivisionError"),
    "no class": ("x = 1\n", None, "The cell defines no class"),
    "no policy": ("class Mine:\n    pass\n", None, "Mine derives from no contract"),
    "abstract": ("class Mine(EvictionPolicy):\n    pass\n", None, "victim"),
    "illegal victim": ("class Mine(EvictionPolicy):\n    def victim(self, now):\n        return -1\n", 3, "is none of the candidates"),
    "raises in key": (
        "class Mine(KeyEviction):\n    def key(self, block):\n        return block.nothing\n", 4, "AttributeError"),
    "not a tuple of numbers": ("class Mine(KeyEviction):\n    def key(self, block):\n        return ('a',)\n", 3, "total order"),
    "a number": (
        "class Mine(KeyEviction):\n    def key(self, block):\n        return block.used_tick\n", 3, "write (block.used_tick,)"),
    "mixed": (
        "class Mine(KeyEviction):\n    def key(self, block):\n        return (1,) if block.depth else ('a',)\n", 3, "total order"),
    "own clock": (
        "import time\nclass Mine(KeyEviction):\n    def key(self, block):\n        return (time.time(), block.used_tick)\n",
        None, "no clock"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_said_in_words_with_its_line(name):
    source, line, words = FAULTS[name]
    lab = lab_with(source)
    assert lab.check() is False
    assert lab.message.kind == "error"
    assert words in lab.message.text
    if line is not None:
        assert lab.message.text.startswith(f"Line {line}: ")
        assert lab.code.error_line == line
    assert not lab.check_button.disabled
    lab.code.value = TEMPLATES["eviction"]
    assert lab.check()  # it lives
    assert lab.code.error_line == 0


def test_the_last_good_race_stays_when_the_next_fails():
    lab = lab_with(TEMPLATES["eviction"])
    assert lab.race(), lab.message.text
    before = [np.asarray(trace.y).copy() for trace in lab.figure().data]
    lab.code.value = HEAD + FAULTS["illegal victim"][0]
    assert not lab.race()
    assert all(np.array_equal(a, b.y) for a, b in zip(before, lab.figure().data, strict=True))
    lab.rivals.value = list(lab.rivals.options)
    lab.code.value = TEMPLATES["eviction"]
    assert not lab.race()
    assert f"at most {MAX_RIVALS}" in lab.message.text


def test_an_interrupt_ends_the_work_and_not_the_kernel():
    lab = lab_with("class Mine(KeyEviction):\n    def key(self, block):\n        raise KeyboardInterrupt\n")
    assert lab.race() is False
    assert lab.message.text == "Interrupted."
    assert not lab.race_button.disabled


def test_only_what_the_text_says_is_raced():
    lab = lab_with(FAULTS["illegal victim"][0])
    assert not lab.check()
    lab.code.value = ""
    assert not lab.race()
    assert lab.message.text.startswith("The cell defines no class.")
    good = lab.code.value = TEMPLATES["eviction"].replace("Mine", "Good")
    assert lab.check(), lab.message.text
    lab.code.value = HEAD + FAULTS["illegal victim"][0]
    assert not lab.check()
    lab.code.value = good
    assert lab.race(), lab.message.text
    assert lab.results.loc[0, "policy"] == "Good"


LEAVES = {
    "at once": ("import sys\nsys.exit()\n", 3, "SystemExit"),
    "at once with a code": ("raise SystemExit(3)\n", 2, "SystemExit: 3"),
    "as a generator": ("raise GeneratorExit\n", 2, "GeneratorExit"),
    "constructor": ("class Mine(KeyEviction):\n    def __init__(self):\n        raise SystemExit(4)\n"
                    "    def key(self, block):\n        return (block.used_tick,)\n", 4, "SystemExit: 4"),
    "key": ("class Mine(KeyEviction):\n    def key(self, block):\n        exit(5)\n", 4, "SystemExit: 5"),
    "key as a generator": ("class Mine(KeyEviction):\n    def key(self, block):\n        raise GeneratorExit\n", 4, "GeneratorExit"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("button", ["check", "race"])
def test_code_that_leaves_does_not_take_the_kernel_along(name, button):
    source, line, words = LEAVES[name]
    lab = lab_with(source)
    lab._namespace["exit"] = sys.exit
    assert getattr(lab, button)() is False
    assert lab.message.kind == "error"
    assert lab.message.text.startswith(f"Line {line}: {words} (it would have ended the kernel")
    assert lab.code.error_line == line
    assert not lab.check_button.disabled


def test_a_policy_that_leaves_in_the_race_only():
    """12 event sequences of the contract never get as deep as a request of 40 blocks."""
    source = """
    import sys
    class Mine(KeyEviction):
        def key(self, block):
            if block.depth > 30:
                sys.exit(6)
            return (block.used_tick,)
    """
    lab = policy_lab(source=HEAD + textwrap.dedent(source), traces={"deep": [list(range(40))] * 3}, namespace={})
    assert lab.check(), lab.message.text
    assert lab.race() is False
    assert lab.message.text.startswith("Line 7: SystemExit: 6")
    assert len(lab.results) == 0


@pytest.mark.parametrize("source", [
    "raise KeyboardInterrupt\n",
    "class Mine(KeyEviction):\n    def __init__(self):\n        raise KeyboardInterrupt\n    def key(self, block):\n        return (1,)\n",
])  # fmt: skip
def test_an_interrupt_leaves_nothing_behind(source):
    lab, out = lab_with(source), sys.stdout
    assert lab.check() is False
    assert lab.message.text == "Interrupted."
    assert sys.stdout is out
    assert sys.getprofile() is None
    assert "__name__" not in lab._namespace
    lab.code.value = TEMPLATES["eviction"]
    assert lab.check(), lab.message.text


def test_the_class_lives_in_the_namespace_and_prints_are_shown():
    names: dict[str, object] = {"WEIGHT": 3}
    source = "print('<hello>')\nclass Heavy(KeyEviction):\n    def key(self, block):\n        return (WEIGHT * block.depth, block.depth)"
    lab = policy_lab(source=HEAD + source, traces=TRACE, namespace=names)
    assert lab.check(), lab.message.text
    assert names["Heavy"] is lab.policy_class
    assert lab.policy_class.__module__ == "__main__"
    assert "&lt;hello&gt;" in lab.printed.value
    lab.code.value = HEAD + source.replace("KeyEviction", "object")
    lab.check()
    assert lab.policy_class.__name__ == "Heavy"


def test_what_is_printed_does_not_fill_the_page():
    source = "for n in range(200_000):\n    print('<', n)\nprint('y' * 10**6)\n"
    lab = lab_with(source + TEMPLATES["eviction"])
    lab.run_code()
    shown = lab.printed.value.removeprefix("<pre>").removesuffix("</pre>").split("\n")
    assert shown[:100] == [f"&lt; {n}" for n in range(100)]
    assert shown[100] == "... 199,801 lines left out ..."
    assert shown[101:200] == [f"&lt; {n}" for n in range(199_901, 200_000)]
    assert shown[200:] == ["y" * 500 + " ... 999,500 characters left out"]


def test_what_fits_is_shown_whole():
    text = "\n".join(["x" * SHOWN_CHARS] * 2 * SHOWN_LINES)
    assert shortened(text) == text


def test_a_class_of_another_seam_changes_the_race():
    lab = policy_lab("eviction", traces=TRACE, workloads=WORKLOADS, namespace={}, source=TEMPLATES["scheduling"])
    assert lab.race(), lab.message.text
    assert lab.seam == "scheduling"
    assert lab.arena.value == "simulated: small"


@pytest.mark.parametrize(("arguments", "words"), [({"seam": "evictoin"}, "Did you mean 'eviction'"),
                                                  ({"rivals": ["lru", "lrru"]}, "Did you mean 'lru'")])  # fmt: skip
def test_wrong_arguments(arguments, words):
    with pytest.raises(UserError, match=words):
        policy_lab(**arguments)


def test_replay_arena_names_what_it_draws():
    arena = replay_arena("x", TRACE["tiny"])
    assert (arena.x_title, arena.y_title) == ("capacity (blocks)", "blocks found (%)")


def test_source_of_a_cell_can_be_looked_at():
    cell = run_cell(TEMPLATES["eviction"], {})
    import inspect

    assert "block.used_tick" in inspect.getsource(cell.policy_class.key)


CELLS = [
    """
import json
import kvlab
from kvlab.notebook import policy_lab
from kvlab.policies.base import KeyEviction

class Shallow(KeyEviction):
    def key(self, block):
        return (-block.depth, block.used_tick)
""",
    """
lab = policy_lab()
checked = lab.check()
base = ("runner=simulated", "model=dummy_llama3_8b", "workload=shared_prefix", "workload.num_requests=24", "num_blocks=80")
run = kvlab.run(kvlab.compose(*base), eviction=Shallow())
run_lab = kvlab.run(kvlab.compose(*base), eviction=Mine)
by_target = kvlab.run(kvlab.compose(*base, "eviction._target_=__main__.Shallow"))
runs = kvlab.sweep({"eviction": ["lru", Shallow, lab.policy_class], "block_size": [8, 16]}, *base)
trace = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3]] * 5
points = kvlab.replay.sweep(trace, ["lru", Shallow, Mine], [3, 4], jobs=2).frame
""",
    """
print("PROBE" + json.dumps({
    "checked": checked,
    "same_class": Mine is lab.policy_class,
    "run": [run.state, run_lab.state, by_target.state],
    "steps": [run.summary["num_steps"], by_target.summary["num_steps"]],
    "evicted": run.summary["num_evicted_blocks"],
    "sweep": list(runs["status"]),
    "names": list(points["policy"]),
    "hits": [int(x) for x in points["object_hits"]],
}))
""",
]


@pytest.mark.slow
def test_a_class_of_a_cell_runs_everywhere_in_a_real_kernel(tmp_path, monkeypatch):
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", store_widget_state=False,
                            resources={"metadata": {"path": str(tmp_path)}})  # fmt: skip
    client.execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    probe = json.loads(printed.split("PROBE", 1)[1])
    assert probe["checked"] is True
    assert probe["same_class"] is True
    assert probe["run"] == ["finished"] * 3
    assert probe["steps"][0] == probe["steps"][1]
    assert probe["evicted"] > 0
    assert probe["sweep"] == ["finished"] * 6
    assert probe["names"] == ["lru", "lru", "Shallow", "Shallow", "Mine", "Mine"]
    assert min(probe["hits"]) > 0


@pytest.mark.parametrize(
    ("num_beaten", "num_rivals", "words"),
    [(0, 6, "none of 6 rivals"), (2, 6, "2 of 6 rivals"), (6, 6, "all 6 rivals"), (1, 1, "its rival"), (0, 1, "nobody"), (0, 0, "nobody")],
)
def test_a_verdict_in_words(num_beaten, num_rivals, words):
    assert _share(num_beaten, num_rivals) == words
