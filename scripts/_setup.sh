# Sourced by the scripts beside it: goes to the repository's root and makes .venv hold exactly what constraints.txt says.
# A second call compares one hash and installs nothing; of two calls at once, one waits. Sets $python, the interpreter of
# .venv. scripts/test adds what only tests need.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

fits() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    for base in python3 python3.13 python3.12 python3.11; do
        fits "$base" && return
    done
    fail "this needs Python 3.11, 3.12 or 3.13, and finds $(python3 --version 2>/dev/null || echo none); install one of them"
}

make_venv() {
    fits "$python" && "$python" -c 'import pip' 2>/dev/null && return
    say "making .venv with $("$base" --version)"
    "$base" -m venv --clear .venv 2>/dev/null && return
    # Some distributions ship venv without ensurepip; the interpreter's own pip can fill the new environment.
    { "$base" -m venv --clear --without-pip .venv &&
        "$base" -m pip --python "$python" install --quiet --disable-pip-version-check pip; } ||
        fail "$base cannot make a virtual environment; on Debian and Ubuntu: apt install $base-venv"
}

# What the installation depends on: the pins, the package's own metadata, the interpreter, and where the package lies.
wanted_stamp() {
    "$python" -I -S - constraints.txt pyproject.toml <<'PYTHON'
import hashlib, os, pathlib, sys
content = b"".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])
print(hashlib.sha256(content + f"{sys.version_info[:2]} {os.getcwd()}".encode()).hexdigest())
PYTHON
}

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

# From torch's own index of builds for the CPU; $1 is how long to wait for it, in seconds.
install_for_cpu() {
    pip_install --retries 1 --timeout "$1" --extra-index-url https://download.pytorch.org/whl/cpu "$2" 2>/dev/null
}

# torch first: a build without CUDA is a tenth of the download, and enough where there is no GPU.
install_torch() {
    local version vision
    version=$(sed -n 's/^torch==//p' constraints.txt)
    vision=$(sed -n 's/^torchvision==//p' constraints.txt)
    if [[ ! -e /dev/nvidia0 ]] && ! nvidia-smi >/dev/null 2>&1; then
        say "installing torch $version for the CPU"
        if pip_install "torch==$version+cpu" 2>/dev/null || install_for_cpu 20 "torch==$version+cpu"; then
            install_for_cpu 5 "torchvision==$vision+cpu" || true # the build for CUDA will do: see below
            return
        fi
    fi
    say "installing torch $version"
    pip_install "torch==$version"
}

# Where torchvision is a build for CUDA beside torch for the CPU, every interpreter of .venv gets what its import needs.
let_torchvision_be_imported() {
    "$python" -c 'import torchvision' 2>/dev/null && return
    local packages
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    ln -sf "$PWD/ddp/vision.py" "$packages/torchvision_operators.py"
    echo 'import torchvision_operators; torchvision_operators.install()' >"$packages/torchvision_operators.pth"
}

install() {
    find_python
    make_venv
    install_torch
    say "installing the rest"
    pip_install setuptools wheel
    pip_install --no-build-isolation --editable '.[data,search,submitit]'
    let_torchvision_be_imported
}

install_tests() {
    say "installing what tests need"
    pip_install --no-build-isolation --editable '.[test]'
}

# $1: the stamp of an installation; the rest: the function that makes it.
unless_installed() {
    local stamp=.venv/$1 base
    [[ -f $stamp && $(<"$stamp") == "$(wanted_stamp 2>/dev/null)" ]] && return
    [[ ! -L .venv ]] ||
        fail "$PWD/.venv is a link to $(readlink .venv), and this would change that environment: remove the link"
    (
        find_python
        "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' # which this subshell holds until it ends
        [[ -f $stamp && $(<"$stamp") == "$(wanted_stamp 2>/dev/null)" ]] && exit # another call was faster
        [[ ! -f $stamp ]] || rm "$stamp"
        "$2"
        wanted_stamp >"$stamp"
    ) 9>.venv.lock
}

unless_installed installed-from install
