"""List the test files that a change can break: those of changed modules, demos, documents and tests.

    python tests/changed.py [REVISION]

The change is what differs from a revision, by default HEAD: with what is not committed, and with new
files. If nothing differs from HEAD, it is the last commit. The tests of a module are those that
`mutation.TESTS` or `OTHERS` list for it, those in the file named after it, and those that import it.
Those of a module of the tests are those that import it, directly or not. Each line names where to run a
file, and the file; ``tests/run --changed`` runs them.
"""

import argparse
import ast
import fnmatch
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

import mutation
from compilers import OF_PYTENSOR
from processes import ROOT

PACKAGE = "synkhronos"
CALLS = mutation.CALLS
PROGRAMS = ["test_spmd.py", "test_worlds.py"]
STEPS = [
    "test_parallel_function.py", "test_clipped_gradients.py", "test_train_rules.py", "test_losses.py",
    "test_copyable.py", "test_flags.py",
]  # fmt: skip
GRAPHS = ["test_functions.py", "test_ops_gradients.py", "test_graphs_of_steps.py", "test_watch.py"]
ZOO = ["test_zoo.py", "test_zoo_layers.py", "test_zoo_data.py"]
#: The tests of the source code of all modules.
OF_CODE = ["test_architecture.py", "test_troubleshooting.py"]
#: The tests of modules in addition to those in `mutation.TESTS`, by patterns of the modules' names.
OTHERS = {
    "*.py": CALLS,  # at the top
    "arithmetic/*": ["test_partition.py", "test_operations.py", *CALLS],
    "arithmetic/averages.py": ["test_center.py", "test_rules.py"],
    "arithmetic/codes.py": ["test_wire.py", "test_wire_arithmetic.py"],
    "arithmetic/low_rank.py": ["test_wire.py", "test_wire_arithmetic.py"],
    "arithmetic/largest.py": ["test_wire.py", "test_wire_arithmetic.py"],
    "arithmetic/clocks.py": ["test_profile.py"],
    "arithmetic/trees.py": ["test_trees.py", *mutation.MACHINES],
    "arithmetic/pairwise.py": ["test_all_reduce.py", "test_machines.py"],
    "arrays/*": ["test_data.py", "test_drop.py", "test_bad_input.py", "test_fixed_rows.py"],
    "checkpoints/*": ["test_checkpoint.py", "test_feedback.py", "test_rank_files.py"],
    "compat/platoon/*": ["test_platoon.py"],
    "compat/platoon/*/*": ["test_platoon.py"],
    "engines/*": ["test_engines.py", *GRAPHS, *CALLS],
    "engines/analysis/*": ["test_engines.py", *GRAPHS, *CALLS],
    "engines/pytensor/*": ["test_pytensor.py", "test_modes.py", "test_jax.py"],
    "engines/theano/gpu*": ["test_emulated_cuda.py", "test_gpu_*.py", "test_pocl.py"],
    "engines/theano/*": [
        "test_precompiled_headers.py",
        "test_theano_values.py",
        "test_late_operations.py",
        "test_kernels.py",
    ],
    "engines/theano/repairs/*": ["test_theano_values.py", "test_older_python.py", "test_theano_scan.py"],
    "engines/theano/kernels/*": ["test_kernels*.py", "test_theano_values.py"],
    "comms/nccl.py": ["test_emulated_cuda.py", "test_gpu_communicators.py", "test_gpu_processes.py"],
    "extensions/*": ["test_train.py", "test_updates.py"],
    "extensions/batch_norm.py": ["test_batch_norm.py"],
    "extensions/keras.py": ["test_keras.py"],
    "extensions/keras_backend/*": ["test_keras.py"],
    "extensions/loading.py": ["test_loading.py", "test_loading_failures.py"],
    "extensions/loaders/*": ["test_loading_plan.py", "test_loading.py", "test_loading_failures.py"],
    "extensions/pymc/*": [
        "test_pymc.py",
        "test_pymc_models.py",
        "test_nutpie.py",
        "test_chains.py",
        "test_rows_potential.py",
        "test_resident.py",
    ],
    "functions/stay.py": ["test_resident.py"],
    "extensions/rules/*": [
        "test_rules.py",
        "test_rules_train.py",
        "test_session.py",
        "test_session_worlds.py",
    ],
    "compat/theanompi/*": ["test_theanompi.py", "test_theanompi_names.py"],
    "compat/theanompi/*/*": ["test_theanompi.py", "test_theanompi_names.py"],
    "compat/theanompi/*/*/*": ["test_theanompi.py", "test_theanompi_names.py"],
    "extensions/session/*": ["test_session.py", "test_session_worlds.py", "test_recorder.py"],
    "extensions/steps/*": STEPS,
    "extensions/zoo/*": [*ZOO, "test_demo_mnist.py", "test_demo_resnet.py", "test_demo_lstm.py"],
    "extensions/zoo/networks/*": ["test_zoo.py"],
    "host/*": ["test_doctor.py", "test_environment.py", "test_imports.py"],
    "host/entries.py": ["test_troubleshooting.py"],
    "host/messages.py": ["test_troubleshooting.py"],
    "host/other_programs.py": ["test_other_programs.py", "test_doctor.py"],
    "host/handler_errors.py": ["test_handlers.py", "test_interrupts.py"],
    "host/doctor/*": ["test_doctor.py", "test_doctor_gpus.py", "test_blas_kernels.py", "test_main.py"],
    "host/signal*": ["test_handlers.py", "test_interrupts.py"],
    "host/nvidia*": ["test_nvidia_libraries.py", "test_nvidia_links.py", "test_main.py"],
    "host/aliases.py": ["test_platoon.py", "test_theanompi.py", "test_theanompi_names.py"],
    "host/compile*": [
        "test_compiler.py",
        "test_compile_lock.py",
        "test_limits.py",
        "test_drop.py",
        "test_security.py",
    ],
    "host/status.py": ["test_status.py", "test_top.py", "test_transports.py"],
    "host/watching.py": ["test_status.py", "test_top.py"],
    "host/top.py": ["test_status.py"],
    "host/repairs.py": ["test_theano_values.py", "test_older_python.py"],
    "machines/*": ["test_machines_lost.py", "test_machines_differ.py", "test_eight_machines.py"],
    "ops/*": ["test_ops.py", "test_ops_calls.py", "test_ops_gradients.py", "test_ops_shapes.py"],
    "profiles/*": ["test_timeline.py", "test_profile.py", "test_drawing.py", "test_clocks.py"],
    "programs/*": [
        *PROGRAMS,
        "test_own_variables.py",
        "test_rank_files.py",
        "test_center.py",
        "test_messages.py",
        "test_controller.py",
    ],
    "services/background_processes.py": [
        "test_background_processes.py",
        "test_loading.py",
        "test_loading_failures.py",
    ],
    "programs/attached.py": ["test_attached.py", "test_platoon.py"],
    "programs/group_collectives.py": ["test_attached.py", "test_rank_group.py"],
    "programs/rank_group.py": ["test_rank_group.py"],
    "services/listener.py": ["test_attached.py", "test_platoon.py"],
    "services/register_group.py": ["test_attached.py", "test_rank_group.py"],
    "services/*": [*PROGRAMS, "test_center.py", "test_messages.py", "test_controller.py"],
    "startup/*": ["test_main.py", "test_nvidia_libraries.py"],
    "stores/mapped.py": ["test_background_processes.py", "test_loading.py"],
    "stores/*": ["test_stores.py", "test_commons.py", "test_data.py"],
    "transports/*": ["test_faults.py"],
    "variables/*": ["test_collectives_oracle.py", "test_in_sync.py", "test_functions.py"],
    "world/*": ["test_worlds.py", *mutation.PROCESSES, "test_launch.py", "test_turn.py"],
}
#: The tests of other files, by patterns of their names.
OF_FILES = {
    "conda/*": ["test_packaging.py"],
    "demos/lasagne_mnist/*": ["test_demo_mnist.py"],
    "demos/lstm_imdb/*": ["test_demo_lstm.py"],
    "demos/resnet/*": ["test_demo_resnet.py"],
    "demos/ports/*": ["test_ports.py"],
    "demos/session/*": ["test_demo_session.py"],
    "demos/clusters/*": ["test_clusters.py"],
    "demos/comparison.py": ["test_demo_comparison.py", "test_demo_mnist.py", "test_demo_resnet.py"],
    "demos/*.ipynb": ["test_notebook.py", "test_pymc.py"],
    "demos/*.py": ["test_demos.py", "test_demo_scripts.py", "test_demo_comparison.py"],
    "demos/run": ["test_setup.py", "test_packaging.py"],
    "docs/pictures/*": ["test_pictures.py"],
    "docs/*": [
        "test_docs.py",
        "test_docs_build.py",
        "test_examples.py",
        "test_troubleshooting.py",
        "test_pages.py",
    ],
    "docs/checking.rst": ["test_idioms_oracle.py"],
    "docs/clusters.rst": ["test_clusters.py"],
    "docs/environment.rst": ["test_environment.py"],
    "docs/*/*": ["test_docs.py", "test_docs_build.py"],
    "docs/reference/*": ["test_architecture.py"],
    "benchmarks/*": ["test_soak.py", "test_setup.py"],
    "benchmarks/divided_state.py": ["test_divided_state.py"],
    "requirements/*": ["test_packaging.py", "test_installation.py", "test_environment.py"],
    "tools/*": ["test_setup.py", "test_packaging.py"],
    "tests/newcomers/*": ["test_newcomers.py", "test_pymc.py"],
    "tests/programs/platoon/*": ["test_platoon.py"],
    "tests/faults/*": ["test_faults.py"],
    "tests/mutation.py": ["test_architecture.py"],
    "tests/changed.py": ["test_architecture.py"],
    "tests/conftest.py": ["test_partition.py", "test_call.py", "test_processes.py"],
    "tests/run": ["test_setup.py", "test_packaging.py"],
    "tests/selection": ["test_packaging.py"],
    ".github/*/*": ["test_packaging.py"],
    "README.rst": ["test_readme.py", "test_newcomers.py", "test_packaging.py", "test_docs.py"],
    "*": ["test_packaging.py", "test_setup.py"],
}


def matches(path, pattern):
    """Whether each part of a path matches that of a pattern."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def listed(path, table):
    """Return the names of test files whose patterns match a path."""
    return {name for pattern, names in table.items() if matches(path, pattern) for name in names}


def listed_for_module(module):
    """Return the test files that are listed for a module, such as ``host/heap.py``."""
    return {words.split()[0] for words in mutation.TESTS.get(module, ())} | listed(module, OTHERS)


def imported_by(path):
    """Return the full names of what a file imports: of modules, and of what it takes from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


class Files:
    """The files of the tests, and what they import."""

    def __init__(self):
        self.tests = {path.name: path for path in sorted(TESTS.rglob("test_*.py"))}
        self.imports = {path: imported_by(path) for path in sorted(TESTS.rglob("*.py"))}

    def named(self, patterns):
        """Return the paths of test files whose names match one of the patterns."""
        return {
            path
            for name, path in self.tests.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }

    def that_import(self, name):
        """Return the test files that import a module, directly or by other modules of the tests."""
        found, waiting = set(), [name]
        while waiting:
            name = waiting.pop()
            new = {path for path, names in self.imports.items() if name in names} - found
            found |= new
            waiting += map(name_of, new)
        return {path for path in found if path.name in self.tests}

    def that_run(self, program):
        """Return the files that name a program."""
        return {path for path in self.tests.values() if program in path.read_text()}

    def of(self, path):
        """Return the test files that a change of a file, named from the project on, can break."""
        folder, _, rest = path.partition("/")
        name = Path(path).name
        if folder == PACKAGE and name.endswith(".py"):
            of_name = f"test_{Path(path).stem.lstrip('_')}.py"
            module = path[: -len(".py")].replace("/", ".")
            return self.named({*listed_for_module(rest), *OF_CODE, of_name}) | self.that_import(module)
        if folder == PACKAGE:  # C++, for instance
            return self.named(listed(rest, OTHERS))
        found = self.named(listed(path, OF_FILES))
        if path.startswith("tests/programs/"):
            return found | self.that_run(name)
        if folder == "tests" and name.endswith(".py"):
            own = {ROOT / path} if name in self.tests else set()
            return found | own | self.that_import(name_of(ROOT / path))
        return found


def name_of(path):
    """Return the name by which tests import a module of the tests."""
    package = path.parent.name
    return f"{package}.{path.stem}" if package in ("checks", "gpu") else path.stem


def changed_files(revision):
    """Return the paths that differ from a revision, relative to the project."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"tests/changed.py: git {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    new = git("ls-files", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", "--no-renames", revision or "HEAD", "--") + new
    if not changed and not revision:
        changed = git("diff", "--name-only", "--no-renames", "HEAD~1", "HEAD")
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?")
    options = parser.parse_args()
    files = Files()
    found = set().union(*map(files.of, changed_files(options.revision)))
    for path in sorted(found):
        if path.exists():
            print(place_of(path), path.relative_to(ROOT))


def place_of(path):
    """Return where a test file is run: with one of the compilers, on a device, or with PyMC."""
    if path.parent.name == "gpu":
        return "gpu"
    if path.name in ("test_chains.py", "test_nutpie.py", "test_pymc.py", "test_pymc_models.py"):
        return "pymc"
    return "pytensor" if path.name in OF_PYTENSOR else "theano"


if __name__ == "__main__":
    main()
