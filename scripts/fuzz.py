"""Runs the hypothesis state machine of the tests until it finds a failure or its time is over.

`make fuzz MINUTES=30`. Prints a failure as a program that reproduces it and saves it, so that the
next run begins with it. Prints at the end how often each rule ran.
"""

import argparse
import collections
import random
import sys
import time
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import run_state_machine_as_test

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from state_machine.machine import Machine  # noqa: E402
from state_machine.muon import MuonMachine  # noqa: E402

FOUND = ROOT / "build" / "fuzz"
EXAMPLES = 100  # examples per round; the time limit is checked after each round
STEPS = 40  # maximum number of rules in an example


def table(counts: collections.Counter[str]) -> str:
    return "\n".join(f"  {count:>9,}  {name}" for name, count in sorted(counts.items()))


def run(number: int) -> None:
    options = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=DirectoryBasedExampleDatabase(FOUND),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    for machine in (Machine, MuonMachine):
        run_state_machine_as_test(seed(number)(machine), settings=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to look")
    parser.add_argument("--seed", type=int, help="of the first round; drawn when missing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {first}, {arguments.minutes:g} minutes", flush=True)
    start, rounds = time.monotonic(), 0
    try:
        while time.monotonic() - start < 60 * arguments.minutes:
            run(first + rounds)
            rounds += 1
    finally:
        minutes = (time.monotonic() - start) / 60
        examples = Machine.done.pop("examples", 0)
        steps = sum(Machine.done.values())
        print(f"{examples:,} examples and {steps:,} rules in {minutes:.1f} minutes")
        print(table(Machine.done))
        print(f"places where torch differs on purpose:\n{table(Machine.met)}", flush=True)


if __name__ == "__main__":
    main()
