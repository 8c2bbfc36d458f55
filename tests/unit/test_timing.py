"""Tests of the times of operations, with the virtual machines of either compiler."""

import numpy as np
import pytest
from compilers import NAME, compiler, tt

from synkhronos.engines.base import Definition, sum_by_operation
from synkhronos.engines.cpu import CpuEngine

if NAME == "theano":
    from theano.ifelse import ifelse
else:
    from pytensor.ifelse import ifelse


@pytest.fixture(autouse=True)
def no_kernels():
    CpuEngine().use_kernels(False)


OWN = {"theano": "Theano's own", "pytensor": "PyTensor's own"}[NAME]
A = np.arange(12.0).reshape(4, 3)


def built(outputs, inputs, updates=(), **options):
    definition = Definition(inputs, outputs, [True] * len(outputs), list(updates))
    return CpuEngine(), CpuEngine().build(definition, **options)


def by_class(times):
    return {one.kind.rpartition(".")[2]: one for one in times}


def test_nodes_with_one_operation_are_summed():
    kinds = "theano.tensor.A", "synkhronos.engines.theano.kernels.pool.FastA", "a.B", "__main__.C"
    timed = [("a", kinds[0], 1.0), ("b", kinds[1], 0.5), ("a", kinds[0], 2.0), ("a", kinds[2], 4.0)]
    assert sum_by_operation([*timed, ("c", kinds[3], 0.0)]) == [
        ("a", kinds[0], "Theano's own", 2, 3.0),
        ("b", kinds[1], "fast", 1, 0.5),
        ("a", kinds[2], "a's own", 1, 4.0),
        ("c", kinds[3], "__main__'s own", 1, 0.0),
    ]


def test_operations_have_the_names_that_the_compiler_writes():
    x = tt.dmatrix("x")
    engine, compiled = built([tt.nnet.softmax(x) if NAME == "theano" else tt.exp(x)], [x])
    with engine.time_operations(compiled) as times:
        engine.call(compiled, [A])
    nodes = compiled.maker.fgraph.toposort()
    assert sorted(one.name for one in times) == sorted({str(node.op) for node in nodes})
    assert sum(one.nodes for one in times) == len(nodes)
    assert {one.kernel for one in times} == {OWN}


def test_a_branch_that_is_not_taken_has_no_time():
    x, which = tt.dmatrix("x"), tt.iscalar("which")
    chosen = ifelse(which, x.sum(axis=0), tt.sort(x, axis=0)[0])
    mode = compiler.Mode("cvm", "fast_run") if NAME == "theano" else "CVM"
    engine, compiled = built([chosen], [x, which], mode=mode)
    for value, (taken, other) in ((1, ("Sum", "SortOp")), (0, ("SortOp", "Sum"))):
        with engine.time_operations(compiled) as times:
            engine.call(compiled, [A, np.int32(value)])
        found = by_class(times)
        assert taken in found and other not in found and "IfElse" in found


def test_the_machine_times_nothing_after_an_error():
    x = tt.dmatrix("x")
    engine, compiled = built([x + x.T], [x])
    machine = getattr(compiled, "vm", None) or compiled.fn
    with pytest.raises(ValueError):
        with engine.time_operations(compiled):
            engine.call(compiled, [A])
    assert not machine.time_thunks and not any(machine.call_counts)
    np.testing.assert_array_equal(engine.call(compiled, [A[:3]])[0], A[:3] + A[:3].T)
    assert not any(machine.call_counts)


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_profile_of_the_script_has_its_readings_too(is_timed):
    x = tt.dmatrix("x")
    engine, compiled = built([x.sum(axis=0)], [x], profile=True)
    compiled.profile.atexit_print = False
    machine = getattr(compiled, "vm", None) or compiled.fn
    machine.time_thunks = is_timed
    large = np.ones((1000, 1000))  # the clock of the machine cannot tell a fraction of a microsecond
    engine.call(compiled, [large])
    with engine.time_operations(compiled) as times:
        for _ in range(2):
            engine.call(compiled, [large])
    assert machine.time_thunks == is_timed
    assert compiled.profile.fct_callcount == 3
    assert set(compiled.profile.apply_callcount.values()) == {3 if is_timed else 2}
    whole = sum(compiled.profile.apply_time.values())
    assert 0 < sum(one.seconds for one in times) <= whole


if NAME == "theano":

    @pytest.mark.parametrize("linker", ["cvm", "cvm_nogc", "vm", "vm_nogc"])
    def test_all_virtual_machines_time_operations(linker):
        x, w = tt.dmatrix("x"), compiler.shared(np.zeros(3))
        mode = compiler.Mode(linker, "fast_run")
        engine, compiled = built([x.sum(axis=0)], [x], [(w, w + x.sum(axis=0))], mode=mode)
        with engine.time_operations(compiled) as times:
            for _ in range(2):
                engine.call(compiled, [A])
        assert {"Sum", "Elemwise"} <= set(by_class(times))
        np.testing.assert_array_equal(w.get_value(), 2 * A.sum(axis=0))

    @pytest.mark.parametrize("linker", ["c|py", "py", "c"])
    def test_other_linkers_say_that_they_cannot(linker):
        x = tt.dmatrix("x")
        engine, compiled = built([x.sum()], [x], mode=compiler.Mode(linker, "fast_run"), name="f")
        with pytest.raises(ValueError, match="f: expected .*got one that .*Linker has compiled"):
            with engine.time_operations(compiled):
                pass
