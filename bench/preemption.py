"""Preemption by recompute, swap and cost on bursty, adversarial and mixed traffic, on paper.

Usage: python bench/preemption.py

Modelled: Llama-3.1-8B on an H100, no byte is moved. The ceiling of "cost" is the better of the
other two, unless requests differ so much that each way is best for some.
"""

from __future__ import annotations

from kvtiers.bench.preemption import MIXES, compare
from kvtiers.cost.preempt import PreemptMode


def main() -> None:
    """Print a line for each mix."""
    print(f"{'mix':26} {'p99 s: cost':>11} {'swap':>7} {'recompute':>9}   cost / better")
    for mix in MIXES:
        found = compare(mix)
        cost, swap, again = (found[PreemptMode(m)] for m in ("cost", "swap", "recompute"))
        better = min(swap.p99_seconds, again.p99_seconds)
        print(
            f"{mix.name:26} {cost.p99_seconds:11.2f} {swap.p99_seconds:7.2f} "
            f"{again.p99_seconds:9.2f}   {cost.p99_seconds / better:.4f}; {cost.num_swaps} of "
            f"{cost.num_preemptions} victims swapped"
        )


if __name__ == "__main__":
    main()
