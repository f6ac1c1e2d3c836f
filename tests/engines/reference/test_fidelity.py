"""The modelled runner puts workloads in the order in which the torch runner does."""

import pytest

from kvtiers.cost.catalogue import known_hardware
from kvtiers.cost.model_source import load_shape
from kvtiers.cost.prefill import PrefillModel, PrefillSpeed
from kvtiers.cost.shapes import model_shape
from kvtiers.cost.steps import StepModel
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.torch_runner import TorchRunner

from .small import prompt_of, small_shape

SHAPE = small_shape()
SPEED = PrefillSpeed(1e-3, 1e10)
LLAMA = load_shape("llama-3.1-8b")[0]
# (requests, prompt tokens, output tokens): each several times the work of the one before.
WORKLOADS = ((1, 16, 2), (2, 64, 12), (8, 120, 60))


def settings_of():
    return EngineSettings(
        num_blocks=1000, max_model_len=256, max_num_batched_tokens=256, max_num_seqs=16
    )


def requests_of(num, num_prompt, num_output):
    return [NewRequest(f"r{i}", 0.0, num_output, prompt_of(num_prompt, i)) for i in range(num)]


def seconds_of(engine, requests):
    began = engine.now
    for request in requests:
        engine.add(request)
    steps = []
    while engine.num_unfinished:
        steps.append(engine.step())
    return engine.now - began, steps


def test_both_runners_run_the_same_steps():
    """One scheduler: without kvtiers nothing that it decides depends on time."""
    model = ReferenceModel(SHAPE)
    for workload in WORKLOADS:
        really = Engine(settings_of(), TorchRunner(model, settings_of()))
        machine = ModelledMachine(model_shape(SHAPE.to_hf_config()), SPEED, 512)
        paper = modelled_engine(settings_of(), machine)
        _, one = seconds_of(really, requests_of(*workload))
        _, two = seconds_of(paper, requests_of(*workload))
        assert [step.num_tokens for step in one] == [step.num_tokens for step in two]


def test_the_order_of_workloads_is_kept():
    model = ReferenceModel(SHAPE)
    measured = []
    for workload in WORKLOADS:
        times = []
        for _ in range(3):
            engine = Engine(settings_of(), TorchRunner(model, settings_of()))
            times.append(seconds_of(engine, requests_of(*workload))[0])
        measured.append(min(times))
    shape = model_shape(SHAPE.to_hf_config())
    machine = ModelledMachine(shape, SPEED, SHAPE.kv_nbytes_per_token)
    said = [
        seconds_of(modelled_engine(settings_of(), machine), requests_of(*workload))[0]
        for workload in WORKLOADS
    ]
    assert sorted(said) == said
    assert sorted(measured) == measured


def test_a_step_model_learns_from_steps():
    shape = model_shape(SHAPE.to_hf_config())
    reads = {"kv_bytes_per_second": 2e9, "kv_element_nbytes": 4}
    truth = StepModel(PrefillSpeed(2e-3, 5e9, 3e9, **reads), shape, 3e-4)
    steps = [([n] * num, [c] * num) for n in (1, 16, 200) for num in (1, 4) for c in (0, 50, 400)]
    guess = StepModel(PrefillSpeed(1e-3, 1e10, kv_bytes_per_second=1e10), shape, 1e-4)
    guess.fit(steps, [truth.seconds(*step) for step in steps])
    for step in (([3, 7], [11, 90]), ([100], [10]), ([1] * 9, list(range(9)))):
        assert abs(guess.seconds(*step) / truth.seconds(*step) - 1) < 0.02
    assert truth.seconds([], []) == 0.0


def test_a_step_of_one_request_is_a_prefill_and_a_sequence():
    speed = known_hardware("h100").speed(LLAMA)
    for num, context in ((1, 0), (1, 30_000), (500, 100), (4096, 9000)):
        prefill = float(PrefillModel.of(speed, LLAMA, num).seconds(num, context))
        assert StepModel(speed, LLAMA, 2e-4).seconds([num], [context]) == pytest.approx(
            prefill + 2e-4
        )


def test_a_step_of_decodes_only_is_spared_what_prompts_take():
    speed = known_hardware("h100").speed(LLAMA)
    without, having = StepModel(speed, LLAMA), StepModel(speed, LLAMA, prompt_seconds=3e-3)
    assert having.seconds([1, 1], [9, 90]) == without.seconds([1, 1], [9, 90])
    for new in ([2], [1, 500]):
        context = [7] * len(new)
        more = having.seconds(new, context) - without.seconds(new, context)
        assert more == pytest.approx(3e-3)


def test_a_cache_of_fewer_bytes_is_read_faster():
    def decode_seconds(kv_element_nbytes):
        machine = ModelledMachine.of(
            LLAMA,
            known_hardware("h100"),
            {},
            kv_element_nbytes=kv_element_nbytes,
        )
        steps = machine.step_model()
        return steps.seconds([1] * 8, [100_000] * 8) - steps.seconds([1] * 8, [0] * 8)

    # Beside reading, attention multiplies: that does not depend on the cache.
    assert decode_seconds(2) - decode_seconds(1) == pytest.approx(
        8 * 100_000 * LLAMA.kv_nbytes_per_token(1) / known_hardware("h100").memory_bandwidth.value
    )
