"""Every error a user can cause at the public edge: the table in docs/errors.md, row by row."""

from __future__ import annotations

import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import regrow
from regrow._core import compat, turns
from regrow._core.split import Split, edges_of
from regrow.platform import get_platform

TABLE = Path(__file__).parents[1] / "docs" / "errors.md"
ROW = re.compile(r"^\| `(?P<says>[^`]+)` \| (?P<cls>\w+) \|")


def rows() -> dict[str, str]:
    found = (ROW.match(line) for line in TABLE.read_text().splitlines())
    return {row["says"]: row["cls"] for row in found if row}


def leaf() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def call(**options: Any) -> Callable[[], Any]:
    return lambda: regrow.checkpoint(torch.sin, leaf(), **options)


def with_handle(action: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> None:
        with regrow.recompute_handle_collector_ctx() as handles:
            output = regrow.checkpoint(torch.sin, leaf())
        try:
            action(handles[0])
        finally:
            regrow.clear_recompute_session("mine")
            del output

    return run


def prefire_in(session_id: str, *, retain: bool) -> Callable[[Any], None]:
    def action(handle: Any) -> None:
        with regrow.recompute_session_ctx(session_id, retain_on_unpack=retain):
            regrow.recompute_handle(handle, "mine")

    return action


def prefire_twice(handle: Any) -> None:
    regrow.recompute_handle(handle, "mine")
    regrow.recompute_handle(handle, "other")


def prefire_the_dead() -> None:
    with regrow.recompute_handle_collector_ctx() as handles:
        regrow.checkpoint(torch.sin, leaf()).sum().backward()
    regrow.recompute_handle(handles[0], "mine")


def prefire_in_forward() -> None:
    with regrow.recompute_handle_collector_ctx() as handles:
        regrow.checkpoint(lambda x: regrow.recompute_handle(handles[0], "mine"), leaf())


def nest_contexts() -> None:
    with regrow.recompute_session_ctx("a"), regrow.recompute_session_ctx("b"):
        pass


def wake_a_device() -> None:
    """A module that sleeps until forward uses it stands for a device, on a type that has no module of its own."""

    class Sleeper:
        awake = False

        def is_initialized(self) -> bool:
            return self.awake

    sleeper = Sleeper()
    kind = torch.utils.checkpoint.DefaultDeviceType.get_device_type()
    torch._register_device_module("meta", sleeper)
    torch.utils.checkpoint.DefaultDeviceType.set_device_type("meta")
    try:
        regrow.checkpoint(lambda x: setattr(sleeper, "awake", True) or x.sin(), leaf())
    finally:
        torch.utils.checkpoint.DefaultDeviceType.set_device_type(kind)
        del torch.meta


def change_an_input() -> None:
    x, scale = leaf(), torch.ones(4)
    loss = regrow.checkpoint(torch.mul, x, scale).sum()
    scale.add_(1)
    loss.backward()


def step_between() -> None:
    layer = nn.Linear(4, 4)
    loss = regrow.checkpoint(lambda x: layer(x).sin(), leaf()).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    loss.backward()


LAYER: nn.Module = nn.Linear(4, 4)


def uses_a_global(x: torch.Tensor) -> torch.Tensor:
    return LAYER(x).sin()


def set_a_global_anew() -> None:
    global LAYER
    loss = regrow.checkpoint(uses_a_global, leaf()).sum()
    LAYER = nn.Linear(4, 4)
    loss.backward()


def overwrite_a_saved_tensor() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y.sin()
        y.mul_(2)
        return z.cos() + y

    regrow.checkpoint(function, leaf(), early_stop=False).sum().backward()


def branch(first: Callable[[Any], Any], second: Callable[[Any], Any], **options: Any) -> Callable[[], None]:
    def run() -> None:
        ways = iter([first, second])

        def function(x: torch.Tensor) -> Any:
            return next(ways)(x)

        regrow.checkpoint(function, leaf(), **options).sum().backward()

    return run


def run_into_itself() -> None:
    reached = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if reached:
            torch.autograd.grad(reached[0], x, retain_graph=True)
        return x.sin()

    with regrow.recompute_session_ctx("mine", retain_on_unpack=True):
        with regrow.recompute_handle_collector_ctx() as handles:
            reached.append(regrow.checkpoint(function, leaf()).sum())
        regrow.recompute_handle(handles[0], "mine")


def wait_for_a_thread_that_waits() -> None:
    norm, failed, wait_s = nn.BatchNorm1d(4), [], turns.WAIT_S
    x = torch.randn(3, 4, requires_grad=True)

    def backward() -> None:
        try:
            torch.autograd.grad(regrow.checkpoint(norm, x).exp().sum(), x)
        except regrow.CheckpointError as error:
            failed.append(error)

    def function(t: torch.Tensor) -> torch.Tensor:
        if regrow.is_recomputing():
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        return norm(t).sin()

    turns.WAIT_S = 0.05
    try:
        regrow.checkpoint(function, x).sum().backward()
    finally:
        turns.WAIT_S = wait_s
    raise failed[0]


class Swallow:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> bool:
        return True


def raise_under_a_swallowing_context() -> None:
    regrow.checkpoint(lambda x: x.nothing, leaf(), context_fn=lambda: (Swallow(), Swallow()))


def make_stage(**options: Any) -> Any:
    """One stage of two on this process alone, which is a group of one."""
    from regrow.pipelining import PipelineStage

    return PipelineStage(options.pop("module", nn.Linear(4, 4)), 0, options.pop("n_stages", 1), torch.device("cpu"))


def make_schedule(stage_class: Any = None, module: nn.Module | None = None) -> Any:
    from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

    from regrow.pipelining import PipelineStage

    stages = [
        (stage_class or PipelineStage)(module or nn.Linear(4, 4), index, 2, torch.device("cpu")) for index in range(2)
    ]
    return ScheduleInterleavedZeroBubble(stages, 2, loss_fn=lambda output, target: (output - target).square().mean())


def attached(**options: Any) -> Any:
    from regrow.pipelining import attach

    return attach(make_schedule(), **options)


def step(schedule: Any) -> None:
    schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))


def attach_to(schedule: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        from regrow.pipelining import attach

        attach(schedule())

    return run


def with_stages_elsewhere() -> Any:
    schedule = make_schedule()
    schedule.stage_index_to_group_rank = {0: 0, 1: 1}
    return schedule


def with_other_waits() -> Any:
    schedule = make_schedule()
    schedule.bwd_recv_ops = OrderedDict()
    return schedule


def schedule_1f1b(n_microbatches: Any, **options: Any) -> Callable[[], Any]:
    def run() -> None:
        from regrow.pipelining import schedule_1f1b

        schedule_1f1b(make_stage(**options), n_microbatches)

    return run


def no_stage() -> None:
    from regrow.pipelining import schedule_1f1b

    schedule_1f1b([make_stage()], 2)


def replicas_that_look_for_unused_parameters() -> None:
    from torch.nn.parallel import DistributedDataParallel

    schedule = make_schedule(module=DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True))
    step(schedule)


def finish_twice() -> None:
    split = Split(edges_of([leaf().sin().sum()]), [])
    split.dw()
    split.dw()


def torch_stages() -> Any:
    from torch.distributed.pipelining import PipelineStage

    return make_schedule(PipelineStage)


def unpickle_a_policy_with_an_unknown_operator() -> None:
    pickled = pickle.dumps(regrow.policies.keep(torch.ops.aten.mm.default))
    pickle.loads(pickled.replace(b"aten.mm.default", b"aten.zz.default"))


def own_forward() -> None:
    module = nn.ReLU()
    module.forward = torch.sin
    regrow.checkpoint_wrapper(module)


def schedule_in_a_compiled_function() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with regrow.recompute_handle_collector_ctx():
            return regrow.checkpoint(torch.sin, x)

    torch.compile(step, backend="eager")(leaf())


class OldFormat(nn.ReLU):
    def _set_gradient_checkpointing(self, module: nn.Module, value: bool = False) -> None:
        """As models of before 2023 have it."""


def enable_transformers(make: Callable[[], nn.Module] = nn.ReLU, **options: Any) -> Callable[[], Any]:
    def run() -> None:
        from regrow.integrations.transformers import enable

        enable(make(), **options)

    return run


save = regrow.save_region


def region(*ways: Callable[..., Any], **options: Any) -> Callable[[], None]:
    """Forward goes one way, and every replay the last one."""

    def run() -> None:
        way = [ways[0]]
        out = regrow.checkpoint(lambda t: way[-1](t.tanh()).cos().sum(), leaf(), early_stop=False, **options)
        way.append(ways[-1])
        out.backward()

    return run


def reentrant(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda: regrow.checkpoint(function, leaf(), use_reentrant=True)


def grad_enabled(action: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return action()


class Record:
    def __init__(self, value: Any) -> None:
        self.value = value


def capture_a_graph() -> None:
    outside = leaf() * 2
    reentrant(lambda x: x * outside)()


def reach_a_buffer() -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("scale", leaf())
    reentrant(layer)()


def nest_scopes() -> None:
    with regrow.reentrant_checkpoint_scope([]), regrow.reentrant_checkpoint_scope([]):
        pass


def with_reentrant(action: Callable[[Any, torch.Tensor], Any]) -> Callable[[], Any]:
    def run() -> None:
        with regrow.reentrant_checkpoint_scope([]) as handles:
            loss = reentrant(torch.sin)().sum()
        action(handles[0], loss)

    return run


def overwrite_a_weight_of_a_region() -> None:
    weight = leaf()
    out = regrow.checkpoint(lambda t: save(torch.mul, t.sin(), weight).sum(), leaf())
    with torch.no_grad():
        weight.zero_()
    out.backward()


def go_on_after_an_error(t: torch.Tensor) -> torch.Tensor:
    try:
        return save(torch.mul, t, "text")
    except TypeError:
        return t.sin()


def take_a_gradient(t: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(save(torch.exp, t).sum(), t, create_graph=True)[0]


def torch_contexts() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)


def set_phase_outside() -> None:
    with regrow.recompute_handle_collector_ctx() as handles:
        output = reentrant(torch.sin)()
    try:
        handles[0].set_phase("dx")
    finally:
        del output


def limit_a_backward() -> None:
    x = leaf()
    torch.autograd.grad(regrow.checkpoint(nn.Linear(4, 4), x, use_reentrant=True).sum(), x)


def leave_a_graph() -> None:
    def function(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x.sin())
        return x.cos()

    regrow.checkpoint(function, leaf(), [], use_reentrant=True).sum().backward()


def replay_other(forward: Callable[..., Any], replay: Callable[..., Any]) -> Callable[[], Any]:
    def run() -> None:
        outputs = reentrant(lambda x: replay(x) if regrow.is_recomputing() else forward(x))()
        sum(output.sum() for output in outputs).backward()

    return run


def share_under_ddp() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(regrow.checkpoint(self.layer, x, use_reentrant=True))

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = DistributedDataParallel(Net())
        net(leaf()).sum().backward()
    finally:
        if alone:
            dist.destroy_process_group()


RECORDING = {"rank": 0, "host": "here", "epoch_ns": 0, "events": []}

CAUSES: dict[str, Callable[[], Any]] = {
    "name must be one of": lambda: get_platform("jax"),
    "function is missing": lambda: regrow.checkpoint(x=1),
    "function must be": lambda: regrow.checkpoint(3, leaf()),
    "use_reentrant must be True or False": call(use_reentrant=None),
    "not with use_reentrant=True": call(use_reentrant=True, debug=True),
    "inside another one with use_reentrant=True": reentrant(lambda x: grad_enabled(reentrant(torch.sin))),
    "which holds no tensor": reentrant(lambda x: None),
    "with tensors inside, which is no container": reentrant(lambda x: (x, Record(x * 2))),
    "was computed outside and needs a gradient": capture_a_graph,
    "reaches the buffer": reach_a_buffer,
    "parameters must be an iterable": lambda: regrow.reentrant_checkpoint_scope(3),
    "parameters must hold tensors": lambda: regrow.reentrant_checkpoint_scope([3]),
    "reentrant_checkpoint_scope inside another one": nest_scopes,
    "phase must be": with_reentrant(lambda handle, loss: handle.set_phase("dz")),
    "on a call that is not split": set_phase_outside,
    "this checkpointed call was released": with_reentrant(lambda handle, loss: (handle.release(), loss.backward())),
    "whose phase was never set": with_reentrant(lambda handle, loss: loss.backward()),
    "reached a checkpoint with use_reentrant=True that captures": limit_a_backward,
    "whose gradients have no graph": lambda: reentrant(torch.sin)().sum().backward(create_graph=True),
    "leaves a tensor that needs a gradient in": leave_a_graph,
    "tensor(s), the replay returned": replay_other(lambda x: (x.sin(), x.cos()), lambda x: (x.sin(),)),
    "outputs of the replay differ": replay_other(lambda x: (x.sin(),), lambda x: (x.sin()[:1],)),
    "of a DistributedDataParallel module is used by another": share_under_ddp,
    "preserve_rng_state must be True or False": call(preserve_rng_state=1),
    "debug must be True or False": call(debug="yes"),
    "early_stop must be True or False": call(early_stop=1),
    "respect_saved_tensors_hooks must be True or False": call(respect_saved_tensors_hooks=0),
    "context_fn must be": call(context_fn=3),
    "context_fn must return a pair": call(context_fn=Swallow),
    "policy_fn must be": call(policy_fn=[torch.ops.aten.mm.default]),
    "determinism_check must be one of": call(determinism_check="strict"),
    "policy_fn returned": call(policy_fn=lambda *_, **__: CheckpointPolicy.MUST_CPU_OFFLOAD),
    "is no OpOverload": lambda: regrow.create_selective_checkpoint_contexts([torch.ops.aten.mm]),
    "keep() needs at least one": regrow.policies.keep,
    "cannot be kept: an operator": lambda: regrow.policies.keep(torch.ops.aten.view.default),
    "every must be a whole number": lambda: regrow.policies.keep_matmuls(every=0),
    "counts the operators of one call": lambda: regrow.policies.keep_matmuls(every=2)(None, torch.ops.aten.mm.default),
    "which this process does not know": unpickle_a_policy_with_an_unknown_operator,
    "must be a function or a list of operators": lambda: regrow.create_selective_checkpoint_contexts(3),
    "suppressed an exception": raise_under_a_swallowing_context,
    "was initialised inside the checkpointed function": wake_a_device,
    "session_id must name the session": lambda: regrow.recompute_session_ctx(None),
    "session_id must be equal to itself": lambda: regrow.clear_recompute_session(float("nan")),
    "session_id must be hashable": lambda: regrow.clear_recompute_session([1]),
    "retain_on_unpack must be True or False": lambda: regrow.recompute_session_ctx("mine", retain_on_unpack=1),
    "handle must come from": lambda: regrow.recompute_handle("handle", "mine"),
    "contexts nest only with the same id": nest_contexts,
    "Prefire inside a context of the same session": with_handle(prefire_in("other", retain=True)),
    "which lets values go as they are read": with_handle(prefire_in("mine", retain=False)),
    "inside a function that torch.compile compiles": schedule_in_a_compiled_function,
    "graph of this checkpointed call has died": prefire_the_dead,
    "its forward has not returned": prefire_in_forward,
    "is active on this checkpointed call": with_handle(prefire_twice),
    "an input was changed in place": change_an_input,
    "What it reads was changed in place": step_between,
    "stand for other tensors or modules": set_a_global_anew,
    "was changed in place after an operator saved it": overwrite_a_saved_tensor,
    "tensors, the replay saved": branch(lambda x: x.sin().cos(), lambda x: x.sin()),
    "saved by the replay differ": branch(lambda x: x.sin().cos(), lambda x: x[:2].sin().cos()),
    "of the replay is": branch(torch.sin, torch.cos, policy_fn=lambda *_, **__: False, early_stop=False),
    "for a replay on another thread": wait_for_a_thread_that_waits,
    "backward through its own output": run_into_itself,
    "save_output must be True or False": lambda: regrow.checkpoint_exclude_wrapper(torch.sin, save_output=1),
    "wrote into": region(lambda t: save(torch.Tensor.exp_, t.sin())),
    "was changed in place after the region": region(lambda t: save(torch.sin, t.sin()).mul_(2).exp()),
    "a tensor that a SAVE region kept was changed": overwrite_a_weight_of_a_region,
    "and the function went on": region(go_on_after_an_error),
    "the replay reached SAVE region": region(torch.exp, lambda t: save(torch.exp, t)),
    "SAVE regions of forward not reached": region(lambda t: save(torch.exp, t), torch.exp),
    "in the replay and was": region(lambda t: save(torch.exp, t), lambda t: save(torch.exp, t[:2])),
    "computes a gradient through SAVE region": region(take_a_gradient),
    "under a torch.func transform": region(torch.vmap(lambda t: save(torch.sin, t))),
    "under torch's own selective contexts": region(lambda t: save(torch.exp, t), context_fn=torch_contexts),
    "which cannot be taken apart": region(lambda t: save(lambda u: SimpleNamespace(value=u.exp()), t)),
    "save_output=False does not keep": region(
        lambda t: regrow.checkpoint_exclude_wrapper(torch.exp, save_output=False)(t).sin()
    ),
    "capture must be": lambda: regrow.register_ambient(None, torch.no_grad),
    "restore must be": lambda: regrow.register_ambient(torch.get_default_dtype, None),
    "module_or_fn must be": lambda: regrow.checkpoint_wrapper(3),
    "no option of checkpoint": lambda: regrow.checkpoint_wrapper(nn.ReLU(), earlystop=True),
    "is wrapped already": lambda: regrow.checkpoint_wrapper(regrow.checkpoint_wrapper(nn.ReLU())),
    "has a forward of its own instance": own_forward,
    "whose forward is generated code": lambda: regrow.checkpoint_wrapper(torch.fx.symbolic_trace(nn.ReLU())),
    "model must be an nn.Module": lambda: regrow.apply_checkpointing([nn.ReLU()], nn.ReLU),
    "where must be": lambda: regrow.apply_checkpointing(nn.ReLU(), "ReLU"),
    "where selects no module": lambda: regrow.apply_checkpointing(nn.ReLU(), nn.GELU),
    "every_n_layers must be": enable_transformers(every_n_layers=0),
    "offload must be True or False": enable_transformers(offload="cpu"),
    "has no layer that Transformers can checkpoint": enable_transformers(),
    "old format of gradient checkpointing": enable_transformers(OldFormat),
    "schedule must be a schedule": attach_to(lambda: "ZBV"),
    "schedule has no stage that regrow knows": attach_to(torch_stages),
    "looks for the stages": attach_to(with_stages_elsewhere),
    "schedule is attached already": attach_to(attached),
    "so regrow cannot see its waits": attach_to(with_other_waits),
    "prefire must be one of": lambda: attached(prefire=True),
    "retention must be one of": lambda: attached(retention="some"),
    "keep must be one of": lambda: attached(keep=None),
    "prefire_bytes must be None or": lambda: attached(prefire_bytes=-1),
    "; it must return one of": lambda: step(attached(retention=lambda stage, microbatch: None, keep="never")),
    "; it must return True or False": lambda: step(attached(keep=lambda stage, microbatch: 1)),
    "stage must be one PipelineStage": no_stage,
    "keep must be a number of at least 1": lambda: regrow.ledger(keep=0),
    "limit must be a number of at least 1": lambda: import_module("regrow.trace").record(limit=0),
    "Make it, or name another": lambda: import_module("regrow.trace").record("nowhere/run.json"),
    "give each rank's once": lambda: import_module("regrow.trace").Timeline.of([RECORDING, RECORDING]),
    "no timeline of regrow.trace.record": lambda: import_module("regrow.trace").Timeline.from_json("{}"),
    "loss must be a tensor with a graph": lambda: regrow.saved_tensors_report(torch.ones(2)),
    "n_microbatches must be": schedule_1f1b(0),
    "1F1B needs one stage per rank": schedule_1f1b(2, n_stages=2),
    "with find_unused_parameters=True": replicas_that_look_for_unused_parameters,
    "This backward was finished": finish_twice,
    "which torch": lambda: compat._private("torch._C", "_no_such_name", "a test asks for it"),
}


def test_the_table_and_the_causes_are_the_same_rows() -> None:
    """Rule 19: every error a user can cause is in the table, and every row of the table can be caused."""
    assert set(rows()) == set(CAUSES)


@pytest.mark.parametrize("says", CAUSES)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_mistake_says_what_the_table_says(one_rank: Any, says: str) -> None:
    """Rules 4, 8, 10, 11, 15 and 19: the error has the documented class and sentence."""
    with pytest.raises(Exception, match=re.escape(says)) as caught:
        CAUSES[says]()
    assert type(caught.value).__name__ == rows()[says]
