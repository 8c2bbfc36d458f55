"""Tests of collectives in graphs: values, order, gradients, and what is refused."""

import numpy as np
import pytest
from compilers import NAME, MergeOptimizer, MissingInputError, OpFromGraph, compiler, ifelse, scan, tt

import synkhronos as synk
from synkhronos.arithmetic.operations import OPERATIONS

ops = synk.ops
INTEGERS = [kind + bits for kind in ("int", "uint") for bits in ("8", "16", "32", "64")]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
ROWS = np.random.RandomState(0).normal(size=(7, 3))
LARGE = 5000  # items, more than what is sent along with the exchange


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} rank(s)".format)
def size(open_world, request):
    open_world(request.param, master_rank=request.param // 2)
    return request.param


@pytest.fixture
def two(open_world):
    """Two ranks; a world that is there already is used again."""
    if not synk.is_forked() or synk.size() != 2:
        open_world(2)


def matrix(dtype="float64"):
    return tt.matrix("x", dtype=dtype)


def on_all_ranks(variable):
    """Return an output that has the value of each rank."""
    return variable.dimshuffle("x", *range(variable.ndim)), "gather"


def build(inputs, outputs, **kwargs):
    kwargs.setdefault("mode", compiler.compile.get_mode("FAST_COMPILE"))
    return synk.function(inputs, outputs, **kwargs)


def values_of(dtype, shape):
    values = np.random.RandomState(1).normal(size=shape) * 2
    if dtype.startswith("uint"):
        values = abs(values)
    return (values > 0) if dtype == "bool" else values.astype(dtype)


CASES = [
    (op, dtype) for op, each in OPERATIONS.items() for dtype in DTYPES if each.is_defined_for(dtype)
]


@pytest.fixture(scope="module")
def functions(size):
    """By dtype, functions with all collectives and operations; the ranks' last rows are reduced."""
    made = {}
    for dtype in DTYPES:
        x, reductions = matrix(dtype), [op for op, one in CASES if one == dtype]
        variables = [ops.all_reduce(x[-1], op) for op in reductions]
        variables += [ops.all_gather(x), ops.broadcast(x[:1])]
        made[dtype] = reductions, build([x], [on_all_ranks(one) for one in variables])
    return made


@pytest.mark.parametrize("width", [3, LARGE])
def test_reductions_are_those_of_numpy_for_every_operation_and_dtype(size, width, functions):
    for dtype, (chosen, f) in functions.items():
        rows = values_of(dtype, (4 * size - 1, width))
        tolerance = (5e-3, 5e-3) if dtype == "float16" else (1e-5, 1e-5)
        shares = np.array_split(rows, size)
        lasts, weights = [share[-1] for share in shares], [len(share) for share in shares]
        for op, result in zip(chosen, f(rows)):
            expected = OPERATIONS[op].reduce(lasts, weights)
            assert result.shape == (size, width) and result.dtype == expected.dtype
            for one in result:
                np.testing.assert_allclose(one, expected, *tolerance)
                np.testing.assert_array_equal(one, result[0])


@pytest.mark.parametrize("width", [3, LARGE])
def test_rows_are_gathered_and_the_masters_value_is_broadcast(size, width, functions):
    for dtype, (chosen, f) in functions.items():
        rows = values_of(dtype, (4 * size - 1, width))
        of_all, of_master = f(rows, output_subset=[len(chosen), len(chosen) + 1])
        first = np.array_split(rows, size)[size // 2][:1]
        for result, expected in ((of_all, rows), (of_master, first)):
            assert result.shape == (size, *expected.shape) and result.dtype == dtype
            for one in result:
                np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("width", [3, LARGE])
def test_averages_of_finite_numbers_and_their_gradients_are_finite(size, width):
    largest, x = np.finfo("float32").max, matrix("float32")
    average, ones = ops.all_reduce(x[0], "avg"), tt.ones_like(x[0])
    slopes = tt.grad((ops.all_reduce(ones, "avg", loss_op="sum") * x[0]).sum(), ones)
    f = build([x], [on_all_ranks(average), on_all_ranks(slopes)])
    for n_rows in (4 * size, 4 * size - 1):
        # Of unequal shares, some slopes are larger than the rows.
        rows = np.full((n_rows, width), largest if n_rows == 4 * size else largest / 2, "float32")
        averages, slopes = f(rows)
        np.testing.assert_allclose(averages, rows[:size])
        shares = [len(share) * size / n_rows for share in np.array_split(rows, size)]
        if n_rows == 4 * size:
            np.testing.assert_allclose(slopes, np.outer(shares, rows[0]))


MODES = {
    "FAST_COMPILE": "FAST_COMPILE",
    "Python, all optimizations": compiler.Mode("py", "fast_run"),
    "virtual machine": compiler.Mode("vm", "fast_run"),
    "virtual machine, no optimization": compiler.Mode("vm", None),
    "an optimizer of the script": compiler.Mode("vm", MergeOptimizer()),
    "FAST_RUN": "FAST_RUN",
}
if NAME == "theano":
    from theano.compile.nanguardmode import NanGuardMode

    MODES["C and Python"] = compiler.Mode("c|py", "fast_run")
    MODES["NanGuardMode"] = NanGuardMode(True, True, False)
    MODES["DebugMode"] = "DebugMode"


def independent(x, w):
    """Return independent collectives of different shapes; some occur twice, some are not needed."""
    ops.all_reduce(x.sum(1))
    large = ops.all_reduce(tt.tile(x.sum(0), LARGE))
    centred = x - ops.all_reduce(tt.exp(x).mean(0) * w, "avg")
    loss = tt.sqr(centred).mean()
    return [
        ops.all_reduce(x.sum(0)) * 2,
        ops.all_reduce(x.sum(0)) * 3,
        ops.all_reduce(x.sum()),
        ops.all_gather(x[:, 0]),
        ops.all_gather(x).shape[1],
        ops.all_reduce(x.max(1).max(), "max"),
        tt.set_subtensor(large[1:], 0.0),
        ops.broadcast(w.sum()),
        tt.grad(loss, w),
    ]


OTHER_NUMBERS = [pytest.param(number, marks=pytest.mark.slow) for number in (1, 3, 4)]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("number", [2, *OTHER_NUMBERS], ids="{} rank(s)".format)
def test_all_ranks_keep_one_order_in_every_mode(open_world, number, mode):
    """The workers get these functions as pickles, which DebugMode compiles anew."""
    if not synk.is_forked() or synk.size() != number:
        open_world(number)
    x, w = matrix(), compiler.shared(np.arange(1.0, 4.0), name="w")
    outputs = independent(x, w)
    new = w + 1e-3 * ops.all_reduce(x.sum(0))
    built = [(one, None) for one in outputs[:-1]] + [outputs[-1]]
    f = synk.function([x], built, updates=[(w, new)], mode=mode)
    expected = compiler.function([x], [*outputs, new], mode="FAST_COMPILE")(ROWS)
    for result, one in zip(f(ROWS), expected):
        np.testing.assert_allclose(result, one, rtol=1e-9)
    assert synk.in_sync(w)
    np.testing.assert_allclose(w.get_value(), expected[-1])


def collectives_in(f):
    nodes = f.maker.fgraph.toposort()
    return [node for node in nodes if type(node.op).__name__ in ("AllReduce", "AllGather", "Broadcast")]


def test_equal_collectives_are_merged_and_unused_ones_removed(two):
    x, w = matrix(), compiler.shared(np.ones(3), name="w")
    f = build([x], [(one, None) for one in independent(x, w)[:6]], mode=compiler.Mode("vm", "fast_run"))
    nodes = collectives_in(f)
    assert len(nodes) == 4  # a sum of rows, a sum of all, the gathered column, and a maximum
    assert [node.op.number for node in nodes] == [0, 1, 2, 3]
    for one, following in zip(nodes, nodes[1:]):
        assert following.inputs[0] is one.outputs[0]


def test_a_subset_of_the_outputs_and_condition_are_computed_together(two):
    x, flag = matrix(), tt.dscalar("flag")
    total = ops.all_reduce(x.sum())
    chosen = ifelse(tt.gt(total * flag, 0), ops.all_reduce(x.max(), "max"), total)
    outputs = [total, chosen, ops.all_reduce(x.max(), "max")]
    f = build([x], outputs, bcast_inputs=[flag], mode=compiler.Mode("vm", "fast_run"))
    for sign, expected in ((1, ROWS.max()), (-1, ROWS.sum())):
        np.testing.assert_allclose(f(ROWS, sign, output_subset=[1]), [expected])
        np.testing.assert_allclose(f(ROWS, sign)[1:], [expected, ROWS.max()])


def test_collectives_that_ranks_may_not_reach_together_are_refused(two):
    x, flag, row = matrix(), tt.dscalar("flag"), tt.dvector("row")
    scanned = scan(lambda one: ops.all_reduce(one), sequences=[x])
    branch = ifelse(flag > 0, ops.all_reduce(x.sum()), x.sum())
    for output, error, message in [
        (scanned.sum(), TypeError, "inside scan or OpFromGraph.*use collectives outside"),
        (branch, ValueError, "one branch of an ifelse only.*use (theano|pytensor).tensor.switch"),
    ]:
        with pytest.raises(error, match=message):
            build([x], output, bcast_inputs=[flag], on_unused_input="ignore")
    own = "depends on shared variable alone"  # of PyTensor 3.3
    with pytest.raises((TypeError, MissingInputError), match=f"inside scan or OpFromGraph|{own}"):
        build([x], OpFromGraph([row], [ops.all_reduce(row)])(x.sum(0)).sum())
    w = compiler.shared(np.ones(3))
    scanned = scan(lambda one: ops.all_reduce(one * w), sequences=[x])
    with pytest.raises((AttributeError, TypeError), match="a collective is inside scan"):
        build([x], tt.grad(scanned.sum(), w))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: ops.all_reduce(x, "mean"), ValueError, "all_reduce: op: expected one of"),
        (lambda x: ops.all_reduce(x, "avg"), TypeError, "'avg' of all_reduce of x: not defined for"),
        (lambda x: ops.all_reduce("x"), TypeError, "all_reduce: expected a tensor, got 'x'"),
        (lambda x: ops.all_gather(x, loss_op="max"), ValueError, "all_gather: loss_op: expected one of"),
        (lambda x: ops.broadcast(x, loss_op=None), TypeError, "broadcast: loss_op: expected one of"),
    ],
)
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(tt.lmatrix("x"))


def test_shapes_that_differ_are_an_error_that_lists_them(two):
    x = matrix()
    reduced, gathered = build([x], ops.all_reduce(x).sum()), build([x], ops.all_gather(x.T).sum())
    with pytest.raises(ValueError, match=r"rank 0: float64 \(4, 3\), rank 1: float64 \(3, 3\);"):
        reduced(ROWS)
    with pytest.raises(ValueError, match=r"equal except for axis 0, got rank 0: float64 \(3, 4\)"):
        gathered(ROWS)
    np.testing.assert_allclose(reduced(ROWS[:4]), (ROWS[:2] + ROWS[2:4]).sum())


def test_a_plain_function_computes_alone_whatever_there_is(two):
    x = matrix()
    outputs = [ops.all_reduce(x, op) for op in ("sum", "avg", "max", "min", "prod")]
    outputs += [ops.all_gather(x), ops.broadcast(x)]
    for result in compiler.function([x], outputs)(ROWS):
        np.testing.assert_array_equal(result, ROWS)
    f = build([x], [(ops.all_reduce(x.sum(0)), None)])
    np.testing.assert_allclose(f.as_theano(ROWS)[0], ROWS.sum(0))
