// The passes for any CPU.
#define FASTSYNC_AVX2_LOOPS 0
#define FASTSYNC_INSTRUCTIONS any
#include "passes/cpu/typed_passes.h"
