"""Whatever users, stores and the connector do, the torch engine generates the model's tokens."""

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.torch_runner import torch_engine
from kvtiers.model.config import parse_mapping
from kvtiers.model.outcome import Outcome
from kvtiers.testing.faults import FaultyStore, Flip

from .machine import KNOBS, EngineMachine
from .small import plain_logits, prompt_of, small_shape

MODEL = ReferenceModel(small_shape())
BLOCK = 4
CONTENTS = [prompt_of(8, 99) + prompt_of(50, seed) for seed in range(3)]
FAULTS = (Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT, Flip(300), OSError("the disk is gone"))


@lru_cache(maxsize=2**14)
def likeliest(tokens):
    """Return what the model says after some tokens, best first: no blocks, chunks or kvtiers."""
    return tuple(plain_logits(MODEL, list(tokens))[-1].topk(3).indices.tolist())


def continued(tokens, num_tokens):
    for _ in range(num_tokens):
        tokens = (*tokens, likeliest(tokens)[0])
    return tokens[len(tokens) - num_tokens :]


def until_stop(tokens, stop_ids):
    stop = next((idx for idx, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return list(tokens[: stop + 1])


def generated(request: NewRequest):
    """Return what each of a request's sequences is to be."""
    prompt, num, stop_ids = (
        tuple(request.prompt_token_ids),
        request.max_tokens,
        request.stop_token_ids,
    )
    if request.num_sequences == 1:
        return [until_stop(continued(prompt, num), stop_ids)]
    return [
        until_stop((first, *continued((*prompt, first), num - 1)), stop_ids)
        for first in likeliest(prompt)[: request.num_sequences]
    ]


def config_of(folder, kind, mode="always", offload="eager", dram="64KiB", sync_below="5ms"):
    stores = {
        "dram": [],
        "memory": [{"kind": "memory", "capacity": "1MiB"}],
        "nvme": [{"kind": "nvme", "paths": [str(folder / "nvme")], "capacity": "1MiB"}],
        "lmdb": [{"kind": "lmdb", "path": str(folder / "shared.lmdb"), "capacity": "4MiB"}],
    }
    stores["all"] = stores["nvme"] + stores["lmdb"]
    return parse_mapping(
        {
            "tiers": [{"kind": "dram", "capacity": dram, "pin": "off"}, *stores[kind]],
            "cost": {"mode": mode},
            "policy": {"offload": offload},
            "reload": {"sync_below": sync_below, "lookup_deadline": "30s"},
        }
    )


class TorchMachine(EngineMachine):
    """A small model, really; its tiers are as small, so that all of them are used."""

    folder = None

    @initialize(
        kind=st.sampled_from([None, "dram", "memory", "nvme", "lmdb", "all"]),
        mode=st.sampled_from(["auto", "always", "always", "never"]),
        offload=st.sampled_from(["eager", "lazy"]),
        sync_below=st.sampled_from(["0ms", "5ms", "1s"]),
        knobs=KNOBS,
    )
    def start(self, kind, mode, offload, sync_below, knobs):
        knobs = EngineSettings(max_model_len=64, block_size=BLOCK, max_num_seqs=6, **knobs)
        self.stores = []
        if kind is None:
            self.begin(torch_engine(MODEL, knobs))
            return
        self.folder = Path(tempfile.mkdtemp(prefix="kvtiers-"))

        def wrap(_, store):
            self.stores.append(FaultyStore(store, store._slab))
            return self.stores[-1]

        config = config_of(self.folder, kind, mode, offload, sync_below=sync_below)
        self.begin(torch_engine(MODEL, knobs, config, wrap))

    def make_request(self, name, content, num_prompt, max_tokens, **more):
        prompt = CONTENTS[content][:num_prompt]
        stop_ids = {token for token in (7, 23) if (num_prompt + max_tokens) % 3 == 0}
        return NewRequest(
            name,
            self.engine.now,
            max_tokens,
            prompt,
            stop_token_ids=frozenset(stop_ids),
            **more,
        )

    def check_served(self, request, served):
        wanted = generated(request)
        if served.reason == "aborted":  # somewhere on the way, a group perhaps before it parted
            found = [tokens for tokens in served.token_ids if tokens]
            assert found == [w[: len(f)] for f, w in zip(found, wanted, strict=False)]
        else:
            assert served.token_ids == wanted

    @precondition(lambda self: self.engine and self.stores)
    @rule(
        which=st.integers(0, 1),
        verb=st.sampled_from(["put", "get", "get"]),
        fault=st.sampled_from(FAULTS),
    )
    def break_a_store(self, which, verb, fault):
        if verb == "put" and not isinstance(fault, OSError):
            fault = Outcome.FAILED
        self.stores[which % len(self.stores)].fail(verb, fault)

    def teardown(self):
        super().teardown()
        if self.folder is not None:
            shutil.rmtree(self.folder)


TorchMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_tokens_are_the_models = pytest.mark.filterwarnings("ignore::pytest.PytestWarning")(
    TorchMachine.TestCase
)
