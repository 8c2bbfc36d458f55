"""What Theano computes, by the names of cases, to compare versions of Python and NumPy.

``python theano_values.py record FILE`` writes the results, and needs only Theano and NumPy;
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
import json
import logging
import math
import sys
import time
import warnings

import numpy as np
import theano
import theano.tensor as tt
import theano.tensor.fft
import theano.tensor.nnet.neighbours
import theano.tensor.signal.pool
import theano.tensor.slinalg
from theano.gof.graph import inputs as inputs_of, io_toposort

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

#: The name of each family of cases, and the ways that its results are computed.
FAMILIES = {}


def family(*ways):
    """Make a family of a function that yields the name of each case, and a function that builds it."""

    def add(function):
        FAMILIES[function.__name__] = (function, ways)
        return function

    return add


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


# The families


@family("python", "constant")
def unary(dtypes=DTYPES):
    """Functions of one argument."""
    for dtype in dtypes:
        for name in UNARY:
            values = unary_values(name, dtype, extremes)
            yield (
                f"{name} {dtype}",
                lambda name=name, values=values, dtype=dtype: getattr(tt, name)(
                    variable(values, dtype=dtype)
                ),
            )
        for name in SPECIAL_UNARY:
            values = special_values(name, dtype)
            yield (
                f"{name} {dtype}",
                lambda name=name, values=values, dtype=dtype: getattr(tt, name)(
                    variable(values, dtype=dtype)
                ),
            )
        for name in (
            "sigmoid",
            "softplus",
            "hard_sigmoid",
            "ultra_fast_sigmoid",
            "softsign",
            "relu",
            "elu",
        ):
            values = unary_values(name, dtype, small)
            yield (
                f"{name} {dtype}",
                lambda name=name, values=values, dtype=dtype: getattr(tt.nnet, name)(
                    variable(values, dtype=dtype)
                ),
            )


@family("python")
def binary(dtypes=DTYPES):
    """Functions of two arguments, of all pairs of values."""
    for name in BINARY + SPECIAL_BINARY:
        for first in dtypes:
            for second in dtypes:
                if has_changed(name, (first, second)):
                    continue
                if name in SPECIAL_BINARY:
                    left, right = special_values(name, first), special_values(name, second)
                else:
                    left, right = binary_values(name, (first, second), extremes)

                def build(name=name, left=left, right=right, first=first, second=second):
                    left = variable(np.array(left, first)[:, None], (False, True))
                    return getattr(tt, name)(
                        left, variable(np.array(right, second)[None], (True, False))
                    )

                yield f"{name} {first} {second}", build


@family("scalar", "compiled")
def scalar_unary():
    """Functions of one scalar."""
    for name in UNARY + SPECIAL_UNARY:
        for dtype in DTYPES:
            yield f"{name} {dtype}", lambda name=name, dtype=dtype: Scalars(name, (dtype,))


@family("scalar")
def scalar_networks():
    """Functions of one scalar, of networks."""
    for name in ("scalar_sigmoid", "scalar_softplus", "ultra_fast_scalar_sigmoid"):
        for dtype in REAL:
            yield (
                f"{name} {dtype}",
                lambda name=name, dtype=dtype: Scalars(
                    name,
                    (dtype,),
                    [(value,) for value in small(dtype)],
                    getattr(tt.nnet.sigm, name),
                ),
            )


@family("scalar", "compiled")
def scalar_binary():
    """Functions of two scalars."""
    yield from pairs_of_scalars(BINARY)


@family("scalar", "compiled")
def scalar_special():
    """Special functions of two scalars. The C code of some aborts for numbers outside their domain."""
    yield from pairs_of_scalars(SPECIAL_BINARY)


def pairs_of_scalars(names):
    """Yield functions of scalars of all pairs of dtypes."""
    for name in names:
        for first in DTYPES:
            for second in DTYPES:
                if has_changed(name, (first, second)):
                    continue
                yield (
                    f"{name} {first} {second}",
                    lambda name=name, dtypes=(first, second): Scalars(name, dtypes),
                )


@family("scalar", "compiled")
def scalar_casts():
    """Casts of scalars, to dtypes that have the value: the compiler decides about others."""
    for first in DTYPES:
        for second in DTYPES:
            yield (
                f"{first} {second}",
                lambda first=first, second=second: Scalars(
                    "cast",
                    (first,),
                    [(value,) for value in cast_values(first, second)],
                    theano.scalar.basic._cast_mapping[second],
                ),
            )


def cast_values(first, second):
    """Return values of the first dtype that the second one has, but for their fractions."""
    if first in INTEGERS and second in INTEGERS:
        return extremes(first)  # these wrap
    values = small(first)
    if second in INTEGERS:
        low = 0 if second in UNSIGNED else -128
        values = [value for value in values if not isinstance(value, complex) and low <= value < 128]
    return values


@family("python", "optimized", "constant")
def casts(dtypes=DTYPES):
    """Casts of vectors, to dtypes that have the value."""
    for first in dtypes:
        for second in dtypes:
            values = cast_values(first, second)
            yield (
                f"{first} {second}",
                lambda first=first, second=second, values=values: tt.cast(
                    variable(values, dtype=first), second
                ),
            )
            # Two casts, which an optimization may combine.
            yield (
                f"{first} int16 {second}",
                lambda first=first, second=second: tt.cast(
                    tt.cast(variable([0, 1], dtype=first), "int16"), second
                ),
            )


@family("python", "optimized", "constant")
def ternary():
    """Functions of more arguments."""
    yield from functions_of_more(REAL)


@family("compiled")
def ternary_compiled():
    """The same by C code."""
    yield from functions_of_more(["int8", "float32"])


def functions_of_more(dtypes):
    """Yield functions of three arguments, and the like."""
    for dtype in dtypes:
        values = extremes(dtype)
        for other in ("bool", "int8", "uint8", "int64", "float32", "float64"):
            v = lambda: variable(extremes(dtype), dtype=dtype)  # noqa: B023, E731
            b = lambda: variable(small(other)[1], dtype=other)  # noqa: B023, E731
            c = lambda: variable(small(other)[-1], dtype=other)  # noqa: B023, E731
            yield f"clip {dtype} {other}", lambda v=v, b=b: tt.clip(v(), 0, b())
            yield f"clip {dtype} {other} -1 100", lambda v=v, b=b: tt.clip(v(), -1, 100) + b()
            yield f"switch {dtype} {other}", lambda v=v, b=b: tt.switch(tt.gt(v(), 0), v(), b())
            yield f"switch {dtype} {other} 300", lambda v=v, b=b: tt.switch(tt.gt(b(), 0), 300, v())
            yield f"add {dtype} {other}", lambda v=v, b=b, c=c: tt.add(v(), b(), c())
            yield f"mul {dtype} {other}", lambda v=v, b=b, c=c: tt.mul(v(), b(), c())
        yield f"isclose {dtype}", lambda v=v: tt.isclose(v(), v())
        if dtype in FLOATS:
            for mode in ("half_to_even", "half_away_from_zero"):
                yield (
                    f"round {dtype} {mode}",
                    lambda dtype=dtype, mode=mode: tt.round(
                        variable([0.5, 1.5, -0.5, -2.5, 2.4, -2.6], dtype=dtype), mode
                    ),
                )
                yield (
                    f"iround {dtype} {mode}",
                    lambda dtype=dtype, mode=mode: tt.iround(
                        variable([0.5, 1.5, -0.5, -2.5, 2.4, -2.6], dtype=dtype), mode
                    ),
                )
        del values


#: Python's numbers in expressions, which Theano casts by their values
WITH_PYTHON = {
    "x + 1": lambda x: x + 1,
    "x * 300": lambda x: x * 300,
    "x + 0.5": lambda x: x + 0.5,
    "2 ** x": lambda x: 2 ** abs(x),
    "x - 1000": lambda x: x - 1000,
    "1 - x": lambda x: 1 - x,
    "300 - x": lambda x: 300 - x,
    "x * 70000": lambda x: x * 70000,
    "x + 2 ** 40": lambda x: x + 2**40,
    "x + 255": lambda x: x + 255,
    "x - 128": lambda x: x - 128,
    "x / 3": lambda x: x / 3,
    "x / 2.0": lambda x: x / 2.0,
    "x // 3": lambda x: x // 3,
    "x % 7": lambda x: x % 7,
    "x ** 2": lambda x: x**2,
    "x ** 0.5": lambda x: abs(x) ** 0.5,
    "x ** 3": lambda x: x**3,
    "x > 300": lambda x: x > 300,
    "x < -1": lambda x: x < -1,
    "x == 256": lambda x: tt.eq(x, 256),
    "x == 0.1": lambda x: tt.eq(x, 0.1),
    "maximum(x, 200)": lambda x: tt.maximum(x, 200),
    "minimum(x, -200)": lambda x: tt.minimum(x, -200),
    "x & 15": lambda x: x & 15,
    "x | 256": lambda x: x | 256,
    "x ^ 255": lambda x: x ^ 255,
    "x * 2 * 3": lambda x: x * 2 * 3,
    "x * 200 * 2": lambda x: x * 200 * 2,
    "x * 2 / 4": lambda x: x * 2 / 4,
    "x + 100 + 100": lambda x: x + 100 + 100,
    "x * 0.1 * 10": lambda x: x * 0.1 * 10,
    "x - x * 2": lambda x: x - x * 2,
    "-x * 3 * -1": lambda x: -x * 3 * -1,
    "clip(x, 0, 300)": lambda x: tt.clip(x, 0, 300),
    "switch(x > 1, 1, 300)": lambda x: tt.switch(x > 1, 1, 300),
    "x + np.int8(1)": lambda x: x + np.int8(1),
    "x * np.float32(0.1)": lambda x: x * np.float32(0.1),
    "x * np.float64(0.1)": lambda x: x * np.float64(0.1),
    "x + np.uint8(200)": lambda x: x + np.uint8(200),
    "x + np.array([1000])": lambda x: x + np.array([1000]),
    "x.mean() * 2": lambda x: x.mean() * 2,
    "(x + 1).sum() - 1": lambda x: (x + 1).sum() - 1,
    "x + True": lambda x: x + True,
    "x * 1e-10": lambda x: x * 1e-10,
    "x * 1e300": lambda x: x * 1e300,
    "exp(x * 0.5) + 1": lambda x: tt.exp(x * 0.5) + 1,
    "log(1 + exp(x * 0.1))": lambda x: tt.log(1 + tt.exp(x * 0.1)),
    "sqrt(x * x + 1)": lambda x: tt.sqrt(x * x + 1),
    "x * (1 - x)": lambda x: x * (1 - x),
    "(x * 4) * (1 / 8)": lambda x: (x * 4) * (1 / 8),
    "x + 1 - 1 + 7": lambda x: x + 1 - 1 + 7,
    "zeros_like(x) + 3": lambda x: tt.zeros_like(x) + 3,
    "ones_like(x) * 300": lambda x: tt.ones_like(x) * 300,
    "x.astype('int8') * 100": lambda x: x.astype("int8") * 100 * 3,
}


def with_python_numbers(dtypes):
    """Yield expressions of vectors and scalars with Python's numbers."""
    for dtype in dtypes:
        for name, expression in WITH_PYTHON.items():
            if name == "x // 3" and dtype in COMPLEX:
                continue  # NumPy has removed it
            values = [0, 1] if dtype == "bool" else [0, 1, 3, 60] + [-2] * (dtype not in UNSIGNED)
            yield f"{name}, {dtype}", lambda f=expression, v=values, d=dtype: f(variable(v, dtype=d))
            yield (
                f"{name}, {dtype} number",
                lambda f=expression, v=values, d=dtype: f(variable(v[1], dtype=d)),
            )


@family("python", "optimized", "constant")
def numbers():
    """Python's numbers in expressions."""
    yield from with_python_numbers(DTYPES)


@family("python", "optimized", "constant")
def numbers_floatx_float32():
    """The same if ``floatX`` is ``float32``."""
    yield from with_python_numbers(["bool", "int8", "uint8", "int64", "float16", "float32", "float64"])


@family("compiled")
def numbers_compiled():
    """The same for C code."""
    yield from with_python_numbers(["int8", "float32"])


def constants_of(numbers):
    """Yield constants of Python's and NumPy's numbers."""
    for number in numbers:
        yield f"constant({number!r})", lambda number=number: tt.constant(number)
        yield f"as_tensor_variable({number!r})", lambda number=number: tt.as_tensor_variable(number)
        yield f"as_tensor_variable([{number!r}])", lambda number=number: tt.as_tensor_variable([number])
        yield (
            f"as_tensor_variable([{number!r}, 1])",
            lambda number=number: tt.as_tensor_variable([number, 1]),
        )
        yield (
            f"scalar {number!r}",
            lambda number=number: tt.tensor_from_scalar(theano.scalar.as_scalar(number)),
        )
        yield (
            f"get_scalar_constant_value({number!r})",
            lambda number=number: np.asarray(tt.get_scalar_constant_value(tt.constant(number) * 1)),
        )
        yield f"shared({number!r})", lambda number=number: theano.shared(number).get_value()
        for dtype in ("int8", "uint8", "int32", "float32", "float64"):
            if isinstance(number, float) and "int" in dtype and not abs(number) < 128:
                continue  # the compiler decides what this is
            if isinstance(number, float) and dtype == "uint8" and number < 0:
                continue
            yield (
                f"constant({number!r}, dtype={dtype})",
                lambda number=number, dtype=dtype: tt.constant(number, dtype=dtype),
            )
            yield (
                f"_asarray({number!r}, {dtype})",
                lambda number=number, dtype=dtype: theano._asarray(number, dtype=dtype),
            )


PYTHON_NUMBERS = [0, 1, -1, 100, 127, 128, -128, -129, 255, 256, 300, 32767, 32768, -32769, 65535, 65536]
PYTHON_NUMBERS += [2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**40, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
PYTHON_NUMBERS += [True, False]
PYTHON_NUMBERS += [0.5, 0.1, 1.0, -2.5, 1e10, 1e-40, 1e300, math.inf, 3.0]


@family("python")
def constants():
    """The dtypes and values of constants."""
    yield from constants_of(PYTHON_NUMBERS)
    for dtype in DTYPES:
        number = np.dtype(dtype).type(1)
        yield f"constant({dtype})", lambda number=number: tt.constant(number)
        yield (
            f"as_tensor_variable([{dtype}, 1])",
            lambda number=number: tt.as_tensor_variable([number, 1]),
        )
        yield (
            f"as_tensor_variable([{dtype}, 0.5])",
            lambda number=number: tt.as_tensor_variable([number, 0.5]),
        )
        yield (
            f"as_tensor_variable(array {dtype})",
            lambda number=number: tt.as_tensor_variable(np.array([number])),
        )
        yield f"shared {dtype}", lambda number=number: theano.shared(np.array([number])) + 1
        yield (
            f"filter {dtype}",
            lambda number=number: tt.fvector().type.filter(np.array([number]), allow_downcast=True),
        )
        for target in ("bscalar", "iscalar", "fscalar", "dscalar"):
            yield (
                f"filter {dtype} {target}",
                lambda number=number, target=target: getattr(tt, target).filter(number),
            )
    for target in (
        "bscalar",
        "wscalar",
        "iscalar",
        "lscalar",
        "fscalar",
        "dscalar",
        "fvector",
        "bvector",
    ):
        for value in (1, 127, 128, 300, -129, 2**40, 0.5, 0.1, 1e300):
            what = [value] if "vector" in target else value
            for options in ({}, {"allow_downcast": True}, {"strict": True}):
                if isinstance(value, float) and target[0] in "bwil" and abs(value) > 1:
                    continue  # the compiler decides what this is
                yield (
                    f"filter {what} {target} {options}",
                    lambda target=target, what=what, options=options: np.asarray(
                        getattr(tt, target).filter(what, **options)
                    ),
                )
    for value in (1, 127, 128, 300, 2**40, 0.5, 0.1):
        for dtype in ("int8", "uint8", "int64", "float32", "float64"):
            yield (
                f"scalar filter {value} {dtype}",
                lambda value=value, dtype=dtype: np.asarray(
                    theano.scalar.get_scalar_type(dtype).filter(value, allow_downcast=True)
                ),
            )


@family("python")
def constants_floatx_float32():
    """The same if ``floatX`` is ``float32``."""
    yield from constants_of([1, 300, 2**40, 0.5, 0.1, 1e-40, 3.0])


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


def reductions_of(dtypes):
    """Yield reductions."""
    for dtype in dtypes:
        for name in (
            "sum",
            "prod",
            "mean",
            "var",
            "std",
            "max",
            "min",
            "argmax",
            "argmin",
            "any",
            "all",
        ):
            for axis in (None, 0, 1, -1, (0, 1)):
                yield (
                    f"{name} {dtype} {axis}",
                    lambda name=name, dtype=dtype, axis=axis: getattr(tt, name)(
                        matrix(dtype), axis=axis
                    ),
                )
        for name in ("sum", "prod"):
            for options in ({"dtype": "float32"}, {"dtype": "int8"}, {"acc_dtype": "float64"}):
                if dtype in FLOATS and options == {"dtype": "int8"}:
                    continue  # the compiler decides what negative numbers are
                yield (
                    f"{name} {dtype} {options}",
                    lambda name=name, dtype=dtype, options=options: getattr(tt, name)(
                        matrix(dtype), axis=0, **options
                    ),
                )
        yield f"sum keepdims {dtype}", lambda dtype=dtype: matrix(dtype).sum(axis=1, keepdims=True)
        yield f"var ddof {dtype}", lambda dtype=dtype: matrix(dtype).var(axis=0, ddof=1)
        yield f"var corrected {dtype}", lambda dtype=dtype: tt.var(matrix(dtype), axis=0, corrected=True)
        yield (
            f"mean float32 {dtype}",
            lambda dtype=dtype: tt.mean(matrix(dtype), axis=0, dtype="float32"),
        )
        for axis in (None, 0, 1):
            yield f"cumsum {dtype} {axis}", lambda dtype=dtype, axis=axis: tt.cumsum(matrix(dtype), axis)
            yield (
                f"cumprod {dtype} {axis}",
                lambda dtype=dtype, axis=axis: tt.cumprod(matrix(dtype), axis),
            )
        for order in (None, 1, 2, "inf"):
            yield (
                f"norm {dtype} {order}",
                lambda dtype=dtype, order=order: matrix(dtype).norm(
                    math.inf if order == "inf" else (order or 2), axis=0
                ),
            )
        yield f"ptp {dtype}", lambda dtype=dtype: tt.ptp(matrix(dtype), axis=0)
        yield f"sum of nothing {dtype}", lambda dtype=dtype: matrix(dtype)[:0].sum(axis=0)
        yield f"sum of many {dtype}", lambda dtype=dtype: tt.tile(matrix(dtype).flatten(), 60).sum()
        yield f"mean of many {dtype}", lambda dtype=dtype: tt.tile(matrix(dtype).flatten(), 60).mean()


@family("python", "optimized", "constant")
def reductions():
    """Reductions."""
    yield from reductions_of(DTYPES)


@family("compiled")
def reductions_compiled():
    """Reductions by C code."""
    yield from reductions_of(["bool", "int8", "float32", "complex128"])


#: What is incremented, from a vector of five and a matrix of three by four
INCREMENTED = {
    "v[1:4]": lambda v, m: v[1:4],
    "v[::-2]": lambda v, m: v[::-2],
    "v[-1]": lambda v, m: v[-1],
    "v[repeated]": lambda v, m: v[variable([0, 3, 0, 0])],
    "v[negative]": lambda v, m: v[variable([-1, 2, -1])],
    "v[int32]": lambda v, m: v[variable([1, 1], dtype="int32")],
    "v[uint8]": lambda v, m: v[variable([1, 1], dtype="uint8")],
    "v[mask]": lambda v, m: v[variable([True, False, True, False, True])],
    "v[v > 2]": lambda v, m: v[tt.gt(v, 2)],
    "v[matrix]": lambda v, m: v[variable([[0, 1], [1, -1]])],
    "v[[0, 2, 2]]": lambda v, m: v[[0, 2, 2]],
    "m[1]": lambda v, m: m[1],
    "m[:, 1:3]": lambda v, m: m[:, 1:3],
    "m[::2, -1]": lambda v, m: m[::2, -1],
    "m[repeated]": lambda v, m: m[variable([0, 2, 0])],
    "m[negative]": lambda v, m: m[variable([-1, -1])],
    "m[pairs]": lambda v, m: m[variable([0, 2, 0]), variable([1, -1, 1])],
    "m[:, repeated]": lambda v, m: m[:, variable([1, 1, -1])],
    "m[1:, repeated]": lambda v, m: m[1:, variable([1, 1, -1])],
    "m[mask]": lambda v, m: m[variable(np.arange(12).reshape(3, 4) % 5 == 0)],
    "m[row mask]": lambda v, m: m[variable([True, False, True])],
    "m[column, row]": lambda v, m: m[variable([[0], [2]]), variable([[1, 3]])],
    "m[0, repeated]": lambda v, m: m[0, variable([2, 2])],
}


def increments_of(dtypes, names=INCREMENTED, others=None):
    """Yield what is read from, set and added at indices."""
    for dtype in dtypes:
        for name in names:

            def part(name=name, dtype=dtype):
                v = variable(np.arange(5).astype(dtype))
                m = variable(np.arange(12).reshape(3, 4).astype(dtype))
                return INCREMENTED[name](v, m)

            yield f"{name} {dtype}", part
            yield f"set {name} {dtype} 1", lambda part=part: tt.set_subtensor(part(), 1)
            yield f"inc {name} {dtype} 100", lambda part=part: tt.inc_subtensor(part(), 100)
            yield f"inc {name} {dtype} 300", lambda part=part: tt.inc_subtensor(part(), 300)
            for other in others or (dtype, "int8", "uint8", "float32"):
                number = lambda other=other: variable(1, dtype=other)  # noqa: E731
                yield (
                    f"inc {name} {dtype} {other}",
                    lambda part=part, number=number: tt.inc_subtensor(part(), number()),
                )
                yield (
                    f"set {name} {dtype} {other}",
                    lambda part=part, number=number: tt.set_subtensor(part(), number()),
                )

            def vector(part=part, dtype=dtype):
                where = part()
                shape = evaluate(where).shape
                values = np.arange(1, shape[-1] + 1 if shape else 2).astype(dtype)
                return where, variable(values if shape else values[0])

            yield f"inc {name} {dtype} vector", lambda vector=vector: tt.inc_subtensor(*vector())
            yield f"set {name} {dtype} vector", lambda vector=vector: tt.set_subtensor(*vector())


@family("python", "optimized")
def increments():
    """Reading, setting and adding at indices."""
    yield from increments_of(
        ["bool", "int8", "uint8", "int64", "float16", "float32", "float64", "complex64"]
    )


@family("compiled")
def increments_compiled():
    """The same by C code."""
    names = ["v[1:4]", "v[-1]", "v[repeated]", "v[int32]", "m[1]", "m[:, 1:3]", "m[repeated]"]
    yield from increments_of(["int8", "float32"], names, ("float32", "int8"))
    yield from increments_of(["float64", "complex64"], ["v[repeated]", "m[negative]"], ("float32",))


@family("python", "optimized", "constant")
def shapes():
    """Shapes, and what they are computed with."""
    x = lambda: variable(np.zeros((3, 4)))  # noqa: E731
    empty = lambda: variable(np.zeros((0, 4)))  # noqa: E731
    yield "x.shape", lambda: x().shape
    yield "x.size", lambda: x().size
    for name, f in {
        "n + 1": lambda n: n + 1,
        "n * 2": lambda n: n * 2,
        "n / 2": lambda n: n / 2,
        "n // 2": lambda n: n // 2,
        "n % 2": lambda n: n % 2,
        "n ** 2": lambda n: n**2,
        "n - 1000": lambda n: n - 1000,
        "n * 0.5": lambda n: n * 0.5,
        "ceil(n / 2)": lambda n: tt.ceil(n / 2).astype("int64"),
        "int8 + n": lambda n: variable(1, dtype="int8") + n,
        "uint64 + n": lambda n: variable(1, dtype="uint64") + n,
        "float32 + n": lambda n: variable(1, dtype="float32") * n,
        "maximum(n, 1)": lambda n: tt.maximum(n, 1),
        "arange(n)": lambda n: tt.arange(n),
        "arange(n * 0.5)": lambda n: tt.arange(n * 0.5),
        "zeros(n)": lambda n: tt.zeros((n, 2)),
        "zeros(n + 1, int8)": lambda n: tt.zeros((n + 1,), dtype="int8"),
        "ones(uint8)": lambda n: tt.ones((n, variable(2, dtype="uint8"))),
        "alloc(300, n)": lambda n: tt.alloc(300, n),
        "alloc(float32, n)": lambda n: tt.alloc(np.float32(0.1), n, 2),
        "eye(n)": lambda n: tt.eye(n),
        "eye(n, n + 1, 1, int8)": lambda n: tt.eye(n, n + 1, 1, dtype="int8"),
        "stack([n, 2])": lambda n: tt.stack([n, 2]),
        "stack([n, 2.5])": lambda n: tt.stack([n, 2.5]),
        "as_tensor_variable([n, 1])": lambda n: tt.as_tensor_variable([n, 1]),
        "as_tensor_variable([n, int8])": lambda n: tt.as_tensor_variable([n, variable(1, dtype="int8")]),
        "as_tensor_variable((n,))": lambda n: tt.as_tensor_variable((n,)),
    }.items():
        yield name, lambda f=f: f(x().shape[0])
        yield f"{name}, empty", lambda f=f: f(empty().shape[0])
    yield "prod(shape)", lambda: tt.prod(x().shape)
    yield "sum(shape)", lambda: x().shape.sum()
    yield "shape * 2", lambda: x().shape * 2
    yield "shape / 2", lambda: x().shape / 2
    yield "shape[::-1]", lambda: x().shape[::-1]
    yield "shape of reshape", lambda: x().reshape((2, -1)).shape
    yield "reshape", lambda: variable(np.arange(12)).reshape((4, 3))
    yield "reshape variable", lambda: variable(np.arange(12)).reshape((variable(4), -1), ndim=2)
    yield "reshape int8", lambda: variable(np.arange(12)).reshape(variable([4, 3], dtype="int8"), ndim=2)
    yield (
        "reshape uint64",
        lambda: variable(np.arange(12)).reshape(variable([4, 3], dtype="uint64"), ndim=2),
    )
    yield "reshape number", lambda: variable([7]).reshape([])
    yield "reshape nothing", lambda: empty().reshape((2, 0))
    yield "flatten", lambda: x().flatten().shape
    yield "shape of number", lambda: variable(1.0).shape
    yield "empty list", lambda: tt.as_tensor_variable([])
    yield "empty int list", lambda: tt.as_tensor_variable(np.array([], dtype="int8"))
    yield "shape of dot", lambda: tt.dot(x(), x().T).shape
    yield "shape of join", lambda: tt.join(0, x(), x()).shape
    yield "shape of slice", lambda: x()[1 : variable(100, dtype="int8")].shape
    yield "shape of negative slice", lambda: x()[:: variable(-2, dtype="int8")].shape
    yield "shape of alloc", lambda: tt.zeros((variable(2, dtype="int8"), 3)).shape
    yield "shape of mean", lambda: x().mean(axis=0).shape
    yield "len", lambda: x()[x().shape[0] - 1]


@family("python", "optimized", "constant")
def arrays():
    """Making, joining, splitting, ordering and counting."""
    for start, stop, step in (
        (0, 5, 1),
        (2, 10, 3),
        (0, 1, 0.25),
        (5, 0, -2),
        (0, 300, 100),
        (-200, 0, 50),
    ):
        yield f"arange({start}, {stop}, {step})", lambda a=(start, stop, step): tt.arange(*a)
        for dtype in ("int8", "uint8", "int32", "float32", "float64"):
            if dtype == "uint8" and min(start, stop, step) < 0:
                continue
            yield (
                f"arange({start}, {stop}, {step}, {dtype})",
                lambda a=(start, stop, step), d=dtype: tt.arange(*a, dtype=d),
            )
    for dtype in REAL:
        yield f"arange({dtype})", lambda dtype=dtype: tt.arange(variable(1, dtype=dtype) + 4)
        yield f"arange(1, {dtype})", lambda dtype=dtype: tt.arange(1, variable(1, dtype=dtype) * 5)
    for dtype in DTYPES:
        v = lambda dtype=dtype: matrix(dtype)[1]  # noqa: E731
        m = lambda dtype=dtype: matrix(dtype)  # noqa: E731
        for name, f in {
            "eye": lambda v, m: tt.eye(3, 4, 1, dtype=v.dtype),
            "zeros_like": lambda v, m: tt.zeros_like(v),
            "ones_like": lambda v, m: tt.ones_like(m),
            "fill": lambda v, m: tt.fill(m, 300),
            "alloc": lambda v, m: tt.alloc(v, 2, 3),
            "identity_like": lambda v, m: tt.identity_like(m),
            "diag": lambda v, m: tt.diag(v),
            "extract diag": lambda v, m: tt.diag(m),
            "tri": lambda v, m: tt.tri(3, 3, 0, dtype=v.dtype),
            "tril": lambda v, m: tt.tril(m),
            "triu": lambda v, m: tt.triu(m, 1),
            "join": lambda v, m: tt.join(0, v, v),
            "join int8": lambda v, m: tt.join(0, v, variable([1], dtype="int8")),
            "join uint8": lambda v, m: tt.join(0, variable([1], dtype="uint8"), v),
            "join float32": lambda v, m: tt.join(0, v, variable([0.5], dtype="float32")),
            "concatenate": lambda v, m: tt.concatenate([m, m], axis=1),
            "stack": lambda v, m: tt.stack([v, v], axis=1),
            "stack numbers": lambda v, m: tt.stack([v[0], 1, 300]),
            "stack fractions": lambda v, m: tt.stack([v[0], 0.1]),
            "split": lambda v, m: tt.split(v, [1, 2], 2)[1],
            "tile": lambda v, m: tt.tile(m, (2, 1)),
            "repeat": lambda v, m: tt.repeat(v, 2),
            "repeat each": lambda v, m: tt.repeat(v, variable([1, 0, 2]), axis=0),
            "repeat uint8": lambda v, m: tt.repeat(v, variable([1, 0, 2], dtype="uint8"), axis=0),
            "roll": lambda v, m: tt.roll(v, 1),
            "diff": lambda v, m: tt.extra_ops.diff(v),
            "diff 2": lambda v, m: tt.extra_ops.diff(v, n=2),
            "sort": lambda v, m: tt.sort(v),
            "sort columns": lambda v, m: tt.sort(m, axis=0),
            "argsort": lambda v, m: tt.argsort(v, kind="mergesort"),
            "topk": lambda v, m: tt.sort(tt.topk(v, 2, sorted=False)),
            "argtopk": lambda v, m: tt.argtopk(m, 1, axis=0, sorted=False),
            "topk sorted": lambda v, m: tt.topk_and_argtopk(m, 1, axis=1, sorted=False)[0],
            "max_and_argmax": lambda v, m: tt.max_and_argmax(m, axis=1)[1],
            "searchsorted": lambda v, m: tt.extra_ops.searchsorted(tt.sort(v), v),
            "searchsorted right": lambda v, m: tt.extra_ops.searchsorted(tt.sort(v), v, side="right"),
            "searchsorted int8": lambda v, m: tt.extra_ops.searchsorted(
                tt.sort(v), variable([2], dtype="int8")
            ),
            "unique": lambda v, m: tt.extra_ops.Unique()(m),
            "fill_diagonal": lambda v, m: tt.fill_diagonal(m, tt.cast(1, m.dtype)),
            "fill_diagonal_offset": lambda v, m: tt.fill_diagonal_offset(m, tt.cast(1, m.dtype), 1),
            "bincount": lambda v, m: tt.bincount(abs(v)),
            "bincount weights": lambda v, m: tt.bincount(variable([1, 0, 1]), weights=v),
            "bincount length": lambda v, m: tt.bincount(
                variable([1, 0, 1], dtype=v.dtype if "int" in v.dtype else "int8"), minlength=4
            ),
            "one hot": lambda v, m: tt.extra_ops.to_one_hot(
                variable([1, 0, 2], dtype="uint8"), 3, v.dtype
            ),
            "one hot of": lambda v, m: tt.extra_ops.to_one_hot(v % 2, 3),
            "compress": lambda v, m: tt.extra_ops.compress(variable([1, 0, 1]), v),
            "choose": lambda v, m: tt.choose(variable([0, 1, 0]), m),
            "choose by": lambda v, m: tt.choose(v % 2, variable([[1, 2, 3], [4, 5, 6]])),
            "take": lambda v, m: tt.take(m, variable([1, 0, -1]), axis=1),
            "take by": lambda v, m: tt.take(variable(np.arange(200)), v),
            "index by": lambda v, m: variable(np.arange(200))[v],
            "nonzero": lambda v, m: tt.nonzero(m)[1],
            "nonzero_values": lambda v, m: tt.nonzero_values(m),
            "flatnonzero": lambda v, m: tt.flatnonzero(m),
            "squeeze": lambda v, m: tt.extra_ops.squeeze(tt.addbroadcast(m[:1], 0)),
            "unbroadcast": lambda v, m: tt.unbroadcast(v.dimshuffle("x", 0), 0),
            "transpose": lambda v, m: m.T,
            "inverse_permutation": lambda v, m: tt.inverse_permutation(variable([2, 0, 1])),
            "permute_row_elements": lambda v, m: tt.permute_row_elements(m, variable([2, 0, 1])),
            "ravel_multi_index": lambda v, m: tt.ravel_multi_index((v % 2, v % 2), (3, 4)),
            "unravel_index": lambda v, m: tt.unravel_index(v % 5, (3, 4))[1],
            "mgrid": lambda v, m: tt.mgrid[0:3, 0:2][0] + v[0],
            "dtype of list": lambda v, m: tt.as_tensor_variable([v[0], v[1], 2]),
            "all close": lambda v, m: tt.allclose(v, v),
            "swapaxes": lambda v, m: m.swapaxes(0, 1),
            "clip": lambda v, m: v.clip(0, 10),
            "round": lambda v, m: v.round(),
            "imag": lambda v, m: v.imag,
            "conj": lambda v, m: v.conj(),
            "divmod": lambda v, m: tt.stack(divmod(v, 3)),
            "batched_dot": lambda v, m: tt.batched_dot(m, m),
            "outer": lambda v, m: tt.outer(v, v),
            "tensordot": lambda v, m: tt.tensordot(m, m, axes=[[1], [1]]),
            "dot int8": lambda v, m: tt.dot(m, variable([[1], [2], [3]], dtype="int8")),
            "kron": lambda v, m: tt.slinalg.kron(m, m),
            "max of number": lambda v, m: tt.maximum(v, 0.1),
            "smallest": lambda v, m: tt.smallest(v, v + 1),
            "largest": lambda v, m: tt.largest(v, 300),
            "bartlett": lambda v, m: tt.bartlett(5),
            "power": lambda v, m: tt.power(v, 2),
            "confusion": lambda v, m: tt.nnet.confusion_matrix(v % 3, v % 2)[0],
            "bits": lambda v, m: ~v & 7 | v ^ 3,
        }.items():
            if dtype in FLOATS and name.startswith(("choose by", "bincount length")):
                continue
            yield f"{name} {dtype}", lambda f=f, v=v, m=m: f(v(), m())


@family("python", "optimized")
def products():
    """Matrix products of pairs of dtypes."""
    shapes = {"vv": ((4,), (4,)), "mv": ((3, 4), (4,)), "vm": ((4,), (4, 2)), "mm": ((3, 4), (4, 2))}
    for name, (left, right) in shapes.items():
        for first in DTYPES:
            for second in DTYPES:

                def build(left=left, right=right, first=first, second=second):
                    a = np.arange(np.prod(left)).reshape(left) * 3 % 50
                    b = np.arange(np.prod(right)).reshape(right) * 7 % 30
                    return tt.dot(variable(a.astype(first)), variable(b.astype(second)))

                yield f"{name} {first} {second}", build
    for dtype in ("float32", "float64", "complex64", "complex128"):

        def gemm(dtype=dtype):
            m = variable((np.arange(9).reshape(3, 3) / 7).astype(dtype))
            return 2 * m + 0.5 * tt.dot(m, m.T) - tt.dot(m, m)

        def gemv(dtype=dtype):
            m = variable((np.arange(9).reshape(3, 3) / 7).astype(dtype))
            return 2 * m[0] + 0.1 * tt.dot(m, m[1])

        def ger(dtype=dtype):
            m = variable((np.arange(9).reshape(3, 3) / 7).astype(dtype))
            return m + 0.1 * tt.outer(m[1], m[2])

        yield f"gemm {dtype}", gemm
        yield f"gemv {dtype}", gemv
        yield f"ger {dtype}", ger


def graphs_for_networks(dtypes):
    """Yield what networks are made of."""
    nnet = tt.nnet
    for dtype in dtypes:
        rows = np.array([[0.5, -1.5, 3.25], [100, -50, 0], [0.1, 0.2, 0.3]])
        x = lambda d=dtype: variable((np.arange(3)[:, None] + rows).astype(d))  # noqa: B023, E731
        p = lambda d=dtype: variable(  # noqa: E731
            np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]], d)
        )
        b = lambda d=dtype: variable(np.array([0.5, -0.5, 1], d))  # noqa: E731
        y = lambda kind="int32": variable(np.array([0, 2, 1], kind))  # noqa: E731
        image = lambda d=dtype: variable(  # noqa: E731
            (np.arange(2 * 3 * 6 * 6).reshape(2, 3, 6, 6) % 17 / 8).astype(d)
        )
        kernel = lambda d=dtype: variable(  # noqa: E731
            (np.arange(2 * 3 * 3 * 3).reshape(2, 3, 3, 3) % 7 / 4 - 0.5).astype(d)
        )
        graphs = {
            "softmax": lambda x=x: nnet.softmax(x()),
            "logsoftmax": lambda x=x: nnet.logsoftmax(x()),
            "log softmax": lambda x=x: tt.log(nnet.softmax(x())),
            "softmax with bias": lambda x=x, b=b: nnet.softmax_with_bias(x(), b()),
            "sigmoid": lambda x=x: nnet.sigmoid(x()),
            "log sigmoid": lambda x=x: tt.log(nnet.sigmoid(x())),
            "log 1 - sigmoid": lambda x=x: tt.log(1 - nnet.sigmoid(x())),
            "softplus": lambda x=x: nnet.softplus(x()),
            "ultra_fast_sigmoid": lambda x=x: nnet.ultra_fast_sigmoid(x()),
            "hard_sigmoid": lambda x=x: nnet.hard_sigmoid(x()),
            "relu": lambda x=x: nnet.relu(x()),
            "leaky relu": lambda x=x: nnet.relu(x(), 0.1),
            "elu": lambda x=x: nnet.elu(x(), 0.5),
            "selu": lambda x=x: nnet.selu(x()),
            "binary_crossentropy": lambda p=p: nnet.binary_crossentropy(p() * 0.9, p()),
            "sigmoid_binary_crossentropy": lambda x=x, p=p: nnet.sigmoid_binary_crossentropy(x(), p()),
            "categorical_crossentropy": lambda p=p: nnet.categorical_crossentropy(p(), p()),
            "categorical_crossentropy labels": lambda p=p, y=y: nnet.categorical_crossentropy(p(), y()),
            "crossentropy of softmax": lambda x=x, y=y: nnet.categorical_crossentropy(
                nnet.softmax(x()), y("int64")
            ),
            "crossentropy with bias": lambda x=x, b=b, y=y: nnet.crossentropy_softmax_1hot_with_bias(
                x(), b(), y()
            )[0],
            "mean error": lambda x=x, y=y: tt.neq(tt.argmax(x(), axis=1), y()).mean(),
            "log of chosen": lambda p=p, y=y: -tt.mean(tt.log(p())[tt.arange(3), y()]),
            "batch normalization": lambda x=x, b=b: nnet.bn.batch_normalization_test(
                x(), b() + 2, b(), b(), b() + 3
            ),
            "batch normalization train": lambda x=x, b=b: nnet.bn.batch_normalization_train(
                x(), b() + 2, b()
            )[0],
            "old batch normalization": lambda x=x, b=b: nnet.bn.batch_normalization(
                x(), b() + 2, b(), b(), b() + 3
            ),
            "conv2d": lambda i=image, k=kernel: nnet.conv2d(i(), k()),
            "conv2d half": lambda i=image, k=kernel: nnet.conv2d(i(), k(), border_mode="half"),
            "conv2d steps": lambda i=image, k=kernel: nnet.conv2d(i(), k(), subsample=(2, 2)),
            "pool max": lambda i=image: tt.signal.pool.pool_2d(i(), (2, 2), ignore_border=True),
            "pool mean": lambda i=image: tt.signal.pool.pool_2d(
                i(), (2, 2), ignore_border=True, mode="average_inc_pad"
            ),
            "pool border": lambda i=image: tt.signal.pool.pool_2d(
                i(), (4, 4), ignore_border=False, mode="sum"
            ),
            "images2neibs": lambda i=image: nnet.neighbours.images2neibs(i(), (2, 3)),
            "bilinear": lambda i=image: nnet.abstract_conv.bilinear_upsampling(
                i(), ratio=2, batch_size=2, num_input_channels=3
            ),
            "spatial transformer": lambda i=image, d=dtype: (
                nnet.spatialtf(i(), variable(np.array([[[0.9, 0.1, 0], [-0.1, 0.8, 0.1]]] * 2, d)))
                if hasattr(nnet, "spatialtf")
                else i()
            ),
            "dot sigmoid": lambda x=x, p=p: nnet.sigmoid(tt.dot(x(), p())),
            "h_softmax": lambda x=x, p=p, b=b: nnet.h_softmax(
                x() / 50, 3, 9, 3, 3, p(), b(), tt.stack([p(), p(), p()]), p()
            ),
        }
        for name, build in graphs.items():
            yield f"{name} {dtype}", build
        for name in (
            "softmax", "logsoftmax", "log softmax", "sigmoid", "log sigmoid", "softplus", "relu",
            "leaky relu", "elu", "crossentropy of softmax", "sigmoid_binary_crossentropy", "conv2d",
            "conv2d half", "pool max", "pool mean", "batch normalization train", "dot sigmoid",
            "categorical_crossentropy", "log of chosen",
        ):  # fmt: skip
            yield f"gradient of {name} {dtype}", lambda build=graphs[name]: gradient(build())


def gradient(output):
    """Return the gradient with respect to the input that comes first."""
    wrt = [one for one in inputs_of([output]) if hasattr(one.tag, "value") and one.ndim]
    wrt = [one for one in wrt if one.dtype in tt.continuous_dtypes]
    return tt.grad(tt.sqr(output).sum(), wrt[0])


@family("python", "optimized")
def networks():
    """What networks are made of, and gradients."""
    yield from graphs_for_networks(["float32", "float64"])


@family("python", "optimized")
def networks_floatx_float32():
    """The same if ``floatX`` is ``float32``."""
    yield from graphs_for_networks(["float32"])


@family("python", "optimized", "constant")
def gradients():
    """Gradients of scalar operations and others."""
    for dtype in FLOATS:
        x = lambda d=dtype: variable(np.array([0.25, 0.5, 0.9], d))  # noqa: E731
        for name in UNARY + SPECIAL_UNARY:
            if name in ("arccosh", "invert", "tri_gamma", "conj"):
                continue
            yield f"{name} {dtype}", lambda x=x, name=name: gradient(getattr(tt, name)(x()))
        yield f"arccosh {dtype}", lambda x=x: gradient(tt.arccosh(x() + 1))
        for name in BINARY:
            for other in ("int8", "float32", "float64"):

                def build(x=x, name=name, other=other):
                    return gradient(getattr(tt, name)(x(), variable([1, 2, 3], dtype=other)))

                yield f"{name} {dtype} {other}", build
        for name, f in {
            "mean": lambda x: x.mean(),
            "var": lambda x: x.var(),
            "std": lambda x: x.std(),
            "prod": lambda x: x.prod(),
            "max": lambda x: x.max(),
            "x ** 3": lambda x: x**3,
            "x ** -0.5": lambda x: x**-0.5,
            "2 ** x": lambda x: 2**x,
            "norm": lambda x: x.norm(2),
            "cumsum": lambda x: tt.cumsum(x),
            "cumprod": lambda x: tt.cumprod(x),
            "clip": lambda x: x.clip(0.3, 1),
            "switch": lambda x: tt.switch(x > 0.4, x, 300),
            "repeat": lambda x: tt.repeat(x, 2),
            "x[repeated]": lambda x: x[variable([0, 0, 2])],
            "x[::2]": lambda x: x[::2],
            "x[mask]": lambda x: x[variable([True, False, True])],
            "x[matrix]": lambda x: x[variable([[0, 0], [2, 1]])],
            "inc_subtensor": lambda x: tt.inc_subtensor(x[1:], x[0]),
            "set_subtensor": lambda x: tt.set_subtensor(x[variable([0, 1])], x[2]),
            "join": lambda x: tt.join(0, x, x),
            "dot": lambda x: tt.dot(x, x),
            "outer": lambda x: tt.outer(x, x),
            "diff": lambda x: tt.extra_ops.diff(x),
            "tile": lambda x: tt.tile(x, 3),
            "sort": lambda x: tt.sort(x),
            "reshape": lambda x: x.reshape((1, 3)),
            "alloc": lambda x: tt.alloc(x, 2, 3),
            "grad of grad": lambda x: tt.grad((x**3).sum(), x),
            "clipped": lambda x: theano.gradient.grad_clip(x, -0.1, 0.1) * 2,
        }.items():
            yield f"{name} {dtype}", lambda f=f, x=x: gradient(f(x()))


@family("python")
def linear_algebra():
    """Linear algebra."""
    for dtype in ("int8", "float32", "float64"):
        m = lambda d=dtype: variable(np.array([[4, 1, 2], [1, 5, 3], [2, 3, 6]], d))  # noqa: E731
        v = lambda d=dtype: variable(np.array([1, 2, 3], d))  # noqa: E731
        for name, f in {
            "det": lambda m, v: tt.nlinalg.det(m),
            "inverse": lambda m, v: tt.nlinalg.matrix_inverse(m),
            "pinv": lambda m, v: tt.nlinalg.pinv(m),
            "trace": lambda m, v: tt.nlinalg.trace(m),
            "cholesky": lambda m, v: tt.slinalg.cholesky(m),
            # The dtype of SciPy's result for int8 has changed.
            "solve": lambda m, v: tt.slinalg.solve(m if m.dtype != "int8" else m / 1, v),
            "eigvalsh": lambda m, v: tt.slinalg.eigvalsh(m, tt.eye(3)),
            "expm": lambda m, v: tt.slinalg.expm(m / 10),
            "matrix_power": lambda m, v: tt.nlinalg.matrix_power(m, 3),
            "svd": lambda m, v: tt.nlinalg.svd(m)[1],
            "eigh": lambda m, v: tt.nlinalg.eigh(m)[0],
            "qr": lambda m, v: abs(tt.nlinalg.qr(m)[1]),
            "norm": lambda m, v: tt.nlinalg.norm(m, "fro"),
            "tensorsolve": lambda m, v: tt.nlinalg.tensorsolve(m, v),
            "lstsq": lambda m, v: tt.nlinalg.lstsq()(m, v, -1)[0],
            "fft": lambda m, v: tt.fft.rfft(m),
        }.items():
            yield f"{name} {dtype}", lambda f=f, m=m, v=v: f(m(), v())


def drawn(make, n_steps=3, floatx="float64", linker="py"):
    """Return what a function draws in several steps."""
    with theano.configparser.change_flags(floatX=floatx):
        outputs = make()
        f = theano.function([], outputs, mode=theano.Mode(linker, None))
        return np.array([f() for _ in range(n_steps)])


@family("python")
def random_mrg():
    """The streams of ``MRG_RandomStreams``."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    for floatx in ("float32", "float64"):
        for name, make in {
            "uniform": lambda s: s.uniform((2, 3)),
            "uniform float16": lambda s: s.uniform((4,), dtype="float16"),
            "uniform float32": lambda s: s.uniform((4,), dtype="float32"),
            "uniform float64": lambda s: s.uniform((4,), dtype="float64"),
            "uniform between": lambda s: s.uniform((4,), low=-3, high=2.5),
            "uniform between variables": lambda s: s.uniform(
                (2, 2), low=tt.constant([0, 10], dtype="int8"), high=tt.constant([1, 300])
            ),
            "uniform many": lambda s: s.uniform((130,)),
            "uniform streams": lambda s: s.uniform((10,), nstreams=3),
            "uniform int8 size": lambda s: s.uniform(tt.constant([2, 2], dtype="int8"), ndim=2),
            "normal": lambda s: s.normal((4,)),
            "normal odd": lambda s: s.normal((3, 3), avg=1, std=2),
            "normal float32": lambda s: s.normal((4,), dtype="float32"),
            "normal float16": lambda s: s.normal((4,), dtype="float16"),
            "truncated_normal": lambda s: s.truncated_normal((5,)),
            "binomial": lambda s: s.binomial((6,), p=0.3),
            "binomial n": lambda s: s.binomial((6,), n=1, p=0.5, dtype="float32"),
            "binomial int8": lambda s: s.binomial((6,), p=0.5, dtype="int8"),
            "multinomial": lambda s: s.multinomial(pvals=tt.constant([[0.1, 0.2, 0.7]] * 3)),
            "multinomial n": lambda s: s.multinomial(n=4, pvals=tt.constant([[0.1, 0.2, 0.7]] * 3)),
            "multinomial float32": lambda s: s.multinomial(
                pvals=tt.constant(np.float32([[0.25, 0.25, 0.5]] * 3)), dtype="float32"
            ),
            "choice": lambda s: s.choice(
                size=2, replace=False, p=tt.constant([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
            ),
            "permuted uniform twice": lambda s: s.uniform((2,)) + s.uniform((2,)),
        }.items():
            yield (
                f"{name} floatX={floatx}",
                lambda make=make, floatx=floatx: drawn(
                    lambda: make(MRG_RandomStreams(seed=234)), 3, floatx
                ),
            )
        for seed in (1, 2**31 - 2**15, [1, 2, 3, 4, 5, 6]):
            yield (
                f"seed {seed} floatX={floatx}",
                lambda seed=seed, floatx=floatx: drawn(
                    lambda: MRG_RandomStreams(seed=seed).uniform((3,)), 2, floatx
                ),
            )
    yield (
        "states",
        lambda: np.asarray(MRG_RandomStreams(5).get_substream_rstates(4, "float32")),
    )


@family("compiled")
def random_mrg_compiled():
    """The same by C code."""
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    for dtype in ("float32", "float64"):
        yield (
            f"uniform {dtype}",
            lambda dtype=dtype: drawn(
                lambda: MRG_RandomStreams(seed=234).uniform((70,), dtype=dtype), linker="c|py"
            ),
        )
    yield (
        "multinomial",
        lambda: drawn(
            lambda: MRG_RandomStreams(seed=234).multinomial(pvals=tt.constant([[0.1, 0.2, 0.7]] * 3)),
            linker="c|py",
        ),
    )


@family("python")
def random_numpy():
    """The streams of ``RandomStreams``."""
    from theano.tensor.shared_randomstreams import RandomStreams

    for floatx in ("float32", "float64"):
        for name, make in {
            "uniform": lambda s: s.uniform((2, 3)),
            "uniform between": lambda s: s.uniform((4,), low=-3, high=2.5),
            "uniform variables": lambda s: s.uniform(
                low=tt.constant([0, 10], dtype="int8"), high=tt.constant([1, 300])
            ),
            "uniform float32": lambda s: s.uniform((4,), dtype="float32"),
            "uniform number": lambda s: s.uniform(),
            "normal": lambda s: s.normal((4,), avg=1, std=2),
            "normal float32": lambda s: s.normal((4,), dtype="float32"),
            "binomial": lambda s: s.binomial((6,), n=10, p=0.3),
            "binomial variables": lambda s: s.binomial(
                n=tt.constant([5, 200]), p=tt.constant([0.25, 0.5])
            ),
            "binomial int8": lambda s: s.binomial((6,), n=1, p=0.5, dtype="int8"),
            "random_integers": lambda s: s.random_integers((5,), low=-5, high=300),
            "random_integers int8": lambda s: s.random_integers((5,), low=0, high=100, dtype="int8"),
            "random_integers uint8": lambda s: s.random_integers((5,), low=0, high=255, dtype="uint8"),
            "random_integers variables": lambda s: s.random_integers(
                low=tt.constant([0, 10]), high=tt.constant([1, 30])
            ),
            "permutation": lambda s: s.permutation(n=6),
            "permutations": lambda s: s.permutation((2,), n=4),
            "permutation int8": lambda s: s.permutation(n=6, dtype="int8"),
            "choice": lambda s: s.choice((4,), a=10),
            "choice p": lambda s: s.choice((4,), a=3, p=tt.constant([0.25, 0.25, 0.5])),
            "poisson": lambda s: s.poisson((4,), lam=3.5),
            "multinomial": lambda s: s.multinomial((3,), n=5, pvals=[0.25, 0.25, 0.5]),
            "shuffle_row_elements": lambda s: s.shuffle_row_elements(
                tt.constant(np.arange(8).reshape(2, 4))
            ),
        }.items():
            yield (
                f"{name} floatX={floatx}",
                lambda make=make, floatx=floatx: drawn(lambda: make(RandomStreams(seed=234)), 3, floatx),
            )


@family("python")
def loops():
    """Loops of scan."""

    def looped(make):
        output = make()
        inputs = [one for one in inputs_of([output]) if hasattr(one.tag, "value")]
        f = theano.function(
            inputs, output, mode=theano.Mode("py", "fast_compile"), on_unused_input="ignore"
        )
        return np.asarray(f(*[one.tag.value for one in inputs]))

    for dtype in ("int8", "int64", "float32", "float64"):
        v = lambda d=dtype: variable(np.array([1, 2, 3], d))  # noqa: E731
        for name, make in {
            "map": lambda v: theano.map(lambda x: x * 2 + 1, v)[0],
            "sum": lambda v: theano.scan(lambda x, s: (s + x).astype(v.dtype), v, v[0])[0],
            "reduce": lambda v: theano.reduce(lambda x, s: (s * x).astype(v.dtype), v, v[1])[0],
            "steps": lambda v: theano.scan(
                lambda s: (s * 3 + 1).astype(v.dtype), outputs_info=v[0], n_steps=5
            )[0],
            "until": lambda v: theano.scan(
                lambda s: ((s * 2).astype(v.dtype), theano.scan_module.until(s > 20)),
                outputs_info=v[0],
                n_steps=10,
            )[0],
        }.items():
            yield f"{name} {dtype}", lambda make=make, v=v: looped(lambda: make(v()))


# Computing the results


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


# Writing and comparing them


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
                name,
                way,
                len(kept),
                sum(isinstance(one, Exception) for one in results.values()),
                f"{time.time() - start:.1f} s",
                flush=True,
            )
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


def main(arguments):
    """Record the results, or print how they differ from recorded ones."""
    command, path = arguments[:2]
    logging.disable(logging.CRITICAL)
    if command == "record":
        return record(path, arguments[2:])
    recorded = read(path)
    for key in recorded:
        name, way = key.split(" ")
        if not arguments[2:] or name in arguments[2:] or key in arguments[2:]:
            lines = differences(recorded, name, way)
            print(f"{key}: {len(lines)} of {len(recorded[key])} differ")
            print("".join(f"    {line}\n" for line in lines), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
