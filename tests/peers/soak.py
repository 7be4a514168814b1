"""`make soak`: fresh seeds of faults between an engine and its peers, so many of them."""

from __future__ import annotations

import argparse
import logging
import time

from tests.peers.schedule import Plan, pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**40)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with pair() as both:
        for seed in range(options.seed, options.seed + options.trials):
            try:
                both.trial(seed)
            except BaseException:
                print(f"--seed {seed} --trials 1: {Plan.of(seed)}", flush=True)  # noqa: T201
                raise
    print(f"{options.trials} faults, and every answer was right", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
