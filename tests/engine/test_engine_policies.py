"""Policies as values: what each keeps, what they count and for how long, and how they are combined, printed, copied."""

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import regrow
from regrow import policies
from regrow._core import families

pytestmark = pytest.mark.only("hooks", because="the other engine takes no policy")

aten = torch.ops.aten
MM, BMM, ADDMM = aten.mm.default, aten.bmm.default, aten.addmm.default
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
DROPOUT = aten.native_dropout.default
WATCHED = {MM, BMM, ADDMM, aten.baddbmm.default, aten._grouped_mm.default, SDPA, DROPOUT, aten.rand_like.default}


class Operators(TorchDispatchMode):
    """Counts operators, and notes the shapes that products give."""

    def __init__(self):
        super().__init__()
        self.seen, self.shapes = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen[func] += 1
        if func is MM:
            self.shapes.append(tuple(out.shape))
        return out


def operators_of(run):
    with Operators() as operators:
        run()
    return operators.seen


def again(call, function, *inputs):
    """The operators that backward runs beyond those of the plain backward, of those that policies are about."""
    plain = operators_of(function(*inputs).sum().backward)
    ours = operators_of(call(function, *inputs).sum().backward)
    return {op: n for op, n in (ours - plain).items() if op in WATCHED}


def whole(engine, **options):
    """The checkpoint that runs its function to the end again."""
    return partial(engine.checkpoint, early_stop=False, **options)


def matrices(n=2):
    return [torch.randn(4, 4, requires_grad=True) for _ in range(n)]


def chain(n):
    """A function of n products."""

    def run(x, w):
        for _ in range(n):
            x = torch.tanh(x @ w)
        return x

    return run


def block(x, w):
    """A little of everything: mm, addmm, attention, dropout, a draw, bmm."""
    h = torch.addmm(x, (x @ w).sin(), w).exp()
    h = F.scaled_dot_product_attention(h[None, None], x[None, None], w[None, None])[0]
    h = torch.native_dropout(h.sin(), 0.4, True)[0] * torch.rand_like(h)
    return torch.bmm(h, w[None]).cos()


ALL = {MM: 1, ADDMM: 1, SDPA: 1, DROPOUT: 1, aten.rand_like.default: 1, BMM: 1}
PRODUCTS, DRAWS = (MM, ADDMM, BMM), (DROPOUT, aten.rand_like.default)
# What each keeps of the block.
KEEPS = {
    policies.keep(MM): (MM,),
    policies.keep(BMM, DROPOUT): (BMM, DROPOUT),
    policies.keep_matmuls(): PRODUCTS,
    policies.keep_matmuls(every=2): (MM, BMM),
    policies.keep_matmuls(every=3): (MM,),
    policies.keep_attention(): (SDPA,),
    policies.keep_random(): DRAWS,
    policies.keep_matmuls() | policies.keep_attention(): (*PRODUCTS, SDPA),
    policies.keep_matmuls() & policies.keep(MM, SDPA): (MM,),
    policies.keep_matmuls() & ~policies.keep(MM): (ADDMM, BMM),
    ~policies.keep_matmuls(): (SDPA, *DRAWS),
    ~~policies.keep_random(): DRAWS,
    policies.keep(MM) | policies.keep_matmuls(every=2): (MM, BMM),
    policies.keep(MM, ADDMM) & policies.keep_matmuls(every=2): (MM,),
    policies.keep(ADDMM, BMM) & policies.keep_matmuls(every=2): (BMM,),
    ~policies.keep_matmuls(every=2) & policies.keep_matmuls(): (ADDMM,),
}


@pytest.mark.parametrize("policy", KEEPS, ids=repr)
def test_what_a_policy_keeps_does_not_run_again(engine, policy):
    """Rule 16: counted around backward; everything else runs once more."""
    call = whole(engine, policy_fn=policy)
    assert again(call, block, *matrices()) == {op: n for op, n in ALL.items() if op not in KEEPS[policy]}


@pytest.mark.parametrize("policy", KEEPS, ids=repr)
def test_contexts_of_a_policy_keep_the_same(engine, policy):
    """Rule 16: ``context_fn=policy.context_fn`` is ``policy_fn=policy``."""
    call = whole(engine, context_fn=policy.context_fn)
    assert again(call, block, *matrices()) == {op: n for op, n in ALL.items() if op not in KEEPS[policy]}


REGIONS = {
    "block": block,
    "products": chain(5),
    "dropout that writes": lambda x, w: F.dropout(F.dropout(x @ w, 0.3) @ w, 0.3).sin(),
    "attention that is written out": lambda x, w: F.scaled_dot_product_attention(
        (x @ w)[None], x[None], w[None], dropout_p=0.3
    ).sin(),
    "products that are overwritten": lambda x, w: ((x @ w).mul_(2).relu_() @ w).add_(1).sin(),
    "layers": lambda x, w: F.layer_norm(F.linear(x, w, w[0]).relu(), (4,)) @ F.rrelu(w, training=True),
}


@pytest.mark.parametrize("policy", KEEPS, ids=repr)
@pytest.mark.parametrize("region", REGIONS)
def test_gradients_with_any_policy(same_grads, region, policy):
    """Rules 1 and 16: values, gradients of two backwards and the caller's random numbers are the plain call's."""

    def program(call):
        x, w = matrices()
        out = call(REGIONS[region], x, w)
        between = torch.rand(2)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        return out.detach(), x.grad, w.grad, between, torch.rand(2)

    same_grads(program, policy_fn=policy)


@pytest.mark.parametrize("policy", KEEPS, ids=repr)
def test_gradients_with_a_policy_around_a_region(same_grads, policy):
    """Rules 1 and 16: what a SAVE region ran in forward is in no replay, and is counted in forward only."""

    def program(call):
        x, w = matrices()
        out = call(lambda x, w: chain(2)(regrow.save_region(chain(3), chain(1)(x, w), w), w), x, w)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        return out.detach(), x.grad, w.grad

    same_grads(program, policy_fn=policy)


def growing(x):
    """Products whose results have 1, 2, 3, 4, 5 columns."""
    for columns in range(1, 6):
        x = torch.tanh(x @ torch.ones(x.shape[1], columns))
    return x


@pytest.mark.parametrize("policy_of", [policies.keep_matmuls, partial(policies.keep, MM)], ids=["matmuls", "operators"])
@pytest.mark.parametrize(
    ("every", "run_again"), [(1, []), (2, [2, 4]), (3, [2, 3, 5]), (4, [2, 3, 4]), (9, [2, 3, 4, 5])]
)
def test_the_first_is_kept_and_then_every_nth(engine, policy_of, every, run_again):
    """Rule 16: told by the shapes of the products that backward makes before its own."""
    out = engine.checkpoint(growing, torch.ones(3, 2, requires_grad=True), policy_fn=policy_of(every=every))
    with Operators() as operators:
        out.sum().backward()
    assert operators.shapes[: len(run_again)] == [(3, columns) for columns in run_again]
    assert len(operators.shapes) == len(run_again) + 5  # backward's own: the constants need no gradient


def test_each_call_counts_for_itself(engine):
    """Rule 16: three products, one of which runs again, however many calls came before."""
    policy = policies.keep_matmuls(every=2)
    x, w = matrices()
    call = whole(engine, policy_fn=policy)
    assert [again(call, chain(3), x, w) for _ in range(3)] == [{MM: 1}] * 3
    both = call(chain(3), call(chain(3), x, w), w)
    assert operators_of(both.sum().backward)[MM] == 2 + 12


def test_a_call_inside_a_call_counts_for_itself(engine):
    """Rules 15 and 16: outer sees five products and keeps three, inner three and keeps two, in forward and replay."""
    policy = policies.keep_matmuls(every=2)
    x, w = matrices()
    call = whole(engine, policy_fn=policy)

    def outer(x, w):
        return chain(1)(call(chain(3), chain(1)(x, w), w), w)

    out = call(outer, x, w).sum()
    # Backward's own 10; the replay of outer runs numbers 2 and 4; that of inner runs its number 2.
    assert operators_of(out.backward)[MM] == 10 + 2 + 1


def test_calls_of_two_threads_at_once_count_for_themselves(engine):
    """Rule 16: forwards that take turns at every product, and one backward of each."""
    policy, barrier, ran = policies.keep_matmuls(every=2), threading.Barrier(2), []

    def body():
        def region(x, w):
            for _ in range(3):
                if not regrow.is_recomputing():
                    barrier.wait(60)
                x = torch.tanh(x @ w)
            return x

        out = whole(engine, policy_fn=policy)(region, *matrices()).sum()
        ran.append(operators_of(out.backward)[MM])

    threads = [threading.Thread(target=body, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ran == [6 + 1, 6 + 1]


def test_two_backwards_run_the_same_again(engine):
    """Rule 16: the second replay reads what the first did, and asks nobody."""
    out = whole(engine, policy_fn=policies.keep_matmuls(every=2))(chain(3), *matrices()).sum()
    assert operators_of(lambda: out.backward(retain_graph=True))[MM] == 7
    assert operators_of(out.backward)[MM] == 7


def test_one_pair_of_contexts_counts_anew_for_every_call(engine):
    """Rule 16: also where a caller gives the same pair twice."""
    pair = policies.keep_matmuls(every=2).context_fn()
    call = whole(engine, context_fn=lambda: pair)
    assert [again(call, chain(3), *matrices()) for _ in range(2)] == [{MM: 1}] * 2


def test_prefire_dx_and_dw_with_a_policy(engine, same):
    """Rules 9 and 16: the prefire runs what is not kept, the two passes run nothing again."""
    x, w = matrices()
    plain = chain(3)(x, w).sum()
    want = torch.autograd.grad(plain, [x, w])
    with regrow.recompute_handle_collector_ctx() as handles:
        out = whole(engine, policy_fn=policies.keep_matmuls(every=2))(chain(3), x, w).sum()
    got = []
    prefire = operators_of(lambda: regrow.recompute_handle(handles[0], "session"))
    with regrow.recompute_session_ctx("session", retain_on_unpack=True):
        dx = operators_of(lambda: got.extend(torch.autograd.grad(out, x, retain_graph=True)))
    with regrow.recompute_session_ctx("session", retain_on_unpack=False):
        dw = operators_of(lambda: got.extend(torch.autograd.grad(out, w)))
    regrow.clear_recompute_session("session")
    same(got, list(want))
    assert (prefire[MM], dx[MM], dw[MM]) == (1, 3, 3 + 2)  # dw passes through two products on its way to the first


def test_kept_dropout_and_what_is_drawn_after_it(engine):
    """Rule 16: the kept mask is forward's, and the next numbers of the replay are forward's next."""
    drawn = []

    def region(x):
        y = torch.native_dropout(x, 0.5, True)[0].exp()
        drawn.append(torch.rand(3))
        return (y * drawn[-1].sum()).sin()

    (x,) = matrices(1)
    out = whole(engine, policy_fn=policies.keep_random())(region, x)
    torch.rand(100)
    mask = out.detach() != (drawn[0].sum()).sin()
    seen = operators_of(out.sum().backward)
    assert seen[DROPOUT] == seen[aten.rand.default] == 0
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(x.grad != 0, mask)


def test_what_random_operators_draw_beside_kept_ones(engine):
    """Rules 3 and 16: the mask of a dropout that writes is drawn again, between two draws that are kept."""
    drawn = []

    def region(x):
        drawn.append([torch.rand(2), F.dropout(x, 0.5), torch.rand(2), torch.empty(2).uniform_()])
        return (drawn[-1][1].exp() * drawn[-1][0].sum()).sin()

    (x,) = matrices(1)
    out = whole(engine, policy_fn=policies.keep_random())(region, x)
    torch.rand(100)
    seen = operators_of(out.sum().backward)
    assert (seen[aten.rand.default], seen[aten.bernoulli_.float], seen[aten.uniform_.default]) == (0, 1, 1)
    assert all(map(torch.equal, *drawn))


def test_kept_draws_need_no_preserved_random_numbers(engine, same):
    """Rule 16: ``preserve_rng_state=False`` is right where every draw returns new tensors and is kept."""
    (x,) = matrices(1)
    masks = []

    def region(t):
        y, mask = torch.native_dropout(t.sin(), 0.5, True)
        masks.append(mask)
        return y.exp()

    out = engine.checkpoint(region, x, policy_fn=policies.keep_random(), preserve_rng_state=False)
    torch.rand(7)
    (got,) = torch.autograd.grad(out.sum(), x)
    (want,) = torch.autograd.grad((x.sin() * masks[0] * 2).exp().sum(), x)
    same(got, want)


ATTENTION = [
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
]
PRODUCTS_OF_TORCH = ["mm", "bmm", "addmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"]


def test_attention_on_every_device():
    """Rule 16: the operators of other devices, and the higher order one, are asked by themselves."""
    operators = [getattr(aten, name).default for name in ATTENTION if hasattr(aten, name)]
    operators.append(torch.ops.higher_order.flex_attention)
    assert len(operators) > 5
    assert {policies.keep_attention()(None, op) for op in operators} == {CheckpointPolicy.MUST_SAVE}
    assert {policies.keep_matmuls()(None, op) for op in operators} == {CheckpointPolicy.PREFER_RECOMPUTE}


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention", "_flash_attention_forward"])
def test_attention_is_random_where_it_has_dropout(name):
    """Rule 16: by position, by name and by default."""
    operator = getattr(aten, name).default
    names = [argument.name for argument in operator._schema.arguments]
    before = [None] * names.index("dropout_p")

    def kept(*args, **kwargs):
        return policies.keep_random()(None, operator, *args, **kwargs) is CheckpointPolicy.MUST_SAVE

    assert (kept(*before, 0.3), kept(*before, dropout_p=0.3)) == (True, True)
    assert (kept(*before, 0.0), kept(*before, dropout_p=0.0), kept(*before)) == (False, False, False)


def test_products_of_every_kind():
    """Rule 16: each overload of each product; attention and additions are none."""
    operators = [
        getattr(getattr(aten, name), overload)
        for name in PRODUCTS_OF_TORCH
        if hasattr(aten, name)
        for overload in getattr(aten, name).overloads()
    ]
    assert len(operators) > 6
    assert {policies.keep_matmuls()(None, op) for op in operators} == {CheckpointPolicy.MUST_SAVE}
    assert policies.keep_matmuls()(None, aten.add.Tensor) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="names of torch 2.13")
def test_every_name_of_a_family_is_an_operator():
    """Rule 16: a name that is misspelt would keep nothing, and say nothing."""
    import torch.nn.attention.varlen  # noqa: F401 - registers its operator

    names = families._MATMULS | families._ATTENTION
    assert [name for name in names if families.operator_at(name) is None] == []


def test_grouped_products_are_kept(engine):
    """Rule 16: on the operator itself."""
    x, w = matrices()
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2, 16, 16, dtype=torch.bfloat16, requires_grad=True)

    def region(x, w):
        return F.grouped_mm(x, w, offs=offsets).sin()

    assert again(whole(engine), region, x, w) == {aten._grouped_mm.default: 1}
    assert again(whole(engine, policy_fn=policies.keep_matmuls()), region, x, w) == {}


def test_a_higher_order_operator_is_kept(same_grads):
    """Rule 16: ``keep`` takes it as it takes an overload, and the body does not run in the replay."""

    def program(call):
        x, w = matrices()
        bodies.clear()
        out = call(lambda a, b: (product(a, b).sin() @ b).exp(), x, w)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        return x.grad, w.grad, list(bodies)

    policy = policies.keep(product)
    assert same_grads(program, policy_fn=policy)[2] == ["ran"]
    assert repr(policy) == "keep(higher_order.regrow_test_product)"
    assert pickle.loads(pickle.dumps(policy)) == policy


bodies = []


class Product(HigherOrderOperator):
    """A higher order operator that modes see in eager mode with gradients, as flex_attention on devices is."""

    def __init__(self):
        super().__init__("regrow_test_product")

    def __call__(self, a, b):
        return super().__call__(a, b)


class ProductFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        with torch._C._AutoDispatchBelowAutograd():
            return product(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.t(), a.t() @ grad


product = Product()
product.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda a, b: (bodies.append("ran"), a @ b)[1])
product.py_impl(torch._C.DispatchKey.Autograd)(ProductFunction.apply)


def pair_of_rows(ctx, op, *args, **kwargs):
    return op is MM and ctx.op_output.shape[0] == 2


def test_a_function_of_the_users_is_told_what_torch_tells_and_combines(engine):
    """Rule 16: context, operator and arguments; a bool or an enum; once in forward."""
    x, w = torch.randn(2, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def region(x, w):
        return torch.tanh(x @ w) @ torch.tanh(w @ w)

    for answer in (bool, lambda kept: CheckpointPolicy.PREFER_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE):
        asked = []

        def function(ctx, op, *args, answer=answer, asked=asked, **kwargs):
            asked.append((ctx.is_recompute, len(args)))
            return answer(pair_of_rows(ctx, op, *args, **kwargs))

        policy = policies.keep_where(function)
        assert again(whole(engine, policy_fn=policy), region, x, w) == {MM: 1}
        assert (False, 2) in asked
        assert {recompute for recompute, _ in asked} == {False}
        assert again(whole(engine, policy_fn=~policy), region, x, w) == {MM: 2}


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD, None, 1])
def test_an_answer_that_cannot_be_honoured_is_refused_in_a_combination(engine, answer):
    """Rule 19: torch ignores an offload in eager mode; here it is an error that says what to do."""
    policy = policies.keep_matmuls() | policies.keep_where(lambda *_, **__: answer)
    with pytest.raises(ValueError, match=r"policy_fn returned .* for aten\.mm\.default.*save_on_cpu"):
        engine.checkpoint(chain(1), *matrices(), policy_fn=policy)


def test_kept_results_lie_where_surrounding_hooks_put_them(same_grads):
    """Rule 16: what the refusal of an offload advises: hooks around the call get what the policy keeps."""
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def program(call):
        packed.clear()
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = call(lambda a, b: (a @ b).sin().exp(), x, w)
        out.sum().backward()
        return x.grad, w.grad

    same_grads(program, policy_fn=policies.keep_matmuls())
    assert packed == [(3, 4), (4, 5), (3, 5)]


WORDS = {
    "keep(aten.mm.default)": policies.keep(MM),
    "keep(aten.bmm.default, aten.mm.default, every=3)": policies.keep(MM, BMM, MM, every=3),
    "keep(higher_order.flex_attention)": policies.keep(torch.ops.higher_order.flex_attention),
    "keep_matmuls()": policies.keep_matmuls(every=1),
    "keep_matmuls(every=2)": policies.keep_matmuls(every=2),
    "keep_attention()": policies.keep_attention(),
    "keep_random()": policies.keep_random(),
    "keep_where(pair_of_rows)": policies.keep_where(pair_of_rows),
    "keep_matmuls() | keep_random() | keep_attention()": policies.keep_matmuls()
    | policies.keep_random()
    | policies.keep_attention(),
    "keep_matmuls() | (keep_random() | keep_attention())": policies.keep_matmuls()
    | (policies.keep_random() | policies.keep_attention()),
    "keep_matmuls(every=2) & ~keep(aten.mm.default)": policies.keep_matmuls(every=2) & ~policies.keep(MM),
    "(keep_matmuls() | keep_random()) & keep_random()": (policies.keep_matmuls() | policies.keep_random())
    & policies.keep_random(),
    "keep_matmuls() & (keep_random() & keep_attention())": policies.keep_matmuls()
    & (policies.keep_random() & policies.keep_attention()),
    "~(keep_matmuls() | ~keep_random())": ~(policies.keep_matmuls() | ~policies.keep_random()),
}


@pytest.mark.parametrize("words", WORDS)
def test_a_policy_says_how_it_is_made(words):
    """Rule 16: what is printed, read as Python, is an equal policy."""
    names = {**vars(policies), "aten": aten, "higher_order": torch.ops.higher_order, "pair_of_rows": pair_of_rows}
    assert repr(WORDS[words]) == words
    assert eval(words, names) == WORDS[words]


@pytest.mark.parametrize("copied", [lambda policy: pickle.loads(pickle.dumps(policy)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("words", WORDS)
def test_a_policy_is_pickled_and_copied(engine, words, copied):
    """Rule 16: the copy is equal, hashes alike, and keeps the same."""
    policy = WORDS[words]
    other = copied(policy)
    assert other == policy
    assert (hash(other), repr(other)) == (hash(policy), words)
    x, w = matrices()
    kept = [again(whole(engine, policy_fn=each), chain(3), x, w) for each in (policy, other)]
    assert kept[0] == kept[1] == again(whole(engine, context_fn=other.context_fn), chain(3), x, w)


def test_policies_are_equal_by_what_they_keep():
    """Rule 16: values: order and repetition of operators do not matter, the number does."""
    assert policies.keep(MM, BMM) == policies.keep(BMM, MM, MM)
    assert len(set(WORDS.values()) | {policies.keep_matmuls(), policies.keep(MM)}) == len(WORDS)
    assert policies.keep_matmuls() != policies.keep_matmuls(every=2)
    assert policies.keep_matmuls() != policies.keep_random()
    assert policies.keep_matmuls() - policies.keep(MM) == policies.keep_matmuls() & ~policies.keep(MM)
    with pytest.raises(AttributeError):
        policies.keep_matmuls().every = 2


def test_a_pickle_with_an_operator_that_is_not_there_says_which():
    """Rule 19: a library that registers operators may not be imported where the policy is read."""
    pickled = pickle.dumps(policies.keep(MM)).replace(b"aten.mm.default", b"aten.zz.default")
    with pytest.raises(ValueError, match=r"torch\.ops\.aten\.zz\.default, which this process does not know"):
        pickle.loads(pickled)


def test_a_wrapped_module_is_copied_and_pickled_with_its_policy(engine):
    """Rules 17 and 16: the policy travels with the module."""
    net = regrow.checkpoint_wrapper(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        policy_fn=policies.keep_matmuls(every=2),
        early_stop=False,
    )
    (x,) = matrices(1)

    def products(module):
        return operators_of(module(x).sum().backward)[ADDMM]

    assert [products(each) for each in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net)))] == [1, 1, 1]


def test_torchs_checkpoint_takes_the_contexts(same):
    """Rule 16: ``context_fn`` serves torch's own checkpoint, twice over one graph."""
    x, w = matrices()
    policy = policies.keep_matmuls(every=2)
    out = torch_checkpoint.checkpoint(chain(3), x, w, use_reentrant=False, context_fn=policy.context_fn).sum()
    got = [torch.autograd.grad(out, [x, w], retain_graph=True) for _ in range(2)]
    want = torch.autograd.grad(chain(3)(x, w).sum(), [x, w])
    same(got, [want, want])


def test_torchs_contexts_take_a_policy(engine, same):
    """Rule 16: as the function it is, or, where it counts, as the function that begins for one call."""
    x, w = matrices()
    want = torch.autograd.grad(chain(3)(x, w).sum(), [x, w])
    counting = policies.keep_matmuls(every=2)
    for policy_fn in (policies.keep_matmuls, counting.begin):
        contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, policy_fn())
        out = torch_checkpoint.checkpoint(chain(3), x, w, use_reentrant=False, context_fn=contexts).sum()
        same(torch.autograd.grad(out, [x, w]), want)


@pytest.mark.parametrize(
    "counting",
    [
        policies.keep_matmuls(every=2),
        policies.keep(MM, every=2),
        policies.keep_random() | policies.keep_matmuls(every=2),
        policies.keep(MM, every=2) & policies.keep_random(),
        ~policies.keep_matmuls(every=2),
    ],
    ids=repr,
)
def test_a_policy_that_counts_is_not_asked_outside_a_call(counting):
    """Rule 16: torch's contexts would share its count among all calls."""
    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, counting)
    with pytest.raises(ValueError, match=r"every=2.* counts the operators of one call.*context_fn=policy\.context_fn"):
        torch_checkpoint.checkpoint(chain(1), *matrices(), use_reentrant=False, context_fn=contexts)


def test_regrows_contexts_take_a_policy(engine):
    """Rule 16: ``create_selective_checkpoint_contexts(policy)`` counts for each call, too."""
    contexts = partial(regrow.create_selective_checkpoint_contexts, policies.keep_matmuls(every=2))
    call = whole(engine, context_fn=contexts)
    assert [again(call, chain(3), *matrices()) for _ in range(2)] == [{MM: 1}] * 2


@pytest.mark.parametrize("every", [0, -1, 1.0, "2", True, None, torch.tensor(2)], ids=repr)
@pytest.mark.parametrize("policy_of", [policies.keep_matmuls, partial(policies.keep, MM)])
def test_a_number_that_is_none_is_refused(policy_of, every):
    """Rule 19: name, value and what is allowed."""
    with pytest.raises(ValueError, match=r"^every must be a whole number, 1 or more, got "):
        policy_of(every=every)


@pytest.mark.parametrize("entry", [aten.mm, torch.mm, "mm", None, [MM], policies.keep(MM)], ids=repr)
def test_something_that_is_no_operator_is_refused(entry):
    """Rule 19: an entry that is no overload is named, with what would be one."""
    with pytest.raises(ValueError, match=r"^operators: .* is no OpOverload but ") as refused:
        policies.keep(MM, entry)
    assert ("mm.default" in str(refused.value).partition("but")[2]) == (entry is aten.mm)


def test_no_operator_is_refused():
    """Rule 19: a policy that keeps nothing would be a slip."""
    with pytest.raises(ValueError, match=r"^operators: keep\(\) needs at least one"):
        policies.keep()


@pytest.mark.parametrize(
    "operator",
    [aten.view.default, aten.detach.default, aten.relu_.default, aten.mm.out, aten._local_scalar_dense.default],
    ids=str,
)
def test_an_operator_that_always_runs_again_is_refused(operator):
    """Rule 19: what cannot be honoured is refused, and named alone."""
    with pytest.raises(ValueError, match=rf"^operators: {operator} cannot be kept"):
        policies.keep(MM, operator)


def test_a_function_that_cannot_be_called_is_refused():
    """Rule 19: name, value and what is allowed."""
    with pytest.raises(ValueError, match=r"^policy_fn must be a function .* got 3"):
        policies.keep_where(3)


@pytest.mark.parametrize("other", [MM, pair_of_rows, None, True])
def test_policies_combine_with_policies_only(other):
    """Rule 19: as Python says it."""
    with pytest.raises(TypeError, match="unsupported operand"):
        policies.keep_matmuls() | other
    with pytest.raises(TypeError, match="unsupported operand"):
        policies.keep_matmuls() - other
    with pytest.raises(TypeError, match="unsupported operand"):
        other & policies.keep_matmuls()


def test_a_policy_and_what_it_asks_die_with_their_last_reference(engine, gc_off):
    """Rule 12: no cycle through the contexts, also after calls and their backwards."""

    class Asked:
        def __call__(self, ctx, op, *args, **kwargs):
            return op is MM

    asked = Asked()
    dead = weakref.ref(asked)
    policy = policies.keep_where(asked) | policies.keep_matmuls(every=2)
    engine.checkpoint(chain(3), *matrices(), policy_fn=policy).sum().backward()
    engine.checkpoint(chain(3), *matrices(), context_fn=policy.context_fn).sum().backward()
    del asked, policy
    assert dead() is None
    assert not gc.isenabled()


def test_the_module_is_found_through_the_front_door(fresh_process):
    """Rule 20: ``import regrow`` alone loads no framework, the first use of ``policies`` does."""
    program = """
import sys, regrow
assert "policies" in regrow.__all__ and "policies" in dir(regrow) and "torch" not in sys.modules
print(regrow.policies.keep_matmuls(), regrow.policies is sys.modules["regrow.policies"])
from regrow import policies
assert policies is regrow.policies
"""
    assert fresh_process(program).strip() == "keep_matmuls() True"
    assert fresh_process("from regrow import policies; print(policies.keep_random())").strip() == "keep_random()"
