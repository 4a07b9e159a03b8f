// Vectors of 32 bytes: loads and stores of each type. A part of loops.h, and included as often.
//
// Note [Vectors without intrinsics]
//   Arithmetic is written in vectors of 32 bytes, which GCC and clang lower to what the target has: one AVX2 register,
//   or two of SSE2's or NEON's. Both namespaces give the same bits, for each lane is rounded as a single value is.
//   Only what narrows or widens has instructions of its own, which are all here, and in the files of wires.

template <class T, int bytes = 32>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class C>
using Vec = typename VectorOf<C>::type;
using Bits = Vec<uint32_t>;
using Ints = Vec<int32_t>;
template <class C>
inline constexpr int kLanes = 32 / sizeof(C);

template <class V>
FASTSYNC_INLINE V load_raw(const void* p) {
  V vector;
  std::memcpy(&vector, p, sizeof(V));
  return vector;
}
template <class V>
FASTSYNC_INLINE void store_raw(void* p, V vector) {
  std::memcpy(p, &vector, sizeof(V));
}

template <class C, class T>
FASTSYNC_INLINE Vec<C> load(const T* p) {
  if constexpr (std::is_same_v<C, T>) {
    return load_raw<Vec<C>>(p);
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, BFloat16>) {
#if FASTSYNC_AVX2_LOOPS
    const auto halves = reinterpret_cast<Bits>(_mm256_cvtepu16_epi32(load_raw<__m128i>(p)));
#else
    const auto halves = __builtin_convertvector(load_raw<VectorOf<uint16_t, 16>::type>(p), Bits);
#endif
    return reinterpret_cast<Vec<float>>(halves << 16);
#if FASTSYNC_AVX2_LOOPS
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, Float16>) {
    return reinterpret_cast<Vec<float>>(_mm256_cvtph_ps(load_raw<__m128i>(p)));
#endif
  } else {
    Vec<C> vector;
    for (int lane = 0; lane < kLanes<C>; ++lane) {
      vector[lane] = static_cast<C>(decode(p[lane]));
    }
    return vector;
  }
}

// To nearest even. No nan comes here, and nothing that is beyond the type's largest.
template <class T, class C>
FASTSYNC_INLINE void store(T* p, Vec<C> vector) {
  if constexpr (std::is_same_v<C, T>) {
    store_raw(p, vector);
#if FASTSYNC_AVX2_LOOPS
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, Float16>) {
    const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(vector), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);  // converting into memory is slower
#endif
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, BFloat16>) {
    const auto bits = reinterpret_cast<Bits>(vector);
    const Bits high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
#if FASTSYNC_AVX2_LOOPS
    const auto halves = reinterpret_cast<__m256i>(high);
    store_raw(p, _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
    store_raw(p, __builtin_convertvector(high, VectorOf<uint16_t, 16>::type));
#endif
  } else {
    for (int lane = 0; lane < kLanes<C>; ++lane) {
      p[lane] = encode<T>(static_cast<Compute<T>>(vector[lane]));
    }
  }
}

// A block's whole numbers: eight, and thirty-two.
template <class Block>
FASTSYNC_INLINE Ints load_numbers(const uint8_t* bytes) {
#if FASTSYNC_AVX2_LOOPS
  return reinterpret_cast<Ints>(Block::get_vector(bytes));
#else
  int32_t numbers[kLanes<float>];
  Block::get(bytes, numbers);
  return load_raw<Ints>(numbers);
#endif
}
template <class Block>
FASTSYNC_INLINE void store_numbers(const Ints (&numbers)[4], uint8_t* bytes) {
#if FASTSYNC_AVX2_LOOPS
  Block::put_vectors(reinterpret_cast<const __m256i(&)[4]>(numbers), bytes);
#else
  int32_t all[4 * kLanes<float>];
  std::memcpy(all, numbers, sizeof(all));
  Block::put(all, bytes);
#endif
}

// As fastsync::round_to_int.
FASTSYNC_INLINE Ints round_to_ints(Vec<float> values) {
#if FASTSYNC_AVX2_LOOPS
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(values)));
#else
  return reinterpret_cast<Ints>(values + 0x1.8p23F) - 0x4B400000;
#endif
}

FASTSYNC_INLINE Vec<float> magnitudes(Vec<float> v) {
  return reinterpret_cast<Vec<float>>(reinterpret_cast<Bits>(v) & 0x7FFFFFFF);
}
FASTSYNC_INLINE Vec<double> magnitudes(Vec<double> v) { return v < 0.0 ? -v : v; }

// Their bits are ordered like the magnitudes, inf and nan above all.
FASTSYNC_INLINE Bits max_of(Bits a, Bits b) { return a > b ? a : b; }
FASTSYNC_INLINE Bits larger(Bits largest, Vec<float> values) {
  return max_of(largest, reinterpret_cast<Bits>(magnitudes(values)));
}
FASTSYNC_INLINE uint32_t largest_of(Bits b) {
  b = max_of(b, Bits{b[4], b[5], b[6], b[7], b[0], b[1], b[2], b[3]});  // g++ 11 has no __builtin_shufflevector
  b = max_of(b, Bits{b[2], b[3], b[0], b[1], b[6], b[7], b[4], b[5]});
  return max_of(b, Bits{b[1], b[0], b[3], b[2], b[5], b[4], b[7], b[6]})[0];
}

template <class Mask>
FASTSYNC_INLINE bool holds_everywhere(Mask mask) {
#if FASTSYNC_AVX2_LOOPS
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) == 0xFF;
#else
  const auto words = reinterpret_cast<VectorOf<int64_t>::type>(mask);
  return (words[0] & words[1] & words[2] & words[3]) == -1;
#endif
}
