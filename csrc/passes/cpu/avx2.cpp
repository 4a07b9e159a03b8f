// The passes for CPUs with AVX2.
//
// Note [Two instruction sets]
//   Only the text of loops.h and vectors.h is compiled for AVX2, by a pragma, and in a namespace of its own. A flag
//   would do so to the whole unit, and so to functions that headers define in it, such as std::fill, our own Tally::add
//   and decode. Of such a function the linker keeps one copy for all units. If that is the one with AVX2, a CPU
//   without it ends the process wherever the function is called, even if no header of torch is included here.
#include "passes/cpu/instruction_sets.h"

#if FASTSYNC_HAS_AVX2

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "passes/cpu/tiles.h"

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
