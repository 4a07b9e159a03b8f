// Loops in a form that the compiler turns into vector instructions.
#include "ppo/float_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

// The same loop for several generations of x86, chosen when the library is loaded. Without fused multiply-adds
// (-ffp-contract=off) all give the same bits.
#if defined(__x86_64__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12
#define FASTSYNC_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTSYNC_WIDE
#endif

namespace fastsync {
namespace {

// Sums over rows begin anew after so many, for they grow less exact with their length.
constexpr int64_t kRowsOfSum = 256;
// Sums that the compiler keeps in registers.
constexpr int64_t kColumns = 64;

// tanh; libraries that promise 1 unit in the last place take several times as long. Up to 0.625 an odd polynomial,
// beyond it 1 - 2 / (exp(2x) + 1), as in Cephes (S. Moshier, Methods and Programs for Mathematical Functions, 1989),
// whose coefficients the two polynomials have; exp by halving the range with ln 2 in two parts. At 9.1 and beyond the
// nearest float is 1.
inline __attribute__((always_inline)) float tanh_of(float x) {
  const float magnitude = std::abs(x);

  const float square = x * x;
  float odd = -5.70498872745E-3F;
  odd = odd * square + 2.06390887954E-2F;
  odd = odd * square - 5.37397155531E-2F;
  odd = odd * square + 1.33314422036E-1F;
  odd = odd * square - 3.33332819422E-1F;
  const float near_zero = magnitude + magnitude * square * odd;

  const float twice = 2 * (magnitude < 9.1F ? magnitude : 9.1F);
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const float halvings = (twice * 1.44269504F + kRound) - kRound;
  const float rest = (twice - halvings * 0.693359375F) + halvings * 2.12194440E-4F;
  float exponential = 1.9875691500E-4F;
  exponential = exponential * rest + 1.3981999507E-3F;
  exponential = exponential * rest + 8.3334519073E-3F;
  exponential = exponential * rest + 4.1665795894E-2F;
  exponential = exponential * rest + 1.6666665459E-1F;
  exponential = exponential * rest + 5.0000001201E-1F;
  exponential = exponential * rest * rest + rest + 1;
  const auto power = std::bit_cast<float>((static_cast<int32_t>(halvings) + 127) << 23);
  const float far = 1 - 2 / (exponential * power + 1);

  const float result = std::copysign(magnitude < 0.625F ? near_zero : far, x);
  return x == x ? result : x;
}

}  // namespace

FASTSYNC_WIDE void fast_tanh(float* values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = tanh_of(values[i]);
  }
}

FASTSYNC_WIDE void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums) {
  std::fill_n(sums, width, 0.0F);
  for (int64_t column = 0; column < width; column += kColumns) {
    const int64_t columns = std::min(kColumns, width - column);
    for (int64_t begin = 0; begin < rows; begin += kRowsOfSum) {
      std::array<float, kColumns> part{};
      for (int64_t row = begin; row < std::min(begin + kRowsOfSum, rows); ++row) {
        float* __restrict g = grad + row * width + column;
        const float* __restrict y = activated + row * width + column;
        for (int64_t i = 0; i < columns; ++i) {
          g[i] *= 1 - y[i] * y[i];
          part[i] += g[i];
        }
      }
      for (int64_t i = 0; i < columns; ++i) {
        sums[column + i] += part[i];
      }
    }
  }
}

}  // namespace fastsync
