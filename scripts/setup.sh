#!/usr/bin/env bash
# Make .venv in this checkout and install megatron-adacc into it, editable, with every dependency pinned
# by requirements.lock. After this nothing is downloaded. See usage() for the settings.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup.sh [--repair | --find-python | --help]

Makes .venv in the checkout and installs megatron-adacc (editable) with pinned dependencies.
A second call finds it done and returns at once; a set-up that was killed is completed.

  --repair        run pip even if .venv was complete, to bring back what has been removed from it since
  --find-python   print the Python that would be used, and stop
  --help          this text

environment:
  ADACC_PYTHON    the Python (3.12 or newer) to use, a path or a command name
  ADACC_PIP_ARGS  further arguments for pip install, split at spaces; they are remembered in .venv.
                  A V100 needs torch 2.14 built for CUDA 12.6, which is on an index of its own:
                  ADACC_PIP_ARGS="--index-url <that index> --extra-index-url <your usual index>"
TEXT
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/adacc-setup.stamp # written last: without it the set-up is not complete
pip_args_file=$venv/adacc-pip-args
log=$venv/adacc-setup.log
oldest="3.12"

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

# The user's own Python settings must not decide what goes into .venv.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER
export PIP_DISABLE_PIP_VERSION_CHECK=1

# ---- finding a Python ----

# "3.12.1", or nothing if it does not run: a pyenv shim can be on PATH and fail.
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null </dev/null || true; }

is_new_enough() { [[ "$(printf '%s\n%s\n' "$oldest" "$1" | sort -V | head -n 1)" == "$oldest" ]]; }

can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null; }

real_python() {
    "$1" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))' </dev/null
}

candidates() {
    local name path
    for name in python3.12 python3.13 python3.14 python3 python; do type -aP "$name" || true; done
    for path in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.1[2-9]*/bin/python \
        /usr/local/bin/python3.1[2-9] /opt/*/bin/python3.1[2-9]; do
        if [[ -x $path ]]; then printf '%s\n' "$path"; fi
    done
}

venv_missing() {
    printf '%s is Python %s but cannot make a virtual environment: its venv or ensurepip module is missing; ' "$1" "$2"
    printf 'on Debian and Ubuntu, apt-get install python%s-venv and run this again.' "${2%.*}"
}

# Sets $python to the first candidate that is new enough and can make a venv, or ends with one error that
# says what was seen and how to get what is missing.
find_python() {
    local candidate version lacks_venv="" seen=()
    if [[ -n ${ADACC_PYTHON:-} ]]; then
        python=$(type -P "$ADACC_PYTHON" || true)
        [[ -n $python ]] || die "ADACC_PYTHON=$ADACC_PYTHON is not an executable file or command."
        version=$(version_of "$python")
        [[ -n $version ]] || die "ADACC_PYTHON=$ADACC_PYTHON does not run as a Python."
        is_new_enough "$version" ||
            die "ADACC_PYTHON=$ADACC_PYTHON is Python $version, and megatron-adacc needs $oldest or newer."
        can_make_venv "$python" || die "$(venv_missing "$python" "$version")"
        return
    fi
    while IFS= read -r candidate; do
        version=$(version_of "$candidate")
        if [[ -z $version ]]; then
            seen+=("$candidate does not run")
        elif ! is_new_enough "$version"; then
            seen+=("$candidate is $version")
        elif ! can_make_venv "$candidate"; then
            seen+=("$candidate is $version without venv")
            lacks_venv=${lacks_venv:-$(venv_missing "$candidate" "$version")}
        else
            python=$candidate
            return
        fi
    done < <(candidates)
    [[ -z $lacks_venv ]] || die "$lacks_venv"
    {
        printf 'setup: error: no Python %s or newer was found, and megatron-adacc needs one.\n' "$oldest"
        if ((${#seen[@]})); then printf '  seen: %s\n' "${seen[@]}"; else printf '  seen: no Python at all\n'; fi
        printf '  Install one in one of these ways and run this again:\n'
        printf '    Debian 13, Ubuntu 24.04 or newer:  apt-get install python3 python3-venv python3-dev\n'
        printf '    older Ubuntu, with the deadsnakes archive:  apt-get install python3.12 python3.12-venv python3.12-dev\n'
        printf '    pyenv:  pyenv install 3.12\n'
        printf '  or name one that is elsewhere:  ADACC_PYTHON=/path/to/python3.12 bash scripts/setup.sh\n'
    } >&2
    exit 1
}

# ---- the state of .venv ----

venv_runs() { "$venv/bin/python" -c 'import sys' >/dev/null 2>&1 </dev/null; }

# A venv cannot be moved: the scripts in bin/ name the folder that it was made in.
venv_was_moved() {
    local line
    line=$(grep '^command = ' "$venv/pyvenv.cfg" 2>/dev/null || true)
    [[ -n $line && $line != *" $venv" ]]
}

# bin/activate is the last file that `python -m venv` writes, after it has installed pip.
venv_is_usable() { [[ -f $venv/bin/activate ]] && ! venv_was_moved && venv_runs; }

fingerprint() {
    {
        cat "$root/pyproject.toml" "$root/requirements.lock"
        printf '%s\n%s\n' "$(readlink -f "$venv/bin/python")" "$root"
    } | sha256sum | cut -d ' ' -f 1
}

is_complete() { ! $repair && [[ -f $stamp ]] && venv_is_usable && [[ $(<"$stamp") == "$(fingerprint)" ]]; }

# What is asked for now must fit the .venv that is here: it may hold hours of building (apex, Transformer
# Engine), so it is never thrown away to please a changed setting.
check_settings_fit() {
    if [[ -n ${ADACC_PYTHON:-} && $(real_python "$venv/bin/python") != "$(real_python "$python")" ]]; then
        die "$venv was made with $(real_python "$venv/bin/python"), not with ADACC_PYTHON=$ADACC_PYTHON;" \
            "remove .venv to make it anew."
    fi
    # Unfinished, it may have failed for want of these very arguments.
    if [[ -f $stamp && -n ${ADACC_PIP_ARGS:-} && $wanted_pip_args != "$saved_pip_args" ]]; then
        die "$venv was made with ADACC_PIP_ARGS='$saved_pip_args', not '$wanted_pip_args';" \
            "remove .venv to make it anew."
    fi
}

finish_if_complete() {
    is_complete || return 0
    check_settings_fit
    say "nothing to do, .venv is complete"
    exit 0
}

make_venv() {
    local version
    if venv_is_usable; then
        version=$(version_of "$venv/bin/python")
        is_new_enough "$version" ||
            die "$venv is there with Python $version, and megatron-adacc needs $oldest or newer; remove .venv."
        check_settings_fit
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
            "$venv/bin/python" -m ensurepip >/dev/null ||
            die "$venv has no pip and none could be put into it; remove .venv to make it anew."
        return
    fi
    if [[ -z $python ]]; then find_python; fi
    if [[ -e $venv ]]; then say "the .venv that is here is half made, moved or broken; making it anew"; fi
    say "making .venv with Python $(version_of "$python") ($python)"
    "$python" -m venv --clear "$venv" || die "$python could not make $venv; the reason is above."
}

# ---- installing ----

# pip repeats one line for each configured folder that is not there; it says nothing about this set-up.
run_pip() {
    local code
    # In a pipe, not a process substitution: all that pip says is out before we say anything more.
    {
        "$venv/bin/python" -m pip install --log "$log" "$@" 2>&1 >&3 3>&- |
            { grep --line-buffered -v '^WARNING: Location .* is ignored' >&2 || true; }
        code=${PIPESTATUS[0]}
    } 3>&1
    return "$code"
}

install() {
    local constraints=$root/requirements.lock args=()
    rm -f "$stamp"
    if [[ -n $wanted_pip_args ]]; then
        read -r -a args <<<"$wanted_pip_args"
        printf '%s\n' "$wanted_pip_args" >"$pip_args_file"
        # Another build of torch asks for CUDA libraries of its own; the rest stays pinned.
        constraints=$venv/adacc-constraints.txt
        grep -Ev '^(nvidia|cuda)-' "$root/requirements.lock" >"$constraints"
    fi
    say "installing the pinned dependencies into .venv (about 6 GB on disk; the first time takes minutes)"
    # setuptools first, and then no build isolation: an isolated build would fetch an unpinned one.
    if ! { run_pip -c "$constraints" ${args[@]+"${args[@]}"} setuptools &&
        run_pip -c "$constraints" ${args[@]+"${args[@]}"} --no-build-isolation -e "$root[dev,plots]"; }; then
        die "pip install failed; the reason is above, and in full in $log." \
            "Run this again when it is mended: what was installed is kept."
    fi
    fingerprint >"$stamp.new"
    mv -f "$stamp.new" "$stamp"
}

python=""
repair=false
case ${1:-} in
    "") ;;
    --repair) repair=true ;;
    --help | -h)
        usage
        exit 0
        ;;
    --find-python)
        find_python
        printf '%s\n' "$python"
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
esac

if [[ -n ${ADACC_PYTHON:-} ]]; then find_python; fi
# Read now: they are kept in .venv, which may have to be made anew.
saved_pip_args=$(cat "$pip_args_file" 2>/dev/null || true)
wanted_pip_args=${ADACC_PIP_ARGS:-$saved_pip_args}

finish_if_complete

# One set-up at a time in a checkout. pip inherits the lock, so that a pip that outlived its set-up still holds it.
if type -P flock >/dev/null; then
    exec 9>>"$root/scripts/setup.sh"
    if ! flock -n 9; then
        say "another set-up is running in this checkout; waiting for it"
        flock 9
    fi
    finish_if_complete
fi

started=$SECONDS
make_venv
install
say "done in $((SECONDS - started)) s"
