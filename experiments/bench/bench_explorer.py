"""The explorer under the hand: from a moved slider to the redrawn figure, median over 20 moves, at the default simulated workload.

    python experiments/bench/bench_explorer.py

Goal: under 1 s. Without a front end: the way from the kernel to the browser is not in it (`make test-browser` prints that too).
"""

import statistics
import time

began = time.perf_counter()

from kvlab.notebook import sweep_explorer


def main() -> None:
    explorer = sweep_explorer()
    print(f"imports and first figure: {time.perf_counter() - began:.1f} s")
    controls = explorer.controls
    moves = [(controls.watermark, value) for value in (0.05, 0.1, 0.2, 0.3, 0.2, 0.1, 0.05, 0.01)]
    moves += [(controls.block_size, value) for value in (8, 4, 8, 16, 32, 64, 32, 16)]
    moves += [(controls.num_blocks, value) for value in (200, 224, 240, 256)]
    took, busy = [], []
    for control, value in moves:
        drawn, start, cpu = explorer.num_drawn, time.perf_counter(), time.process_time()
        control.value = value
        if not explorer.wait() or explorer.num_drawn == drawn:
            raise SystemExit(f"nothing was drawn: {explorer.message.text}")
        took.append(time.perf_counter() - start)
        busy.append(time.process_time() - cpu)
    print(f"move to redrawn figure over {len(moves)} moves: median {statistics.median(took):.2f} s, worst {max(took):.2f} s "
          f"(processor time: median {statistics.median(busy):.2f} s)")  # fmt: skip
    explorer.close()


if __name__ == "__main__":
    main()
