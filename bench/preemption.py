"""Preemption by recompute, swap and cost on bursty, adversarial and mixed traffic, on paper.

Usage: python bench/preemption.py [--seeds 6] [--only bursty]

Modelled: Llama-3.1-8B on an H100, no byte is moved. The set was fixed before any of it was run:
three kinds of traffic, three links, two offload policies, the first seeds of all. The ceiling of
"cost" is the better of the other two, unless requests differ so much that each way is best for
some.
"""

from __future__ import annotations

import argparse

from kvtiers.bench.preemption import MIXES, SEEDS, Comparison, compare
from kvtiers.cost.preempt import PreemptMode


def main() -> None:
    """Print a line for each mix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, from 0 on")
    parser.add_argument("--only", default="", help="mixes whose name contains this")
    options = parser.parse_args()
    print(f"{'mix':26} p99 s: cost    swap recompute   cost / better  victims swapped")
    for mix in MIXES:
        if options.only in mix.name:
            print(_row(compare(mix, range(options.seeds))), flush=True)


def _row(found: Comparison) -> str:
    cost, swap, again = (found.p99_seconds(PreemptMode(m)) for m in ("cost", "swap", "recompute"))
    mean, error = found.ratio(found.better)
    decided = found.outcomes[PreemptMode.COST]
    victims, swaps = (
        sum(getattr(it, f"num_{n}") for it in decided) for n in ("preemptions", "swaps")
    )
    return (
        f"{found.mix.name:26} {cost:11.2f} {swap:7.2f} {again:9.2f}   "
        f"{mean:.4f} +- {error:.4f}  {swaps} of {victims}"
    )


if __name__ == "__main__":
    main()
