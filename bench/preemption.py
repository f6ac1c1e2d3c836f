"""Preemption by recompute, swap and cost on bursty, adversarial and mixed traffic, on paper.

Usage: python bench/preemption.py [--development] [--only bursty]

Modelled: Llama-3.1-8B on an H100, no byte is moved. Three kinds of traffic, three links and two
offload policies, and two more machines: a small slab over a disk, and a model with four times as
much KV a token; 8 seeds that were not looked at while the rule was written (`--development` has
4 that were).

The p99 of 80 requests is that of the last but one (of the 320 of "mixed", the last but four), so
the ratio of one seed says little. Rule: per seed, the p99 under "cost" over that under the better
way, which is the one of always swapping and always computing again whose p99 is lower in the mean
of all seeds; reported are its median, least and greatest. The ceiling of "cost" is the better way,
unless each way is best for some requests. Of mean latencies the better way is the one whose own is
lower.
"""

from __future__ import annotations

import argparse

from kvtiers.bench.preemption import DEVELOPMENT_SEEDS, MIXES, SEEDS, Comparison, compare
from kvtiers.cost.preempt import PreemptMode


def main() -> None:
    """Print a line for each mix."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--development", action="store_true", help="the seeds of development")
    parser.add_argument("--only", default="", help="mixes whose name contains this")
    options = parser.parse_args()
    mixes = [mix for mix in MIXES if options.only in mix.name]
    if not mixes:
        names = ", ".join(f'"{mix.name}"' for mix in MIXES)
        parser.error(f"--only: no mix has {options.only!r} in its name; there are {names}")
    seeds = DEVELOPMENT_SEEDS if options.development else SEEDS
    print(f"{'':26} p99 s{'':22} cost / better")
    print(f"{'mix':26}    cost    swap recompute   p99 by seed            mean     swapped")
    for mix in mixes:
        print(_row(compare(mix, seeds)), flush=True)


def _row(found: Comparison) -> str:
    cost, swap, again = (found.p99_seconds(PreemptMode(m)) for m in ("cost", "swap", "recompute"))
    ratios = found.ratios(found.better)
    decided = found.outcomes[PreemptMode.COST]
    victims, swaps = (
        sum(getattr(it, f"num_{n}") for it in decided) for n in ("preemptions", "swaps")
    )
    ratio = f"{found.ratio(found.better):.4f} [{min(ratios):.3f} {max(ratios):.3f}]"
    mean = max(found.mean_ratio(mode) for mode in (PreemptMode.SWAP, PreemptMode.RECOMPUTE))
    return (
        f"{found.mix.name:26} {cost:7.2f} {swap:7.2f} {again:9.2f}   {ratio}   "
        f"{mean:.4f}   {swaps} of {victims}"
    )


if __name__ == "__main__":
    main()
