// The passes for any CPU.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "passes/cpu/instruction_sets.h"
#include "passes/cpu/tiles.h"

namespace fastsync::cpu::any {

#define FASTSYNC_AVX2_LOOPS 0
namespace {
#include "passes/cpu/loops.h"
}  // namespace
#include "passes/cpu/typed_passes.h"

}  // namespace fastsync::cpu::any
