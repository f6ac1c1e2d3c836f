"""One decision as rows of tables."""

from __future__ import annotations

from typing import Final

from kvtiers.bench.explain import Explanation
from kvtiers.bench.explain_words import milliseconds

_KNOWN: Final = frozenset(
    ("time", "request_id", "num_tokens", "num_local_tokens", "num_hit_blocks", "mode", "reason")
) | {"predicted_seconds", "num_chosen_blocks", "outcome", "block_size"}
_WORDS: Final = {
    "recompute": "compute everything",
    "reload": "reload everything found",
    "auto": "what auto chooses",
    "chosen": "chosen",
    "load": "of the chosen one, the load",
}


def fact_rows(found: Explanation) -> list[tuple[str, str]]:
    """Return what is known of the request and of what came of it."""
    decision = found.decision
    rows = [
        ("prompt", _tokens(decision.count("num_tokens"))),
        ("in HBM already", _tokens(decision.count("num_local_tokens"))),
    ]
    for tier, num in decision.num_hit_blocks.items():
        tokens = f" ({num * decision.block_size:,} tokens)" if decision.block_size else ""
        rows.append((f"found in {tier}", f"{num:,} blocks{tokens}"))
    rows.append(("mode", decision.mode or "not said"))
    if decision.outcome and not decision.num_chosen_blocks:
        rows.append(("outcome", "computed"))
    elif decision.outcome:
        failed = decision.num_failed_blocks
        loaded = f"{decision.num_loaded_blocks:,} blocks loaded"
        rows.append(("outcome", f"{loaded}, {failed:,} failed" if failed else loaded))
    else:
        rows.append(("outcome", "none yet"))
    if found.regret_seconds is not None:
        rows.append(("regret, estimated", milliseconds(found.regret_seconds)))
    others = decision.fields.keys() - _KNOWN
    return rows + [(name, str(decision.fields[name])) for name in sorted(others)]


def alternative_rows(found: Explanation) -> list[tuple[str, str, str, str]]:
    """Return each alternative: predicted, measured, and the error of the prediction."""
    decision = found.decision
    predicted = decision.predicted_seconds
    hidden = {"auto"} if decision.mode == "auto" else set()  # as it is what was chosen
    names = [name for name in _WORDS if name in predicted and name not in hidden]
    measured = {"load": ("load", decision.load_seconds), "chosen": ("ttft", decision.ttft_seconds)}
    rows = []
    for name in [*names, *sorted(predicted.keys() - _WORDS.keys())]:
        key, seconds = measured.get(name, ("", None))
        if name == "load" and not decision.num_chosen_blocks:
            continue
        error = found.errors.get(key)
        rows.append(
            (
                _WORDS.get(name, name),
                milliseconds(predicted[name]),
                "" if seconds is None else milliseconds(seconds),
                "" if error is None else f"{error:+.0%}",
            )
        )
    return rows


def _tokens(num: int | None) -> str:
    return "not said" if num is None else f"{num:,} tokens"
