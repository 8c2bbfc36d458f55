"""Tests of the rules for the source code, such as permitted imports and the size of functions.

Each rule is one test, which lists all places that break it.
"""

import ast
import importlib
import inspect
import re
import sys
import typing
from multiprocessing.connection import Connection
from pathlib import Path

import mutation
import numpy as np
import pytest
from changed import OF_CODE, OF_FILES, OTHERS, Files, listed_for_module, matches
from processes import find_test

import synkhronos as synk
from synkhronos.engines import names as compiler
from synkhronos.functions.stay import Workers

ROOT = Path(synk.__file__).resolve().parent
DOCS = ROOT.parent / "docs"
LONGEST_FILE = 500  # lines, without docstrings
LONGEST_FUNCTION = 45
PUBLIC_PLACES = (
    synk, synk.ops, synk.extensions.rules, synk.extensions.session, synk.extensions.train,
)  # fmt: skip
PUBLIC_FOLDERS = {"extensions", "ops"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)

ALLOWED_FOR_PYGPU = {"synkhronos.engines.theano.gpu_engine", "synkhronos.comms.nccl"}
OF_MPI4PY = "synkhronos.machines.mpi"
PROCESSES = {"multiprocessing", "subprocess", "signal", "threadpoolctl", "psutil"}
COMPILERS = {"theano", "pygpu", "pytensor", "lasagne"}
#: Besides the public names, the extensions use these: the compiler, which one it is, what its graphs
#: tell about rows and gradients, what copies replace, checks of arguments, how to warn, lists in
#: messages, names of types, what is made for steps of several calls, when and where progress is shown,
#: and processes that are no ranks.
FOR_EXTENSIONS = {
    "synkhronos._checks", "synkhronos._errors", "synkhronos._html", "synkhronos._text",
    "synkhronos._typing",
    "synkhronos.arithmetic.comparison", "synkhronos.arithmetic.partition", "synkhronos.engines.names",
    "synkhronos.engines.swap_argument", "synkhronos.functions.stay",
    "synkhronos.engines.analysis.gradient_seeds", "synkhronos.engines.analysis.rows",
    "synkhronos.engines.analysis.windows", "synkhronos.functions.steps", "synkhronos.host.compiler",
    "synkhronos.host.progress", "synkhronos.profiles.log", "synkhronos.services.background_processes",
}  # fmt: skip
#: Attributes of Keras's models, which classes of this package have, too.
OF_KERAS = {"optimizer", "targets", "weights"}
#: An attribute of Theano-MPI's models, which a class of this package has, too.
OF_MODELS = {"epoch"}
#: An attribute of Numba's functions, which a class of this package has, too.
OF_NUMBA = {"address"}
#: The extensions that are for one compiler, and import it by its own name.
OF_ONE_COMPILER = re.compile(
    r"synkhronos\.(extensions\.(keras|pymc|zoo)|compat\.theanompi\.(lib|models))"
)
EVERYWHERE = {"_checks", "_errors", "_html", "_text", "_typing", "_version"}
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem",
    "popleft", "appendleft", "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip

#: The folders of what runs and joins the ranks
OF_RANKS = {"comms", "machines", "programs", "services", "stores", "transports", "world"}
#: Attributes that are set from outside, and why.
SET_BY_OTHERS = {
    "functions", "shareds", "device", "comm", "restarts",  # of `Here`: what one rank has now
    "is_copy",  # in a process that the script has forked
    "resumed",  # in each wait of a rank, where a call would take time
    "count", "array",  # of a wire format and of a buffer, in a reduction
    "copy", "any_lost",  # of handles and memory that are freed
    "_results", "_failed", "_held",  # of the results of `fuse`
    "_world",  # of the number that `fork` returns
    "daemon", "atexit", "key", "writeable",  # of objects of Python and NumPy
}  # fmt: skip


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}
FUNCTIONS = [
    (name, node)
    for name, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
]


def imports_of(name, nodes=None):
    """Return the full names of all imports of a module, including those inside functions.

    With `nodes`, only these are searched.
    """
    found = set()
    for node in ast.walk(TREES[name]) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = node.module or ""
            if node.level:
                base = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
                for _ in range(node.level - 1):
                    base = base.rpartition(".")[0]
                package = f"{base}.{package}".rstrip(".")
            for alias in node.names:
                full = f"{package}.{alias.name}"
                found.add(full if full in FILES else package)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            if isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found


IMPORTS = {name: imports_of(name) for name in FILES}


def inside(name):
    """Return the modules of this package that a module imports."""
    return {one for one in IMPORTS[name] if one in FILES}


def reached_from(name):
    """Return everything that a module imports, directly or through modules of this package."""
    reached, waiting = set(), [name]
    while waiting:
        for one in IMPORTS[waiting.pop()]:
            if one not in reached:
                reached.add(one)
                if one in FILES and one != "synkhronos":
                    waiting.append(one)
    return reached


def top_level(names):
    return {name.partition(".")[0] for name in names}


def room(name):
    """Return the folder, or the top-level module of the package, that a module belongs to."""
    return (name.split(".") + [""])[1]


FOLDERS = sorted({room(name) for name in FILES if name.count(".") == 2})


# Imports


def layers():
    """Return the names of the layers from the map in the package's docstring, top layer first."""
    return re.findall(r"^``(\w+)``  ", ast.get_docstring(TREES["synkhronos"]), re.MULTILINE)


def may_import(folder):
    """Return the names that a folder may import, as stated in its docstring."""
    docstring = ast.get_docstring(TREES[f"synkhronos.{folder}"])
    permission = docstring.rpartition("\n\n")[2]
    assert permission.startswith("May import: ") and permission.endswith("."), folder
    return re.findall(r"``(\w+)``", permission)


def test_the_map_of_the_layers_names_what_there_is():
    there = {room(name) for name in FILES} - {"", "__main__", "_public"} - EVERYWHERE
    assert sorted(layers()) == sorted(there)


def test_a_folder_imports_what_its_docstring_permits_and_nothing_else():
    imported = {folder: set() for folder in FOLDERS}
    for name in FILES:
        if room(name) in imported:
            imported[room(name)].update(map(room, inside(name)))
    imported = {folder: found - {folder, ""} - EVERYWHERE for folder, found in imported.items()}
    del imported["extensions"]  # covered by another test
    assert imported == {folder: set(may_import(folder)) for folder in imported}


def test_what_a_docstring_permits_is_below_in_the_map():
    places = {name: place for place, name in enumerate(layers())}
    assert not [
        (folder, permitted)
        for folder in FOLDERS
        if folder != "extensions"
        for permitted in may_import(folder)
        if places.get(permitted, -1) <= places[folder]
    ]


def test_the_docstring_of_a_folder_names_its_modules():
    missing = []
    for name in FILES:
        folder, _, module = name.rpartition(".")
        # The docstring of the package is the map of the layers, which another test reads.
        if folder not in ("", "synkhronos") and not module.startswith("_"):
            if f"``{module}``" not in ast.get_docstring(TREES[folder]):
                missing.append(name)
    assert not missing


def test_no_import_circles():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for one in sorted(inside(name)):
            # Importing a module of a package imports the package first.
            if FILES[one].name != "__init__.py":
                visit(one)
        path.pop()
        done.add(name)

    for name in FILES:
        if FILES[name].name != "__init__.py":
            visit(name)


def reaching(folders, packages, rooms):
    """Return the modules of folders that import packages or rooms, directly or not."""
    modules = [name for name in FILES if room(name) in folders]
    assert {room(name) for name in modules} == folders
    found = {}
    for name in modules:
        reached = reached_from(name)
        bad = (top_level(reached) & packages) | ({room(one) for one in reached if one in FILES} & rooms)
        if bad:
            found[name] = bad
    return found


def test_lower_layers_know_nothing_of_graph_compilers():
    folders = {"arithmetic", "host", "stores", "comms", "transports"}
    assert set(reaching(folders, COMPILERS, {"engines"})) <= ALLOWED_FOR_PYGPU


def test_arithmetic_and_engines_know_nothing_of_processes():
    rooms = {"stores", "comms", "transports", "world"}
    assert not reaching({"arithmetic", "engines"}, PROCESSES, rooms)


def test_pygpu_is_imported_in_two_places_only():
    importing = {name for name, found in IMPORTS.items() if "pygpu" in top_level(found)}
    assert importing <= ALLOWED_FOR_PYGPU


def test_mpi4py_is_imported_in_one_place_which_is_imported_inside_functions():
    importing = {name for name, found in IMPORTS.items() if "mpi4py" in top_level(found)}
    assert importing == {OF_MPI4PY}
    assert not [name for name in FILES if OF_MPI4PY in imports_of(name, TREES[name].body)]


def test_compilers_are_imported_in_engines_and_for_keras_pymc_and_the_zoo_only():
    importing = [
        name
        for name, found in IMPORTS.items()
        if top_level(found) & COMPILERS - ({"pygpu"} if name in ALLOWED_FOR_PYGPU else set())
    ]
    others = [name for name in importing if room(name) != "engines"]
    assert not [name for name in others if not OF_ONE_COMPILER.match(name)]


def private_names(tree):
    """Yield the names of the package that a module uses and that are not public."""
    aliases = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update(one.asname or one.name for one in node.names if one.name == "synkhronos")
        if isinstance(node, ast.ImportFrom) and node.module == "synkhronos":
            yield from {one.name for one in node.names} - set(synk.__all__)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in aliases and node.attr not in {*synk.__all__, *PUBLIC_FOLDERS}:
                yield node.attr


def test_extensions_use_public_names_only():
    extensions = [name for name in FILES if room(name) == "extensions"]
    imported = {(name, one) for name in extensions for one in inside(name) - FOR_EXTENSIONS}
    assert not [pair for pair in imported if pair[1] != "synkhronos" and room(pair[1]) != "extensions"]
    compat = [name for name in FILES if room(name) == "compat"]
    assert extensions and compat
    assert not [(name, one) for name in (*extensions, *compat) for one in private_names(TREES[name])]


def attributes_used(tree):
    """Yield the attributes of objects that a module uses, with their lines.

    Names in imported modules are not included, which other tests read, and neither are the attributes of
    ``self``.
    """
    _, imported = module_level_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if getattr(node.value, "id", None) not in {*imported, "self"}:
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            if isinstance(node.args[1], ast.Constant):
                yield node.args[1].value, node.lineno


def attributes_defined(tree):
    """Return the attributes that the classes of a module define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bound, _ = module_level_names(node)
            found |= bound | {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            if isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def documented_attributes():
    """Return the attributes and methods of public classes that the reference documents."""
    found = set(synk.ops.__all__)
    for page in (DOCS / "reference").glob("*.rst"):
        classes = re.findall(
            r"^\.\. autoclass:: (\w+).*\n((?:   .*\n)*)", page.read_text(), re.MULTILINE
        )
        for name, options in classes:
            one = next(getattr(each, name) for each in PUBLIC_PLACES if hasattr(each, name))
            excluded = re.search(":exclude-members: (.*)", options)
            hidden = set(excluded[1].split(", ")) if excluded else set()
            found.update(named_attributes(one))
            for base in one.__mro__[:-1] if ":members:" in options else []:
                members = {key for key, value in vars(base).items() if inspect.getdoc(value)}
                found.update(members - hidden)
    return found


def named_attributes(kind):
    """Return the attributes that the docstring of a class lists."""
    lines = sections(kind.__doc__ or "").get("Attributes", [])
    return {
        name
        for line in lines
        if line and not line.startswith(" ")
        for name in line.partition(" : ")[0].split(", ")
    }


def attributes_for_extensions():
    """Return the attributes of what engines tell extensions, and of processes and workers for them."""
    modules = [importlib.import_module(name) for name in FOR_EXTENSIONS]
    modules = [one for one in modules if room(one.__name__) in ("engines", "services")]
    classes = {one for module in modules for one in vars(module).values() if inspect.isclass(one)}
    rooms = {"engines", "services", "stores", "transports"}
    classes = {one for one in classes if room(one.__module__) in rooms}
    classes.add(Workers)
    return {key for one in classes for key in (*dir(one), *named_attributes(one))}


def attributes_of_others():
    """Return the attributes of Python's objects, of NumPy's, and of the compiler's."""
    x, shared = compiler.tensor.dmatrix("x"), compiler.shared(np.zeros(2), "w", (False,))
    total = (2 * x).sum()
    nodes = [total.owner, total.owner.inputs[0].owner]
    graph = [x, shared, compiler.tensor.constant(1.0), x.type, *nodes, *(node.op for node in nodes)]
    graph += [nodes[1].op.scalar_op, compiler.Scan]
    python = [{}, [], "", b"", 1, sys.stderr, np.zeros(1), np.dtype("f8"), np.random.default_rng(0)]
    python += [Connection]
    return {attribute for one in [*graph, *python] for attribute in dir(one)}


def test_extensions_use_documented_attributes_only():
    extensions = [name for name in FILES if room(name) == "extensions"]
    # What is above the extensions they do not know.
    others = [TREES[name] for name in FILES if room(name) not in ("extensions", "compat")]
    hidden = set().union(*map(attributes_defined, others))
    hidden -= set().union(*(attributes_defined(TREES[name]) for name in extensions))
    hidden -= documented_attributes() | attributes_for_extensions() | attributes_of_others()
    hidden -= OF_KERAS | OF_MODELS | OF_NUMBA
    found = [
        (name, line, attribute)
        for name in extensions
        for attribute, line in attributes_used(TREES[name])
        if attribute in hidden
    ]
    assert not found


# State


def test_the_current_world_is_the_only_name_that_is_rebound():
    rebound = {
        (name, one)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
        for one in node.names
    }
    assert rebound == {("synkhronos.world.world", "_current")}


def module_level_names(tree):
    """Return the names that a module binds at module level, and the names that it imports there."""
    names, imported = set(), set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(one.id for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported.update((one.asname or one.name).partition(".")[0] for one in node.names)
    return names, imported


def local_names(function):
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one]
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return {one.arg for one in every} | stored


def changed_by(function):
    """Yield the names of objects that a function modifies: an item, an attribute, or by a method.

    Each name is paired with whether an attribute is modified.
    """
    for node in ast.walk(function):
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            if isinstance(node.ctx, (ast.Store, ast.Del)) and isinstance(node.value, ast.Name):
                yield node.value.id, isinstance(node, ast.Attribute)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATORS and isinstance(node.func.value, ast.Name):
                yield node.func.value.id, False


def changes_of_a_world(tree):
    """Yield the lines that assign or modify an attribute of a world, or of one of its objects.

    A world is a variable or an attribute of this name.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            target = node
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in MUTATORS:
            target = node.func.value
        else:
            continue
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
            if getattr(target, "id", getattr(target, "attr", "")) in ("world", "_world"):
                yield node.lineno
                break


def test_only_a_world_changes_its_attributes():
    others = [name for name in FILES if name != "synkhronos.world.world"]
    assert not [(name, line) for name in others for line in changes_of_a_world(TREES[name])]


def made_in(function):
    """Return the names of objects that a function creates."""
    made = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            created = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            if created.lstrip("_")[:1].isupper() or created in ("__new__", "copy"):
                made.update(one.id for one in node.targets if isinstance(one, ast.Name))
    return made


def attributes_set_on_others(function):
    """Yield the attributes that a function sets on objects that it has not created, but `self`."""
    own = {"self", "cls"} | made_in(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if not (isinstance(node.value, ast.Name) and node.value.id in own):
                yield node.attr


def test_objects_get_what_they_need_when_they_are_made_or_started_and_not_by_assignments():
    found = {
        (name.partition(".")[2], attribute)
        for name, function in FUNCTIONS
        if room(name) in OF_RANKS
        for attribute in attributes_set_on_others(function)
        if attribute not in SET_BY_OTHERS
    }
    assert not found


def test_functions_change_nothing_at_module_level():
    names = {name: module_level_names(tree) for name, tree in TREES.items()}
    found = []
    for module, function in FUNCTIONS:
        (bound, imported), own = names[module], local_names(function)
        for changed, is_attribute in changed_by(function):
            if changed not in own and (changed in bound or (is_attribute and changed in imported)):
                found.append((module, function.name, changed))
    assert not found


def test_the_library_does_not_print():
    assert not [
        (name, node.lineno)
        for name, tree in TREES.items()
        if name != "synkhronos.__main__"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("print", "pprint")
    ]


# Public names


def documented_in(page):
    return re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", page.read_text(), re.MULTILINE)


def test_all_is_what_the_reference_documents():
    pages = sorted((DOCS / "reference").glob("*.rst"))
    of_rules = DOCS / "reference" / "rules.rst"
    of_sessions = DOCS / "reference" / "sessions.rst"
    of_ops = DOCS / "reference" / "ops.rst"
    assert sorted(documented_in(of_rules)) == sorted(synk.extensions.rules.__all__)
    assert sorted(documented_in(of_sessions)) == sorted(synk.extensions.session.__all__)
    assert sorted(documented_in(of_ops)) == sorted(synk.ops.__all__)
    others = [page for page in pages if page not in (of_rules, of_sessions, of_ops)]
    documented = [name for page in others for name in documented_in(page)]
    assert sorted(documented) == sorted(synk.__all__)


def test_all_is_sorted_and_complete():
    assert synk.__all__ == sorted(synk.__all__)
    public = {
        name
        for name, value in vars(synk).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(synk.__all__)


def test_only_folders_show_among_the_public_names():
    modules = {
        name
        for name, value in vars(synk).items()
        if inspect.ismodule(value) and not name.startswith("_")
    }
    assert modules <= set(FOLDERS)


def sections(docstring):
    """Return a dictionary of the numpydoc sections, each a list of lines."""
    found, current = {}, None
    lines = inspect.cleandoc(docstring).splitlines()
    for line, following in zip(lines, [*lines[1:], ""]):
        if set(following) == {"-"} and len(following) == len(line):
            current = found.setdefault(line, [])
        elif current is not None and set(line) != {"-"}:
            current.append(line)
    return found


def documented_parameters(docstring):
    names = []
    for line in sections(docstring).get("Parameters", []):
        if line and not line.startswith(" "):
            names += [name.strip().lstrip("*") for name in line.partition(" : ")[0].split(",")]
    return names


def public_callables():
    for name in synk.__all__:
        value = getattr(synk, name)
        if inspect.isclass(value):
            for member, function in vars(value).items():
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{name}.{member}", function
        else:
            yield name, value


PUBLIC = dict(public_callables())


def test_what_is_public_has_a_docstring():
    docstrings = {name: inspect.getdoc(getattr(synk, name)) or "" for name in synk.__all__}
    lines = {name: text.partition("\n")[0] for name, text in docstrings.items()}
    assert not [name for name, line in lines.items() if not line.endswith((".", ":"))]


def test_every_parameter_is_documented():
    wrong = {}
    for name, function in {**PUBLIC, "Function.__call__": synk.Function.__call__}.items():
        function = inspect.unwrap(function)
        expected = set(inspect.signature(function).parameters) - {"self"}
        documented = set(documented_parameters(function.__doc__ or ""))
        if documented != expected:
            wrong[name] = documented ^ expected
    assert not wrong


# Types

#: Every function in these modules, and every public method of these classes, must be annotated.
TYPED_MODULES = ["_checks", "arithmetic.conversion", "arithmetic.operations", "arithmetic.partition",
                 "arithmetic.streams", "stores.base", "stores.files", "extensions.train",
                 "extensions.updates", "world.registry"]  # fmt: skip
TYPED_CLASSES = ["world.here.Command", "world.here.Here", "world.world.World",
                 "transports.base.Transport", "stores.memory.SharedMemory", "stores.base.Store",
                 "comms.base.Communicator", "engines.base.Engine", "world.fuse.Pending",
                 "functions.call.CallFunction"]  # fmt: skip


def unannotated(function):
    """Return the names of a function's parameters (or "return") that have no annotation."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one]
    found = {one.arg: one.annotation for one in every if one.arg not in ("self", "cls")}
    found["return"] = function.returns
    return [name for name, annotation in found.items() if annotation is None]


def functions_named(module, name):
    """Return a function, or the public and special methods of a class."""
    node = next(one for one in TREES[module].body if getattr(one, "name", None) == name)
    if isinstance(node, ast.FunctionDef):
        return [node]
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    return [one for one in methods if re.match("[^_]|__", one.name)]


def without_annotations(functions):
    """Return which of the functions, listed by name of what they belong to, lack annotations."""
    return [(key, one.name) for key, found in functions.items() for one in found if unannotated(one)]


def test_what_is_public_is_annotated():
    public = {name: functions_named(getattr(synk, name).__module__, name) for name in synk.__all__}
    assert not without_annotations(public)


def test_every_function_of_these_modules_is_annotated():
    functions = {
        name: [function for module, function in FUNCTIONS if module == f"synkhronos.{name}"]
        for name in TYPED_MODULES
    }
    assert all(functions.values())
    assert not without_annotations(functions)


def test_the_interfaces_between_layers_are_annotated():
    parts = {name: name.rpartition(".") for name in TYPED_CLASSES}
    methods = {name: functions_named(f"synkhronos.{one[0]}", one[2]) for name, one in parts.items()}
    assert all(methods.values())
    assert not without_annotations(methods)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="int | None cannot be evaluated before")
def test_annotations_name_what_there_is():
    hints = {name: typing.get_type_hints(inspect.unwrap(one)) for name, one in PUBLIC.items()}
    assert not [name for name, one in hints.items() if "return" not in one]


def test_the_package_says_that_it_has_types():
    assert (ROOT / "py.typed").exists()


# Size


def lines_of_docstring(node):
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def test_files_are_short():
    lengths = {}
    for name, tree in TREES.items():
        documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
        lines = len(FILES[name].read_text().splitlines())
        lengths[name] = lines - sum(map(lines_of_docstring, documented))
    too_long = {name: length for name, length in lengths.items() if length > LONGEST_FILE}
    assert not too_long


def test_functions_are_short():
    lengths = [
        (one.end_lineno - one.lineno + 1 - lines_of_docstring(one), module, one.name)
        for module, one in FUNCTIONS
    ]
    assert not [found for found in lengths if found[0] > LONGEST_FUNCTION]


# Tests of the tests


def test_every_module_of_these_folders_has_tests_for_its_mutants():
    there = {
        str(path.relative_to(ROOT))
        for folder in mutation.FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"  # docstrings only
    }
    assert there == {*mutation.TESTS, *mutation.EXCLUDED}
    assert not {*mutation.TESTS} & {*mutation.EXCLUDED} and all(mutation.EXCLUDED.values())


def test_the_tests_for_mutants_exist():
    files = {words.split()[0] for listed in mutation.TESTS.values() for words in listed}
    assert all(mutation.TESTS.values())
    assert all(map(find_test, files))


def test_every_module_has_tests_that_a_change_of_it_is_tried_with():
    modules = [
        path.relative_to(ROOT).as_posix() for path in FILES.values() if path.name != "__init__.py"
    ]
    assert not [module for module in modules if not listed_for_module(module)]
    assert not [pattern for pattern in OTHERS if not any(matches(module, pattern) for module in modules)]


def test_the_tests_for_changes_exist():
    files = Files()
    tables = OTHERS, OF_FILES
    names = {one for table in tables for listed in table.values() for one in listed}
    assert not [name for name in {*names, *OF_CODE} if not files.named([name])]


# Rules that find no violation must be able to find one.


def test_the_readers_of_code_find_what_they_look_for():
    tree = ast.parse(
        "import os\nTABLE = {}\n"
        "def f(x):\n    TABLE[x] = 1\n    TABLE.update(x)\n    os.environ = x\n    x.y = 2\n"
    )
    bound, imported = module_level_names(tree)
    assert (bound, imported) == ({"TABLE"}, {"os"})
    changes = set(changed_by(tree.body[-1]))
    assert changes == {("TABLE", False), ("os", True), ("x", True)}
    assert local_names(tree.body[-1]) == {"x"}
    changes = "world.x = 1\nself._world.here.y += 1\nworld.z[0] = 1\nworld.z.append(1)\n"
    none = "x = world\nself._world = x\nworld.f(1).append(x)\nf(world.x).y = 1\n"
    assert list(changes_of_a_world(ast.parse(changes + none))) == [1, 2, 3, 4]
    code = "import os\nclass A:\n    b = 1\n    def c(self):\n        self.d = os.e.f, getattr(x, 'g')\n"
    assert attributes_defined(ast.parse(code)) == {"b", "c", "d"}
    assert {one for one, _ in attributes_used(ast.parse(code))} == {"f", "g"}
    documented = documented_attributes()
    assert {"check", "maker", "output_modes", "differences"} <= documented
    assert not {"specification", "last_handle", "check_layout", "runs"} & documented
    assert unannotated(tree.body[-1]) == ["x", "return"]
    assert documented_parameters("S.\n\nParameters\n----------\na, *b : int\n    A.\nc\n\nReturns\n"
                                 "-------\nint\n") == ["a", "b", "c"]  # fmt: skip
