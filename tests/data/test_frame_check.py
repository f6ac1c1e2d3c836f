"""Frames verified without their layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.data.frame_check import FrameChecker
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import StoreKey

KEY = StoreKey(bytes(range(32)))
layouts = st.lists(st.sampled_from((1, 7, 64, 576, 584, 1024, 2192)), min_size=1, max_size=6)


def sealed(pages, seed=0, key=KEY):
    form = FrameFormat(tuple(pages))
    frame = bytearray(form.frame_nbytes)
    payload = (seed.to_bytes(4, "big") + key) * (form.payload_nbytes // 36 + 1)
    frame[form.header_nbytes :] = payload[: form.payload_nbytes]
    form.seal(memoryview(frame), key)
    return frame


def fault(checker, frame, key=KEY, cut=0):
    return checker.fault(key, bytes(frame[:cut]), memoryview(frame)[cut:])


@given(layouts, st.sampled_from((0, 16)))
def test_a_whole_frame_of_any_layout_is_good(pages, cut):
    assert fault(FrameChecker(), sealed(pages), cut=cut) is None


@given(st.lists(layouts, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_one_flipped_bit_is_found_whatever_was_learnt_before(all_pages, chance):
    checker = FrameChecker()
    for seed, pages in enumerate(all_pages):
        frame = sealed(pages, seed)
        if chance.random() < 0.5:
            assert fault(checker, frame) is None
        form = FrameFormat(tuple(pages))
        covered = [*range(64 + 8 * len(pages)), *range(form.header_nbytes, form.frame_nbytes)]
        frame[chance.choice(covered)] ^= 1 << chance.randrange(8)
        assert fault(checker, frame) is not None


def test_layouts_of_equal_totals_do_not_accuse_each_other():
    checker = FrameChecker()
    for pages in ((64, 192, 256), (256, 192, 64), (192, 256, 64)):
        assert fault(checker, sealed(pages)) is None
    assert fault(checker, sealed((64, 192, 256), 5)) is None


def test_the_fault_names_the_page():
    checker = FrameChecker()
    frame = sealed((100, 200, 300))
    assert fault(checker, frame) is None
    frame[4096 + 250] ^= 1
    assert fault(checker, frame) == "page 1 does not have the checksum that the header says"
    assert fault(FrameChecker(), frame) == "page 1 does not have the checksum that the header says"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda frame: frame[:30], "30 bytes hold no header"),
        (lambda frame: frame[:200], "200 bytes, and a header of 4096"),
        (lambda frame: frame[:5000], "5000 bytes, but its header counts 5096"),
        (lambda frame: frame + b"\0", "5097 bytes, but its header counts 5096"),
        (lambda frame: b"JUNK" + frame[4:], "magic is 4a554e4b, expected 4b565446"),
        (lambda frame: frame[:4] + b"\2" + frame[5:], "version is 2, expected 1"),
        (lambda frame: bytes(len(frame)), "magic is 00000000, expected 4b565446"),
        (lambda frame: sealed((1000,), key=StoreKey(bytes(32))), "store key is 0000"),
        (lambda frame: frame[:12] + bytes(4) + frame[16:], "a header of 4096 bytes for 0 pages"),
        (lambda frame: frame[:64] + bytes(8) + frame[72:], "header checksum does not hold"),
    ],
)
def test_what_is_wrong_is_said(damage, said):
    assert fault(FrameChecker(), damage(sealed((1000,)))).startswith(said)
