"""Tests of the rules for the source code, such as permitted imports and the size of functions."""

import ast
import inspect
import re
import sys
import typing
from pathlib import Path

import mutation
import pytest

import synkhronos as synk

ROOT = Path(synk.__file__).resolve().parent
DOCS = ROOT.parent / "docs"
LONGEST_FILE = 300  # lines, without docstrings
TABLE = "synkhronos.host.repairs"  # may be longer
LONGEST_FUNCTION = 45
PUBLIC_FOLDERS = {"extensions", "ops"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)

ALLOWED_FOR_PYGPU = {"synkhronos.engines.theano_gpu", "synkhronos.comms.nccl"}
OF_MPI4PY = "synkhronos.transports.machines.mpi"
PROCESSES = {"multiprocessing", "subprocess", "signal", "threadpoolctl", "psutil"}
COMPILERS = {"theano", "pygpu", "pytensor", "lasagne"}
#: Besides the public names, the extensions use these: the compiler, which one it is, what its graphs
#: tell about rows and gradients, what copies replace, how to warn, and lists in messages.
FOR_EXTENSIONS = {
    "synkhronos._errors", "synkhronos._text", "synkhronos.engines.names", "synkhronos.engines.rows",
    "synkhronos.engines.seeds", "synkhronos.engines.swaps", "synkhronos.engines.windows",
    "synkhronos.host.compiler",
}  # fmt: skip
#: The extensions that are for one compiler, and import it by its own name.
OF_ONE_COMPILER = re.compile(r"synkhronos\.extensions\.(keras|pymc)")
EVERYWHERE = {"_errors", "_html", "_text", "_typing", "_version"}
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem",
    "popleft", "appendleft", "remove", "reverse", "setdefault", "sort", "update",
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_its_docstring_permits(folder):
    if folder == "extensions":  # covered by another test
        return
    permitted = may_import(folder)
    imported = {room(one) for name in FILES if room(name) == folder for one in inside(name)}
    assert imported - {folder, ""} - EVERYWHERE == set(permitted), folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_a_docstring_permits_is_below_in_the_map(folder):
    if folder != "extensions":
        below = layers()[layers().index(folder) + 1 :]
        assert set(may_import(folder)) <= set(below)


@pytest.mark.parametrize("folder", sorted({name.rpartition(".")[0] for name in FILES} - {""}))
def test_the_docstring_of_a_folder_names_its_modules(folder):
    docstring = ast.get_docstring(TREES[folder])
    if folder == "synkhronos":  # the map of the layers, which another test reads
        return
    modules = {one for parent, _, one in map(split, FILES) if parent == folder}
    modules = {name for name in modules if not name.startswith("_")}
    assert modules <= set(re.findall(r"``(\w+)``", docstring)), folder


def split(name):
    return name.rpartition(".")


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


@pytest.mark.parametrize("folder", ["arithmetic", "host", "stores", "comms", "transports"])
def test_knows_nothing_of_graph_compilers(folder):
    modules = [name for name in FILES if room(name) == folder and name not in ALLOWED_FOR_PYGPU]
    assert modules
    for name in modules:
        reached = reached_from(name)
        assert not top_level(reached) & COMPILERS, name
        assert "engines" not in {room(one) for one in reached if one in FILES}, name


@pytest.mark.parametrize("folder", ["arithmetic", "engines"])
def test_knows_nothing_of_processes(folder):
    modules = [name for name in FILES if room(name) == folder]
    assert modules
    for name in modules:
        reached = reached_from(name)
        assert not top_level(reached) & PROCESSES, name
        rooms = {room(one) for one in reached if one in FILES}
        assert not rooms & {"stores", "comms", "transports", "world"}, name


def test_pygpu_is_imported_in_two_places_only():
    importing = {name for name, found in IMPORTS.items() if "pygpu" in top_level(found)}
    assert importing <= ALLOWED_FOR_PYGPU


def test_mpi4py_is_imported_in_one_place_which_is_imported_inside_functions():
    importing = {name for name, found in IMPORTS.items() if "mpi4py" in top_level(found)}
    assert importing == {OF_MPI4PY}
    assert not [name for name in FILES if OF_MPI4PY in imports_of(name, TREES[name].body)]


def test_compilers_are_imported_in_engines_and_for_keras_and_pymc_only():
    for name, found in IMPORTS.items():
        allowed = {"pygpu"} if name in ALLOWED_FOR_PYGPU else set()
        if top_level(found) & COMPILERS - allowed:
            assert room(name) == "engines" or OF_ONE_COMPILER.match(name), name


@pytest.mark.parametrize("name", [name for name in FILES if room(name) == "extensions"])
def test_extensions_use_public_names_only(name):
    for one in inside(name):
        allowed = one in FOR_EXTENSIONS or one == "synkhronos"
        assert allowed or room(one) == "extensions", one
    aliases = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            aliases.update(one.asname or one.name for one in node.names if one.name == "synkhronos")
        if isinstance(node, ast.ImportFrom) and node.module == "synkhronos":
            assert {one.name for one in node.names} <= set(synk.__all__)
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in aliases:
                assert node.attr in {*synk.__all__, *PUBLIC_FOLDERS}, node.attr


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


@pytest.mark.parametrize("name", [name for name in FILES if name != "synkhronos.world.world"])
def test_only_a_world_changes_its_attributes(name):
    assert not list(changes_of_a_world(TREES[name]))


@pytest.mark.parametrize("name", FILES)
def test_functions_change_nothing_at_module_level(name):
    bound, imported = module_level_names(TREES[name])
    for module, function in FUNCTIONS:
        if module != name:
            continue
        own = local_names(function)
        for changed, is_attribute in changed_by(function):
            if changed not in own:
                assert changed not in bound, f"{function.name} changes {changed}"
                assert not (is_attribute and changed in imported), f"{function.name}: {changed}"


@pytest.mark.parametrize("name", [name for name in FILES if name != "synkhronos.__main__"])
def test_the_library_does_not_print(name):
    calls = [node.func for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]
    assert not [one for one in calls if isinstance(one, ast.Name) and one.id in ("print", "pprint")]


# Public names


def documented_in(page):
    return re.findall(
        r"^\.\. auto(?:function|class|exception):: (\w+)", page.read_text(), re.MULTILINE
    )


def test_all_is_what_the_reference_documents():
    pages = sorted((DOCS / "reference").glob("*.rst"))
    of_rules = DOCS / "reference" / "rules.rst"
    of_ops = DOCS / "reference" / "ops.rst"
    assert sorted(documented_in(of_rules)) == sorted(synk.extensions.rules.__all__)
    assert sorted(documented_in(of_ops)) == sorted(synk.ops.__all__)
    documented = [
        name for page in pages if page not in (of_rules, of_ops) for name in documented_in(page)
    ]
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


@pytest.mark.parametrize("name", synk.__all__)
def test_what_is_public_has_a_docstring(name):
    docstring = inspect.getdoc(getattr(synk, name))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":")), docstring


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_is_documented(name):
    function = inspect.unwrap(PUBLIC[name])
    assert function.__doc__
    expected = [one for one in inspect.signature(function).parameters if one != "self"]
    documented = documented_parameters(function.__doc__)
    assert set(documented) == set(expected)


def test_the_call_of_a_function_documents_its_parameters():
    documented = documented_parameters(synk.Function.__call__.__doc__)
    expected = set(inspect.signature(synk.Function.__call__).parameters) - {"self"}
    assert set(documented) == expected


# Types

#: Every function in these modules, and every public method of these classes, must be annotated.
TYPED_MODULES = ["arithmetic.conversion", "arithmetic.operations", "arithmetic.partition",
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


@pytest.mark.parametrize("name", synk.__all__)
def test_what_is_public_is_annotated(name):
    for function in functions_named(getattr(synk, name).__module__, name):
        assert not unannotated(function), function.name


@pytest.mark.parametrize("name", TYPED_MODULES)
def test_every_function_of_these_modules_is_annotated(name):
    functions = [function for module, function in FUNCTIONS if module == f"synkhronos.{name}"]
    assert functions
    for function in functions:
        assert not unannotated(function), function.name


@pytest.mark.parametrize("name", TYPED_CLASSES)
def test_the_interfaces_between_layers_are_annotated(name):
    module, _, class_name = name.rpartition(".")
    functions = functions_named(f"synkhronos.{module}", class_name)
    assert functions
    for function in functions:
        assert not unannotated(function), function.name


@pytest.mark.skipif(sys.version_info < (3, 10), reason="int | None cannot be evaluated before")
@pytest.mark.parametrize("name", PUBLIC)
def test_annotations_name_what_there_is(name):
    assert "return" in typing.get_type_hints(inspect.unwrap(PUBLIC[name]))


def test_the_package_says_that_it_has_types():
    assert (ROOT / "py.typed").exists()


# Size


@pytest.mark.parametrize("name", [name for name in FILES if name != TABLE])
def test_a_file_is_short(name):
    docstrings = 0
    for node in ast.walk(TREES[name]):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings += node.body[0].end_lineno - node.body[0].lineno + 1
    assert len(FILES[name].read_text().splitlines()) - docstrings <= LONGEST_FILE


@pytest.mark.parametrize("name", FILES)
def test_functions_are_short(name):
    for module, function in FUNCTIONS:
        if module == name:
            first = function.body[0]
            docstring = 0
            if ast.get_docstring(function) is not None:
                docstring = first.end_lineno - first.lineno + 1
            length = function.end_lineno - function.lineno + 1 - docstring
            assert length <= LONGEST_FUNCTION, f"{function.name}: {length} lines"


# Tests of the tests


def test_every_module_of_three_folders_has_tests_for_its_mutants():
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
    assert not [name for name in files if not (Path(mutation.__file__).parent / name).exists()]


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
    assert unannotated(tree.body[-1]) == ["x", "return"]
    assert documented_parameters("S.\n\nParameters\n----------\na, *b : int\n    A.\nc\n\nReturns\n"
                                 "-------\nint\n") == ["a", "b", "c"]  # fmt: skip
