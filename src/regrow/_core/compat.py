"""Every private torch name, one shim each: why it is needed, and what deletes it. Must never hold behaviour of ours.

A name that is missing is found here, when regrow is first used, and named with the torch version that lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch

from regrow._core.private import ask

_OUR_HOOKS = ("regrow._engines.hooks.pack", "regrow._engines.hooks.refill", "regrow._core.regions")

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


_private = ask

# Grad mode without the object that torch.set_grad_enabled makes: it is set twice per replay.
# Deleted if that object becomes cheap.
set_grad_enabled: Callable[[bool], None] = _private("torch._C", "_set_grad_enabled", "replays record a graph")

# Which backward is running: the owner of a replay outside sessions. Deleted by a public id of the graph task.
graph_task_id: Callable[[], int] = _private("torch._C", "_current_graph_task_id", "it tells backward calls apart")

# Whether the running backward keeps its graph: then nothing else frees a value that was read.
# Deleted by a public query of retain_graph.
graph_task_keeps_graph: Callable[[], bool] = _private(
    "torch._C._autograd", "_get_current_graph_task_keep_graph", "it tells whether backward frees its graph"
)

# Runs a callable when the current graph task ends, and drops it when the task dies, on errors too.
# Deleted by a public end-of-backward callback.
at_graph_task_end: Callable[[Callable[[], None]], None] = _private(
    "torch.autograd.variable", "Variable._execution_engine.queue_callback", "it tells when a backward has ended"
)

# Saved-tensor hooks without the object around them: they are installed twice per call.
# Deleted if torch.autograd.graph.saved_tensors_hooks becomes cheap.
push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = _private(
    "torch._C._autograd", "_push_saved_tensors_default_hooks", "checkpointing lives on saved-tensor hooks"
)
pop_hooks: Callable[[], None] = _private(
    "torch._C._autograd", "_pop_saved_tensors_default_hooks", "checkpointing lives on saved-tensor hooks"
)

_top_hooks: Callable[[bool], Hooks | None] = _private(
    "torch._C._autograd", "_top_saved_tensors_default_hooks", "it finds the hooks that surround a call"
)

_make_saved_tensor: Callable[..., Any] = _private(
    "torch._C._autograd", "_make_saved_tensor", "it saves inputs through surrounding hooks"
)

# True under vmap, grad and the other torch.func transforms, which forbid saved-tensor hooks.
# Deleted by hooks that work there.
functorch_active: Callable[[], bool] = _private(
    "torch._C", "_are_functorch_transforms_active", "torch.func transforms forbid saved-tensor hooks"
)

_current_level: Callable[[], int | None] = _private(
    "torch._C._functorch", "maybe_current_level", "replays may run inside a vmapped backward"
)

# The function modes of this thread, innermost last. Deleted by a public view of the stack.
function_mode_count: Callable[[], int] = _private(
    "torch._C", "_len_torch_function_stack", "it finds function modes around a call"
)
_push_function_mode: Callable[[Any], None] = _private(
    "torch._C", "_push_on_torch_function_stack", "it re-enters function modes for a replay"
)
_pop_function_mode: Callable[[], Any] = _private(
    "torch._C", "_pop_torch_function_stack", "it re-enters function modes for a replay"
)
_function_mode_at: Callable[[int], Any] = _private(
    "torch._C", "_get_function_stack_at", "it finds function modes around a call"
)

# Who is asked what an operator does: subclasses of tensors and function modes, modes alone, or nobody.
# Deleted by public contexts and a query for all three.
asks_all: Callable[[], bool] = _private(
    "torch._C", "_is_torch_function_enabled", "replays ask whom forward asked what operators do"
)
_asks_nobody: Callable[[], bool] = _private(
    "torch._C", "_is_torch_function_all_disabled", "replays ask whom forward asked what operators do"
)
_ask_all: Any = _private("torch._C", "_EnableTorchFunction", "replays ask whom forward asked what operators do")

_Accumulator: Any = _private("torch._C", "_functions.AccumulateGrad", "a split backward ends at parameters")

# The node of a custom Function. Deleted by a public class of such nodes.
_PythonNode: Any = _private("torch.autograd.function", "BackwardCFunction", "custom Functions run once in a split")

# Whether the running backward runs a node: it tells a whole backward from a limited one, and dx from dw.
# Deleted by a public query of what a backward was asked for.
_will_run: Callable[[Any], bool] = _private(
    "torch._C", "_will_engine_execute_node", "it tells which gradients a backward was asked for"
)

_no_dispatch_modes: Any = _private(
    "torch.utils._python_dispatch", "_disable_current_modes", "copies of buffers are nobody's operators"
)
_dispatch_mode_count: Callable[[], int] = _private(
    "torch._C", "_len_torch_dispatch_stack", "copies of buffers are nobody's operators"
)

_get_dispatch_mode: Callable[[Any], Any] = _private("torch._C", "_get_dispatch_mode", "it tells whether torch traces")
_PROXY: Any = _private("torch._C", "_TorchDispatchModeKey.PROXY", "it tells whether torch traces")
_dynamo_traces = torch.compiler.is_dynamo_compiling  # the rest of what is_compiling tells, a proxy mode tells, too
# What torch.compile looks at frames with while a function of its own runs. Deleted by a public query.
compile_callback: Any = _private("torch._C._dynamo.eval_frame", "get_eval_frame_callback", "it tells what is compiled")

_ExcludeKey: Any = _private("torch._C", "_SetExcludeDispatchKeyGuard", "kept values share their version counter")
_VIEW_KEY: Any = _private("torch._C", "DispatchKey.ADInplaceOrView", "kept values share their version counter")

# Containers that torch and its users registered, so that tensors inside them are found.
# Deleted by a public torch.utils.pytree.
_pytree_nodes: dict[Any, Any] = _private("torch.utils._pytree", "SUPPORTED_NODES", "it finds tensors in containers")

# What an operator in a selective policy can be. Deleted by a public name of either class.
OpOverload: Any = _private("torch._ops", "OpOverload", "selective policies name operators")
HigherOrderOperator: Any = _private("torch._ops", "HigherOrderOperator", "selective policies name operators")

# A tensor subclass that has a shape and no memory. Deleted by a public constructor of such tensors.
tensor_without_storage: Callable[..., Any] = _private(
    "torch", "Tensor._make_wrapper_subclass", "it stands for what a SAVE region did not keep"
)

# Torch's own selective contexts, which count the operators of both runs and cannot go around one.
# Deleted by a public class of them.
TorchSelectiveMode: Any = _private(
    "torch.utils.checkpoint", "_CachingTorchDispatchMode", "SAVE regions do not mix with torch's selective contexts"
)

# Torch 2.14's selective contexts search the hooks in force for those of a user, and take for such what is not marked as
# a checkpoint's own. None before 2.14, where they search for none. Deleted by a public mark.
_searched: Callable[[], Hooks | None] | None = getattr(
    torch.utils.checkpoint, "_current_user_saved_tensors_hooks", None
)
hooks_are_searched = _searched is not None

# Which symbolic length belongs to the offsets of a jagged tensor. Deleted by a public way to share the length.
_ragged_sizes: Any = _private(
    "torch.nested._internal.nested_tensor", "_tensor_symint_registry", "regrown jagged tensors take forward's length"
)


ALL, MODES, NOBODY = "all", "modes", "nobody"


def asked() -> str:
    """Who is asked what an operator does."""
    if asks_all():
        return ALL
    return NOBODY if _asks_nobody() else MODES


@contextmanager
def asking(whom: str) -> Iterator[None]:
    """Ask these inside."""
    with _ask_all():
        if whom == ALL:
            yield
        else:
            with torch._C.DisableTorchFunctionSubclass() if whom == MODES else torch._C.DisableTorchFunction():
                yield


def is_wanted(node: Any) -> bool:
    """Whether the running backward was asked for what lies at or behind a node."""
    try:
        return _will_run(node)
    except RuntimeError:  # a leaf whose gradient is captured, by torch.autograd.grad
        return True


def inside_autocast() -> bool:
    """Whether an autocast context is open, enabled or not, so that the cache of cast weights is in use.

    Deleted by a public query of the depth.
    """
    deeper: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return deeper > 1


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """No dispatch mode sees what is done inside. Nothing is entered where there is none, as nearly always.

    Deleted by a public way to hide an operator from modes.
    """
    return _no_dispatch_modes() if _dispatch_mode_count() else nullcontext()


def surrounding_hooks() -> Hooks | None:
    """The innermost saved-tensor hooks of this thread. Deleted by a public getter."""
    return _top_hooks(True)


def user_hooks() -> Hooks | None:
    """The innermost saved-tensor hooks, unless they are those of a checkpoint, ours or torch's."""
    hooks = surrounding_hooks()
    if hooks is None or getattr(hooks[0], "__module__", "") in ("torch.utils.checkpoint", *_OUR_HOOKS):
        return None
    return hooks


def user_hooks_below() -> Hooks | None:
    """As `user_hooks`, of the hooks under the innermost ones."""
    top = surrounding_hooks()
    if top is None:
        return None
    pop_hooks()
    try:
        return user_hooks()
    finally:
        push_hooks(*top)


def mark_hooks(pack: Any, *, forward: bool) -> None:
    """Mark a hook of ours, before it is pushed. In a forward the search goes on to the hooks around it."""
    own = getattr(pack, "__func__", pack)  # a method takes no attributes
    own._user_hooks = _searched() if forward and _searched is not None else None
    own._checkpoint_internal = True


def unmark_hooks(pack: Any) -> None:
    """After a forward: a graph may hold the hook, and must not hold the user's by it."""
    pack._user_hooks = None


def save_tensor(tensor: torch.Tensor) -> tuple[Any, Any]:
    """A saved tensor as an autograd node would hold it, through the surrounding hooks, and what these made of it.

    ``.unpack()`` of the first gives the tensor back. Deleted by a public way to save a tensor outside a node.
    """
    hooks = surrounding_hooks()
    assert hooks is not None
    pack, unpack = hooks
    packed: list[Any] = []

    def seen(tensor: torch.Tensor) -> Any:
        packed.append(pack(tensor))
        return packed[0]

    push_hooks(seen, unpack)
    try:
        return _make_saved_tensor(tensor, is_output=False), packed[0]
    finally:
        pop_hooks()


def is_python_function(node: Any) -> bool:
    """Whether a node is a custom Function's, which computes all its gradients whenever it runs.

    Deleted by a public class of such nodes.
    """
    return isinstance(node, _PythonNode)


def sequence_number(node: Any) -> int:
    """When a node was made, among those of its thread: a smaller number than another graph's is none of its nodes.

    Deleted by a public way to tell where a graph begins.
    """
    number: int = node._sequence_nr()
    return number


def is_accumulator(node: Any) -> bool:
    """Whether a node is where a leaf's gradient is accumulated. Deleted by a public class of such nodes."""
    return isinstance(node, _Accumulator)


def variable_of(accumulator: Any) -> torch.Tensor:
    """The leaf that a node accumulates into. Deleted by a public attribute in torch's own types."""
    leaf: torch.Tensor = accumulator.variable
    return leaf


def tracing() -> bool:
    """True while dynamo, export or AOTAutograd traces: a graph is recorded, nothing is executed for good."""
    return _dynamo_traces() or _get_dispatch_mode(_PROXY) is not None


def transform_level() -> int:
    """How deep torch.func transforms are nested on this thread. Deleted with `functorch_active`."""
    return _current_level() or 0


def function_modes() -> tuple[Any, ...]:
    """The function modes of this thread, outermost first."""
    return tuple(_function_mode_at(depth) for depth in range(function_mode_count()))


def swap_function_modes(depth: int, modes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace what lies above ``depth`` on this thread's stack of function modes; return what lay there."""
    above = tuple(_pop_function_mode() for _ in range(function_mode_count() - depth))[::-1]
    for mode in modes:
        _push_function_mode(mode)
    return above


def container_node(kind: type) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """How to take a registered container apart and put it together; None for what is no container."""
    node = _pytree_nodes.get(kind)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias that shares the version counter also inside a dispatch mode, where ``detach`` alone does not.

    Deleted by a version counter that detach always shares.
    """
    with _ExcludeKey(_VIEW_KEY, False):
        return tensor.detach()


def storage_key(tensor: torch.Tensor) -> int | None:
    """What is equal for tensors that share memory; None where a tensor has no storage of its own.

    Deleted by a public identity of storages.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether somebody took a tensor's memory away for a while, as FSDP does with whole parameters.

    Deleted by a public query of what is sharded.
    """
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0 and not tensor.is_meta
    except (NotImplementedError, RuntimeError):
        return False


NO_VERSION = -1


def version_of(tensor: torch.Tensor) -> int:
    """The counter of in-place changes; NO_VERSION for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return NO_VERSION


_read_version = attrgetter("_version")  # in one call for all: it is asked twice per call


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """`version_of` for each."""
    try:
        return list(map(_read_version, tensors))
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


def takes_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient goes on from a tensor. A view made under ``no_grad`` says that it needs one, and takes none.

    Deleted by a view that says so.
    """
    return tensor.grad_fn is not None or (tensor.requires_grad and not tensor._is_view())


def is_ragged(size: object) -> bool:
    """Whether a size is the symbolic length of a jagged tensor. Deleted by a public query."""
    return isinstance(size, torch.SymInt) and bool(size.node.is_nested_int())


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are the same. A jagged length is a new symbol at every construction, so any two match."""
    return len(one) == len(other) and all(
        (is_ragged(a) and is_ragged(b)) or bool(a == b) for a, b in zip(one, other, strict=True)
    )


def with_ragged_size(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A detached alias of a jagged tensor with the symbolic length that ``shape`` has.

    Every construction of a jagged tensor makes a new symbol, and tensors with different symbols do not mix.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name).detach() for name in names}
    source = inner.get("_lengths", inner["_offsets"])
    _ragged_sizes[source] = next(size for size in shape if is_ragged(size))
    kind: Any = type(tensor)
    renamed: torch.Tensor = kind.__tensor_unflatten__(inner, context, shape, tensor.stride())
    return renamed
