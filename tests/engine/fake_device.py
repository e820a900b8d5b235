"""A fake device, and what happens on it: one line of JSON per scenario. Run by test_engine_devices.py.

A program of its own, because a device module cannot be given back to torch. The tensors lie on "meta", which computes
nothing, so the fake is the module of that type; its generator is a number.
"""

import json
import sys
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import DefaultDeviceType

import regrow

RAND_LIKE = torch.ops.aten.rand_like.default


class Fake(types.ModuleType):
    """A device module with one generator."""

    def reset(self):
        self.awake, self.broken, self.draws, self.log = True, False, 0, []

    def is_initialized(self):
        return self.awake

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device="meta"):
        self.log.append(f"get {device}")
        return torch.tensor([self.draws], device="cpu")

    def set_rng_state(self, state, device="meta"):
        if self.broken:
            raise RuntimeError("the device is gone")
        self.log.append(f"set {device} {int(state)}")
        self.draws = int(state)

    def draw(self):
        self.draws += 1
        return self.draws


fake = Fake("torch.meta")
other = Fake("torch.fake")  # the accelerator, once there is one


def leaf(device="meta"):
    return torch.randn(3, device=device, requires_grad=True)


def rewound_and_put_back():
    drawn = []
    fake.draws = 10
    out = regrow.checkpoint(lambda t: (drawn.append(fake.draw()), t.sin().exp())[1], leaf())
    fake.draws = 50
    out.sum().backward()
    return drawn, fake.draws


def put_back_after_a_failure():
    fail = []

    def function(t):
        fake.draw()
        if fail:
            raise KeyError("replay")
        return t.sin()

    out = regrow.checkpoint(function, leaf())
    fake.draws = 50
    fail.append(True)
    try:
        out.sum().backward()
    except KeyError:
        return fake.draws


def not_preserved():
    regrow.checkpoint(lambda t: t.sin().exp(), leaf(), preserve_rng_state=False).sum().backward()
    return fake.log


def in_containers():
    drawn = []

    def function(t, *, parts):
        drawn.append(fake.draw())
        return t.sin()

    out = regrow.checkpoint(function, leaf("cpu"), parts={"k": [torch.ones(2, device="meta")]})
    fake.draws = 50
    out.sum().backward()
    return drawn, fake.draws


class Drawing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is RAND_LIKE:
            fake.draw()
        return func(*args, **(kwargs or {}))


def kept_draw():
    after = []

    def function(t):
        h = t * torch.rand_like(t)
        after.append(fake.draws)
        return h.sin().exp()

    with Drawing():
        out = regrow.checkpoint(function, leaf(), policy_fn=lambda ctx, op, *args, **kwargs: op is RAND_LIKE)
        fake.draws = 50
        out.sum().backward()
    return after, fake.draws


def state_of_the_caller():
    return [
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),
        regrow.is_recomputing(),
        torch.get_rng_state().tolist(),
    ]


def broken_device():
    with torch.autocast("cpu", dtype=torch.bfloat16), regrow.recompute_handle_collector_ctx() as handles:
        _alive = regrow.checkpoint(lambda t: t.sin(), leaf())
    torch.rand(7)
    fake.broken = True
    with torch.no_grad():
        before = state_of_the_caller()
        try:
            regrow.recompute_handle(handles[0], "first")
        except RuntimeError as error:
            said = str(error)
        after = state_of_the_caller()
    fake.broken = False
    regrow.recompute_handle(handles[0], "second")
    return said, before == after


def woken(**options):
    DefaultDeviceType.set_device_type("meta")
    fake.awake = False

    def function(t):
        fake.awake = True
        return t.sin()

    with regrow.recompute_handle_collector_ctx() as handles:
        try:
            _alive = regrow.checkpoint(function, leaf("cpu"), **options)
            said = ""
        except RuntimeError as error:
            said = str(error)
    return said, len(handles)


def woken_without_preserving():
    return woken(preserve_rng_state=False)


def asleep():
    DefaultDeviceType.set_device_type("meta")
    fake.awake = False
    regrow.checkpoint(lambda t: t.sin(), leaf("cpu")).sum().backward()
    return fake.log


def accelerator():
    """From here on torch has an accelerator; no tensor lies there."""
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", other)
    DefaultDeviceType.set_device_type("fake")


def autocast_of_the_accelerator():
    accelerator()
    seen = []

    def function(t):
        seen.append([torch.is_autocast_enabled("fake"), str(torch.get_autocast_dtype("fake"))])
        return t.sin()

    with torch.autocast("fake", dtype=torch.float16):
        out = regrow.checkpoint(function, leaf("cpu"))
    out.sum().backward()
    return seen


def generator_of_the_accelerator():
    drawn = []
    out = regrow.checkpoint(lambda t: (drawn.append(other.draw()), t.sin())[1], leaf("cpu"))
    other.draws = 50
    out.sum().backward()
    return drawn, other.draws


def captured_on_another_device(**options):
    """The input lies on the CPU, the accelerator is another one, and a weight lies on the first."""
    drawn = []
    layer = torch.nn.Linear(3, 3, device="meta")

    def function(t):
        layer.train()
        drawn.append(fake.draw())
        return t.sin()

    out = regrow.checkpoint(function, leaf("cpu"), **options)
    fake.draws = 50
    out.sum().backward()
    return drawn, fake.draws


def captured_on_another_device_reentrant():
    return captured_on_another_device(use_reentrant=True)


SCENARIOS = [
    rewound_and_put_back,
    put_back_after_a_failure,
    not_preserved,
    in_containers,
    kept_draw,
    broken_device,
    woken,
    woken_without_preserving,
    asleep,
    autocast_of_the_accelerator,
    generator_of_the_accelerator,
    captured_on_another_device,
    captured_on_another_device_reentrant,
]


def main():
    torch._register_device_module("meta", fake)
    results = {}
    for scenario in SCENARIOS:
        fake.reset()
        other.reset()
        try:
            results[scenario.__name__] = scenario()
        except Exception as error:
            results[scenario.__name__] = f"{type(error).__name__}: {error}"
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
