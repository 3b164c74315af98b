#!/bin/sh
# Run the engine's tests against one version of transformers, without touching the environment's own.
#   scripts/check_transformers.sh 5.24.0
# PYTHON chooses the interpreter; the default is the checkout's .venv. Versions are kept in the user's cache.
set -eu
version=${1:?usage: scripts/check_transformers.sh VERSION}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
target=${XDG_CACHE_HOME:-$HOME/.cache}/foredraft/transformers-$version
if [ ! -f "$target/transformers/__init__.py" ]; then
    # Without dependencies: transformers itself refuses to be imported beside ones that do not fit.
    "$python" -m pip install --quiet --no-deps --target "$target" "transformers==$version"
fi
PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
found=$("$python" -c 'import transformers; print(transformers.__version__)')
if [ "$found" != "$version" ]; then
    echo "check_transformers: wanted transformers $version, but Python imports $found" >&2
    exit 1
fi
exec "$python" -m pytest -q -p no:cacheprovider \
    tests/engine/test_model.py tests/engine/test_target.py tests/engine/test_drafter.py \
    tests/engine/test_tokenizer.py tests/engine/test_checkpoint.py tests/engine/test_lean.py tests/engine/test_distilled.py \
    tests/engine/test_architectures.py tests/engine/test_captured.py
