"""What was stored before a reset is not named again, by this life or a later one."""

from __future__ import annotations

import os
import re

import pytest

from kvtiers.data.generation_file import Generations
from kvtiers.model.errors import StoreError
from kvtiers.model.fingerprint import Fingerprint

ONE, OTHER = b"1" * 32, b"2" * 32


def test_first_lives_share_a_generation(tmp_path):
    assert Generations([tmp_path], ONE).present == Generations([tmp_path], ONE).present == 0


def test_reset_ends_a_generation_for_good(tmp_path):
    """And what is stored after it belongs to this life only: weights may be anything."""
    life = Generations([tmp_path], ONE)
    seen = {life.present}
    for _ in range(3):
        assert life.renew()
        assert life.present not in seen
        seen.add(life.present)
    later = Generations([tmp_path], ONE)
    assert later.present not in seen
    assert Generations([tmp_path], ONE).present == later.present


def test_other_engines_are_not_concerned(tmp_path):
    Generations([tmp_path], ONE).renew()
    assert Generations([tmp_path], OTHER).present == 0


def test_two_engines_that_reset_at_once_do_not_share(tmp_path):
    first, second = Generations([tmp_path], ONE), Generations([tmp_path], ONE)
    first.renew()
    second.renew()
    later = Generations([tmp_path], ONE)
    assert len({0, first.present, second.present, later.present}) == 4


def test_highest_record_of_all_stores_counts(tmp_path):
    """A store that was away during a reset does not bring back what it ended."""
    here, there = tmp_path / "a", tmp_path / "b"
    Generations([here], ONE).renew()
    both = Generations([here, there], ONE)
    assert both.present == 1
    both.renew()
    assert Generations([there], ONE).present == 2


def test_reset_that_cannot_be_recorded_says_so(tmp_path, caplog):
    life = Generations([tmp_path / "file"], ONE)
    (tmp_path / "file").write_text("in the way")
    before = life.present
    assert not life.renew()
    assert life.present != before
    assert "could not be recorded" in caplog.text


def test_keys_that_mean_nothing_elsewhere_are_never_shared(tmp_path, caplog):
    lives = [Generations([tmp_path], ONE, "its hashes are random") for _ in range(2)]
    assert lives[0].present != lives[1].present
    assert lives[0].renew()
    assert "its hashes are random" in caplog.text


@pytest.mark.parametrize("text", ["", "x", "-1", str(2**63)])
def test_damaged_record_is_an_error(tmp_path, text):
    Generations([tmp_path], ONE).renew()
    (record,) = (tmp_path / "generations").iterdir()
    record.write_text(text)
    with pytest.raises(StoreError, match="no record of a generation"):
        Generations([tmp_path], ONE)


def test_drafts_that_killed_processes_have_left_are_swept(tmp_path):
    """R67: old ones only, and no file of another name."""
    Generations([tmp_path], ONE).renew()
    (record,) = (tmp_path / "generations").iterdir()
    old, young = (record.with_name(f"{record.name}.{pid}.tmp") for pid in (7, 8))
    notes = record.with_name("notes.tmp")
    for path in (old, young, notes):
        path.write_text("1")
    for path in (old, notes):
        os.utime(path, (0, 0))
    Generations([tmp_path], ONE).renew()
    assert set(record.parent.iterdir()) == {record, young, notes}


def test_without_stores_nothing_is_written(tmp_path):
    life = Generations([], ONE)
    assert life.renew()
    assert list(tmp_path.iterdir()) == []


def test_odd_names_of_models_make_plain_names_of_files(tmp_path):
    """R50: slashes, dots, length and letters of a model's name reach no path."""
    names = ["a/b", "a--b", "../x", "x" * 300, "modèle"]
    for name in names:
        Generations([tmp_path], Fingerprint.of({"model": name}).digest).renew()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == len(names)
    assert all(re.fullmatch("[0-9a-f]{32}", path.name) for path in files)
