# Sourced by the other scripts: finds a Python, makes a virtual environment once, installs the project into it.

find_python() { # prints the first interpreter of a supported version
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11, 3.12 or 3.13 is needed" >&2
    return 2
}

ensure_environment() { # FOLDER EXTRAS: a half-made environment is finished, a finished one is left alone
    local folder="$1" extras="$2" python stamp wanted log base
    python="$folder/bin/python"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        base="$(find_python)"
        "$base" -m venv "$folder"
    fi
    stamp="$folder/installed-from"
    wanted="$(echo "$extras" | cat - pyproject.toml constraints-cpu.txt | sha256sum)"
    [[ "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]] && return
    log="$folder/install.log"
    echo "installing into $folder (log: $log)" >&2
    # The constraint takes a CPU build of torch where one is offered; with a GPU, pip's own choice is the right one.
    local constraint=(-c constraints-cpu.txt)
    command -v nvidia-smi >/dev/null && constraint=()
    if ! "$python" -m pip install --quiet --disable-pip-version-check "${constraint[@]}" -e ".[$extras]" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "error: the installation failed, see $log" >&2
        return 1
    fi
    echo "$wanted" >"$stamp"
}
