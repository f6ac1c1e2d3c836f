"""Every frame of a file store, read and verified beside who uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtiers.data.frame_check import FrameChecker
from kvtiers.data.store_admin_index import IndexView
from kvtiers.data.store_admin_read import Keyed, Run, SlotReader, runs_of
from kvtiers.data.store_admin_values import Progress


@dataclass(slots=True)
class Findings:
    """What was read.

    Attributes:
        num_good: frames whose checksums hold. num_gone: frames that left meanwhile.
        bad: all others, and what is wrong with each.
    """

    num_good: int = 0
    num_gone: int = 0
    nbytes: int = 0
    bad: list[tuple[Keyed, str]] = field(default_factory=list)


class FileVerifier:
    """Verifies against one reading of the index.

    A slot is not written again before the record that names it is gone from the index. So what
    was read while the same record was there, before and after, is what the record names.

    Args:
        folders: of the files that are this store's, by their number.
    """

    def __init__(self, view: IndexView, folders: Mapping[int, Path]) -> None:
        self._view = view
        self._reader = SlotReader(folders, view.slot_nbytes)
        self._checker = FrameChecker()

    def run(self, progress: Progress) -> Findings:
        """Read everything."""
        findings = Findings()
        try:
            runs = list(runs_of(self._view.records(), self._view.slot_nbytes))
            for run, data, why in self._reader.read(runs):
                suspects = self._suspects(run, data, why)
                self._judge(suspects, findings)
                nbytes = sum(record.nbytes for _, record in run.records)
                findings.num_good += len(run.records) - len(suspects)
                findings.nbytes += nbytes
                progress(len(run.records), nbytes)
        finally:
            self._reader.close()
        return findings

    def _suspects(self, run: Run, data: memoryview, why: str) -> list[Keyed]:
        """Return the frames of a run that are not what they should be."""
        suspects = []
        for keyed in run.records:
            key, record = keyed
            start = (record.slot - run.first_slot) * self._view.slot_nbytes
            frame = data[start : start + record.nbytes]
            if (why and len(frame) < record.nbytes) or self._checker.fault(key, b"", frame):
                suspects.append(keyed)
        return suspects

    def _judge(self, suspects: list[Keyed], findings: Findings) -> None:
        """Look at frames again: damaged, or only replaced while they were read."""
        for keyed in suspects:
            frame, why = self._reader.read_again(keyed)
            what = why or self._checker.fault(keyed[0], b"", frame)
            if not what:
                findings.num_good += 1
            elif self._view.still_there([keyed]):
                findings.bad.append((keyed, what))
            else:
                findings.num_gone += 1
