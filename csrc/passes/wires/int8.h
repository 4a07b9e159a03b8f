// The int8 wire: blocks of whole numbers from -127 to 127, a byte each.
#pragma once

#include <cstdint>

#include "passes/wire_format.h"

namespace fastsync {

// See Note [Wires] in wire_format.h.
struct Int8Block {
  static constexpr int kBits = 8;
  float scale;
  uint8_t bytes[kBlockValues];

  template <int n>
  FASTSYNC_HOST_DEVICE static void put(const int32_t (&numbers)[n], uint8_t* bytes) {
    for (int i = 0; i < n; ++i) {
      bytes[i] = static_cast<uint8_t>(numbers[i]);
    }
  }
  template <int n>
  FASTSYNC_HOST_DEVICE static void get(const uint8_t* bytes, int32_t (&numbers)[n]) {
    for (int i = 0; i < n; ++i) {
      numbers[i] = static_cast<int8_t>(bytes[i]);
    }
  }
};

}  // namespace fastsync
