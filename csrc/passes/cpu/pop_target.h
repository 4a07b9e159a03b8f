// Ends what push_target.h begins.
#if FASTSYNC_AVX2_LOOPS && defined(__clang__)
#pragma clang attribute pop
#elif FASTSYNC_AVX2_LOOPS
#pragma GCC pop_options
#endif
