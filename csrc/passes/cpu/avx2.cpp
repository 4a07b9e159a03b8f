// The passes for CPUs with AVX2. Only the loops are compiled for AVX2. Headers that other files include too are not,
// because their functions must run on any CPU.
#include "passes/cpu/instruction_sets.h"

#if FASTSYNC_HAS_AVX2

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "passes/cpu/chunks.h"

namespace fastsync::cpu::avx2 {

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define FASTSYNC_AVX2_LOOPS 1
namespace {
#include "passes/cpu/loops.h"
}  // namespace
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#include "passes/cpu/typed_passes.h"

}  // namespace fastsync::cpu::avx2

#endif
