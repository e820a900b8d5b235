"""A fake device with streams, and what waits for what on it: one line of JSON. Run by test_engine_streams.py.

The tensors lie on "meta". A stream is a clock that knows how far it has seen each other stream come: an operator ticks,
a wait takes over what the other knew. Whoever reads a value must know the tick that made it.
"""

import json
import sys
import types
from contextlib import contextmanager, nullcontext
from threading import Thread

import torch

import regrow

DEVICE = torch.device("meta")


class Stream(torch.Stream):
    """A clock."""

    def known(self):
        return fake.clocks.setdefault(self.stream_id, {})

    def wait_stream(self, other):
        self.wait_event(dict(other.known()))
        fake.log.append(f"{self} waits for {other}")

    def wait_event(self, event):
        for stream, tick in event.items():
            self.known()[stream] = max(tick, self.known().get(stream, 0))
        fake.log.append(f"{self} waits")

    def record_event(self):
        fake.log.append(f"{self} records")
        return dict(self.known())

    def __repr__(self):
        return ("main", "side", "third")[self.stream_id]

    __str__ = __repr__


class Fake(types.ModuleType):
    """A device module whose streams are clocks."""

    def reset(self):
        self.clocks, self.log, self.reads, self.told, self.made = {}, [], [], [], {}
        self.now, self.index = main, 0

    def is_initialized(self):
        return True

    def get_amp_supported_dtype(self):
        return []

    def current_device(self):
        return self.index

    def current_stream(self, device=None):
        return self.now

    @contextmanager
    def stream(self, stream):
        was, self.now = self.now, stream
        self.index += 1  # as on CUDA, where a stream brings its device along
        try:
            yield
        finally:
            self.now = was
            self.index -= 1

    @contextmanager
    def device(self, index):
        was, self.index = self.index, index
        try:
            yield
        finally:
            self.index = was


main, side, third = (Stream(stream_id=number, device_index=0, device_type=20) for number in range(3))
fake = Fake("torch.meta")


class Step(torch.autograd.Function):
    """Saves what it makes. Its value is told from others by its length."""

    @staticmethod
    def forward(ctx, x, length):
        clock = fake.now.known()
        clock[fake.now.stream_id] = clock.get(fake.now.stream_id, 0) + 1
        fake.made[length] = fake.now.stream_id, clock[fake.now.stream_id]
        fake.log.append(f"{fake.now} makes {length}")
        made = x.new_empty(length)
        ctx.save_for_backward(made)
        ctx.length = len(x)
        return made

    @staticmethod
    def backward(ctx, grad):
        (made,) = ctx.saved_tensors
        stream, tick = fake.made[len(made)]
        fake.reads.append(fake.now.known().get(stream, 0) >= tick)
        return grad.new_empty(ctx.length), None


def steps(x):
    return Step.apply(Step.apply(x, 5), 6)


def called(function=steps, **options):
    with regrow.recompute_handle_collector_ctx() as handles:
        out = regrow.checkpoint(function, torch.empty(4, device=DEVICE, requires_grad=True), **options)
    fake.log.clear()
    return out, handles


def backward(out, *, retain=False, session="s"):
    with regrow.recompute_session_ctx(session, retain_on_unpack=retain):
        out.backward(torch.empty(len(out), device=DEVICE), retain_graph=retain)


def beside(**options):
    out, handles = called(**options)
    with fake.stream(side):
        regrow.recompute_handle(handles[0], "s")
    fired, fake.log = fake.log, []
    backward(out, retain=True)
    joined, fake.log = fake.log, []
    backward(out)
    return {"fired": fired, "joined": joined, "again": fake.log, "reads": fake.reads, "told": sorted(fake.told)}


def in_an_open_context():
    out, handles = called()
    with regrow.recompute_session_ctx("s", retain_on_unpack=True):
        with fake.stream(side):
            regrow.recompute_handle(handles[0], "s")
        fake.log.clear()
        out.backward(torch.empty(6, device=DEVICE))
    return fake.log, fake.reads


def on_another_thread():
    out, handles = called()
    with fake.stream(side):
        regrow.recompute_handle(handles[0], "s")
    with regrow.recompute_session_ctx("s"):
        thread = Thread(target=lambda: out.backward(torch.empty(6, device=DEVICE)))
        thread.start()
        thread.join()
    return fake.reads


def reader_on_a_third():
    out, handles = called()
    with fake.stream(side):
        regrow.recompute_handle(handles[0], "s")
    fake.log.clear()
    with fake.stream(third):
        backward(out)
    return fake.log, fake.reads


def cleared_unread():
    out, handles = called()
    with fake.stream(side):
        regrow.recompute_handle(handles[0], "s")
    regrow.clear_recompute_session("s")
    fake.log.clear()
    backward(out, session="t")
    return fake.log, fake.reads


def failed():
    fail = []

    def function(x):
        x = Step.apply(x, 5)
        if fail:
            raise KeyError("replay")
        return Step.apply(x, 6)

    out, handles = called(function)
    fail.append(True)
    try:
        with fake.stream(side):
            regrow.recompute_handle(handles[0], "s")
    except KeyError:
        fail.clear()
    fake.log.clear()
    backward(out)
    return fake.log, fake.reads


def same_stream():
    out, handles = called()
    regrow.recompute_handle(handles[0], "s")
    backward(out)
    return fake.log, fake.reads


def lazy_elsewhere(**options):
    devices = []

    def function(x):
        devices.append(fake.index)
        return steps(x)

    out, _ = called(function, **options)
    with fake.stream(third), fake.device(3):
        out.backward(torch.empty(6, device=DEVICE))
        devices.append(fake.index)
    return fake.log, fake.reads, devices


def inner_from_outer():
    def function(x):
        return Step.apply(regrow.checkpoint(lambda h: Step.apply(h, 8), Step.apply(x, 7)), 9)

    out, handles = called(function)
    with fake.stream(side):
        regrow.recompute_handle(handles[0], "s")
    fake.log.clear()
    regrow.recompute_handle(handles[1], "s")  # on main: its input is the outer's, from the other stream
    backward(out)
    return fake.log, fake.reads


def known_to_the_reader(stream, tick):
    return fake.now.known().get(stream, 0) >= tick


def tick():
    clock = fake.now.known()
    clock[fake.now.stream_id] = clock.get(fake.now.stream_id, 0) + 1
    return fake.now.stream_id, clock[fake.now.stream_id]


def inputs_that_hooks_bring_back(**options):
    copied, reads = [], []

    def bring_back(packed):
        copied.append(tick())
        return torch.empty(packed, device=DEVICE)

    def function(x):
        reads.extend(known_to_the_reader(*copy) for copy in copied)
        return steps(x)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.shape, bring_back):
        out, _ = called(function, **options)
    with fake.stream(third):
        out.backward(torch.empty(6, device=DEVICE))
    return reads, fake.reads


def read_while_it_runs():
    readers, early = [], []

    def function(x):
        x = Step.apply(x, 5)
        if readers:
            readers[0].start()
            readers[0].join(timeout=0.5)  # it waits for this replay, so this ends without it
            early.append(not readers[0].is_alive())
        return Step.apply(x, 6)

    out, handles = called(function)
    with regrow.recompute_session_ctx("s", retain_on_unpack=True):
        readers.append(Thread(target=lambda: out.grad_fn.next_functions[0][0].saved_tensors))
        with fake.stream(side):
            regrow.recompute_handle(handles[0], "s")
        readers[0].join()
        readers.clear()
        out.backward(torch.empty(6, device=DEVICE))
    return early, fake.reads


def failed_behind_a_clone():
    """The replay copies what the policy keeps before it is overwritten, and fails; the copy stays for later ones."""
    fail = []

    def function(x):
        y = torch.cat([x, x, x])
        h = Step.apply(y, 5)
        y.mul_(2)
        if fail:
            raise KeyError("replay")
        return Step.apply(h, 6)

    _alive, handles = called(function, policy_fn=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.cat.default)
    fail.append(True)
    try:
        with fake.stream(side):
            regrow.recompute_handle(handles[0], "s")
    except KeyError:
        fail.clear()
    return fake.log, sorted(fake.told)


def casts(around=nullcontext):
    cached = []

    def function(x):
        cached.append(torch.is_autocast_cache_enabled())
        return steps(x)

    with torch.autocast("cpu", dtype=torch.bfloat16), around():
        _alive, handles = called(function)
        regrow.recompute_handle(handles[0], "s")
        regrow.clear_recompute_session("s")
        with fake.stream(side):
            regrow.recompute_handle(handles[0], "t")
        regrow.clear_recompute_session("t")
        with fake.stream(third):
            _alive.backward(torch.empty(6, device=DEVICE))
        cached.append(torch.is_autocast_cache_enabled())
    return cached


def main_program():
    torch._register_device_module("meta", fake)
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "record_stream", lambda tensor, stream: fake.told.append([len(tensor), stream.stream_id]), DEVICE.type.title()
    )
    scenarios = {
        "beside": beside,
        "beside, reentrant": lambda: beside(use_reentrant=True),
        "in an open context": in_an_open_context,
        "on another thread": on_another_thread,
        "reader on a third": reader_on_a_third,
        "cleared unread": cleared_unread,
        "failed": failed,
        "same stream": same_stream,
        "lazy elsewhere": lazy_elsewhere,
        "lazy elsewhere, reentrant": lambda: lazy_elsewhere(use_reentrant=True),
        "inner from outer": inner_from_outer,
        "casts": casts,
        "casts, function mode": lambda: casts(lambda: torch.device("cpu")),
        "inputs that hooks bring back": inputs_that_hooks_bring_back,
        "inputs that hooks bring back, reentrant": lambda: inputs_that_hooks_bring_back(use_reentrant=True),
        "read while it runs": read_while_it_runs,
        "failed behind a clone": failed_behind_a_clone,
    }
    results = {}
    for name, scenario in scenarios.items():
        fake.reset()
        try:
            results[name] = scenario()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        regrow.clear_recompute_session("s")
        regrow.clear_recompute_session("t")
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main_program()
