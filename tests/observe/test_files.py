import os

import pytest

from kvtiers.observe.files import file_name, write_whole


def test_files_are_all_replaced_or_none_is(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"old")
    with pytest.raises(OSError, match="No such file or directory"):
        write_whole({first: b"new", tmp_path / "gone" / "file": b"new"})
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert first.read_bytes() == b"old"
    write_whole({first: b"new", second: b"more"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert (first.read_bytes(), second.read_bytes()) == (b"new", b"more")


def test_a_file_keeps_its_mode_and_a_link_what_it_points_to(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole({link: b"new"})
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_that_may_not_be_written_stays_as_it_is(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError):
        write_whole({file: b"new"})
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["n" * 300, "ä" * 300, "a/b", "\udcff\udcfe"])
def test_any_text_begins_the_name_of_a_file(tmp_path, text):
    path = tmp_path / f"{file_name(text)}.json"
    path.write_bytes(b"")
    assert path.parent == tmp_path
