"""The parts of Theano 1.0.5, Lasagne 0.1 and Keras 2.3.1 to replace, and from which version on.

``imports`` applies the repairs. Each is a row: in which modules, what text, by what, why, and the first
version of Python or NumPy that needs it; without a version, all do. A replacement has as many lines as
the text that it replaces, so that tracebacks show the right lines.
"""

import sys
from typing import List, NamedTuple, Optional, Tuple, Union

Version = Tuple[int, ...]


class Module(NamedTuple):
    """A module that is loaded from a file of this package, in place of one of the name, if any."""

    name: str
    file: str
    why: str
    python: Optional[Version] = None
    numpy: Optional[Version] = None

    def names(self) -> List[str]:
        """List the module."""
        return [self.name]


class Repair(NamedTuple):
    """A text that is replaced in the source code of some modules. All of these contain it."""

    modules: str  # with spaces in between
    why: str
    old: str
    new: str
    python: Optional[Version] = None
    numpy: Optional[Version] = None

    def names(self) -> List[str]:
        """List the modules."""
        return self.modules.split()


def _in(
    modules: str,
    why: str,
    *pairs: Tuple[str, str],
    python: Optional[Version] = None,
    numpy: Optional[Version] = None,
) -> List[Repair]:
    """Return the repairs of some modules that have the same reason."""
    return [Repair(modules, why, *pair, python=python, numpy=numpy) for pair in pairs]


MODULES = (
    Module(
        "theano.tensor.signal.downsample",
        "engines/theano/repairs/downsample.py",
        "Lasagne imports it, and Theano 1.0 has its function under another name",
    ),
    Module(
        "theano.scan_module.scan_perform_ext",
        "engines/theano/repairs/scan_perform_ext.py",
        "the C code of scan's loop does not compile",
        python=(3, 11),
    ),
    Module(
        "theano.compat.numpy_1_24",
        "engines/theano/repairs/numpy_1_24.py",
        "repairs call its functions",
        numpy=(1, 24),
    ),
    Module(
        "theano.compat.environment",
        "host/environment.py",
        "repairs call its functions",
    ),
    Module(
        "theano.tensor.inc_code",
        "engines/theano/repairs/inc_code.py",
        "the C code of increments at indices uses an iterator that is private now",
        numpy=(2, 0),
    ),
)

_NO_DISTUTILS = "distutils is gone"
_NO_SETUPTOOLS = "pkg_resources is not part of new environments"
_NO_NUMPY_DISTUTILS = "numpy.distutils is gone; before, it warned"
_RENAMED = "the module was renamed"
_NO_NAME = "NumPy no longer has the name"
_HEADERS = "NumPy's headers have changed"
_WRAPS = "integers that do not fit a dtype are an error, and used to wrap"
_LISTS = "a list as an index is one array, and used to be an index for each axis"
_PROMOTION = "dtypes no longer depend on values, and numbers of Python count as imprecise"
_NO_DTYPE = "an object whose dtype is a name is no dtype"
_USE = "from theano.compat import numpy_1_24; "

REPAIRS = (
    # Modules and names of Python
    *_in(
        "theano.gof.cmodule",
        _NO_DISTUTILS,
        ("import distutils.sysconfig\n", "import sysconfig\n"),
        ("distutils.sysconfig.get_config_var(", "sysconfig.get_config_var("),
        ("distutils.sysconfig.get_python_inc()", "sysconfig.get_path('include')"),
        (
            "distutils.sysconfig.get_python_inc(plat_specific=True)",
            "sysconfig.get_path('platinclude')",
        ),
        (
            "distutils.sysconfig.get_python_lib(plat_specific=1,\n"
            "                                                    standard_lib=1)",
            "sysconfig.get_path(\n        'platstdlib')",
        ),
        python=(3, 12),
    ),
    *_in(
        "theano.configdefaults",
        _NO_DISTUTILS,
        (
            "    import distutils.spawn\n    newp = distutils.spawn.find_executable(param)\n",
            "    import shutil as distutils\n    newp = distutils.which(param)\n",
        ),
        python=(3, 12),
    ),
    *_in(
        "theano.tests.breakpoint",
        "imp is gone",
        ("import imp\n", "import importlib.util\n"),
        ("imp.find_module(", "importlib.util.find_spec("),
        python=(3, 12),
    ),
    *_in(
        "theano.gpuarray.linalg",
        _NO_SETUPTOOLS,
        ("import pkg_resources\n", "\n"),
        ("RuntimeError, pkg_resources.DistributionNotFound)", "RuntimeError)"),
        python=(3, 12),
    ),
    *_in(
        "lasagne",
        _NO_SETUPTOOLS,
        (
            "import pkg_resources\n"
            '__version__ = pkg_resources.get_distribution("Lasagne").version\n'
            "del pkg_resources\n",
            "import importlib.metadata\n"
            '__version__ = importlib.metadata.version("Lasagne")\n'
            "del importlib\n",
        ),
        python=(3, 8),
    ),
    *_in(
        "keras.callbacks.callbacks",
        "collections no longer has the abstract classes",
        ("from collections import Iterable\n", "from collections.abc import Iterable\n"),
        python=(3, 10),
    ),
    *_in(
        "keras.engine.training_utils",
        "collections no longer has the abstract classes",
        ("import collections\n", "import collections.abc\n"),
        ("collections.Container)", "collections.abc.Container)"),
        ("collections.Mapping)", "collections.abc.Mapping)"),
        ("collections.Sequence)", "collections.abc.Sequence)"),
        python=(3, 10),
    ),
    # Modules of NumPy
    *_in(
        "theano.gof.cmodule",
        _NO_NUMPY_DISTUTILS,
        ("import numpy.distutils\n", "import numpy\n"),
        ("numpy.distutils.misc_util.get_numpy_include_dirs()", "[numpy.get_include()]"),
        numpy=(1, 23),
    ),
    *_in(
        "theano.configdefaults",
        _NO_NUMPY_DISTUTILS,
        (
            "def default_blas_ldflags():\n    global numpy\n",
            "def default_blas_ldflags():\n"
            "    from theano.compat.environment import find_ldflags; return find_ldflags()\n",
        ),
        numpy=(1, 22),
    ),
    *_in(
        "theano.tensor.blas",
        _NO_NUMPY_DISTUTILS,
        (
            "import numpy.distutils\n"
            "try:\n"
            "    import numpy.distutils.__config__  # noqa\n"
            "except ImportError:\n"
            "    pass\n",
            "\n\n\n\n\n",
        ),
        numpy=(1, 23),
    ),
    *_in(
        "theano.gof.cc",
        _RENAMED,
        (
            "np.core._multiarray_umath._get_ndarray_c_version()",
            "np._core._multiarray_umath._get_ndarray_c_version()",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.gpuarray.linalg",
        _RENAMED,
        ("from numpy.linalg.linalg import", "from numpy.linalg import"),
        numpy=(2, 0),
    ),
    # C code
    *_in(
        "theano.gof.cmodule",
        _HEADERS,
        (
            "            cppfile.write(src_code)\n",
            f"            {_USE}cppfile.write(numpy_1_24.PREAMBLE + src_code)\n",
        ),
        numpy=(1, 24),
    ),
    *_in(
        "theano.tensor.basic theano.tensor.subtensor theano.tensor.extra_ops",
        _HEADERS,
        ("NPY_MAXDIMS", "NPY_RAVEL_AXIS"),
        numpy=(2, 0),
    ),
    *_in("theano.tensor.extra_ops", _HEADERS, ("np.MAXDIMS", "-2**31"), numpy=(2, 0)),
    *_in(
        "theano.tensor.nnet.conv",
        _HEADERS,
        ("['<numpy/noprefix.h>', '<iostream>', '<sstream>']", "['<iostream>', '<sstream>']"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.scalar.basic",
        _HEADERS,
        (
            "PyArrayScalar_ASSIGN(py_%(name)s, %(cls)s, %(name)s);",
            "memcpy(&PyArrayScalar_VAL(py_%(name)s, %(cls)s), &%(name)s, sizeof(%(name)s));",
        ),
        numpy=(2, 0),
    ),
    # Names of NumPy
    *_in(
        "theano.scalar.basic",
        _NO_NAME,
        ("np.complex(", "type(0j)("),
        (
            "isinstance(x, np.complex) or isinstance(y, np.complex)",
            "isinstance(x, type(0j)) or isinstance(y, type(0j))",
        ),
        ("self.ctor = getattr(np, o_type.dtype)", "self.ctor = np.dtype(o_type.dtype).type"),
        numpy=(1, 24),
    ),
    *_in("theano.tensor.basic", _NO_NAME, ("np.complex(data)", "type(0j)(data)"), numpy=(1, 24)),
    *_in(
        "theano.scalar.basic",
        _NO_NAME,
        ("np.product(", "np.prod("),
        numpy=(1, 25),
    ),
    *_in(
        "theano.scalar.basic",
        _NO_NAME,
        ("np.sctypeDict[config.floatX]", "np.dtype(config.floatX).type"),
        ("np.cast[x.type](2)", "np.asarray(2, x.type.dtype)"),
        ("np.cast[x.type](1)", "np.asarray(1, x.type.dtype)"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.nnet.bn",
        _NO_NAME,
        ("np.cast[theano.config.floatX](epsilon)", "np.asarray(epsilon, theano.config.floatX)"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.slinalg theano.tensor.nnet.conv theano.tensor.nnet.abstract_conv",
        _NO_NAME,
        ("np.ComplexWarning", "np.exceptions.ComplexWarning"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.elemwise",
        _NO_NAME,
        ("np.sctype2char(out_dtype)", "np.dtype(out_dtype).char"),
        numpy=(2, 0),
    ),
    *_in("theano.printing", _NO_NAME, ("x.tostring()", "x.tobytes()"), numpy=(2, 0)),
    *_in("keras.callbacks.callbacks", _NO_NAME, ("np.Inf", "np.inf"), numpy=(2, 0)),
    *_in("keras.utils.io_utils", _NO_NAME, ("np.string_", "np.bytes_"), numpy=(2, 0)),
    *_in("keras_preprocessing.sequence", _NO_NAME, ("np.unicode_", "np.str_"), numpy=(2, 0)),
    # Names of SciPy
    *_in(
        "theano.tensor.nnet.conv theano.tensor.nnet.abstract_conv",
        "SciPy's modules are private",
        ("from scipy.signal.signaltools import", "from scipy.signal._signaltools import"),
        ("from scipy.signal.sigtools import", "from scipy.signal._sigtools import"),
        numpy=(1, 23),
    ),
    # Lists as indices
    *_in(
        "theano.tensor.sort",
        _LISTS,
        (
            "    idx[axis] = (slice(-k, None) if k > 0 else slice(-k))\n",
            "    idx[axis] = (slice(-k, None) if k > 0 else slice(-k)); idx = tuple(idx)\n",
        ),
        numpy=(1, 23),
    ),
    *_in(
        "theano.tensor.signal.pool",
        _LISTS,
        (
            "yk[[region_slices[i][r[i]] for i in xrange(nd)]]",
            "yk[tuple([region_slices[i][r[i]] for i in xrange(nd)])]",
        ),
        ("gxk[region_slice] += val", "gxk[tuple(region_slice)] += val"),
        numpy=(1, 23),
    ),
    # Integers that do not fit
    *_in(
        "theano.misc.safe_asarray",
        _WRAPS,
        (
            "rval = np.asarray(a, dtype=dtype, order=order)",
            f"{_USE}rval = numpy_1_24.asarray(a, dtype, order)",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.scalar.basic",
        _WRAPS,
        ("return self.ctor(input)\n", f"{_USE}return numpy_1_24.number(self.ctor, input)\n"),
        (
            "converted_data = py_type(data)\n",
            f"{_USE}converted_data = numpy_1_24.number(py_type, data)\n",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.elemwise",
        _WRAPS,
        (
            "variable.fill(self.scalar_op.identity)",
            "variable.fill(np.asarray(self.scalar_op.identity).astype(acc_dtype))",
        ),
        (
            "    variable = np.asarray(variable, dtype=nout.dtype)\n",
            f"    {_USE}variable = numpy_1_24.asarray(variable, nout.dtype)\n",
        ),
        (
            "    variable = np.asarray(variable, nout.dtype)\n",
            f"    {_USE}variable = numpy_1_24.asarray(variable, nout.dtype)\n",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.opt",
        _WRAPS,
        (
            "np.array(-1, dtype=node.inputs[0].dtype)",
            "np.array(-1).astype(node.inputs[0].dtype)",
        ),
        (
            "np.asarray(-1, dtype=node.outputs[0].dtype)",
            "np.asarray(-1).astype(node.outputs[0].dtype)",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.basic",
        _WRAPS,
        (
            "out[0] = np.arange(start, stop, step, dtype=self.dtype)\n",
            f"{_USE}out[0] = numpy_1_24.arange(start, stop, step, self.dtype)\n",
        ),
        numpy=(2, 0),
    ),
    # Promotion: with NumPy 2 values no longer count, and numbers of Python are of any precision.
    *_in(
        "theano.scalar.basic",
        _PROMOTION,
        ("if np.all(x == x_):", "if np.all(np.asarray(x) == x_):"),
        (
            "data == converted_data):\n                return py_type(data)\n",
            "np.asarray(data) == converted_data):\n                return converted_data\n",
        ),
        ("return np.float32(1.0) / x\n", "return np.float32(1.0) / np.asarray(x)[()]\n"),
        (
            "return sum(inputs)\n",
            "return sum(inputs, np.int64(0) if inputs and isinstance(inputs[0], np.generic) else 0)\n",
        ),
        ("return np.angle(x)\n", "return np.angle(x if np.iscomplexobj(x) else np.float64(x))\n"),
        ("return np.floor(a + 0.5)\n", "return np.floor(a + np.float64(0.5))\n"),
        ("return np.ceil(a - 0.5)\n", "return np.ceil(a - np.float64(0.5))\n"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.nnet.sigm",
        _PROMOTION,
        ("1.0 / (1.0 + np.exp(-x", "1.0 / (np.float64(1.0) + np.exp(-x"),
        ("        x = 0.5 * x\n", "        x = np.float64(0.5) * x\n"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.nnet.bn",
        _PROMOTION,
        (
            "inputs[:5]\n        axes = self.axes\n",
            "inputs[:5]\n        axes = self.axes; epsilon = epsilon.item(); "
            "running_average_factor = running_average_factor.item()\n",
        ),
        (
            "np.sqrt(estimated_variance + epsilon)) + bias\n        output_storage",
            "np.sqrt(estimated_variance + epsilon.item())) + bias\n        output_storage",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.sandbox.rng_mrg",
        _PROMOTION,
        ("mask = 0xffffffff", "mask = np.int64(0xffffffff)"),
        ("mask = 0x7fff", "mask = np.int64(0x7fff)"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.subtensor",
        _PROMOTION,
        ("    sub_x += y\n", f"    {_USE}sub_x += numpy_1_24.added(sub_x, y)\n"),
        (
            "x.__setitem__(cdata, sub_x + y)\n",
            "x.__setitem__(cdata, np.asarray(sub_x + y).astype(x.dtype))\n",
        ),
        numpy=(2, 0),
    ),
    # Other results and arguments of NumPy's functions
    *_in(
        "theano.tensor.raw_random",
        "copies of random generators share their state",
        ("from copy import copy\n", "from copy import deepcopy as copy\n"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.compile.function_module",
        "copies of random generators share their state",
        ("storage[0] = copy.copy(\n", "storage[0] = copy.deepcopy(\n"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.gof.link",
        "copies of random generators share their state",
        (
            "input2.storage[0] = copy(input1.storage[0])",
            "input2.storage[0] = deepcopy(input1.storage[0])",
        ),
        numpy=(2, 0),
    ),
    *_in(
        "theano.scalar.basic",
        "roundings of integers are integers",
        ("return np.ceil(x)\n", "return np.ceil(x) * np.float16(1)\n"),
        ("return np.floor(x)\n", "return np.floor(x) * np.float16(1)\n"),
        ("return np.trunc(x)\n", "return np.trunc(x) * np.float16(1)\n"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.scalar.basic theano.tensor.nnet.sigm",
        "a signature has a type for each operand",
        (", sig='f')", ", dtype='f')"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.scalar.basic",
        _NO_DTYPE,
        ("return np.zeros((), dtype=dt)", f"{_USE}return np.zeros((), numpy_1_24.dtype_of(dt))"),
        ("gz * np.asarray(np.pi / 180, gz.type),", "gz * np.asarray(np.pi / 180, gz.type.dtype),"),
        ("gz * np.asarray(180. / np.pi, gz.type),", "gz * np.asarray(180. / np.pi, gz.type.dtype),"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.misc.safe_asarray",
        _NO_DTYPE,
        ("dtype = np.dtype(dtype)  # Convert", f"{_USE}dtype = numpy_1_24.dtype_of(dtype)  # Convert"),
        numpy=(2, 0),
    ),
    *_in(
        "theano.tensor.extra_ops",
        "the inverse of unique has another shape",
        ("outs = np.unique(x, **param)", f"{_USE}outs = numpy_1_24.unique(x, **param)"),
        numpy=(2, 0),
    ),
    # Theano's own faults, with any version
    *_in(
        "theano.gpuarray.type",
        "the C code of GPU operations contains an address, so that no other process finds it compiled",
        (
            "(type(self))\n\n    @staticmethod\n    def values_eq(a, b):\n        return a == b",
            "(type(self))\n    __str__ = lambda self: type(self).__name__\n"
            "    @staticmethod\n    def values_eq(a, b):\n        return a == b",
        ),
    ),
)


def needed_here() -> List[Union[Module, Repair]]:
    """Return the rows that these versions of Python and NumPy need. It imports NumPy."""
    import numpy

    numpy_here = tuple(int(part) for part in numpy.__version__.split(".")[:2])
    python_here = sys.version_info[:2]
    rows: List[Union[Module, Repair]] = [*MODULES, *REPAIRS]
    return [row for row in rows if is_needed(row, python_here, numpy_here)]


def is_needed(row: Union[Module, Repair], python: Version, numpy: Version) -> bool:
    """Return whether versions of Python and NumPy need a row."""
    if row.python is None and row.numpy is None:
        return True
    return bool(row.python and python >= row.python) or bool(row.numpy and numpy >= row.numpy)
