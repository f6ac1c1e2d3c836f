"""The modelled runner puts tiers in the order in which the torch runner does, and hits the same."""

import statistics
from pathlib import Path

from kvtiers.bench.throttle import ThrottledStore
from kvtiers.cost.links import LinkSeed
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.torch_runner import torch_engine
from kvtiers.model.config import parse_mapping

from .small import prompt_of, small_shape

SHAPE = small_shape()
SETTINGS = EngineSettings(
    num_blocks=60, max_model_len=640, max_num_batched_tokens=32, max_num_seqs=4
)
NUM_DOCUMENTS, NUM_TOKENS = 5, 520  # one of five fits HBM beside the next
BYTES_PER_SECOND = 5e5  # of the slow store: a document takes most of a second
FRAME_NBYTES = 12288  # 16 tokens of this shape, header and padding included


def tiers_of(*below, dram):
    return [{"kind": "dram", "capacity": dram, "pin": "off"}, *below]


def config_of(tiers, folder):
    if not tiers:
        return None
    places = [{**t, "paths": [str(folder)]} if t["kind"] == "nvme" else t for t in tiers]
    return parse_mapping({"tiers": places, "cost": {"mode": "always"}})


# From the fastest to the slowest; DRAM alone and DRAM over NVMe are too near to tell apart.
FAST = (
    ("DRAM", tiers_of(dram="8MiB")),
    ("DRAM, NVMe", tiers_of({"kind": "nvme", "capacity": "8MiB"}, dram="1MiB")),
)
COMPUTED = ("no kvtiers", [])
SLOW = ("DRAM, slow", tiers_of({"kind": "memory", "capacity": "8MiB"}, dram="1MiB"))


def machine():
    """Links that are slower than memory by far, and faster than this model computes."""
    quick = LinkSeed(5e-4, 2e-5, 1e9)
    links = dict.fromkeys(("hbm>dram", "dram>hbm", "dram>memory"), quick)
    links |= {"nvme>dram": LinkSeed(1e-3, 1e-4, 1e9), "dram>nvme": LinkSeed(1e-3, 1e-4, 1e9)}
    links["memory>dram"] = LinkSeed(0.0, FRAME_NBYTES / BYTES_PER_SECOND, 1e12)
    shape = model_shape(SHAPE.to_hf_config())
    return ModelledMachine(shape, PrefillSpeed(1e-3, 1e10), SHAPE.kv_nbytes_per_token, links)


def ttft_and_hits(engine):
    """Ask for every document, and then once more for all of them."""
    served = []
    for turn in range(2):
        for i in range(NUM_DOCUMENTS):
            name = f"{turn}-{i}"
            engine.add(NewRequest(name, engine.now, 2, prompt_of(NUM_TOKENS, seed=i)))
            while engine.num_unfinished:
                served += engine.step().finished
            engine.settle()
    again = served[NUM_DOCUMENTS:]
    hits = [(it.num_local_tokens, dict(it.reloaded_by_tier)) for it in again]
    return statistics.fmean(it.ttft_seconds for it in again), hits


def both(name, tiers, folder):
    """Return the measured and the modelled time; their hits are the same."""
    model, times = ReferenceModel(SHAPE), []
    for repeat in range(2):  # the better of two: others use this machine too
        engine = torch_engine(
            model,
            SETTINGS,
            config_of(tiers, folder / f"{name}{repeat}"),
            lambda store_name, store: (
                ThrottledStore(store, BYTES_PER_SECOND) if store_name == "memory" else store
            ),
        )
        seconds, measured = ttft_and_hits(engine)
        engine.close()
        times.append(seconds)
    paper = modelled_engine(SETTINGS, machine(), config_of(tiers, Path("/nowhere")))
    said, modelled = ttft_and_hits(paper)
    assert measured == modelled, name
    assert bool(tiers) == any(by_tier for _, by_tier in modelled), name
    return min(times), said


def test_the_order_of_tiers_is_kept_and_hits_are_the_same(tmp_path):
    fast = [both(*tiers, tmp_path) for tiers in FAST]
    computed, slow = both(*COMPUTED, tmp_path), both(*SLOW, tmp_path)
    for which in (0, 1):  # really, and on paper
        assert max(pair[which] for pair in fast) < computed[which] < slow[which]
