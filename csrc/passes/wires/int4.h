// The int4 wire: blocks of whole numbers from -7 to 7, two in a byte, the first one in its lower half.
#pragma once

#include <cstdint>

#include "passes/wire_format.h"

namespace fastsync {

// See Note [Wires] in wire_format.h.
struct Int4Block {
  static constexpr int kBits = 4;
  float scale;
  uint8_t bytes[kBlockValues / 2];

  template <int n>
  FASTSYNC_HOST_DEVICE static void put(const int32_t (&numbers)[n], uint8_t* bytes) {
    for (int i = 0; i < n / 2; ++i) {
      bytes[i] = static_cast<uint8_t>((numbers[2 * i] & 0xF) | (numbers[2 * i + 1] & 0xF) << 4);
    }
  }
  template <int n>
  FASTSYNC_HOST_DEVICE static void get(const uint8_t* bytes, int32_t (&numbers)[n]) {
    for (int i = 0; i < n / 2; ++i) {
      numbers[2 * i] = ((bytes[i] & 0xF) ^ 8) - 8;  // extends the sign of four bits
      numbers[2 * i + 1] = ((bytes[i] >> 4) ^ 8) - 8;
    }
  }
};

}  // namespace fastsync
