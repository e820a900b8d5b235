"""Device code goes through ``torch.get_device_module`` alone; a fake device, whose generator counts, proves it."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def happened(fresh_process):
    """What each scenario of the fake device gave."""
    program = Path(__file__).with_name("fake_device.py")
    return json.loads(fresh_process(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"))


def test_the_generator_of_the_inputs_device_is_rewound_and_put_back(happened):
    """Rule 3: a replay draws what forward drew, and the device's generator is where the caller left it."""
    assert happened["rewound_and_put_back"] == [[11, 11], 50]


def test_the_generator_is_put_back_after_a_failed_replay(happened):
    """Rule 3: also when the function raises."""
    assert happened["put_back_after_a_failure"] == 50


def test_without_preserved_random_numbers_the_device_is_not_asked(happened):
    """Rule 3: ``preserve_rng_state=False`` neither reads nor sets a state."""
    assert happened["not_preserved"] == []


def test_tensors_in_containers_and_keywords_bring_their_device(happened):
    """Rule 3: the devices in play are those of all arguments."""
    assert happened["in_containers"] == [[1, 1], 50]


def test_a_kept_draw_moves_the_devices_generator(happened):
    """Rule 16: what comes after it finds the generator as in forward, and the caller's is put back."""
    assert happened["kept_draw"] == [[1, 1], 50]


def test_the_callers_state_is_the_same_if_the_device_fails(happened):
    """Rule 3: a device that cannot set its state fails the replay before it begins, and all else is as it was."""
    assert happened["broken_device"] == ["the device is gone", True]


def test_a_device_that_wakes_up_inside_forward_is_refused(happened):
    """Rule 3: its generator was not captured, so a replay could draw other numbers; no handle is left."""
    said, handles = happened["woken"]
    assert "the meta device was initialised inside the checkpointed function" in said
    assert "preserve_rng_state=False" in said
    assert handles == 0


def test_a_device_may_wake_up_where_random_numbers_are_not_preserved(happened):
    """Rule 3: nothing had to be captured."""
    assert happened["woken_without_preserving"] == ["", 1]


def test_a_device_that_sleeps_is_not_woken(happened):
    """Rule 3: asking for a state would initialise it."""
    assert happened["asleep"] == []


def test_autocast_of_the_accelerator_is_forwards_though_no_input_lies_there(happened):
    """Rule 3: the tensors that the function captured are where the work is done; torch's checkpoint does the same."""
    assert happened["autocast_of_the_accelerator"] == [[True, "torch.float16"]] * 2


def test_the_generator_of_the_accelerator_is_rewound_though_no_input_lies_there(happened):
    """Rule 3: the function may draw there all the same; torch's checkpoint draws other numbers then."""
    assert happened["generator_of_the_accelerator"] == [[1, 1], 50]


@pytest.mark.parametrize("engine", ["", "_reentrant"], ids=["hooks", "reentrant"])
def test_captured_tensors_and_parameters_bring_their_device(happened, engine):
    """Rule 3: the devices in play are those of all that the function reaches, here beside the current one."""
    assert happened["captured_on_another_device" + engine] == [[1, 1], 50]
