// The passes of pack_unpack.h, once for each instruction set. pack_unpack.cpp chooses one.
#pragma once

#include "passes/pack_unpack.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTSYNC_HAS_AVX2 1
#else
#define FASTSYNC_HAS_AVX2 0
#endif

namespace fastsync::cpu {
namespace any {
void pack(const PackArgs& args, const Scratch& /*scratch*/, void* /*stream*/);
void unpack(const UnpackArgs& args, const Scratch& /*scratch*/, void* /*stream*/);
void reduce(const ReduceArgs& args, const Scratch& /*scratch*/, void* /*stream*/);
}  // namespace any

namespace avx2 {
void pack(const PackArgs& args, const Scratch& /*scratch*/, void* /*stream*/);
void unpack(const UnpackArgs& args, const Scratch& /*scratch*/, void* /*stream*/);
void reduce(const ReduceArgs& args, const Scratch& /*scratch*/, void* /*stream*/);
}  // namespace avx2
}  // namespace fastsync::cpu
