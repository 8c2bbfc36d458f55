"""What Theano computes, by the names of cases, to compare versions of Python and NumPy.

``python theano_values.py FILE [FAMILY...]`` writes the results, and needs only Theano and NumPy;
``test_theano_values`` compares them. A case is a graph whose inputs carry their values. Its results are
computed in several ways:

- ``python``: by the method ``perform`` of each operation;
- ``scalar``: by the Python code of a scalar operation, from NumPy's scalars;
- ``optimized``: by ``perform``, after Theano's optimizations, which compute with constants;
- ``constant``: the same, with constants in place of the inputs;
- ``compiled``: by C code, without optimizations, many cases in one module.

What depends on the compiler, the C library, or a NumPy or SciPy that Theano supported, is left out here,
with the reason.
"""

import contextlib
import gzip
import itertools
import json
import logging
import math
import sys
import time
import warnings
from functools import partial

import numpy as np
import theano
import theano.tensor as tt
import theano.tensor.fft
import theano.tensor.nnet.neighbours
import theano.tensor.signal.pool
import theano.tensor.slinalg
from theano.gof.graph import inputs as inputs_of, io_toposort
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
INTEGERS = SIGNED + UNSIGNED
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
REAL = ["bool"] + INTEGERS + FLOATS
DTYPES = REAL + COMPLEX

UNARY = """
    abs_ neg sgn ceil floor trunc round_half_to_even round_half_away_from_zero inv log log2 log10
    log1p exp exp2 expm1 sqr sqrt deg2rad rad2deg cos arccos sin arcsin tan arctan cosh arccosh sinh
    arcsinh tanh arctanh real imag conj angle invert isnan isinf
""".split()
BINARY = """
    add sub mul true_div int_div mod pow lt gt le ge eq neq and_ or_ xor maximum minimum arctan2 second
    complex complex_from_polar
""".split()
SPECIAL_UNARY = "erf erfc erfcx erfinv erfcinv gamma gammaln psi tri_gamma j0 j1 i0 i1".split()
SPECIAL_BINARY = "chi2sf gammainc gammaincc gammau gammal jv iv".split()


def variable(value, broadcastable=None, dtype=None):
    """Return an input that carries its value."""
    value = np.asarray(value, dtype)
    if broadcastable is None:
        broadcastable = [False] * value.ndim
    result = tt.TensorType(str(value.dtype), broadcastable)()
    result.tag.value = value
    return result


def extremes(dtype):
    """Return values of a dtype, with the extreme ones."""
    if dtype == "bool":
        return [False, True]
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return [0, 1, 7, limits.max] + ([-1, -3, limits.min] if dtype in SIGNED else [limits.max - 6])
    if dtype in FLOATS:
        large = {"float16": 6e4, "float32": 1e30, "float64": 1e300}[dtype]
        return [0, 1, -1, 0.5, -2.5, 3.7, large, math.inf, -math.inf, math.nan]
    # Complex functions of large numbers depend on the C library.
    return [0, 1, 1j, -1.5 + 2j, 0.3 - 0.7j]


def small(dtype):
    """Return small values of a dtype."""
    if dtype == "bool":
        return [False, True]
    if dtype in INTEGERS:
        return [0, 1, 5, 100] + ([-3, -100] if dtype in SIGNED else [200])
    if dtype in FLOATS:
        return [0, 1, 0.5, -2.5, 3.75, 100]
    return [0.5, 1, 1j, -1.5 + 2j, 0.3 - 0.7j]


def unary_values(name, dtype, values):
    """Return the values that a function of one argument is computed for."""
    values = values(dtype)
    if dtype in COMPLEX:
        # Whether the result at zero and on branch cuts is finite depends on the C library.
        return [0.5 + 0.5j, -1.5 + 2j, 0.3 - 0.7j]
    if dtype in FLOATS and name.startswith("round"):
        values = values + [
            0.49999997,
            0.49976,
            1.5,
            -1.5,
        ]  # the sum with 0.5 of the first may round to 1
    if dtype in FLOATS and name in ("sin", "cos", "tan"):
        # The sine of a large number depends on the C library.
        values = [value for value in values if not abs(value) > 1e4]
    return values


def binary_values(name, dtypes, values):
    """Return the values that a function of two arguments is computed for."""
    left, right = (values(dtype) for dtype in dtypes)
    if name in ("int_div", "mod"):
        # NumPy 1.20 changed the results for infinity, nan, division by zero, and the smallest integer.
        left = [value for value in left if np.isfinite(value) and value not in smallest()]
        right = [value for value in right if np.isfinite(value) and value not in smallest() and value]
    if name == "pow" and dtypes[1] in INTEGERS:
        right = [0, 1, 2, 3]  # NumPy refuses negative powers of integers
    if name in ("pow", "true_div") and "complex" in "".join(dtypes):
        # The C library decides what is infinite and what is nan.
        left, right = (
            [value for value in those if value and np.isfinite(value) and abs(value) < 1e4]
            for those in (left, right)
        )
    if name == "mul" and "complex" in "".join(dtypes):
        left, right = ([value for value in those if np.isfinite(value)] for those in (left, right))
    if name in ("lt", "gt", "le", "ge", "eq", "neq") and set(dtypes) in (
        {"uint64", one} for one in SIGNED
    ):
        # NumPy compared these as floating point numbers before 1.25, and compares them exactly since.
        left, right = ([value for value in those if abs(value) < 2**52] for those in (left, right))
    if name == "complex_from_polar":
        left, right = ([value for value in those if not abs(value) > 1e4] for those in (left, right))
    return left, right


def has_changed(name, dtypes):
    """Tell whether NumPy has changed a function of two arguments."""
    if name == "int_div":
        return bool(set(dtypes) & set(COMPLEX))  # it was removed
    # The cosine of these is a float16, whose rounding has changed.
    return name == "complex_from_polar" and dtypes[1] in ("bool", "int8", "uint8")


def smallest():
    """Return the smallest integer of each dtype."""
    return [np.iinfo(dtype).min for dtype in SIGNED]


def special_values(name, dtype):
    """Return values where the functions of SciPy did not change, which they did at their poles."""
    if dtype in INTEGERS + ["bool"]:
        return [1] if dtype == "bool" or "inv" in name else [1, 2, 3]
    if dtype in COMPLEX:
        return [0.5 + 0.25j]
    return [0.1, 0.25, 0.75] if "inv" in name else [0.125, 0.5, 1, 2.5, 7]


def scalar_operation(name):
    """Return the scalar operation of a name."""
    if name in SPECIAL_UNARY + SPECIAL_BINARY:
        return getattr(theano.scalar.basic_scipy, name)
    return getattr(theano.scalar, name)


def scalar_values(name, dtypes):
    """Return the values for scalar operations, in pairs if there are two arguments.

    C code raises an error for a division by zero, and leaves open what an integer is that does not fit.
    """
    if name in SPECIAL_UNARY:
        return [(value,) for value in special_values(name, dtypes[0])]
    if name in SPECIAL_BINARY:
        return [(a, b) for a in special_values(name, dtypes[0]) for b in special_values(name, dtypes[1])]
    if len(dtypes) == 1:
        values = unary_values(name, dtypes[0], small)
        # Integers have no infinity, so that C code returns any number.
        return [(value,) for value in values if value or name not in ("inv", "log", "log2", "log10")]
    if name == "pow":
        left = [value for value in small(dtypes[0]) if abs(value) < 5]
        right = [1, 2, 3] if dtypes[1] != "bool" else [True]
    else:
        left, right = binary_values(name, dtypes, small)
        right = [value for value in right if value]
    return [(a, b) for a in left for b in right]


class Scalars:
    """A scalar operation, and the values to compute it for."""

    def __init__(self, name, dtypes, values=None, operation=None):
        self.operation = operation or scalar_operation(name)
        self.inputs = [theano.scalar.get_scalar_type(dtype)() for dtype in dtypes]
        self.output = self.operation(*self.inputs)
        dtypes_of_cast = [dtypes[0], self.output.dtype]
        self.has_c_code = has_c_code_for(name, dtypes_of_cast if name == "cast" else dtypes)
        values = scalar_values(name, dtypes) if values is None else values
        self.values = [tuple(np.dtype(d).type(v) for d, v in zip(dtypes, those)) for those in values]

    def in_python(self):
        """Return the results of the Python code."""
        results = []
        for values in self.values:
            storage = [[None]]
            self.output.owner.op.perform(self.output.owner, list(values), storage)
            results.append(np.asarray(storage[0][0]))
        return joined(results)


def has_c_code_for(name, dtypes):
    """Tell whether a compiler takes the C code of a scalar operation; it has few for complex numbers."""
    if "float16" in dtypes or len(dtypes) == 2 and set(dtypes) & {"int16", "uint16", "uint32"}:
        return False
    if not set(dtypes) & set(COMPLEX):
        return True
    if len(dtypes) == 1:
        return name in ("abs_", "neg", "sqr", "real", "imag", "conj", "angle", "sgn", "invert")
    if name == "cast":
        return dtypes[0] in SIGNED + FLOATS
    return len(set(dtypes)) == 1 and name in ("add", "sub", "mul", "true_div", "eq", "neq", "second")


def joined(results):
    """Return an array of results, which must have one dtype."""
    dtypes = sorted({str(result.dtype) for result in results})
    if len(dtypes) > 1:
        raise TypeError("several dtypes: " + ", ".join(dtypes))
    return np.array(results)


def expressions(text):
    """Return the expressions of a table, which are the names of cases as well."""
    return [one.strip() for one in " ".join(text.split()).split(";")]


def build(expression, **names):
    """Return what an expression of a table is with some names."""
    return eval(expression, {**globals(), **names})


def cases_of(table, suffix, **names):
    """Yield the cases of a table; functions of the names are called in each case."""
    for one in expressions(table):
        yield f"{one}{suffix}", lambda one=one: build(one, **{key: f() for key, f in names.items()})


def of_vectors(module, name, *vectors):
    """Return a function of vectors."""
    return getattr(module, name)(*[variable(values, dtype=dtype) for values, dtype in vectors])


def unary():
    """Functions of one argument."""
    of_networks = "sigmoid softplus hard_sigmoid ultra_fast_sigmoid softsign relu elu".split()
    for dtype in DTYPES:
        chosen = [(tt, name, unary_values(name, dtype, extremes)) for name in UNARY]
        chosen += [(tt, name, special_values(name, dtype)) for name in SPECIAL_UNARY]
        chosen += [(tt.nnet, name, unary_values(name, dtype, small)) for name in of_networks]
        for module, name, values in chosen:
            yield f"{name} {dtype}", partial(of_vectors, module, name, (values, dtype))


def binary():
    """Functions of two arguments, of all pairs of values."""

    def outer(name, left, right, first, second):
        left = variable(np.array(left, first)[:, None], (False, True))
        return getattr(tt, name)(left, variable(np.array(right, second)[None], (True, False)))

    for name, first, second in pairs(BINARY + SPECIAL_BINARY):
        if name in SPECIAL_BINARY:
            left, right = special_values(name, first), special_values(name, second)
        else:
            left, right = binary_values(name, (first, second), extremes)
        yield f"{name} {first} {second}", partial(outer, name, left, right, first, second)


def pairs(names):
    """Yield names with all pairs of dtypes of which the results have not changed."""
    for name, first, second in itertools.product(names, DTYPES, DTYPES):
        if not has_changed(name, (first, second)):
            yield name, first, second


def scalars_of_one():
    """Functions of one scalar."""
    for name, dtype in itertools.product(UNARY + SPECIAL_UNARY, DTYPES):
        yield f"{name} {dtype}", partial(Scalars, name, (dtype,))


def scalars_of_two(names):
    """Functions of two scalars. The C code of some aborts for numbers outside their domain."""
    for name, first, second in pairs(names):
        yield f"{name} {first} {second}", partial(Scalars, name, (first, second))


def scalar_casts():
    """Casts of scalars, to dtypes that have the value: the compiler decides about others."""
    for first, second in itertools.product(DTYPES, DTYPES):
        values = [(value,) for value in cast_values(first, second)]
        operation = theano.scalar.basic._cast_mapping[second]
        yield f"{first} {second}", partial(Scalars, "cast", (first,), values, operation)


def cast_values(first, second):
    """Return values of the first dtype that the second one has, but for their fractions."""
    if first in INTEGERS and second in INTEGERS:
        return extremes(first)  # these wrap
    values = small(first)
    if second in INTEGERS:
        low = 0 if second in UNSIGNED else -128
        values = [value for value in values if not isinstance(value, complex) and low <= value < 128]
    return values


def casts():
    """Casts of vectors, to dtypes that have the value, and two casts, which may be combined."""

    def cast(values, *dtypes):
        result = variable(values, dtype=dtypes[0])
        for dtype in dtypes[1:]:
            result = tt.cast(result, dtype)
        return result

    for first, second in itertools.product(DTYPES, DTYPES):
        yield f"{first} {second}", partial(cast, cast_values(first, second), first, second)
        yield f"{first} int16 {second}", partial(cast, [0, 1], first, "int16", second)


OF_MORE = """
    tt.clip(v, 0, b); tt.clip(v, -1, 100) + b; tt.switch(tt.gt(v, 0), v, b);
    tt.switch(tt.gt(b, 0), 300, v); tt.add(v, b, c); tt.mul(v, b, c)
"""
ROUNDED = """
    tt.round(r, 'half_to_even'); tt.iround(r, 'half_to_even');
    tt.round(r, 'half_away_from_zero'); tt.iround(r, 'half_away_from_zero')
"""


def functions_of_more(dtypes):
    """Yield functions of three arguments, and the like."""
    for dtype in dtypes:
        v = partial(variable, extremes(dtype), dtype=dtype)
        for other in ("bool", "int8", "uint8", "int64", "float32", "float64"):
            b, c = (partial(variable, small(other)[place], dtype=other) for place in (1, -1))
            yield from cases_of(OF_MORE, f" {dtype} {other}", v=v, b=b, c=c)
        yield f"isclose {dtype}", lambda v=v: tt.isclose(v(), v())
        if dtype in FLOATS:
            r = partial(variable, [0.5, 1.5, -0.5, -2.5, 2.4, -2.6], dtype=dtype)
            yield from cases_of(ROUNDED, f" {dtype}", r=r)


#: Python's numbers in expressions, which Theano casts by their values
WITH_PYTHON = """
    x + 1; x * 300; x + 0.5; 2 ** abs(x); x - 1000; 1 - x; 300 - x; x * 70000; x + 2 ** 40; x + 255;
    x - 128; x / 3; x / 2.0; x // 3; x % 7; x ** 2; abs(x) ** 0.5; x ** 3; x > 300; x < -1;
    tt.eq(x, 256); tt.eq(x, 0.1); tt.maximum(x, 200); tt.minimum(x, -200); x & 15; x | 256; x ^ 255;
    x * 2 * 3; x * 200 * 2; x * 2 / 4; x + 100 + 100; x * 0.1 * 10; x - x * 2; -x * 3 * -1;
    tt.clip(x, 0, 300); tt.switch(x > 1, 1, 300); x + np.int8(1); x * np.float32(0.1);
    x * np.float64(0.1); x + np.uint8(200); x + np.array([1000]); x.mean() * 2; (x + 1).sum() - 1;
    x + True; x * 1e-10; x * 1e+300; tt.exp(x * 0.5) + 1; tt.log(1 + tt.exp(x * 0.1));
    tt.sqrt(x * x + 1); x * (1 - x); x * 4 * (1 / 8); x + 1 - 1 + 7; tt.zeros_like(x) + 3;
    tt.ones_like(x) * 300; x.astype('int8') * 100 * 3
"""


def with_python_numbers(dtypes):
    """Yield expressions of vectors and scalars with Python's numbers."""
    for dtype in dtypes:
        values = [0, 1] if dtype == "bool" else [0, 1, 3, 60] + [-2] * (dtype not in UNSIGNED)
        for one in expressions(WITH_PYTHON):
            if one == "x // 3" and dtype in COMPLEX:
                continue  # NumPy has removed it
            yield from cases_of(one, f", {dtype}", x=partial(variable, values, dtype=dtype))
            yield from cases_of(one, f", {dtype} number", x=partial(variable, values[1], dtype=dtype))


OF_NUMBERS = """
    tt.constant(number); tt.as_tensor_variable(number); tt.as_tensor_variable([number]);
    tt.as_tensor_variable([number, 1]); tt.tensor_from_scalar(theano.scalar.as_scalar(number));
    np.asarray(tt.get_scalar_constant_value(tt.constant(number) * 1));
    theano.shared(number).get_value()
"""
WITH_DTYPES = "tt.constant(number, dtype=dtype); theano._asarray(number, dtype=dtype)"
OF_ONES = """
    tt.constant(one); tt.as_tensor_variable([one, 1]); tt.as_tensor_variable([one, 0.5]);
    tt.as_tensor_variable(np.array([one])); theano.shared(np.array([one])) + 1;
    tt.fvector().type.filter(np.array([one]), allow_downcast=True); tt.bscalar.filter(one);
    tt.iscalar.filter(one); tt.fscalar.filter(one); tt.dscalar.filter(one)
"""


def constants_of(numbers):
    """Yield constants of Python's and NumPy's numbers."""
    for number in numbers:
        names = {"number": lambda number=number: number}
        yield from cases_of(OF_NUMBERS, f" {number!r}", **names)
        for dtype in ("int8", "uint8", "int32", "float32", "float64"):
            if isinstance(number, float) and "int" in dtype and not abs(number) < 128:
                continue  # the compiler decides what this is
            if isinstance(number, float) and dtype == "uint8" and number < 0:
                continue
            yield from cases_of(WITH_DTYPES, f" {number!r} {dtype}", dtype=partial(str, dtype), **names)


PYTHON_NUMBERS = [0, 1, -1, 100, 127, 128, -128, -129, 255, 256, 300, 32767, 32768, -32769, 65535, 65536]
PYTHON_NUMBERS += [2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**40, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
PYTHON_NUMBERS += [True, False]
PYTHON_NUMBERS += [0.5, 0.1, 1.0, -2.5, 1e10, 1e-40, 1e300, math.inf, 3.0]


def constants():
    """The dtypes and values of constants."""

    def filtered(target, what, options):
        return np.asarray(getattr(tt, target).filter(what, **options))

    def filtered_scalar(value, dtype):
        return np.asarray(theano.scalar.get_scalar_type(dtype).filter(value, allow_downcast=True))

    yield from constants_of(PYTHON_NUMBERS)
    for dtype in DTYPES:
        yield from cases_of(OF_ONES, f" {dtype}", one=partial(np.dtype(dtype).type, 1))
    targets = "bscalar wscalar iscalar lscalar fscalar dscalar fvector bvector".split()
    values = (1, 127, 128, 300, -129, 2**40, 0.5, 0.1, 1e300)
    ways = ({}, {"allow_downcast": True}, {"strict": True})
    for target, value, options in itertools.product(targets, values, ways):
        what = [value] if "vector" in target else value
        if isinstance(value, float) and target[0] in "bwil" and abs(value) > 1:
            continue  # the compiler decides what this is
        yield f"filter {what} {target} {options}", partial(filtered, target, what, options)
    for value in (1, 127, 128, 300, 2**40, 0.5, 0.1):
        for dtype in ("int8", "uint8", "int64", "float32", "float64"):
            yield f"scalar filter {value} {dtype}", partial(filtered_scalar, value, dtype)


def matrix(dtype):
    """Return a matrix with numbers in no order."""
    if dtype == "bool":
        values = np.array([[True, False, True], [True, True, True]])
    elif dtype in COMPLEX:
        values = np.array([[1, 2j, 0.5], [-1 + 1j, 3, 0.25j]])
    elif dtype in FLOATS:
        values = np.array([[3.5, -1.25, 0.5], [2, 7.75, -0.1]])
    else:
        values = np.array([[7, 3, 100], [100, 1, 50]]) - (50 if dtype in SIGNED else 0)
    return variable(values.astype(dtype))


REDUCED = "sum prod mean var std max min argmax argmin any all".split()
REDUCTIONS = """
    m.sum(axis=1, keepdims=True); m.var(axis=0, ddof=1); tt.var(m, axis=0, corrected=True);
    tt.mean(m, axis=0, dtype='float32'); tt.cumsum(m, None); tt.cumprod(m, None); tt.cumsum(m, 0);
    tt.cumprod(m, 0); tt.cumsum(m, 1); tt.cumprod(m, 1); m.norm(1, axis=0);
    m.norm(2, axis=0); m.norm(math.inf, axis=0); tt.ptp(m, axis=0); m[:0].sum(axis=0);
    tt.tile(m.flatten(), 60).sum(); tt.tile(m.flatten(), 60).mean()
"""


def reductions_of(dtypes):
    """Yield reductions."""

    def reduced(name, dtype, options):
        return getattr(tt, name)(matrix(dtype), **options)

    axes = [{"axis": axis} for axis in (None, 0, 1, -1, (0, 1))]
    ways = [{"dtype": "float32"}, {"dtype": "int8"}, {"acc_dtype": "float64"}]
    for dtype in dtypes:
        chosen = list(itertools.product(REDUCED, axes))
        # The compiler decides what negative numbers are.
        wanted = [one for one in ways if dtype not in FLOATS or one != {"dtype": "int8"}]
        chosen += [(name, {"axis": 0, **one}) for name in ("sum", "prod") for one in wanted]
        for name, options in chosen:
            yield f"{name} {dtype} {options}", partial(reduced, name, dtype, options)
        yield from cases_of(REDUCTIONS, f" {dtype}", m=partial(matrix, dtype))


#: What is incremented, from a vector of five and a matrix of three by four
INCREMENTED = """
    v[1:4]; v[::-2]; v[-1]; v[variable([0, 3, 0, 0])]; v[variable([-1, 2, -1])];
    v[variable([1, 1], dtype='int32')]; v[variable([1, 1], dtype='uint8')];
    v[variable([True, False, True, False, True])]; v[tt.gt(v, 2)]; v[variable([[0, 1], [1, -1]])];
    v[[0, 2, 2]]; m[1]; m[:, 1:3]; m[::2, -1]; m[variable([0, 2, 0])]; m[variable([-1, -1])];
    m[variable([0, 2, 0]), variable([1, -1, 1])]; m[:, variable([1, 1, -1])];
    m[1:, variable([1, 1, -1])]; m[variable(np.arange(12).reshape(3, 4) % 5 == 0)];
    m[variable([True, False, True])]; m[variable([[0], [2]]), variable([[1, 3]])];
    m[0, variable([2, 2])]
"""


def increments_of(dtypes, table=INCREMENTED, others=None):
    """Yield what is read from, set and added at indices."""

    def part(name, dtype):
        v = variable(np.arange(5).astype(dtype))
        return build(name, v=v, m=variable(np.arange(12).reshape(3, 4).astype(dtype)))

    def change(how, name, dtype, number):
        return how(part(name, dtype), number if isinstance(number, int) else variable(1, dtype=number))

    def change_by_vector(how, name, dtype):
        where = part(name, dtype)
        shape = evaluate(where).shape
        values = np.arange(1, shape[-1] + 1 if shape else 2).astype(dtype)
        return how(where, variable(values if shape else values[0]))

    add, put = tt.inc_subtensor, tt.set_subtensor
    for dtype, name in itertools.product(dtypes, expressions(table)):
        yield f"{name} {dtype}", partial(part, name, dtype)
        changes = [(put, 1), (add, 100), (add, 300)]
        others_of = others or (dtype, "int8", "uint8", "float32")
        changes += [(how, other) for other in others_of for how in (add, put)]
        for how, number in changes:
            yield f"{how.__name__} {name} {dtype} {number}", partial(change, how, name, dtype, number)
        for how in (add, put):
            yield f"{how.__name__} {name} {dtype} vector", partial(change_by_vector, how, name, dtype)


def increments_compiled():
    """The same by C code."""
    table = """
        v[1:4]; v[-1]; v[variable([0, 3, 0, 0])]; v[variable([1, 1], dtype='int32')]; m[1]; m[:, 1:3];
        m[variable([0, 2, 0])]
    """
    yield from increments_of(["int8", "float32"], table, ("float32", "int8"))
    table = "v[variable([0, 3, 0, 0])]; m[variable([-1, -1])]"
    yield from increments_of(["float64", "complex64"], table, ("float32",))


OF_LENGTHS = """
    n + 1; n * 2; n / 2; n // 2; n % 2; n ** 2; n - 1000; n * 0.5; tt.ceil(n / 2).astype('int64');
    variable(1, dtype='int8') + n; variable(1, dtype='uint64') + n; variable(1, dtype='float32') * n;
    tt.maximum(n, 1); tt.arange(n); tt.arange(n * 0.5); tt.zeros((n, 2));
    tt.zeros((n + 1,), dtype='int8'); tt.ones((n, variable(2, dtype='uint8'))); tt.alloc(300, n);
    tt.alloc(np.float32(0.1), n, 2); tt.eye(n); tt.eye(n, n + 1, 1, dtype='int8'); tt.stack([n, 2]);
    tt.stack([n, 2.5]); tt.as_tensor_variable([n, 1]);
    tt.as_tensor_variable([n, variable(1, dtype='int8')]); tt.as_tensor_variable((n,))
"""
OF_SHAPES = """
    x().shape; x().size; tt.prod(x().shape); x().shape.sum(); x().shape * 2; x().shape / 2;
    x().shape[::-1]; x().reshape((2, -1)).shape; variable(np.arange(12)).reshape((4, 3));
    variable(np.arange(12)).reshape((variable(4), -1), ndim=2);
    variable(np.arange(12)).reshape(variable([4, 3], dtype='int8'), ndim=2);
    variable(np.arange(12)).reshape(variable([4, 3], dtype='uint64'), ndim=2);
    variable([7]).reshape([]); empty().reshape((2, 0)); x().flatten().shape; variable(1.0).shape;
    tt.as_tensor_variable([]); tt.as_tensor_variable(np.array([], dtype='int8'));
    tt.dot(x(), x().T).shape; tt.join(0, x(), x()).shape; x()[1:variable(100, dtype='int8')].shape;
    x()[::variable(-2, dtype='int8')].shape; tt.zeros((variable(2, dtype='int8'), 3)).shape;
    x().mean(axis=0).shape; x()[x().shape[0] - 1]
"""


def shapes():
    """Shapes, and what they are computed with."""
    x, empty = partial(variable, np.zeros((3, 4))), partial(variable, np.zeros((0, 4)))
    for one in expressions(OF_LENGTHS):
        yield from cases_of(one, "", n=lambda: x().shape[0])
        yield from cases_of(one, ", empty", n=lambda: empty().shape[0])
    yield from cases_of(OF_SHAPES, "", x=lambda: x, empty=lambda: empty)


OF_ARRAYS = """
    tt.eye(3, 4, 1, dtype=v.dtype); tt.zeros_like(v); tt.ones_like(m); tt.fill(m, 300);
    tt.alloc(v, 2, 3); tt.identity_like(m); tt.diag(v); tt.diag(m); tt.tri(3, 3, 0, dtype=v.dtype);
    tt.tril(m); tt.triu(m, 1); tt.join(0, v, v); tt.join(0, v, variable([1], dtype='int8'));
    tt.join(0, variable([1], dtype='uint8'), v); tt.join(0, v, variable([0.5], dtype='float32'));
    tt.concatenate([m, m], axis=1); tt.stack([v, v], axis=1); tt.stack([v[0], 1, 300]);
    tt.stack([v[0], 0.1]); tt.split(v, [1, 2], 2)[1]; tt.tile(m, (2, 1)); tt.repeat(v, 2);
    tt.repeat(v, variable([1, 0, 2]), axis=0);
    tt.repeat(v, variable([1, 0, 2], dtype='uint8'), axis=0); tt.roll(v, 1); tt.extra_ops.diff(v);
    tt.extra_ops.diff(v, n=2); tt.sort(v); tt.sort(m, axis=0); tt.argsort(v, kind='mergesort');
    tt.sort(tt.topk(v, 2, sorted=False)); tt.argtopk(m, 1, axis=0, sorted=False);
    tt.topk_and_argtopk(m, 1, axis=1, sorted=False)[0]; tt.max_and_argmax(m, axis=1)[1];
    tt.extra_ops.searchsorted(tt.sort(v), v); tt.extra_ops.searchsorted(tt.sort(v), v, side='right');
    tt.extra_ops.searchsorted(tt.sort(v), variable([2], dtype='int8')); tt.extra_ops.Unique()(m);
    tt.fill_diagonal(m, tt.cast(1, m.dtype)); tt.fill_diagonal_offset(m, tt.cast(1, m.dtype), 1);
    tt.bincount(abs(v)); tt.bincount(variable([1, 0, 1]), weights=v);
    tt.bincount(variable([1, 0, 1], dtype=v.dtype if 'int' in v.dtype else 'int8'), minlength=4);
    tt.extra_ops.to_one_hot(variable([1, 0, 2], dtype='uint8'), 3, v.dtype);
    tt.extra_ops.to_one_hot(v % 2, 3); tt.extra_ops.compress(variable([1, 0, 1]), v);
    tt.choose(variable([0, 1, 0]), m); tt.choose(v % 2, variable([[1, 2, 3], [4, 5, 6]]));
    tt.take(m, variable([1, 0, -1]), axis=1); tt.take(variable(np.arange(200)), v);
    variable(np.arange(200))[v]; tt.nonzero(m)[1]; tt.nonzero_values(m); tt.flatnonzero(m);
    tt.extra_ops.squeeze(tt.addbroadcast(m[:1], 0)); tt.unbroadcast(v.dimshuffle('x', 0), 0); m.T;
    tt.inverse_permutation(variable([2, 0, 1])); tt.permute_row_elements(m, variable([2, 0, 1]));
    tt.ravel_multi_index((v % 2, v % 2), (3, 4)); tt.unravel_index(v % 5, (3, 4))[1];
    tt.mgrid[0:3, 0:2][0] + v[0]; tt.as_tensor_variable([v[0], v[1], 2]); tt.allclose(v, v);
    m.swapaxes(0, 1); v.clip(0, 10); v.round(); v.imag; v.conj(); tt.stack(divmod(v, 3));
    tt.batched_dot(m, m); tt.outer(v, v); tt.tensordot(m, m, axes=[[1], [1]]);
    tt.dot(m, variable([[1], [2], [3]], dtype='int8')); tt.slinalg.kron(m, m); tt.maximum(v, 0.1);
    tt.smallest(v, v + 1); tt.largest(v, 300); tt.bartlett(5); tt.power(v, 2);
    tt.nnet.confusion_matrix(v % 3, v % 2)[0]; ~v & 7 | v ^ 3
"""


def arrays():
    """Making, joining, splitting, ordering and counting."""
    ranges = [(0, 5, 1), (2, 10, 3), (0, 1, 0.25), (5, 0, -2), (0, 300, 100), (-200, 0, 50)]
    for one in ranges:
        yield f"arange{one}", partial(tt.arange, *one)
        for dtype in ("int8", "uint8", "int32", "float32", "float64"):
            if dtype != "uint8" or min(one) >= 0:
                yield f"arange{one} {dtype}", partial(tt.arange, *one, dtype=dtype)
    for dtype in REAL:
        table = "tt.arange(one + 4); tt.arange(1, one * 5)"
        yield from cases_of(table, f" {dtype}", one=partial(variable, 1, dtype=dtype))
    for dtype in DTYPES:
        m = partial(matrix, dtype)
        for one in expressions(OF_ARRAYS):
            of_integers = one.startswith(("tt.choose(v %", "tt.bincount(variable([1, 0, 1], "))
            if not of_integers or dtype not in FLOATS:
                yield from cases_of(one, f" {dtype}", v=lambda m=m: m()[1], m=m)


def products():
    """Matrix products of pairs of dtypes."""

    def product(left, right, first, second):
        a = np.arange(np.prod(left)).reshape(left) * 3 % 50
        b = np.arange(np.prod(right)).reshape(right) * 7 % 30
        return tt.dot(variable(a.astype(first)), variable(b.astype(second)))

    shapes = {"vv": ((4,), (4,)), "mv": ((3, 4), (4,)), "vm": ((4,), (4, 2)), "mm": ((3, 4), (4, 2))}
    for name, first, second in itertools.product(shapes, DTYPES, DTYPES):
        yield f"{name} {first} {second}", partial(product, *shapes[name], first, second)
    table = """
        2 * m + 0.5 * tt.dot(m, m.T) - tt.dot(m, m); 2 * m[0] + 0.1 * tt.dot(m, m[1]);
        m + 0.1 * tt.outer(m[1], m[2])
    """
    for dtype in ("float32", "float64", "complex64", "complex128"):
        m = partial(variable, (np.arange(9).reshape(3, 3) / 7).astype(dtype))
        yield from cases_of(table, f" {dtype}", m=m)


DIFFERENTIATED = """
    nnet.softmax(x()); nnet.logsoftmax(x()); tt.log(nnet.softmax(x())); nnet.sigmoid(x());
    tt.log(nnet.sigmoid(x())); nnet.softplus(x()); nnet.relu(x()); nnet.relu(x(), 0.1);
    nnet.elu(x(), 0.5); nnet.sigmoid_binary_crossentropy(x(), p());
    nnet.categorical_crossentropy(p(), p());
    nnet.categorical_crossentropy(nnet.softmax(x()), y('int64'));
    -tt.mean(tt.log(p())[tt.arange(3), y()]);
    nnet.bn.batch_normalization_train(x(), b() + 2, b())[0]; nnet.conv2d(i(), k());
    nnet.conv2d(i(), k(), border_mode='half');
    tt.signal.pool.pool_2d(i(), (2, 2), ignore_border=True);
    tt.signal.pool.pool_2d(i(), (2, 2), ignore_border=True, mode='average_inc_pad');
    nnet.sigmoid(tt.dot(x(), p()))
"""
NETWORKS = """
    nnet.softmax_with_bias(x(), b()); tt.log(1 - nnet.sigmoid(x())); nnet.ultra_fast_sigmoid(x());
    nnet.hard_sigmoid(x()); nnet.selu(x()); nnet.binary_crossentropy(p() * 0.9, p());
    nnet.categorical_crossentropy(p(), y());
    nnet.crossentropy_softmax_1hot_with_bias(x(), b(), y())[0];
    tt.neq(tt.argmax(x(), axis=1), y()).mean();
    nnet.bn.batch_normalization_test(x(), b() + 2, b(), b(), b() + 3);
    nnet.bn.batch_normalization(x(), b() + 2, b(), b(), b() + 3);
    nnet.conv2d(i(), k(), subsample=(2, 2));
    tt.signal.pool.pool_2d(i(), (4, 4), ignore_border=False, mode='sum');
    nnet.neighbours.images2neibs(i(), (2, 3));
    nnet.abstract_conv.bilinear_upsampling(i(), ratio=2, batch_size=2, num_input_channels=3);
    nnet.h_softmax(x() / 50, 3, 9, 3, 3, p(), b(), tt.stack([p(), p(), p()]), p())
"""


def graphs_for_networks(dtypes):
    """Yield what networks are made of, and gradients of some."""
    for dtype in dtypes:
        d, third = dtype, 1 / 3
        rows = np.array([[0.5, -1.5, 3.25], [100, -50, 0], [0.1, 0.2, 0.3]])
        images = np.arange(2 * 3 * 6 * 6).reshape(2, 3, 6, 6) % 17 / 8
        kernels = np.arange(2 * 3 * 3 * 3).reshape(2, 3, 3, 3) % 7 / 4 - 0.5
        names = {
            "nnet": tt.nnet,
            "d": dtype,
            "x": partial(variable, (np.arange(3)[:, None] + rows).astype(d)),
            "p": partial(variable, [[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [third] * 3], dtype=d),
            "b": partial(variable, [0.5, -0.5, 1], dtype=d),
            "y": lambda kind="int32": variable([0, 2, 1], dtype=kind),
            "i": partial(variable, images.astype(d)),
            "k": partial(variable, kernels.astype(d)),
        }
        for one in expressions(DIFFERENTIATED) + expressions(NETWORKS):
            yield f"{one} {dtype}", partial(build, one, **names)
        for one in expressions(DIFFERENTIATED):
            yield f"gradient of {one} {dtype}", partial(build, f"gradient({one})", **names)


def gradient(output):
    """Return the gradient with respect to the input that comes first."""
    wrt = [one for one in inputs_of([output]) if hasattr(one.tag, "value") and one.ndim]
    wrt = [one for one in wrt if one.dtype in tt.continuous_dtypes]
    return tt.grad(tt.sqr(output).sum(), wrt[0])


DIFFERENTIABLE = """
    x.mean(); x.var(); x.std(); x.prod(); x.max(); x ** 3; x ** (-0.5); 2 ** x; x.norm(2);
    tt.cumsum(x); tt.cumprod(x); x.clip(0.3, 1); tt.switch(x > 0.4, x, 300); tt.repeat(x, 2);
    x[variable([0, 0, 2])]; x[::2]; x[variable([True, False, True])]; x[variable([[0, 0], [2, 1]])];
    tt.inc_subtensor(x[1:], x[0]); tt.set_subtensor(x[variable([0, 1])], x[2]); tt.join(0, x, x);
    tt.dot(x, x); tt.outer(x, x); tt.extra_ops.diff(x); tt.tile(x, 3); tt.sort(x); x.reshape((1, 3));
    tt.alloc(x, 2, 3); tt.grad((x ** 3).sum(), x); theano.gradient.grad_clip(x, -0.1, 0.1) * 2
"""


def gradients():
    """Gradients of scalar operations and others."""
    for dtype in FLOATS:
        x = partial(variable, [0.25, 0.5, 0.9], dtype=dtype)
        left_out = ("arccosh", "invert", "tri_gamma", "conj")
        texts = [f"tt.{name}(x)" for name in UNARY + SPECIAL_UNARY if name not in left_out]
        texts.append("tt.arccosh(x + 1)")
        for name, other in itertools.product(BINARY, ("int8", "float32", "float64")):
            texts.append(f"tt.{name}(x, variable([1, 2, 3], dtype='{other}'))")
        for one in texts + expressions(DIFFERENTIABLE):
            yield f"{one} {dtype}", lambda one=one, x=x: gradient(build(one, x=x()))


LINEAR_ALGEBRA = """
    tt.nlinalg.det(m); tt.nlinalg.matrix_inverse(m); tt.nlinalg.pinv(m); tt.nlinalg.trace(m);
    tt.slinalg.cholesky(m); tt.slinalg.solve(m if m.dtype != 'int8' else m / 1, v);
    tt.slinalg.eigvalsh(m, tt.eye(3)); tt.slinalg.expm(m / 10); tt.nlinalg.matrix_power(m, 3);
    tt.nlinalg.svd(m)[1]; tt.nlinalg.eigh(m)[0]; abs(tt.nlinalg.qr(m)[1]); tt.nlinalg.norm(m, 'fro');
    tt.nlinalg.tensorsolve(m, v); tt.nlinalg.lstsq()(m, v, -1)[0]; tt.fft.rfft(m)
"""


def linear_algebra():
    """Linear algebra. The dtype of SciPy's solution for int8 has changed."""
    for dtype in ("int8", "float32", "float64"):
        m = partial(variable, [[4, 1, 2], [1, 5, 3], [2, 3, 6]], dtype=dtype)
        v = partial(variable, [1, 2, 3], dtype=dtype)
        yield from cases_of(LINEAR_ALGEBRA, f" {dtype}", m=m, v=v)


def drawn(expression, kind, seed=234, n_steps=3, floatx="float64", linker="py"):
    """Return what a function draws in several steps."""
    with theano.configparser.change_flags(floatX=floatx):
        outputs = build(expression, s=kind(seed=seed))
        f = theano.function([], outputs, mode=theano.Mode(linker, None))
        return np.array([f() for _ in range(n_steps)])


OF_MRG = """
    s.uniform((2, 3)); s.uniform((4,), dtype='float16'); s.uniform((4,), dtype='float32');
    s.uniform((4,), dtype='float64'); s.uniform((4,), low=-3, high=2.5);
    s.uniform((2, 2), low=tt.constant([0, 10], dtype='int8'), high=tt.constant([1, 300]));
    s.uniform((130,)); s.uniform((10,), nstreams=3);
    s.uniform(tt.constant([2, 2], dtype='int8'), ndim=2); s.normal((4,));
    s.normal((3, 3), avg=1, std=2); s.normal((4,), dtype='float32'); s.normal((4,), dtype='float16');
    s.truncated_normal((5,)); s.binomial((6,), p=0.3); s.binomial((6,), n=1, p=0.5, dtype='float32');
    s.binomial((6,), p=0.5, dtype='int8'); s.multinomial(pvals=tt.constant([[0.1, 0.2, 0.7]] * 3));
    s.multinomial(n=4, pvals=tt.constant([[0.1, 0.2, 0.7]] * 3));
    s.multinomial(pvals=tt.constant(np.float32([[0.25, 0.25, 0.5]] * 3)), dtype='float32');
    s.choice(size=2, replace=False, p=tt.constant([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]));
    s.uniform((2,)) + s.uniform((2,))
"""


def random_mrg():
    """The streams of ``MRG_RandomStreams``."""
    for floatx in ("float32", "float64"):
        for one in expressions(OF_MRG):
            yield f"{one} floatX={floatx}", partial(drawn, one, MRG_RandomStreams, floatx=floatx)
        for seed in (1, 2**31 - 2**15, [1, 2, 3, 4, 5, 6]):
            case = partial(drawn, "s.uniform((3,))", MRG_RandomStreams, seed, 2, floatx)
            yield f"seed {seed} floatX={floatx}", case
    yield "states", lambda: np.asarray(MRG_RandomStreams(5).get_substream_rstates(4, "float32"))


def random_mrg_compiled():
    """The same by C code."""
    for one in expressions("""
        s.uniform((70,), dtype='float32'); s.uniform((70,), dtype='float64');
        s.multinomial(pvals=tt.constant([[0.1, 0.2, 0.7]] * 3))
    """):
        yield one, partial(drawn, one, MRG_RandomStreams, linker="c|py")


OF_NUMPY = """
    s.uniform((2, 3)); s.uniform((4,), low=-3, high=2.5);
    s.uniform(low=tt.constant([0, 10], dtype='int8'), high=tt.constant([1, 300]));
    s.uniform((4,), dtype='float32'); s.uniform(); s.normal((4,), avg=1, std=2);
    s.normal((4,), dtype='float32'); s.binomial((6,), n=10, p=0.3);
    s.binomial(n=tt.constant([5, 200]), p=tt.constant([0.25, 0.5]));
    s.binomial((6,), n=1, p=0.5, dtype='int8'); s.random_integers((5,), low=-5, high=300);
    s.random_integers((5,), low=0, high=100, dtype='int8');
    s.random_integers((5,), low=0, high=255, dtype='uint8');
    s.random_integers(low=tt.constant([0, 10]), high=tt.constant([1, 30])); s.permutation(n=6);
    s.permutation((2,), n=4); s.permutation(n=6, dtype='int8'); s.choice((4,), a=10);
    s.choice((4,), a=3, p=tt.constant([0.25, 0.25, 0.5])); s.poisson((4,), lam=3.5);
    s.multinomial((3,), n=5, pvals=[0.25, 0.25, 0.5]);
    s.shuffle_row_elements(tt.constant(np.arange(8).reshape(2, 4)))
"""


def random_numpy():
    """The streams of ``RandomStreams``."""
    for floatx, one in itertools.product(("float32", "float64"), expressions(OF_NUMPY)):
        yield f"{one} floatX={floatx}", partial(drawn, one, RandomStreams, floatx=floatx)


#: The cases of each family, and the ways that their results are computed
FAMILIES = {
    "unary": (unary, ("python", "constant")),
    "binary": (binary, ("python",)),
    "scalar_unary": (scalars_of_one, ("scalar", "compiled")),
    "scalar_binary": (partial(scalars_of_two, BINARY), ("scalar", "compiled")),
    "scalar_special": (partial(scalars_of_two, SPECIAL_BINARY), ("scalar", "compiled")),
    "scalar_casts": (scalar_casts, ("scalar", "compiled")),
    "casts": (casts, ("python", "optimized", "constant")),
    "ternary": (partial(functions_of_more, REAL), ("python", "optimized", "constant")),
    "ternary_compiled": (partial(functions_of_more, ["int8", "float32"]), ("compiled",)),
    "numbers": (partial(with_python_numbers, DTYPES), ("python", "optimized", "constant")),
    "numbers_floatx_float32": (
        partial(
            with_python_numbers, ["bool", "int8", "uint8", "int64", "float16", "float32", "float64"]
        ),
        ("python", "optimized", "constant"),
    ),
    "numbers_compiled": (partial(with_python_numbers, ["int8", "float32"]), ("compiled",)),
    "constants": (constants, ("python",)),
    "constants_floatx_float32": (
        partial(constants_of, [1, 300, 2**40, 0.5, 0.1, 1e-40, 3.0]),
        ("python",),
    ),
    "reductions": (partial(reductions_of, DTYPES), ("python", "optimized", "constant")),
    "reductions_compiled": (
        partial(reductions_of, ["bool", "int8", "float32", "complex128"]),
        ("compiled",),
    ),
    "increments": (
        partial(increments_of, "bool int8 uint8 int64 float16 float32 float64 complex64".split()),
        ("python", "optimized"),
    ),
    "increments_compiled": (increments_compiled, ("compiled",)),
    "shapes": (shapes, ("python", "optimized", "constant")),
    "arrays": (arrays, ("python", "optimized", "constant")),
    "products": (products, ("python", "optimized")),
    "networks": (partial(graphs_for_networks, ["float32", "float64"]), ("python", "optimized")),
    "networks_floatx_float32": (partial(graphs_for_networks, ["float32"]), ("python", "optimized")),
    "gradients": (gradients, ("python", "optimized", "constant")),
    "linear_algebra": (linear_algebra, ("python",)),
    "random_mrg": (random_mrg, ("python",)),
    "random_mrg_compiled": (random_mrg_compiled, ("compiled",)),
    "random_numpy": (random_numpy, ("python",)),
}


def evaluate(output, values=()):
    """Return the value of an output, computed by the Python code of each operation."""
    values = dict(values)
    leaves = inputs_of([output])
    for leaf in leaves:
        if isinstance(leaf, theano.Constant):
            values[leaf] = leaf.data
        elif hasattr(leaf.tag, "value"):
            values[leaf] = leaf.tag.value
        else:
            values[leaf] = leaf.get_value()
    for node in io_toposort(leaves, [output]):
        storage = {one: [values.get(one)] for one in node.inputs}
        storage.update((one, [None]) for one in node.outputs)
        compute = {one: [one in values] for one in storage}
        thunk = node.op.make_thunk(node, storage, compute, [], impl="py")
        thunk()
        for one in node.outputs:
            values[one] = storage[one][0]
    return values[output]


def by_function(outputs, constant=False, mode=None):
    """Return the values of outputs, computed by one function."""
    inputs = [one for one in inputs_of(outputs) if hasattr(one.tag, "value")]
    inputs = list(dict.fromkeys(inputs))
    givens = {}
    if constant:
        givens = {one: tt.constant(one.tag.value, dtype=one.dtype) for one in inputs}
        givens = {one: tt.patternbroadcast(new, one.broadcastable) for one, new in givens.items()}
        outputs, inputs = theano.clone(outputs, givens), []
    f = theano.function(inputs, outputs, mode=mode, on_unused_input="ignore")
    return f(*[one.tag.value for one in inputs])


def has_c_code(inputs, output):
    """Tell whether all operations of a graph have C code, which few have for float16."""
    graph = theano.gof.FunctionGraph(inputs, [output], clone=True)
    if any(getattr(one, "dtype", None) == "float16" for one in graph.variables):
        return False
    # Its C code asserts that no other operation of the module made what it takes a part of.
    if any(isinstance(one.op, tt.Subtensor) and one.inputs[0].owner for one in graph.apply_nodes):
        return False
    try:
        theano.gof.CLinker().accept(graph).code_gen()
    except Exception:
        return False
    return True


def in_groups(cases, compute, size):
    """Compute many cases at once; if that fails, each half of them."""
    results = {}
    for start in range(0, len(cases), size):
        group = cases[start : start + size]
        try:
            results.update(zip([name for name, _ in group], compute([built for _, built in group])))
        except Exception as error:
            if len(group) == 1:
                results[group[0][0]] = error
            else:
                results.update(in_groups(group, compute, (len(group) + 1) // 2))
    return results


def compute_scalars_in_c(scalars):
    """Return the results of the C code of scalar operations."""
    inputs = {}
    for one in scalars:
        for index, input in enumerate(one.inputs):
            inputs.setdefault((index, input.dtype), input.type())
    outputs = []
    for one in scalars:
        outputs.append(one.operation(*[inputs[i, v.dtype] for i, v in enumerate(one.inputs)]))
    graph = theano.gof.FunctionGraph(list(inputs.values()), outputs, clone=True)
    f = theano.gof.CLinker().accept(graph).make_function()
    results = [[] for _ in scalars]
    for turn in range(max(len(one.values) for one in scalars)):
        # An input has one value in a call, but operations have values of their own.
        pending = {
            number: dict(zip([(i, v.dtype) for i, v in enumerate(one.inputs)], one.values[turn]))
            for number, one in enumerate(scalars)
            if turn < len(one.values)
        }
        while pending:
            given, chosen = {}, []
            for number, values in pending.items():
                if all(given.get(key, value) == value for key, value in values.items()):
                    given.update(values)
                    chosen.append(number)
            arguments = [given.get(key, np.dtype(key[1]).type(1)) for key in inputs]
            outputs = f(*arguments)
            outputs = outputs if isinstance(outputs, list) else [outputs]
            for number in chosen:
                results[number].append(np.asarray(outputs[number]))
                del pending[number]
    return [joined(result) for result in results]


def compute(name, way, chosen=None):
    """Return the results of a family of cases, or of some, in one way: arrays, or errors."""
    function, _ = FAMILIES[name]
    floatx = "float32" if name.endswith("floatx_float32") else "float64"
    results, cases = {}, []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(theano.configparser.change_flags(floatX=floatx, compute_test_value="off"))
        # Otherwise an optimization that fails is only left out.
        stack.enter_context(theano.configparser.change_flags(on_opt_error="raise"))
        if way != "compiled":
            stack.enter_context(theano.configparser.change_flags(cxx=""))
        for case, build in function():
            if chosen is not None and case not in chosen:
                continue
            try:
                built = build()
                if way == "python" and isinstance(built, theano.Variable):
                    results[case] = evaluate(built)
                elif not isinstance(built, (theano.Variable, Scalars)):
                    results[case] = built
                elif way == "scalar":
                    results[case] = built.in_python()
                elif isinstance(built, theano.Variable):
                    evaluate(built)  # an error here would be one of all cases in a function
                    cases.append((case, built))
                elif built.has_c_code:
                    cases.append((case, built))
            except Exception as error:
                results[case] = error
        if way == "compiled" and cases and isinstance(cases[0][1], Scalars):
            cases = [one for one in cases if has_c_code(one[1].inputs, one[1].output)]
            results.update(in_groups(cases, compute_scalars_in_c, 800))
        elif way == "compiled":
            cases = [one for one in cases if has_c_code(inputs_of([one[1]]), one[1])]
            mode = theano.Mode(theano.gof.CLinker(), None)
            results.update(in_groups(cases, lambda those: by_function(those, mode=mode), 100))
        elif cases:
            # Without a compiler, convolutions are not replaced by others.
            mode = theano.Mode("py", "fast_run").excluding("local_abstractconv_check")
            constant = way == "constant"
            results.update(in_groups(cases, lambda those: by_function(those, constant, mode), 60))
    return results


def encode(result):
    """Return a result as text: the dtype, the shape and the bytes, or the type of an error."""
    if isinstance(result, Exception):
        return "error " + type(result).__name__
    result = np.asarray(result)
    if result.dtype == object:
        return "error object"
    return f"{result.dtype} {','.join(map(str, result.shape))} {result.tobytes().hex()}"


def decode(text):
    """Return the array of a text."""
    dtype, shape, data = text.split(" ")
    shape = [int(size) for size in shape.split(",") if size]
    return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)


def same(expected, got, family, case="", roundings=1):
    """Tell whether two texts are of the same result, but for rounding."""
    if expected == got:
        return True
    if expected.startswith("error") or got.startswith("error"):
        return False
    if expected.split(" ")[:2] != got.split(" ")[:2]:
        return False
    expected, got = decode(expected), decode(got)
    if expected.dtype.kind not in "fc" or (family.startswith("random") and "normal" not in case):
        return False
    n_epsilons = roundings * (4 if expected.dtype == "float16" else 32)
    dtypes = [str(expected.dtype)]
    if case == "angle complex64" or family.startswith(
        ("reductions", "products", "networks", "gradients", "linear_algebra")
    ):
        dtypes += [one for one in ("float16", "float32", "complex64") if one in case]
    epsilon = n_epsilons * max(np.finfo(one).eps for one in dtypes)
    # Sums of terms that cancel are as precise as the terms, which are about one.
    tiny = 0 if "scalar" in family or family in ("unary", "binary") else epsilon
    if expected.dtype.kind == "c" or family in ("linear_algebra", "networks", "gradients", "products"):
        tiny = epsilon
    with np.errstate(all="ignore"):
        return bool(np.allclose(expected, got, rtol=epsilon, atol=tiny, equal_nan=True))


def record(path, names=None):
    """Write the results of all cases."""
    texts, families = [], {}
    index = {}
    for name, (_, ways) in FAMILIES.items():
        for way in ways:
            if names and name not in names:
                continue
            start = time.time()
            results = compute(name, way)
            kept = {}
            for case, result in results.items():
                text = encode(result)
                if text not in index:
                    index[text] = len(texts)
                    texts.append(text)
                kept[case] = index[text]
            families[f"{name} {way}"] = kept
            print(
                name, way, len(kept), sum(isinstance(one, Exception) for one in results.values()),
                f"{time.time() - start:.1f} s", flush=True,
            )  # fmt: skip
    try:
        import scipy
    except ImportError:
        scipy = None
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "scipy": scipy and scipy.__version__,
        "theano": theano.__version__,
    }
    document = {"made with": made_with, "results": texts, "cases": families}
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as compressed:
        compressed.write(json.dumps(document, separators=(",", ":")).encode())


def read(path):
    """Return the recorded results: the text of each case, by the family and the way."""
    with gzip.open(str(path), "rt") as file:
        document = json.load(file)
    texts = document["results"]
    return {
        name: {case: texts[number] for case, number in cases.items()}
        for name, cases in document["cases"].items()
    }


def describe(text):
    """Return a text as people read it."""
    if text.startswith("error"):
        return text
    value = decode(text)
    numbers = np.array2string(value.ravel(), threshold=30, max_line_width=10**6)
    return f"{value.dtype} {value.shape} {numbers}"


def differences(recorded, name, way, roundings=1, every=1):
    """Return a line for each case whose result differs, is missing, or was not recorded.

    Cases that were an error are left out: they may have a result now. With `every`, one case in so many
    is computed.
    """
    everything = recorded[f"{name} {way}"]
    expected = {case: text for case, text in everything.items() if not text.startswith("error")}
    expected = dict(list(expected.items())[::every])
    results = compute(name, way, expected)
    lines = []
    for case, text in expected.items():
        result = results.get(case, KeyError("there is no such case"))
        if not same(text, encode(result), name, case, roundings):
            got = repr(result) if isinstance(result, Exception) else describe(encode(result))
            lines.append(f"{case}: expected {describe(text)}, got {got}")
    if way == FAMILIES[name][1][0] != "compiled":
        lines += [f"{case}: not recorded" for case, _ in FAMILIES[name][0]() if case not in everything]
    return lines


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    record(sys.argv[1], sys.argv[2:])
