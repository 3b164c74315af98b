#!/usr/bin/env bash
# What needs a CUDA device: the tests marked `gpu`, then the launch-overhead table. Installs nothing.
#
#   scripts/gpu_check.sh [--results FILE] [--no-table] [--no-tests] [--tiny]
#
# Exit code: 0 all well, 1 something failed, 2 wrong usage, 77 no CUDA device here (nothing was run).
# PYTHON names the interpreter; by default .venv/bin/python, then python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=docs/results/gpu.json
run_tests=1
run_table=1
sizes=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --results)
            [[ $# -ge 2 ]] || { echo "gpu_check: --results needs a file" >&2; exit 2; }
            results=$2
            shift
            ;;
        --no-tests) run_tests=0 ;;
        --no-table) run_table=0 ;;
        --tiny) sizes=(--tiny) ;;
        -h | --help)
            sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *)
            echo "gpu_check: unknown argument $1 (see --help)" >&2
            exit 2
            ;;
    esac
    shift
done

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
command -v "$python" >/dev/null || { echo "gpu_check: no Python; set PYTHON" >&2; exit 2; }

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: no CUDA device that this torch can use: nothing was run" >&2
    exit 77
fi

failed=0
if [[ $run_tests == 1 ]]; then
    "$python" -m pytest -q -m gpu || failed=1
fi
if [[ $run_table == 1 ]]; then
    "$python" scripts/gpu_check.py "${sizes[@]}" --results "$results" || failed=1
fi
exit "$failed"
