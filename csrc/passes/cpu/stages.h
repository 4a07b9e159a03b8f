// The stages of a pass that does more than convert: values are gathered or summed into a block that stays in the
// first-level cache, encoded from there, and what the encoding lost is kept. Whole blocks go by vector instructions
// where the machine has them.
#pragma once

#include <ATen/Version.h>

#include <type_traits>

#include "passes/cpu/avx2_stages.h"
#include "passes/cpu/portable_stages.h"

namespace fastsync::cpu {

// ATEN_CPU_CAPABILITY=default, which makes torch itself do without vector instructions, does so here too.
[[maybe_unused]] inline bool has_avx2_rows() {
#if FASTSYNC_HAS_AVX2_ROWS
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && at::get_cpu_capability() != "DEFAULT";
  return has;
#else
  return false;
#endif
}

template <class C>
bool goes_by_vectors([[maybe_unused]] int64_t numel) {
  return std::is_same_v<C, float> && numel == kBlock && has_avx2_rows();
}

// values[i] = gradient[i]
template <class G, class C>
void convert(const G* gradient, int64_t numel, C* values) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (std::is_same_v<C, float>) {
    if (goes_by_vectors<C>(numel)) {
      return avx2::convert(gradient, values);
    }
  }
#endif
  portable::convert(gradient, numel, values);
}

// values[i] = gradient[i] - subtrahend[i]
template <class G, class C>
void subtract(const G* gradient, const G* subtrahend, int64_t numel, C* values) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (std::is_same_v<C, float>) {
    if (goes_by_vectors<C>(numel)) {
      return avx2::subtract(gradient, subtrahend, values);
    }
  }
#endif
  portable::subtract(gradient, subtrahend, numel, values);
}

// sums[i] = sum over the wires of element first + i, times the multiplier.
template <class W, class C>
void sum_wires(const Wires& wires, int64_t first, int64_t numel, C multiplier, C* sums) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (std::is_same_v<C, float>) {
    if (goes_by_vectors<C>(numel)) {
      return avx2::sum_wires<W>(wires, first, multiplier, sums);
    }
  }
#endif
  portable::sum_wires<W>(wires, first, numel, multiplier, sums);
}

// values[i] += residual[i] * scale
template <class C>
void add_residual(const C* residual, C scale, int64_t numel, C* values) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (std::is_same_v<C, float>) {
    if (goes_by_vectors<C>(numel)) {
      return avx2::add_residual(residual, scale, values);
    }
  }
#endif
  portable::add_residual(residual, scale, numel, values);
}

// wire[i] = encode(values[i]); the place is that of the first on the whole wire. Returns how many values saturated.
template <class W, class C>
int64_t encode_values(const C* values, int64_t numel, const Scaling<C>& scaling, Rounding rounding, int64_t place,
                      W* wire) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (std::is_same_v<C, float>) {
    if (goes_by_vectors<C>(numel)) {
      return avx2::encode_values(values, scaling, rounding, place, wire);
    }
  }
#endif
  return portable::encode_values(values, numel, scaling, rounding, place, wire);
}

// residual[i] = (values[i] - what decoding wire[i] gives, times the multiplier) * unit, where that is finite.
template <class W, class C>
void keep_loss(const C* values, int64_t numel, const W* wire, C multiplier, C unit, C* residual) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (std::is_same_v<C, float>) {
    if (goes_by_vectors<C>(numel)) {
      return avx2::keep_loss(values, wire, multiplier, unit, residual);
    }
  }
#endif
  portable::keep_loss(values, numel, wire, multiplier, unit, residual);
}

}  // namespace fastsync::cpu
