// Sums of 16-bit floats, by torch's vectorised addition, which rounds as a loop over single values does.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastsync {

void add_halves(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes);
void add_bfloat16s(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes);

}  // namespace fastsync
