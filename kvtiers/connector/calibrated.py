"""What a calibration file says of the links that a configuration has on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvtiers.connector.machine import machine_facts
from kvtiers.cost.calibration import Calibration, MachineFacts, TierFacts, load_calibration
from kvtiers.cost.links import LinkSeed, offload_link, read_link, reload_link, write_link
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import LmdbTier, NvmeTier, StoreTier

logger = logging.getLogger(__name__)

_AGAIN = "run `kvtiers probe` again"


def measured_seeds(
    config: Config, device: str = "", machine: MachineFacts | None = None
) -> dict[str, LinkSeed]:
    """Return link name to what was measured; nothing where no calibration is configured.

    A file that was measured on another machine, and a tier of it that is another medium, say
    nothing about this one: they are passed over with a warning, and the built-in seeds hold. So is
    the way to HBM where it was measured for an engine on another device.

    Args:
        device: of the engine, "cpu" or "cuda"; "" if that is not known.
        machine: this one; None asks the kernel.

    Raises:
        ConfigError: the file is none.
    """
    if config.cost.calibration is None:
        return {}
    found = load_calibration(config.cost.calibration)
    here = machine_facts() if machine is None else machine
    if _is_foreign(found.machine, here):
        logger.warning(
            "%s was measured on %s, not on %s: it is not used; %s",
            config.cost.calibration, _title(found.machine), _title(here), _AGAIN,
        )  # fmt: skip
        return {}
    names = [offload_link(), reload_link()]
    if device and device != found.device:
        logger.warning(
            "%s measured the way to HBM for an engine on %s, not %s: that is not used; %s",
            config.cost.calibration, found.device, device, _AGAIN,
        )  # fmt: skip
        names = []
    for tier in config.stores:
        why = _misfit(tier, found)
        if why:
            logger.warning(
                "%s says nothing of tier %s: %s; %s",
                config.cost.calibration, tier.name, why, _AGAIN,
            )  # fmt: skip
        else:
            names += [read_link(tier.name), write_link(tier.name)]
    return {name: found.fits[name].seed for name in names if name in found.fits}


def tier_facts(tier: StoreTier) -> TierFacts:
    """Return which medium a configured tier is."""
    if isinstance(tier, NvmeTier):
        paths = tuple(str(path) for path in tier.paths)
        return TierFacts(kind=tier.kind, paths=paths, io=tier.io, direct=tier.direct)
    if isinstance(tier, LmdbTier):
        return TierFacts(kind=tier.kind, paths=(str(tier.path),))
    return TierFacts(kind=tier.kind)


def _misfit(tier: StoreTier, found: Calibration) -> str:
    """Return why the measurements of a name are not those of a tier; "" where they are."""
    measured: Mapping[str, TierFacts] = found.tiers
    if tier.name not in measured or read_link(tier.name) not in found.fits:
        return "it was not measured"
    then, now = measured[tier.name], tier_facts(tier)
    for field in ("kind", "paths", "io", "direct"):
        before, after = getattr(then, field), getattr(now, field)
        if before != after:
            return f"its {field} was {_words(before)}, and is {_words(after)}"
    return ""


def _is_foreign(then: MachineFacts, now: MachineFacts) -> bool:
    """Whether two machines differ, as far as both say what they are.

    The number of cores does not count: it is that of a process.
    """
    gpus = bool(then.gpus and now.gpus) and then.gpus[0] != now.gpus[0]
    return bool(then.cpu and now.cpu and then.cpu != now.cpu) or gpus


def _title(machine: MachineFacts) -> str:
    return ", ".join((machine.cpu or "an unknown CPU", *machine.gpus))


def _words(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
