"""Measure the dashboard's script time per drawing, for each view, with 256 running and 1,000 waiting requests.

Owns: the measurement. Frames of a simulated engine are sent five times a second, as a live engine's are. A drawing's
cost is the time to read the frames since the last drawing, and to draw.
Does not: time the browser's own layout and painting.
Usage: python -m tools.dashboard_cost [--seconds 8] [--views steps plots]; needs the extra `browser` and Chromium.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.dashboard.page import write_page

RUNNING = "325"  # places: the made-up pool holds about 256 of them at once
VIEWS = ("steps", "pool", "queue", "lanes", "plots")
# Feeds frames by their own clock from the middle on, in parts of 0.2 s, and gives what the pictures cost.
FEED = """async ([view, frames, seconds]) => {
  octavo.store = new octavo.store.constructor(true);
  octavo.isLiveSource = true;
  octavo.mode = "live";
  octavo.show(view);
  octavo.span = 10;
  let next = 0;
  const takeUntil = (time) => {
    const part = [];
    while (next < frames.length && (frames[next].t ?? 0) <= time) part.push(frames[next++]);
    octavo.take(JSON.parse(JSON.stringify(part)));
  };
  const middle = frames[Math.floor(frames.length / 2)].t;
  takeUntil(middle);
  octavo.toEnd();
  await new Promise((go) => setTimeout(go, 500));
  octavo.numCosts = 0;
  octavo.takeMs = 0;
  const began = performance.now();
  for (let now = 0.2; now <= seconds; now += 0.2) {
    await new Promise((go) => setTimeout(go, began + now * 1000 - performance.now()));
    takeUntil(middle + now);
  }
  const last = octavo.store.steps.count - 1;
  return { ...octavo.cost(), run: octavo.store.steps.run[last], wait: octavo.store.steps.wait[last] };
}"""


def measure(page: Path, frames: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the costs of each view."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        found = {}
        for view in args.views:
            tab = browser.new_page(viewport={"width": 1280, "height": 800})
            tab.goto(page.as_uri())
            tab.wait_for_timeout(500)
            found[view] = tab.evaluate(FEED, [view, frames, args.seconds])
            tab.close()
        browser.close()
    return found


def main() -> int:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=VIEWS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, page = Path(folder) / "frames.jsonl", Path(folder) / "page.html"
        subprocess.run(
            [sys.executable, "-m", "tools.sample_frames", str(source), "--running", RUNNING, "--steps", "700"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        frames = [json.loads(line) for line in source.read_text().splitlines()]
        write_page(frames[:1], page)
        found = measure(page, frames, args)
    print(f"{'view':8} {'pictures':>8} {'p50':>8} {'p95':>8} {'most':>8}   running waiting")
    for view, cost in found.items():
        numbers = f"{cost['number']:8.0f} {cost['p50']:5.1f} ms {cost['p95']:5.1f} ms {cost['most']:5.1f} ms"
        print(f"{view:8} {numbers}   {cost['run']:7.0f} {cost['wait']:7.0f}")
    print(json.dumps({view: {name: round(value, 2) for name, value in cost.items()} for view, cost in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
