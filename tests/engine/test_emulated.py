"""The shim that the kernels run on without a GPU: it gives CUDA's results, and reports what CUDA leaves undefined."""

from __future__ import annotations

import ctypes

import pytest

from tests import compiled, emulated

KERNELS = """
#include <cuda_runtime.h>

#include <cstdint>

__global__ void orderly(unsigned* out) {
  __shared__ unsigned of_thread[64];
  of_thread[threadIdx.x] = threadIdx.x + 1;
  __syncthreads();
  const unsigned of_other = of_thread[blockDim.x - 1 - threadIdx.x];
  const unsigned of_warp = __reduce_max_sync(0xFFFFFFFFU, of_other);
  out[blockIdx.x * blockDim.x + threadIdx.x] = of_other * 100 + of_warp;
}
__global__ void shuffles(unsigned* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = __shfl_down_sync(0xFFFFFFFFU, threadIdx.x, 3);
}
__global__ void lacks_a_lane(unsigned* out) {
  if (threadIdx.x < 8) {
    out[threadIdx.x] = __shfl_down_sync(0xFFU, threadIdx.x, 4);
  }
}
__global__ void leaves(unsigned*) {
  if (threadIdx.x != 40) {
    __syncthreads();
  }
}
__global__ void parts(unsigned*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void misaligned(unsigned* out) {
  struct alignas(8) Pair { unsigned a, b; };
  *reinterpret_cast<Pair*>(out + 1) = {1, 2};
}
__global__ void beyond(unsigned* out) {
  __shared__ unsigned of_thread[64];
  out[0] = of_thread[threadIdx.x + 1];
}

#define KERNEL(name) \\
  if (std::string(kernel) == #name) { \\
    return text(cudaLaunchKernel(name, {blocks}, {64}, arguments, 0, nullptr)); \\
  }

#include <string>

const char* text(cudaError_t error) { return error == cudaSuccess ? "" : cudaGetErrorString(error); }

extern "C" __attribute__((visibility("default"))) const char* run(const char* kernel, unsigned blocks, bool descending,
                                                                  unsigned* out) {
  void* arguments[] = {&out};
  emulator::set_descending(descending);
  KERNEL(orderly)
  KERNEL(shuffles)
  KERNEL(lacks_a_lane)
  KERNEL(leaves)
  KERNEL(parts)
  KERNEL(misaligned)
  KERNEL(beyond)
  return "unknown";
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("kernels")
    source = folder / "kernels.cu"
    source.write_text(KERNELS)
    built = compiled.compile_library(folder / "kernels", {str(source): emulated.KERNEL_FLAGS, **emulated.FIBERS}, ())
    return ctypes.CDLL(str(built))


def run(library: ctypes.CDLL, kernel: str, blocks: int = 2, descending: bool = False) -> tuple[str, list[int]]:
    """What the launch says went wrong, and what it wrote."""
    library.run.restype = ctypes.c_char_p
    out = (ctypes.c_uint * (64 * blocks))()
    ctypes.memset(out, 0, ctypes.sizeof(out))
    said = library.run(kernel.encode(), blocks, descending, out)
    return said.decode(), list(out)


@pytest.mark.parametrize("descending", [False, True])
def test_barriers_and_warps_wait_for_all(library: ctypes.CDLL, descending: bool) -> None:
    said, out = run(library, "orderly", 3, descending)
    assert said == ""
    assert out == 3 * [(64 - i) * 100 + (64 if i < 32 else 32) for i in range(64)]


@pytest.mark.parametrize("descending", [False, True])
def test_lanes_get_the_values_of_those_above_them(library: ctypes.CDLL, descending: bool) -> None:
    said, out = run(library, "shuffles", 1, descending)
    assert said == ""
    assert out == [i + 3 if i % 32 < 29 else i for i in range(64)]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        ("leaves", "but thread 40 has left"),
        ("parts", "but thread 32 waits at"),
        ("lacks_a_lane", "brings no value at"),
        ("misaligned", "misaligned address at"),
        ("beyond", "index 64 out of bounds at"),
    ],
)
def test_what_is_undefined_is_reported(library: ctypes.CDLL, kernel: str, complaint: str, descending: bool) -> None:
    said, _ = run(library, kernel, descending=descending)
    assert complaint in said
    assert run(library, "orderly")[0] == ""  # and the next launch is as good as any
