// From here to pop_target.h code is compiled for the instruction set of the unit. So it has no #pragma once.
#if FASTSYNC_AVX2_LOOPS && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#elif FASTSYNC_AVX2_LOOPS
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
