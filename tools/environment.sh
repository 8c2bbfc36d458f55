#!/bin/sh
# Creates the virtual environment .venv at the project's root, with everything that the demos and the
# tests need. If it exists already, nothing is done unless the requirements have changed.
#
# Requires Python 3.10 to 3.14, and permission to install Debian packages unless they are installed already.
#
# The option --with-opencl also installs pygpu and an OpenCL implementation for the CPU, for the tests
# of Theano's GPU back end; only with Python before 3.12, as the packages of pygpu are for NumPy 1, and are
# not in Debian 13. The option --with-mpi also installs OpenMPI and mpi4py, for several machines,
# OpenMPI 5 in .venv/openmpi5, for jobs that go on when tasks die, and MPICH in .venv/mpich.
# The option --with-pytensor also creates .venv-pytensor, with PyTensor and NumPy 2 in place of Theano, and
# with JAX, and mpi4py if --with-mpi is given.
# The option --with-pymc also creates .venv-pymc, with nutpie, and PyMC 6 or, on Python 3.11, PyMC 5 and the
# older PyTensor that it needs.
# The option --for-demos leaves out what only the tests and the documentation need; without it, a later
# call adds this to the same .venv.
# The others are optional: if they cannot be installed, a message says so.
set -eu

with_opencl=no
with_mpi=no
with_pytensor=no
with_pymc=no
kind=complete
for option in "$@"; do
    case $option in
        --with-opencl) with_opencl=yes ;;
        --with-mpi) with_mpi=yes ;;
        --with-pytensor) with_pytensor=yes ;;
        --with-pymc) with_pymc=yes ;;
        --for-demos) kind=demos ;;
        *)
            echo "usage: environment.sh [--for-demos] [--with-opencl] [--with-mpi] [--with-pytensor]" \
                "[--with-pymc]" >&2
            exit 2
            ;;
    esac
done

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
environment=$root/.venv
stamp=$environment/made-from
log=$environment/environment.log
for_demos='requirements/build.txt requirements/library.txt requirements/theano.txt requirements/demos.txt
    requirements/keras.txt'
requirements="$for_demos requirements/docs.txt requirements/tests.txt"

fingerprint() {
    # The root is included because the environment contains absolute paths, and the version of Python
    # because an upgrade of the system can change it.
    {
        echo "$root"
        [ -z "$python" ] || "$python" --version
        cat tools/environment.sh setup.py pyproject.toml requirements/*.in $requirements \
            requirements/mpi.txt requirements/openmpi5.txt requirements/mpich.txt requirements/pytensor.txt \
            requirements/pymc.txt requirements/jax.txt requirements/images.txt
    } | sha256sum
}

is_made() {
    # Whether .venv has what a kind of environment needs: "demos", or "complete".
    [ -x "$environment/bin/python" ] && [ -f "$stamp" ] || return 1
    [ "$(cat "$stamp")" = "$wanted" ] || [ "$(cat "$stamp")" = "$1: $wanted" ]
}

say() {
    echo "environment: $*" >&2
}

fail() {
    say "$@"
    exit 1
}

step() {
    # Runs a command, and shows its output only if it fails.
    say "$1"
    shift
    if ! "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        fail "that failed; the whole log is in $log"
    fi
}

find_python() {
    # Debian's own Python comes first, as only that one finds Debian's package python3-pygpu.
    for candidate in /usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

missing_packages() {
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$version-venv"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || echo "$version-dev"
    command -v g++ >/dev/null || echo g++
    has_openblas || echo libopenblas-dev
}

has_openblas() {
    ls /usr/lib/libopenblas.so /usr/lib64/libopenblas.so /usr/lib/*/libopenblas.so \
        /usr/local/lib/libopenblas.so 2>/dev/null | grep -q .
}

install_debian_packages() {
    missing=$(missing_packages | tr '\n' ' ')
    missing=${missing% }
    [ -n "$missing" ] || return 0
    if may_install; then
        step "reading the list of Debian packages" $as_root apt-get update
        # shellcheck disable=SC2086
        step "installing the Debian packages $missing" \
            $as_root apt-get install --yes --no-install-recommends $missing
    elif [ "$missing" = libopenblas-dev ]; then
        say "no OpenBLAS is installed; the one that comes with SciPy is used"
    else
        fail "these are missing: $missing. Have them installed, with the right to do so, on Debian by:
    apt-get install $missing"
    fi
}

may_install() {
    # Checks whether Debian packages may be installed, and sets as_root to the prefix for apt-get.
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" = 0 ]; then
        as_root='env DEBIAN_FRONTEND=noninteractive'
    elif sudo -n true 2>/dev/null; then
        as_root='sudo -n env DEBIAN_FRONTEND=noninteractive'
    else
        return 1
    fi
}

may_have_pygpu() {
    # The packages of pygpu are for NumPy 1, of which there is none in .venv on newer versions of Python.
    "$environment/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' ||
        "$environment/bin/python" -c 'import pygpu' 2>/dev/null
}

missing_for_opencl() {
    may_have_pygpu || return 0
    "$environment/bin/python" -c 'import pygpu' 2>/dev/null || echo python3-pygpu
    [ -e /usr/include/gpuarray/array.h ] || echo libgpuarray-dev
    ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 || echo pocl-opencl-icd
    ls /usr/lib/*/libclblast.so >/dev/null 2>&1 || echo libclblast-dev
}

install_opencl() {
    if ! may_have_pygpu; then
        say "left out, as it needs pygpu, which Debian 12 and Ubuntu 22.04 have (see docs/gpu.rst): OpenCL"
        return 0
    fi
    packages=
    for package in $(missing_for_opencl); do
        if [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null)" = installed ]; then
            say "left out, as .venv does not see what this package has installed: $package"
        else
            packages="$packages $package"
        fi
    done
    # shellcheck disable=SC2086
    install_optional $packages
}

has_mpi4py() {
    "$1/bin/python" -c 'import mpi4py' 2>/dev/null
}

install_mpi4py() {
    # Installs mpi4py in the environment in a folder, or says that it is left out.
    has_mpi4py "$1" && return
    say "installing mpi4py in ${1##*/}"
    "$1/bin/python" -m pip --disable-pip-version-check install --requirement requirements/mpi.txt \
        >>"$log" 2>&1 || say "left out, as that failed (the whole log is in $log): mpi4py in ${1##*/}"
}

install_mpi() {
    command -v mpirun >/dev/null || install_optional openmpi-bin
    install_mpi4py "$environment"
    for mpi in openmpi5 mpich; do
        has_mpi $mpi && continue
        say "installing .venv/$mpi"
        pip_install --prefix "$environment/$mpi" --requirement requirements/$mpi.txt >>"$log" 2>&1 ||
            say "left out, as that failed (the whole log is in $log): $mpi"
    done
}

has_mpi() {
    [ -x "$environment/$1/bin/mpiexec" ]
}

install_optional() {
    # Installs Debian packages, or says that they are left out.
    [ $# -gt 0 ] || return 0
    packages=" $*"
    if ! may_install; then
        say "left out, as installing Debian packages needs apt-get and root's rights:$packages"
        return 0
    fi
    say "installing the Debian packages$packages"
    # shellcheck disable=SC2086
    if ! { $as_root apt-get update &&
        $as_root apt-get install --yes --no-install-recommends $packages; } >>"$log" 2>&1; then
        say "left out, as that failed (the whole log is in $log):$packages"
    fi
}

pip_install() {
    "$environment/bin/python" -m pip --disable-pip-version-check install --no-build-isolation "$@"
}

install_python_packages() {
    step "installing setuptools" pip_install --requirement requirements/build.txt
    # shellcheck disable=SC2046
    step "installing Theano, Lasagne and Keras" \
        "$environment/bin/python" -m synkhronos install theano lasagne keras \
        $(printf ' --constraint %s' $requirements)
    # shellcheck disable=SC2046
    step "installing what the library and the demos need" \
        pip_install $(printf ' --requirement %s' $for_demos)
    # Only the files of these packages are read.
    step "installing the packages with images" pip_install --no-deps --requirement requirements/images.txt
    step "installing Synkhronos from here" pip_install --no-deps --editable .
}

install_for_tests() {
    # Adds what the tests and the documentation need to what the demos need.
    # shellcheck disable=SC2046
    step "installing what the documentation and the tests need" \
        pip_install $(printf ' --requirement %s' $requirements)
    echo "$wanted" >"$stamp"
}

write_theano_settings() {
    # Makes a plain `import theano` work in this environment. Theano reads this settings file, and then
    # the user's own, which takes precedence. Unless THEANORC is set to something else, Python also
    # repairs Theano when it is imported.
    "$environment/bin/python" - <<'PYTHON'
import os
import runpy
import sys
import sysconfig

ldflags = runpy.run_path("synkhronos/host/environment.py")["find_ldflags"]()
imports = os.path.abspath("synkhronos/host/imports.py")
ours = f"{sys.prefix}/theanorc:~/.theanorc"
with open(f"{sys.prefix}/theanorc", "w") as settings:
    settings.write(f"[blas]\nldflags = {ldflags}\n")
with open(f"{sysconfig.get_paths()['purelib']}/theano_settings.pth", "w") as hook:
    hook.write(
        f"import os, runpy; "
        f"os.environ.setdefault('THEANORC', {ours!r}) == {ours!r} "
        f"and runpy.run_path({imports!r})['provide']()\n"
    )
PYTHON
}

make_second() {
    # Creates .venv-$1 anew, with the packages of requirements/$1.txt, those that the tests need, and
    # what the other arguments name to pip.
    second=$root/.venv-$1
    rm -rf "$second"
    say "making .venv-$1"
    mkdir "$second"
    name=$1
    shift
    if "$python" -m venv "$second" >>"$second/environment.log" 2>&1 &&
        "$second/bin/python" -m pip --disable-pip-version-check install --no-compile \
            --requirement requirements/library.txt --requirement "requirements/$name.txt" \
            --constraint requirements/tests.txt pytest pytest-xdist hypothesis packaging "$@" \
            >>"$second/environment.log" 2>&1; then
        echo "$root" >"$("$second/bin/python" -c \
            'import sysconfig; print(sysconfig.get_paths()["purelib"])')/synkhronos.pth"
        echo "$wanted" >"$second/made-from"
        say "ready: .venv-$name"
    else
        tail -n 3 "$second/environment.log" >&2
        rm -rf "$second"
        say "left out, as that failed: .venv-$name"
    fi
}

install_jax() {
    # Adds JAX, which is optional, to .venv-pytensor.
    second=$root/.venv-pytensor
    if [ ! -x "$second/bin/python" ] || "$second/bin/python" -c 'import jax' 2>/dev/null; then
        return 0
    fi
    say "installing JAX, in .venv-pytensor"
    "$second/bin/python" -m pip --disable-pip-version-check install --no-compile \
        --requirement requirements/jax.txt --constraint requirements/pytensor.txt >>"$second/environment.log" 2>&1 ||
        say "left out, as that failed (the whole log is in $second/environment.log): JAX"
}

has_second() {
    [ -f "$root/.venv-$1/made-from" ] && [ "$(cat "$root/.venv-$1/made-from")" = "$wanted" ]
}

make_environment() {
    step "making .venv with $python" "$python" -m venv --system-site-packages "$environment"
    install_python_packages
    step "writing Theano's settings" write_theano_settings
    echo "demos: $wanted" >"$stamp"
    [ $kind = demos ] || install_for_tests
    say "ready: .venv"
}

is_ready() {
    is_made $kind || return 1
    [ "$with_opencl" = no ] || [ -z "$(missing_for_opencl)" ] || return 1
    [ "$with_pytensor" = no ] || has_second pytensor || return 1
    [ "$with_pymc" = no ] || has_second pymc || return 1
    [ "$with_mpi" = no ] || { command -v mpirun >/dev/null && has_mpi4py "$environment"; } || return 1
    [ "$with_mpi" = no ] || { has_mpi openmpi5 && has_mpi mpich; } || return 1
    [ "$with_mpi" = no ] || [ "$with_pytensor" = no ] || has_mpi4py "$root/.venv-pytensor"
}

python=$(find_python)
wanted=$(fingerprint)
is_ready && exit 0

# If two commands are started at the same time, only one may write the environment.
if command -v flock >/dev/null; then
    exec 9>.environment.lock
    flock 9
fi
[ -n "$python" ] || fail "Python 3.10 to 3.14 is needed and is not here. Install it, on Debian 12 or newer by:
    apt-get install python3"
mkdir -p "$environment"
install_debian_packages
# Beside the others, as pip uses one core
[ "$with_pymc" = no ] || has_second pymc || make_second pymc &
if [ $kind = complete ] && is_made demos; then
    is_made complete || install_for_tests
else
    is_made $kind || make_environment
fi
[ "$with_opencl" = no ] || install_opencl
[ "$with_mpi" = no ] || install_mpi
[ "$with_pytensor" = no ] || has_second pytensor ||
    make_second pytensor --constraint requirements/demos.txt scikit-learn tqdm
[ "$with_mpi" = no ] || ! has_second pytensor || install_mpi4py "$root/.venv-pytensor"
[ "$with_pytensor" = no ] || install_jax
wait
