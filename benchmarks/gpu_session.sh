#!/bin/sh
# Eight minutes on a bare GPU machine: packages that are missing come from a folder of wheels, without an index.
# Usage: benchmarks/gpu_session.sh WHEELS [options of gpu_session.py]
# The folder is filled where there is an index, for the machine's Python: see docs/guides/gpu.md.
set -eu
wheels=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
packages=$here/build/gpu-session
missing=$("$python" - "$here/benchmarks/gpu_wheels.txt" <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]):
    try:
        name = line.strip()
        version(name)
    except PackageNotFoundError:
        print(name)
END
)
rm -rf "$packages"
if [ -n "$missing" ]; then
    "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-deps --target "$packages" $missing
fi
cd "$here"
export PYTHONPATH="$here/src:$packages" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout --signal=INT --kill-after=10 480 "$python" benchmarks/gpu_session.py --seconds 450 "$@"
