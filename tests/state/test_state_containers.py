"""Like C3 and C4: containers in arguments, which the function extends and the caller fills again."""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from regrow import is_recomputing


@dataclass
class Cache:
    """A key-value cache that is registered with torch's pytree."""

    keys: list = field(default_factory=list)
    length: int = 0


class Box:
    """A registered container of one tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class Pair(NamedTuple):
    """Keys and what they stand for."""

    keys: list
    table: dict


pytree.register_dataclass(Cache)
pytree.register_pytree_node(Box, lambda box: ([box.tensor], None), lambda tensors, _: Box(*tensors))


def start():
    return torch.randn(2, 4)


def append(cache, new):
    cache.append(new)
    return torch.cat(list(cache))


def put(cache, new):
    cache["k"] = torch.cat([cache["k"], new])
    return cache["k"]


def extend(cache, new):
    cache["k"].append(new)
    return torch.cat(cache["k"])


def shift(cache, new):
    cache.popleft()
    return append(cache, new)


def reuse(cache, new):
    cache.keys.append(new)
    cache.length += 1
    return torch.cat(cache.keys) * cache.length


def swap(cache, new):
    cache.tensor = torch.cat([cache.tensor, new])
    return cache.tensor


def into_pair(cache, new):
    cache.table["seen"] = cache.table.get("seen", 0) + 1
    return append(cache.keys, new) * cache.table["seen"]


CACHES = {
    "list": (lambda: [start()], append),
    "dict": (lambda: {"k": start()}, put),
    "dict of lists": (lambda: {"k": [start()]}, extend),
    "deque": (lambda: deque([start(), start()], maxlen=3), shift),
    "defaultdict": (lambda: defaultdict(list, {"v": [start()]}), extend),
    "ordered dict": (lambda: OrderedDict(k=start()), put),
    "dataclass": (lambda: Cache([start()]), reuse),
    "registered": (lambda: Box(start()), swap),
    "named tuple": (lambda: Pair([start()], {}), into_pair),
}


def contents(cache):
    if isinstance(cache, Cache):
        return cache.keys, cache.length
    return cache.tensor if isinstance(cache, Box) else cache


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_extended_once(same_in_any_way, name):
    """Rule 3: the replay gets the cache as forward found it, and the caller's is left alone."""
    make, update = CACHES[name]

    def program(run):
        proj, cache, x = nn.Linear(4, 4), make(), torch.randn(3, 4, requires_grad=True)

        def attend(x, cache):
            keys = update(cache, proj(x))
            return torch.softmax(x @ keys.t(), -1) @ keys

        run.backward(run(attend, x, cache).square().sum())
        return x.grad, proj.weight.grad, contents(cache)

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
@pytest.mark.parametrize("name", ["list", "dict of lists", "deque", "dataclass"])
def test_a_cache_that_grows_from_call_to_call_is_that_of_each_call(same_in_any_way, name):
    """Rule 3: three steps share one cache before any backward; each replay sees what its forward saw."""
    make, update = CACHES[name]

    def program(run):
        proj, cache = nn.Linear(4, 4), make()
        xs = [torch.randn(2, 4, requires_grad=True) for _ in range(3)]
        losses = []
        for x in xs:
            step = run(lambda x, *, past: torch.softmax(x @ update(past, proj(x)).t(), -1), x, past=cache)
            losses.append(step.square().sum())
        run.backward(sum(losses))
        return *(x.grad for x in xs), proj.weight.grad, contents(cache)

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
@pytest.mark.parametrize("name", ["list", "dict", "deque", "registered"])
def test_a_cache_emptied_or_filled_again_later_still_serves_the_first(same_in_any_way, name):
    """Rule 3: what the caller does with the container after forward is not seen by the replay."""
    make, update = CACHES[name]

    def program(run):
        proj, cache, x = nn.Linear(4, 4), make(), torch.randn(3, 4, requires_grad=True)
        out = run(lambda x, cache: (update(cache, proj(x)) @ x.t()).sin().exp(), x, cache)
        if name == "registered":
            cache.tensor = None
        else:
            cache.clear()
        run.backward(out.sum())
        return x.grad, proj.weight.grad

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
def test_one_container_in_two_arguments_stays_one(same_in_any_way):
    """Rule 3: what is written through one name is read through the other, in the replay too."""

    def program(run):
        x, shared = torch.randn(3, 4, requires_grad=True), [start()]

        def function(x, ins, outs, held):
            outs.append(x.sin())
            held["k"].append(x.exp())
            return torch.cat(ins).cos() * len(ins)

        out = run(function, x, shared, shared, held={"k": shared})
        run.backward(out.sum())
        return x.grad, shared

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
def test_a_container_that_holds_itself_and_one_that_is_nested_deep(same_in_any_way):
    """Rule 3: containers are put together again as they were, whatever their shape."""

    def program(run):
        x = torch.randn(3, 4, requires_grad=True)
        ring = {"k": x}
        ring["self"] = ring
        deep = ([{"a": ({"b": [start()]},)}],)

        def function(ring, deep):
            leaf = deep[0][0]["a"][0]["b"]
            leaf.append(ring["self"]["self"]["k"].sin())
            ring["k"] = None
            return torch.cat(leaf).exp() * len(leaf)

        run.backward(run(function, ring, deep).sum())
        return x.grad, deep, ring["k"]

    same_in_any_way(program)


@pytest.mark.only("hooks", because="the other engine refuses a graph that is left elsewhere than in the output")
def test_tensors_made_by_one_call_and_kept_in_the_cache_serve_the_next(same_in_any_way):
    """Rule 3: the cache carries a graph from call to call, as in decoding with gradients."""

    def program(run):
        proj, cache, x = nn.Linear(4, 4), {"k": [start()]}, torch.randn(2, 4, requires_grad=True)
        y = x
        for _ in range(3):
            y = run(lambda y, cache: torch.softmax(y @ (keys := extend(cache, proj(y))).t(), -1) @ keys, y, cache)
        run.backward(y.square().sum())
        return x.grad, proj.weight.grad, len(cache["k"])

    same_in_any_way(program)


def test_numbers_and_strings_in_a_container_are_forwards(same_in_any_way):
    """Rule 3: a position, a flag and a name are restored with the container that holds them."""

    def program(run):
        x, state = torch.randn(3, 4, requires_grad=True), {"position": 2, "mode": "sin", "past": []}

        def function(x, state):
            state["position"] += 1
            y = getattr(x, state["mode"])() * state["position"]
            state["mode"] = "exp"
            state["past"].append(state["position"])
            return (y * len(state["past"])).tanh()

        losses = [run(function, x, state).sum() for _ in range(2)]
        state["mode"] = "cos"
        run.backward(sum(losses))
        return x.grad, state

    same_in_any_way(program)


@dataclass
class Unregistered:
    """A container that nobody registered."""

    keys: list


def test_a_container_that_is_not_registered_asks_whether_it_is_a_replay(same_in_any_way):
    """Rule 18: what cannot be taken apart is the function's own business, and the function can tell."""

    def program(run):
        x, cache = torch.randn(3, 4, requires_grad=True), Unregistered([start()])

        def function(x, cache):
            past = cache.keys[:1]
            if not is_recomputing():
                cache.keys.append(x)
            return torch.cat([*past, x]).sin().exp()

        run.backward(run(function, x, cache).sum())
        return x.grad, len(cache.keys)

    same_in_any_way(program)
