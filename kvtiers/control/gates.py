"""Which stores are in use: what transfers say about a medium, and about single frames of it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Final

from kvtiers.control.breaker import Breaker
from kvtiers.control.jobs import Job, Row
from kvtiers.control.settings import ControlSettings
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import DRAM, HBM, RELEASED, TransferKind, UInt8s
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import STORE_OFF, Counters

logger = logging.getLogger(__name__)

# What a medium is to blame for. MISSING and CORRUPT are about one frame, which goes, and FULL
# about room: the medium has answered. STALE is about us.
_BROKEN: Final = (Outcome.FAILED, Outcome.TIMED_OUT)
_NUM_KNOWN: Final = 16  # frames per store that are remembered to probe with
_NUM_NOTED: Final = 4  # of them from one job at most
_NUM_STRUCK: Final = 1 << 16  # frames that failed once and are remembered
NO_LIMIT: Final = 1 << 62


class Gates:
    """Two breakers per store, for reads and for writes.

    A job counts once for each store it read or wrote: as a failure where more blocks failed
    than came, as a hang where none did anything in time, else as a success where any came. Rows
    that the copier or a lack of slots is to blame for do not count.

    A *frame* that FAILED goes only when it fails again after the store has delivered others:
    a medium that is down for a while keeps its inventory.
    """

    def __init__(self, settings: ControlSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._reads = [Breaker() for _ in settings.stores]
        self._writes = [Breaker() for _ in settings.stores]
        self._told: dict[tuple[str, str], bool] = {}  # (store, direction) -> in use
        self._write_probes: dict[int, Row] = {}
        self._known: list[OrderedDict[BlockKey, Row]] = [OrderedDict() for _ in settings.stores]
        self._num_delivered = [0 for _ in settings.stores]
        self._struck: OrderedDict[tuple[int, BlockKey], int] = OrderedDict()
        self._tell()

    # -- questions --------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes whenever the answer to a lookup may change."""
        return sum(breaker.version for breaker in self._reads)

    def readable(self, idx: int) -> bool:
        """Whether requests may count on what a store holds."""
        return self._reads[idx].closed

    def most_writes(self, idx: int) -> int:
        """Return how many blocks may be sent to a store now: any number, one as a probe, none."""
        breaker = self._writes[idx]
        return NO_LIMIT if breaker.closed else int(breaker.wants_probe)

    def wants_read_probe(self, idx: int) -> bool:
        """Whether it is time to try a read."""
        return self._reads[idx].wants_probe

    def condemned(self, idx: int, key: BlockKey, outcome: int) -> bool:
        """Whether a frame must go, after `answered` has taken its outcome in."""
        if outcome == Outcome.FAILED:
            return self._struck.get((idx, key), 0) < 0
        return outcome in (Outcome.MISSING, Outcome.CORRUPT)

    # -- commands ---------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass."""
        for breaker in (*self._reads, *self._writes):
            breaker.tick(now)

    def writing(self, idx: int, row: Row) -> None:
        """Note that a row is on its way to a store; where a probe is wanted, it is that probe."""
        if self._writes[idx].wants_probe:
            self._writes[idx].probe()
            self._write_probes[idx] = row

    def take_known(self, idx: int) -> Row | None:
        """Return a row of a frame that a store had lately, in turn; None when none is known."""
        return self._known[idx].popitem(last=False)[1] if self._known[idx] else None

    def read_probe(self, idx: int) -> None:
        """Note that a probe is under way."""
        self._reads[idx].probe()

    def trust(self, idx: int) -> None:
        """Use a store again without a probe, for want of a frame; one failure closes the gate."""
        self._reads[idx].probe_succeeded()
        self._tell()

    def answered(self, job: Job, hop: str, outcomes: UInt8s, now: float) -> None:
        """Learn from one hop of a job; to be called before the hop's outcomes are applied."""
        if hop == RELEASED:
            return
        reads = job.kind is TransferKind.PROMOTE or hop == HBM
        if reads or hop != DRAM:
            fates = [Outcome(value) for value in outcomes.tolist()]
            if reads:
                self._read(job, fates, now)
            else:
                self._wrote(job, hop, fates, now)
        self._tell()

    def reset(self) -> None:
        """Forget all frames; what is known of the media stays."""
        self._struck.clear()
        for known in self._known:
            known.clear()

    # -- internals --------------------------------------------------------------------

    def _read(self, job: Job, fates: Sequence[Outcome], now: float) -> None:
        rows = list(zip(job.rows, fates, strict=True))
        blameless = self._blameless(job, rows)
        for idx in {row.source - 1 for row in job.rows if row.source and not row.given_up}:
            here = [(r, f) for r, f in rows if r.source == idx + 1 and not r.given_up]
            self._note_frames(idx, here)
            breaker = self._reads[idx]
            verdict = _Verdict.SILENT if blameless else _verdict([fate for _, fate in here])
            (_settle_probe if job.probes else _settle)(breaker, verdict, now)

    def _blameless(self, job: Job, rows: Sequence[tuple[Row, Outcome]]) -> bool:
        """Whether rows may have failed for another reason than the store.

        Such are the copier, if rows from DRAM failed as well, and a lack of slots.
        """
        if any(row.source == 0 and row.entry and fate in _BROKEN for row, fate in rows):
            return True
        return job.lacked_slots

    def _wrote(self, job: Job, store: str, fates: Sequence[Outcome], now: float) -> None:
        idx = [each.name for each in self._settings.stores].index(store)
        landed = job.merged.get(DRAM)
        here = [
            (row, fate)
            for i, (row, fate) in enumerate(zip(job.rows, fates, strict=True))
            if idx in row.store_entries and (landed is None or landed[i] == Outcome.OK)
        ]
        written = [row for row, fate in here if fate is Outcome.OK]
        for row in written:
            self._struck.pop((idx, row.key), None)
        self._know(idx, written[:_NUM_NOTED])
        verdict = _verdict([fate for _, fate in here])
        breaker = self._writes[idx]
        probe = self._write_probes.get(idx)
        if probe is not None and any(row is probe for row in job.rows):
            del self._write_probes[idx]
            _settle_probe(breaker, verdict, now)
        else:
            _settle(breaker, verdict, now)

    def _note_frames(self, idx: int, rows: Sequence[tuple[Row, Outcome]]) -> None:
        """Remember which frames failed, with the frames delivered until then.

        One that fails again after others were delivered is marked with -1: it is condemned.
        """
        delivered = [row for row, fate in rows if fate is Outcome.OK]
        self._num_delivered[idx] += len(delivered)
        for row in delivered:
            self._struck.pop((idx, row.key), None)
        failed = [row for row, fate in rows if fate is Outcome.FAILED]
        for row in failed:
            struck_at = self._struck.get((idx, row.key), self._num_delivered[idx])
            again = struck_at < self._num_delivered[idx]
            self._struck[idx, row.key] = -1 if again else struck_at
        while len(self._struck) > _NUM_STRUCK:
            self._struck.popitem(last=False)
        timed_out = [row for row, fate in rows if fate is Outcome.TIMED_OUT]
        self._know(idx, [*delivered[:_NUM_NOTED], *failed[:_NUM_NOTED], *timed_out[:_NUM_NOTED]])

    def _know(self, idx: int, rows: Sequence[Row]) -> None:
        known = self._known[idx]
        for row in rows:
            known[row.key] = Row(row.key, -1, source=1 + idx, parent=row.parent)
        while len(known) > _NUM_KNOWN:
            known.popitem(last=False)

    def _tell(self) -> None:
        """Log and count each change of a gate once."""
        directions = (("read", self._reads), ("write", self._writes))
        for direction, breakers in directions:
            for store, breaker in zip(self._settings.stores, breakers, strict=True):
                place = (store.name, direction)
                if self._told.get(place, True) != breaker.closed:
                    if breaker.closed:
                        logger.info("store %s is used again for %ss", store.name, direction)
                    else:
                        logger.warning(
                            "store %s keeps failing and is not used for %ss until it answers again",
                            store.name,
                            direction,
                        )
                if self._told.get(place) != breaker.closed:
                    self._told[place] = breaker.closed
                    self._counters.set(STORE_OFF, place, int(not breaker.closed))


class _Verdict(Enum):
    """What a job says about a medium."""

    WORKS = "works"  # most came
    FAILS = "fails"
    HANGS = "hangs"  # nothing came in time
    SILENT = "silent"  # nothing that it is to praise or to blame for


def _verdict(fates: Sequence[Outcome]) -> _Verdict:
    num_ok = sum(fate is Outcome.OK for fate in fates)
    num_failed = sum(fate is Outcome.FAILED for fate in fates)
    num_broken = sum(fate in _BROKEN for fate in fates)
    if not num_ok and not num_broken:
        return _Verdict.SILENT
    if num_ok >= num_broken:
        return _Verdict.WORKS
    return _Verdict.FAILS if num_ok or num_failed else _Verdict.HANGS


def _settle(breaker: Breaker, verdict: _Verdict, now: float) -> None:
    if verdict is _Verdict.WORKS:
        breaker.succeeded()
    elif verdict is _Verdict.FAILS:
        breaker.failed(now)
    elif verdict is _Verdict.HANGS:
        breaker.hung(now)


def _settle_probe(breaker: Breaker, verdict: _Verdict, now: float) -> None:
    if verdict is _Verdict.SILENT:
        breaker.probe_said_nothing()
    elif verdict is _Verdict.WORKS:
        breaker.probe_succeeded()
    else:
        breaker.probe_failed(now)
