#!/bin/sh
# Usage: check_machine.sh PYTHON. Exits 1 with one sentence where this machine lacks what the set-up needs.
python=$1

fail() {
    echo "gemattn: $*" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || fail "needs Linux, this is $(uname -s)."

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
    fail "'$python' does not run; name a Python 3.11, 3.12 or 3.13, for example: make PYTHON=python3.12 test"
case $version in
    3.11.* | 3.12.* | 3.13.*) ;;
    *) fail "needs Python 3.11, 3.12 or 3.13, but '$python' is $version; name another, for example: make PYTHON=python3.12 test" ;;
esac

minor=${version%.*}
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "Python $version has no venv module; on Debian or Ubuntu: apt install python$minor-venv"

for compiler in gcc g++; do
    command -v "$compiler" >/dev/null 2>&1 ||
        fail "found no $compiler, which Triton and torch.compile call; on Debian or Ubuntu: apt install $compiler"
done
