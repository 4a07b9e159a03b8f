// The passes for CPUs with AVX2.
//
// Note [Two instruction sets]
//   any.cpp and avx2.cpp compile the same passes, in a namespace each. For AVX2 only the loops are compiled, by a
//   pragma. A flag would do so to the whole unit, and so to inline functions that it shares with others, such as
//   limit_on, decode and std::fill. The linker keeps one copy of such a function for all units. If that is the one with
//   AVX2, a CPU without it ends the process wherever the function is called. To include no header of torch would not be
//   enough.
#include "passes/cpu/instruction_sets.h"

#if FASTSYNC_HAS_AVX2
#define FASTSYNC_AVX2_LOOPS 1
#define FASTSYNC_INSTRUCTIONS avx2
#include "passes/cpu/typed_passes.h"
#endif
