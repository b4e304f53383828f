"""The block map as a saved page and in an exported notebook, without a kernel: plays, answers keys and pointer, complains of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab.notebook import block_map, export_html, prefix_tree, timeline
from kvlab.notebook.export import save_page
from kvlab.results import Run
from kvlab.trace import RecordConfig, Recorder
from kvlab.types import BlockEvent

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Sixty prompts with common beginnings through 96 blocks."""
    config = kvlab.compose("runner=simulated", "model=tiny", "cost_model=cpu", "kv_cache_tokens=null", "workload=shared_prefix",
                           "workload.num_requests=60", "workload.arrivals.rate=150", "block_size=16", "num_blocks=96",
                           "record.blocks=true", "record.plans=true")  # fmt: skip
    return kvlab.run(config, folder=tmp_path_factory.mktemp("run") / "shared", name="shared prompts", progress=False)


def open_page(page: Any, path: Path) -> None:
    page.goto(f"file://{path}")
    page.wait_for_selector("body[data-kvlab-ready]")


def test_a_saved_page_plays_and_answers(page, run, tmp_path, artifacts):
    blocks = block_map(run, step=10)
    open_page(page, save_page([blocks, timeline(run), prefix_tree(run)], tmp_path / "page.html", "a run"))
    steps = lambda: page.locator(".kvlab-step").all_text_contents()  # noqa: E731
    last = f"{blocks.num_steps - 1:,}"
    assert steps() == [f"step 10 of {last}"] * 3
    slider = page.locator(".kvlab-range").first
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => [...document.querySelectorAll('.kvlab-step')].every(s => s.textContent.startsWith('step 11 '))")
    used = page.locator(".kvlab-key", has_text="used").first.locator("b").text_content()
    assert int(used) == int((blocks.states(11) == 1).sum())  # the browser counts what Python does
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelector('.kvlab-step').textContent.startsWith('step 9 ')")
    used = page.locator(".kvlab-key", has_text="used").first.locator("b").text_content()
    assert int(used) == int((blocks.states(9) == 1).sum())  # stepping back undoes

    page.locator(".kvlab-canvas").first.click(position={"x": 10, "y": 10})
    page.locator(".kvlab-detail", has_text="Block 0").first.wait_for()  # painted with the next frame
    assert "allocate" in page.locator(".kvlab-detail").first.text_content()
    page.screenshot(path=artifacts / "block_map.png", full_page=True)
    page.locator(".kvlab-play").first.click()
    page.wait_for_function("() => parseInt(document.querySelector('.kvlab-step').textContent.slice(5)) > 20")
    page.locator(".kvlab-play").first.click()
    assert page.console_log.errors == []


def test_no_key_is_lost_while_a_frame_takes_long(page, run, tmp_path):
    """Each key steps on from the step that the last one led to, painted or not, whichever of the linked sliders hears it."""
    open_page(page, save_page([block_map(run, step=10), timeline(run)], tmp_path / "page.html", "a run"))
    page.evaluate("() => { window.late = []; window.paintLater = window.requestAnimationFrame;"
                  " window.requestAnimationFrame = f => window.late.push(f); }")  # fmt: skip
    for slider, key in ((0, "Right"), (0, "Right"), (0, "Right"), (1, "Right"), (1, "Right"), (0, "Left")):
        page.locator(".kvlab-range").nth(slider).focus()
        page.keyboard.press(f"Arrow{key}")
    assert page.evaluate("[...document.querySelectorAll('.kvlab-widget')].map(w => w.kvlab.cursor.step)") == [14, 14]
    page.evaluate("() => { window.requestAnimationFrame = window.paintLater; for (const f of window.late) f(performance.now()); }")
    page.wait_for_function("() => [...document.querySelectorAll('.kvlab-step')].every(s => s.textContent.startsWith('step 14 '))")


def test_every_step_in_the_browser_is_that_of_python(page, run, tmp_path):
    blocks = block_map(run)
    open_page(page, blocks.save_html(tmp_path / "map.html"))
    wanted = [0, 400, 30, 31, 30, 200, 5, blocks.num_steps - 1]
    found = page.evaluate("""steps => { const k = document.querySelector('.kvlab-widget').kvlab;
        return steps.map(s => { k.paint(s); return [...k.view.tiers[0].states]; }); }""", wanted)  # fmt: skip
    for step, states in zip(wanted, found, strict=True):
        assert states == blocks.states(step).tolist(), step


def test_the_exported_notebook_works_without_a_kernel(page, tmp_path, artifacts):
    import nbformat
    from nbclient import NotebookClient

    nb = nbformat.read(ROOT / "notebooks" / "06_inside_the_block_pool.ipynb", as_version=4)
    NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    nbformat.write(nb, tmp_path / "06.ipynb")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if r.url.startswith("http") else None)
    open_page(page, export_html(tmp_path / "06.ipynb"))
    assert page.locator(".kvlab-widget").count() == 7
    assert page.locator(".js-plotly-plot").count() == 2
    page.locator(".kvlab-range").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelector('.kvlab-step').textContent.startsWith('step 21 ')")
    page.screenshot(path=artifacts / "notebook_06.png", full_page=True)
    assert asked == []
    assert page.console_log.errors == []


def test_a_message_is_shown_in_words(page, tmp_path):
    open_page(page, block_map(tmp_path / "none").save_html(tmp_path / "page.html"))
    assert "is not a folder" in page.locator(".kvlab-message").text_content()
    assert page.console_log.errors == []


def test_twenty_thousand_blocks(page, tmp_path, artifacts, capsys):
    num_blocks, num_steps, a_step = 20_000, 2000, 100
    draw = np.random.default_rng(0)
    with Recorder(tmp_path, RecordConfig(blocks=True, steps=False, requests=False)) as recorder:
        held = np.zeros(num_blocks, dtype=bool)
        for step in range(num_steps):
            for block in draw.integers(0, num_blocks, a_step).tolist():
                held[block] = not held[block]
                kind = "allocate" if held[block] else "free"
                recorder.on_block(BlockEvent(step, kind, "gpu", block, int(held[block]), "", f"r{block % 97}"))
    big = block_map(Run("big", folder=tmp_path, config={"num_blocks": num_blocks, "block_size": 16}))
    path = big.save_html(tmp_path / "big.html")
    assert path.stat().st_size < 30e6
    open_page(page, path)
    ready = page.evaluate("performance.now()") / 1e3
    frame_ms = page.evaluate("""() => { const k = document.querySelector('.kvlab-widget').kvlab, took = [];
        for (let s = 0; s < 300; s++) { const t = performance.now(); k.paint(s * 6); took.push(performance.now() - t); }
        return took.sort((a, b) => a - b)[150]; }""")  # fmt: skip
    page.screenshot(path=artifacts / "block_map_20000.png")
    with capsys.disabled():
        size = path.stat().st_size / 1e6
        print(f"\n20,000 blocks, 2,000 steps: page of {size:.1f} MB ready after {ready:.2f} s, {frame_ms:.1f} ms a frame")
    states = page.evaluate("""() => { const k = document.querySelector('.kvlab-widget').kvlab;
        k.paint(1999); return [...k.view.tiers[0].states]; }""")  # fmt: skip
    assert states == big.states(1999).tolist()
    assert page.console_log.errors == []
