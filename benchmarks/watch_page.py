"""The live page of a run with many clients and rounds: time to show it, and from a record to the screen.

Run: python -m benchmarks.watch_page [--clients 1000] [--rounds 200] [--shown 20] [--folder DIR]

Writes the folder of a run of which all but the last rounds are over, opens its page in a headless Chromium, writes the
last `--shown` rounds one by one as a run does (a line for every client as it answers, then the records), and measures
how long after the round's record the page shows the round. Then it writes single lines of the log, and
measures how long after each the page shows it. Figures of the page itself come from Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import psutil
import yaml

from benchmarks.timing import machine
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import ClientRecord, EvaluationRecord, RoundRecord, RoutingRecord, RunLog
from fedguild.report.watch.server import WatchServer
from tests.report.watch.browser import Browser

BUDGETS = ("b1", "b2", "b3", "b4")
LINES = 20
"""Lines of the log that are timed one by one."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--shown", type=int, default=20, help="rounds that are written while the page is open")
    parser.add_argument("--folder", type=Path, help="by default a temporary one, removed afterwards")
    parser.add_argument("--screenshot", type=Path)
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "run"
        run = GeneratedRun(folder, arguments.clients, arguments.rounds)
        run.begin()
        for number in range(1, arguments.rounds - arguments.shown + 1):
            run.write_round(number)
        megabytes = run.log.path.stat().st_size / 1e6
        print(f"{arguments.clients} clients, {run.round} rounds written: metrics.jsonl {megabytes:.0f} MB")
        _measure(run, arguments.rounds, Path(scratch) / "profile", arguments.screenshot)


class GeneratedRun:
    """The folder of a run that is generated, not trained.

    Args:
        folder: The folder.
        clients: How many clients take part in every round.
        rounds: The rounds that its config asks for.
    """

    def __init__(self, folder: Path, clients: int, rounds: int) -> None:
        self.folder, self.clients, self.rounds, self.round = folder, clients, rounds, 0
        self.log, self.events, self._random = RunLog(folder), ActivityLog(folder), random.Random(0)

    def begin(self) -> None:
        """Writes what a run writes before its first round."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tiers = [{"name": name, "active_experts": 8 >> place} for place, name in enumerate(BUDGETS)]
        federation = {"clients": self.clients, "rounds": self.rounds, "budgets": tiers}
        config = {"name": "generated", "seed": 0, "method": {"name": "flame"}, "federation": federation}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": _now(), "command": "generated"}
        (self.folder / ".lock.json").write_text(json.dumps(holder))
        self.events.append("begun", pid=os.getpid())
        self.log.append(*self._scores(0))

    def write_round(self, number: int, seconds: float = 0.0) -> float:
        """Writes a round, spread over some seconds; returns the time at which its record was written."""
        clients, everyone = self.clients, list(range(self.clients))
        self.events.append("round", round=number, rounds=self.rounds)
        self.events.append("asked", round=number, attempt=0, clients=everyone)
        self.events.append("training", clients=everyone)
        refused = {client: "its norm is above the limit" for client in everyone if self._random.random() < 0.002}
        for client in everyone:
            self.events.append("delivered", client=client, reason=refused.get(client, ""), needed=True)
            if seconds:
                time.sleep(seconds / clients)
        rejected = [{"client": client, "reason": reason} for client, reason in refused.items()]
        ended = RoundRecord(
            round=number, seconds=30.0 + self._random.random(), participants=everyone, rejected=rejected
        )
        self.log.append(
            *(self._client(number, client) for client in everyone), self._routing(number), *self._scores(number), ended
        )
        self.round = number
        return time.time()

    def _client(self, number: int, client: int) -> ClientRecord:
        return ClientRecord(
            round=number,
            client=client,
            budget=BUDGETS[client % 4],
            active_experts=8 >> client % 4,
            rank=8,
            examples=120,
            steps=20,
            tokens=40_000,
            train_loss=2.0 / number**0.3 + self._random.random() / 10,
            upload_bytes=4_253_040,
            download_bytes=4_251_960,
            upload_parts={"adapter": 4_253_040},
            training_flops=16.2e9,
            peak_memory_bytes=1_370_640_384,
            seconds=1.3,
        )

    def _routing(self, number: int) -> RoutingRecord:
        shares = [[[0.125] * 16] * 4] * self.clients
        figures = [0.9] * 4
        return RoutingRecord(
            round=number,
            layers=4,
            experts=16,
            clients=list(range(self.clients)),
            frequency=shares,
            entropy=figures,
            normalised_entropy=figures,
            gini=figures,
        )

    def _scores(self, number: int) -> list[EvaluationRecord]:
        scores = {name: 0.7 - 0.1 * place - 0.4 / (number + 1) for place, name in enumerate(BUDGETS)}
        known = {"round": number, "split": "test", "examples": 400}
        mean = EvaluationRecord(scope="summary", name="mean", score=sum(scores.values()) / 4, **known)
        return [
            *(EvaluationRecord(scope="budget", name=name, score=score, **known) for name, score in scores.items()),
            mean,
        ]


def _measure(run: GeneratedRun, rounds: int, profile: Path, screenshot: Path | None) -> None:
    process = psutil.Process()
    before, server = process.memory_info().rss, WatchServer(run.folder)
    started = time.perf_counter()
    while server.follower.refresh():
        pass
    print(f"read: {time.perf_counter() - started:.2f} s, {(process.memory_info().rss - before) / 1e6:.0f} MB of memory")
    print(f"state as JSON: {len(json.dumps(server.follower.board.since())) / 1e6:.2f} MB")
    server.begin()
    with Browser(profile) as browser:
        browser.show(1280)
        started = time.perf_counter()
        browser.open(server.url)
        browser.wait_for("document.querySelectorAll('#client-table tbody tr').length")
        print(f"page shown: {time.perf_counter() - started:.2f} s after it was opened")
        browser.value(_COUNT_TASKS)
        written: dict[int, float] = {}
        first = run.round + 1

        def write() -> None:
            for number in range(first, rounds + 1):
                written[number] = run.write_round(number, seconds=1.0)

        threading.Thread(target=write, daemon=True).start()
        delays = []
        for number in range(first, rounds + 1):
            browser.wait_for(f"parts.page.get('totals').round >= {number} && shownAt > 0 && !waiting")
            delays.append(time.time() - written.get(number, time.time()))
        print(f"round on screen after its record: median {median(delays):.2f} s, at most {max(delays):.2f} s")
        alone = [_line_delay(run, browser, f"A line of the log, number {number}") for number in range(LINES)]
        print(f"line on screen after it was written: median {median(alone):.2f} s, at most {max(alone):.2f} s")
        longest = browser.value("Math.round(Math.max(0, ...longTasks))")
        print(f"page's main thread: {browser.value('longTasks.length')} tasks above 50 ms, the longest {longest} ms")
        for what, script in _GESTURES.items():
            print(f"{what}: {browser.value(script):.0f} ms")
        heap = browser.value("performance.memory.usedJSHeapSize") / 1e6
        print(f"page's heap: {heap:.0f} MB; problems: {browser.problems or 'none'}")
        if screenshot:
            browser.screenshot(screenshot)
    server.end()


def _line_delay(run: GeneratedRun, browser: Browser, text: str) -> float:
    """Returns the seconds from the writing of a line of the log to the page that shows it."""
    time.sleep(random.uniform(0.0, 0.4))  # anywhere between two polls
    written = time.perf_counter()
    run.events.append("message", text=f"{text}.")
    browser.wait_for(f"at('log').textContent.includes('{text}.')")
    return time.perf_counter() - written


_COUNT_TASKS = """
window.longTasks = [];
const observer = new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((one) => one.duration)));
observer.observe({entryTypes: ['longtask']});
"""
_GESTURE = """
(async () => {{
  const began = performance.now();
  {act};
  await new Promise((done) => {{ const look = () => waiting ? requestAnimationFrame(look) : done(); look(); }});
  return performance.now() - began;
}})()
"""
_GESTURES = {
    "a filter, shown": _GESTURE.format(act="at('find').value = 'b3'; at('find').dispatchEvent(new Event('input'))"),
    "another page of clients, shown": _GESTURE.format(act="at('next').click()"),
    "another order, shown": _GESTURE.format(
        act="at('sort').value = 'loss'; at('sort').dispatchEvent(new Event('input'))"
    ),
}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


if __name__ == "__main__":
    main()
