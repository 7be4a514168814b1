"""`make soak`: what takes too long for `make test`, between engines and their peers.

faults     fresh seeds of faults
stopped    a server is stopped for 40 s, in each phase of a transfer, and goes on
lengths    prompts of every length from 1 to 600, computed by one engine and answered by another
"""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import ExitStack

from tests.engine.drive import PAGE, make_ask, make_engine, run, words
from tests.peers.roles import roles
from tests.peers.schedule import PHASES, TRANSPORTS, Plan, pair
from tests.peers.test_engines import same
from tiercel.engine.engine import Engine

WHAT = ("faults", "stopped", "lengths")
STOPPED_S = 40.0
LONGEST = 600
HOST_PAGES = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=WHAT, help="all, unless one is named")
    parser.add_argument("--trials", type=int, default=200, help="of faults")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**40, help="of the first fault")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.what in (None, "faults"):
        faults(range(options.seed, options.seed + options.trials))
    if options.what in (None, "stopped"):
        stopped()
    if options.what in (None, "lengths"):
        lengths()


def faults(seeds: range) -> None:
    with pair() as both:
        for seed in seeds:
            try:
                both.trial(Plan.of(seed))
            except BaseException:
                tell(f"faults --seed {seed} --trials 1: {Plan.of(seed)}")
                raise
    tell(f"{len(seeds)} faults, and every answer was right")


def stopped() -> None:
    with pair(STOPPED_S) as both:
        for transport in TRANSPORTS:
            for phase in PHASES:
                plan = Plan("stop", phase, 0.5, True, 1, transport)
                tell(f"stopped for {STOPPED_S:.0f} s: {plan}")
                both.trial(plan)
    tell("every answer was right")


def lengths() -> None:
    """Each with nothing cached on either side. Answers are those of one engine alone."""
    text, alone = words(LONGEST), make_engine()
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(roles(*two_engines(), name)) for name in TRANSPORTS}
        for length in range(1, LONGEST + 1):
            ask = make_ask(f"{length} tokens", text[:length], 2)
            [truth] = run(alone, ask)
            for name, both in pairs.items():
                answer = both.ask(ask)
                assert same(answer, truth), f"{ask.request_id} over {name}: another answer"
                pages = answer.usage.store_tokens / PAGE
                assert pages == (length - 1) // PAGE, f"{ask.request_id} over {name}: {pages} pages came"
                both.forget()
            if length % 100 == 0:
                tell(f"prompts of 1 to {length} tokens: every page came, and every answer was right")
    alone.cache.close()


def two_engines() -> tuple[Engine, Engine]:
    return make_engine(host_pages=HOST_PAGES), make_engine(host_pages=HOST_PAGES)


def tell(what: str) -> None:
    print(what, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
