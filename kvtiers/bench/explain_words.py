"""Why a reload was planned as it was, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvtiers.cost.planner import PlanReason
from kvtiers.observe.decision_file import LoggedDecision

SENTENCES: Final[Mapping[PlanReason, str]] = MappingProxyType(
    {
        PlanReason.NO_HIT: "No block of it lay below HBM, or none that a reload may end with: "
        "everything was computed.",
        PlanReason.RELOAD_ALL: "Reloading all that was found ({hits} blocks) was predicted to be "
        "fastest: {reload}, and {recompute} to compute it.",
        PlanReason.RELOAD_PART: "Of the {hits} blocks found the first {chosen} were reloaded: "
        "the rest was predicted to be faster to compute ({auto} in all, {reload} with everything "
        "reloaded, {recompute} with nothing).",
        PlanReason.RECOMPUTE_FASTER: "Computing was predicted to be fastest: {recompute}, and "
        "{reload} with everything reloaded.",
        PlanReason.PAST_DEADLINE: "A reload was predicted to be faster than computing "
        "({recompute}), but every such one to end after reload.deadline.",
        PlanReason.WITHIN_MARGIN: "A reload was predicted to be faster than computing "
        "({reload}, {recompute}), but by less than cost.margin.",
        PlanReason.TRIAL: "A link on the way had stalled: {chosen} blocks were reloaded to see "
        "how it is now.",
        PlanReason.ALWAYS: "cost.mode is always: every hit is reloaded, whatever is predicted "
        "({reload}, and {recompute} to compute it).",
        PlanReason.NEVER: "cost.mode is never: no hit is reloaded, whatever is predicted "
        "({reload} with a reload, {recompute} to compute it).",
        PlanReason.SHADOW: "cost.mode is shadow: every hit is reloaded ({reload}); auto had "
        "chosen what was predicted to take {auto}.",
    }
)


def sentence(decision: LoggedDecision) -> str:
    """Return why a decision is as it is; a reason of another version is named as it is."""
    try:
        text = SENTENCES[PlanReason(decision.reason)]
    except ValueError:
        return f"The reason {decision.reason!r} is none that this version knows."
    seconds = {
        name: milliseconds(decision.predicted_seconds.get(name))
        for name in ("reload", "recompute", "auto")
    }
    hits = sum(decision.num_hit_blocks.values())
    why = text.format(hits=hits, chosen=decision.num_chosen_blocks, **seconds)
    within = " It was loaded within the step that computed the rest."
    return why + (within if decision.fields.get("in_step") is True else "")


def short(reason: str) -> str:
    """Return a reason of a plan in a few words."""
    return reason.replace("_", " ")


def milliseconds(seconds: float | None) -> str:
    """Return a time to read."""
    if seconds is None:
        return "an unknown time"
    if not seconds:
        return "0 ms"
    digits = 0 if abs(seconds) >= 0.1 else 1 if abs(seconds) >= 0.01 else 2
    return f"{seconds * 1e3:,.{digits}f} ms"
