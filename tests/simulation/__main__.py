"""Run the simulation by hand: `python -m tests.simulation --seeds 1000`, `python -m tests.simulation --seed 7 -v`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.kernel import Violation
from tests.simulation.scenario import KINDS
from tests.simulation.world import run


def main() -> int:
    """Returns the exit status: 1 where a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed of --seeds (default 0)")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default 1000)")
    parser.add_argument("--faults", default=None, help=f"these faults instead of the seed's own: {','.join(KINDS)}")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the trace")
    options = parser.parse_args()
    only = None if options.faults is None else frozenset(options.faults.split(",")) - {""}
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    began, failed = time.monotonic(), 0
    for seed in seeds:
        try:
            digest = run(seed, only=only, echo=options.verbose)
        except Violation as error:
            failed += 1
            print(f"FAILED {error}")
        else:
            if options.seed is not None:
                print(f"seed {seed}: {digest}")
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.1f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
