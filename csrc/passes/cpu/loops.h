// The loops over values: what each pass does to one chunk. pack_unpack.cpp includes this twice, in a namespace for any
// CPU and in one for AVX2, where FASTSYNC_AVX2_LOOPS is 1. There is no #pragma once, and what it needs is included
// there.
//
// Note [Vectors without intrinsics]
//   Arithmetic is written in vectors of 32 bytes, which GCC and clang lower to what the target has: one AVX2 register,
//   or two of SSE2's or NEON's. Both namespaces give the same bits, for each lane is rounded as a single value is.
//   Only what narrows or widens has instructions of its own. A row with a value out of the ordinary (beyond the limit,
//   inf or nan) goes back to the arithmetic of wire_format.h. What is left of a chunk behind its last whole block is
//   padded with zeros, which count for nothing.

template <class T, int bytes = 32>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class C>
using Vec = typename VectorOf<C>::type;
using Bits = VectorOf<uint32_t>::type;
using Ints = VectorOf<int32_t>::type;
template <class C>
inline constexpr int kLanes = 32 / sizeof(C);

// ---- loads and stores of one vector ---------------------------------------------------------------------------------

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

// A wire's values from the i-th on.
template <class C, class W>
FASTSYNC_INLINE Vec<C> load_at(const W* wire, int64_t i) {
  return load<C>(wire + i);
}
template <class C>
FASTSYNC_INLINE Vec<C> load_at(const Int8Block* blocks, int64_t i) {
  if constexpr (std::is_same_v<C, double>) {  // of which a vector has four: eight would go beyond the last block's end
    return Vec<C>{decode_at<C>(blocks, i), decode_at<C>(blocks, i + 1), decode_at<C>(blocks, i + 2),
                  decode_at<C>(blocks, i + 3)};
  } else {
    const Int8Block& block = blocks[i / kBlockValues];
    const int8_t* const values = block.values + i % kBlockValues;
#if FASTSYNC_AVX2_LOOPS
    const auto ints =
        reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values))));
#else
    const auto ints = __builtin_convertvector(load_raw<VectorOf<int8_t, 8>::type>(values), Ints);
#endif
    return __builtin_convertvector(ints, Vec<float>) * block.scale;
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

FASTSYNC_INLINE Vec<float> magnitudes(Vec<float> v) {
  return reinterpret_cast<Vec<float>>(reinterpret_cast<Bits>(v) & 0x7FFFFFFF);
}
FASTSYNC_INLINE Vec<double> magnitudes(Vec<double> v) { return v < 0.0 ? -v : v; }

template <class Mask>
FASTSYNC_INLINE bool holds_everywhere(Mask mask) {
#if FASTSYNC_AVX2_LOOPS
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) == 0xFF;
#else
  const auto words = reinterpret_cast<VectorOf<int64_t>::type>(mask);
  return (words[0] & words[1] & words[2] & words[3]) == -1;
#endif
}

// ---- one row of sixteen values --------------------------------------------------------------------------------------

template <class C>
struct Row {
  static constexpr int kVectors = kRow / kLanes<C>;
  Vec<C> vectors[kVectors];

  template <class T>
  FASTSYNC_INLINE static Row of(const T* p) {
    Row row;
    for (int v = 0; v < kVectors; ++v) {
      row.vectors[v] = load<C>(p + v * kLanes<C>);
    }
    return row;
  }
  FASTSYNC_INLINE Row times(C factor) const {
    Row row;
    for (int v = 0; v < kVectors; ++v) {
      row.vectors[v] = vectors[v] * factor;
    }
    return row;
  }
  // A nan is not.
  FASTSYNC_INLINE bool is_within(C limit) const {
    auto within = magnitudes(vectors[0]) <= limit;
    for (int v = 1; v < kVectors; ++v) {
      within &= magnitudes(vectors[v]) <= limit;
    }
    return holds_everywhere(within);
  }
  template <class T>
  FASTSYNC_INLINE void write(T* p) const {
    for (int v = 0; v < kVectors; ++v) {
      store<T, C>(p + v * kLanes<C>, vectors[v]);
    }
  }
};

// Of a row with a value out of the ordinary. Not inlined, so that the loop keeps its registers.
template <class C, class T, class W>
[[gnu::noinline, gnu::cold]] int64_t encode_one_by_one(const T* values, Scaling<C> scaling, W* wire) {
  int64_t num_saturated = 0;
  for (int i = 0; i < kRow; ++i) {
    bool saturated;
    const C scaled = scale_and_clamp<C>(decode(values[i]), scaling.multiplier, scaling.limit, saturated);
    num_saturated += saturated;
    wire[i] = encode<W>(static_cast<Compute<W>>(scaled));
  }
  return num_saturated;
}

template <class C, class T, class W>
FASTSYNC_INLINE int64_t encode_row(const T* values, Scaling<C> scaling, W* wire) {
  const Row<C> row = Row<C>::of(values).times(scaling.multiplier);
  if (__builtin_expect(row.is_within(scaling.limit), 1)) {
    row.write(wire);
    return 0;
  }
  return encode_one_by_one(values, scaling, wire);
}

// ---- one block ------------------------------------------------------------------------------------------------------

// wire[i] = encode(values[i]) of so many whole rows, on int8 blocks; returns how many values saturated.
template <class C, class T, class W>
int64_t encode_values(const T* values, int64_t numel, Scaling<C> scaling, const Rounding& /*rounding*/,
                      int64_t /*place*/, W* wire) {
  int64_t num_saturated = 0;
  for (int64_t i = 0; i < numel; i += kRow) {
    num_saturated += encode_row<C>(values + i, scaling, wire + i);
  }
  return num_saturated;
}

// As fastsync::random_fraction, for eight places from the given one on.
FASTSYNC_INLINE Ints random_fractions(uint32_t key, int place) {
  Bits bits = key + static_cast<uint32_t>(place) + Bits{0, 1, 2, 3, 4, 5, 6, 7};
  bits = (bits ^ (bits >> 16)) * 0x85EBCA6BU;
  bits = (bits ^ (bits >> 13)) * 0xC2B2AE35U;
  return reinterpret_cast<Ints>((bits ^ (bits >> 16)) >> (32 - kFractionBits));
}

// As fastsync::round_to_int.
FASTSYNC_INLINE Ints round_to_ints(Vec<float> values) {
#if FASTSYNC_AVX2_LOOPS
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(values)));
#else
  return reinterpret_cast<Ints>(values + 0x1.8p23F) - 0x4B400000;
#endif
}

FASTSYNC_INLINE void store_bytes(const Ints (&eights)[4], int8_t* p) {
#if FASTSYNC_AVX2_LOOPS
  const auto part = [&](int i) { return reinterpret_cast<__m256i>(eights[i]); };
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(part(0), part(1)), _mm256_packs_epi32(part(2), part(3)));
  // Packing works in halves of 128 bits; this puts its groups of four bytes back in order.
  store_raw(p, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
  for (int i = 0; i < 4; ++i) {
    store_raw(p + 8 * i, __builtin_convertvector(eights[i], VectorOf<int8_t, 8>::type));
  }
#endif
}

template <bool is_stochastic, class T>
void quantize_block(const T* values, float multiplier, float inverse, uint32_t key, int8_t* quantized) {
  for (int i = 0; i < kBlockValues; i += 32) {
    Ints eights[4];
    for (int j = 0; j < 4; ++j) {
      const Vec<float> scaled = load<float>(values + i + 8 * j) * multiplier * inverse;
      if constexpr (is_stochastic) {
        Ints fixed = round_to_ints(scaled * static_cast<float>(kOneFixed));
        fixed = fixed > kLargestFixed ? kLargestFixed : fixed;
        fixed = fixed < -kLargestFixed ? -kLargestFixed : fixed;
        eights[j] = (fixed + random_fractions(key, i + 8 * j)) >> kFractionBits;
      } else {
        eights[j] = round_to_ints(scaled);
      }
    }
    store_bytes(eights, quantized + i);
  }
}

FASTSYNC_INLINE Bits max_of(Bits a, Bits b) { return a > b ? a : b; }

// The largest magnitude as bits, which are ordered like the magnitudes, inf and nan above all.
FASTSYNC_INLINE uint32_t largest_of(Bits b) {
  b = max_of(b, Bits{b[4], b[5], b[6], b[7], b[0], b[1], b[2], b[3]});  // g++ 11 has no __builtin_shufflevector
  b = max_of(b, Bits{b[2], b[3], b[0], b[1], b[6], b[7], b[4], b[5]});
  return max_of(b, Bits{b[1], b[0], b[3], b[2], b[5], b[4], b[7], b[6]})[0];
}

FASTSYNC_INLINE Bits larger(Bits largest, Vec<float> values) {
  return max_of(largest, reinterpret_cast<Bits>(magnitudes(values)));
}

template <class T>
float largest_magnitude(const T* values, float multiplier) {
  Bits largest{};
  for (int i = 0; i < kBlockValues; i += kLanes<float>) {
    largest = larger(largest, load<float>(values + i) * multiplier);
  }
  return float_from_bits(largest_of(largest));
}

// Of values whose largest magnitude, times the multiplier, this is.
template <class T>
void encode_block(const T* values, float multiplier, float amax, const Rounding& rounding, int64_t place,
                  Int8Block& block) {
  if (!is_finite(amax)) {
    block = {std::numeric_limits<float>::quiet_NaN(), {}};
    return;
  }
  block.scale = block_scale(amax);
  const float inverse = block_inverse(amax);
  if (rounding.is_stochastic) {
    quantize_block<true>(values, multiplier, inverse, block_key(rounding, place / kBlockValues), block.values);
  } else {
    quantize_block<false>(values, multiplier, inverse, 0, block.values);
  }
}

template <class C, class T>
int64_t encode_values(const T* values, int64_t numel, Scaling<C> scaling, const Rounding& rounding, int64_t place,
                      Int8Block* blocks) {
  int64_t num_saturated = 0;
  for (int64_t i = 0; i < numel; i += kBlockValues) {
    Int8Block& block = blocks[i / kBlockValues];
    if constexpr (std::is_same_v<C, float>) {
      const float amax = largest_magnitude(values + i, scaling.multiplier);
      if (__builtin_expect(amax <= scaling.limit, 1)) {
        encode_block(values + i, scaling.multiplier, amax, rounding, place + i, block);
        continue;
      }
    }
    float clamped[kBlockValues];
    for (int j = 0; j < kBlockValues; j += kRow) {
      num_saturated += encode_row<C>(values + i + j, scaling, clamped + j);
    }
    encode_block(clamped, 1.0F, largest_magnitude(clamped, 1.0F), rounding, place + i, block);
  }
  return num_saturated;
}

// residual[i] = (values[i] - what decoding wire[i] gives, times the multiplier) * unit, where that is finite.
template <class W, class C>
void keep_loss(const C* values, const W* encoded, C multiplier, C unit, C* residual) {
  for (int64_t i = 0; i < kBlock; i += kLanes<C>) {
    const Vec<C> sent = load_at<C>(encoded, i);
    Vec<C> back = sent * multiplier;
    back = back > kLargest<C> ? kLargest<C> : back;
    back = back < -kLargest<C> ? -kLargest<C> : back;
    const Vec<C> lost = (load<C>(values + i) - back) * unit;
    store<C, C>(residual + i, magnitudes(sent) <= kLargest<C> ? lost : load<C>(residual + i));
  }
}

// values[i] += residual[i] * scale
template <class C>
void add_residual(const C* residual, C scale, C* values) {
  for (int64_t i = 0; i < kBlock; i += kLanes<C>) {
    store<C, C>(values + i, load<C>(values + i) + load<C>(residual + i) * scale);
  }
}

// sums[i] = sum over the wires of element first + i, times the multiplier. Sums stay in registers while all wires are
// gone through; four make finding the next wire cheap.
template <class W, class C>
void sum_block(const Wires& wires, int64_t first, C multiplier, C* sums) {
  constexpr int kVectors = 4;
  for (int64_t i = 0; i < kBlock; i += kLanes<C> * kVectors) {
    Vec<C> totals[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      totals[v] = load_at<C>(wires.at<W>(0, first), i + v * kLanes<C>) * multiplier;
    }
    for (int64_t r = 1; r < wires.num; ++r) {
      const W* const wire = wires.at<W>(r, first);
      for (int v = 0; v < kVectors; ++v) {
        totals[v] += load_at<C>(wire, i + v * kLanes<C>) * multiplier;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      store<C, C>(sums + i + v * kLanes<C>, totals[v]);
    }
  }
}

template <class W, class C>
void sum_wires(const Wires& wires, int64_t first, int64_t numel, C multiplier, C* sums) {
  if (numel == kBlock) {
    return sum_block<W>(wires, first, multiplier, sums);
  }
  for (int64_t r = 0; r < wires.num; ++r) {
    const W* const wire = wires.at<W>(r, first);
    for (int64_t i = 0; i < numel; ++i) {
      const C value = decode_at<C>(wire, i) * multiplier;
      sums[i] = r == 0 ? value : sums[i] + value;
    }
  }
  std::fill(sums + numel, sums + kBlock, C{});
}

// Squares of a block, summed per column in float, and its largest magnitude as bits. The caller widens to double.
template <class Load>
FASTSYNC_INLINE void measure_rows(BlockSquares& squares, const Load& load_row) {
  Vec<float> low{}, high{};
  Bits largest{};
  for (int64_t i = 0; i < kBlock; i += kRow) {
    const Row<float> row = load_row(i);
    low += row.vectors[0] * row.vectors[0];
    high += row.vectors[1] * row.vectors[1];
    largest = larger(larger(largest, row.vectors[0]), row.vectors[1]);
  }
  store<float, float>(squares.columns, low);
  store<float, float>(squares.columns + kLanes<float>, high);
  squares.largest_bits = largest_of(largest);
}

// From a wire narrower than float, or a sum, a row need not look for values beyond float's largest: what becomes inf
// shows in the block's largest magnitude, and as the wire is still there the block can be done again.
template <class T, class G>
void unpack_block(const T* values, G* gradient, float multiplier, bool may_redo, BlockSquares& squares) {
  measure_rows(squares, [&](int64_t i) {
    Row<float> row = Row<float>::of(values + i).times(multiplier);
    if (may_redo || __builtin_expect(row.is_within(kLargest<G>), 1)) {
      row.write(gradient + i);
    } else {
      for (int j = 0; j < kRow; ++j) {
        gradient[i + j] = decode_to<G>(values[i + j], multiplier);
      }
    }
    return std::is_same_v<G, float> && may_redo ? row : Row<float>::of(gradient + i);  // of what was stored
  });
}

// ---- one chunk ------------------------------------------------------------------------------------------------------

// What is left after the last whole block.
template <class T>
struct Padded {
  T values[kBlock] = {};
  Padded(const T* source, int64_t numel) {
    if (source != nullptr) {
      std::memcpy(values, source, numel * sizeof(T));
    }
  }
};

// The values to be sent: the gradient, weighted, and the residual.
template <class G, class C>
void gather(const G* gradient, const C* residual, C weight, C* gathered) {
  for (int64_t i = 0; i < kBlock; i += kLanes<C>) {
    Vec<C> values{};
    if (weight != C(0)) {  // else it counts for nothing, whatever it is
      values = load<C>(gradient + i) * weight;
    }
    store<C, C>(gathered + i, residual != nullptr ? values + load<C>(residual + i) : values);
  }
}

template <class W, class G, class C>
int64_t pack_block(const G* gradient, C* residual, Scaling<C> scaling, C weight, const Rounding& rounding,
                   int64_t place, W* encoded) {
  C gathered[kBlock];
  gather(gradient, residual, weight, gathered);
  const int64_t num_saturated = encode_values<C>(gathered, kBlock, scaling, rounding, place, encoded);
  if (residual != nullptr) {
    keep_loss(gathered, encoded, C(1) / scaling.multiplier, C(1), residual);
  }
  return num_saturated;
}

template <class W, class G>
int64_t pack_chunk(const G* gradient, Compute<G>* residual, int64_t numel, Scaling<Compute<G>> scaling,
                   Compute<G> weight, const Rounding& rounding, void* wire, int64_t first) {
  using C = Compute<G>;
  if (residual == nullptr && weight != C(0)) {
    scaling.multiplier *= weight;
    weight = C(1);
  }
  const bool is_direct = residual == nullptr && weight == C(1);
  int64_t i = is_direct ? numel / kBlock * kBlock : 0;
  int64_t num_saturated = encode_values<C>(gradient, i, scaling, rounding, first, unit_at<W>(wire, first));
  for (; i + kBlock <= numel; i += kBlock) {
    num_saturated += pack_block(gradient + i, from_or_null(residual, i), scaling, weight, rounding, first + i,
                                unit_at<W>(wire, first + i));
  }
  if (const int64_t rest = numel - i; rest > 0) {
    const Padded<G> last(gradient + i, rest);
    Padded<C> kept(from_or_null(residual, i), rest);
    W encoded[num_units<W>(kBlock)];
    num_saturated += pack_block(last.values, residual != nullptr ? kept.values : nullptr, scaling, weight, rounding,
                                first + i, encoded);
    std::copy_n(encoded, num_units<W>(rest), unit_at<W>(wire, first + i));
    if (residual != nullptr) {
      std::copy_n(kept.values, rest, residual + i);
    }
  }
  return num_saturated;
}

template <class G, class T>
int64_t count_saturated(const T* values, int64_t numel, Compute<G> multiplier) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {
    bool saturated;
    decode_to<G>(values[i], multiplier, saturated);
    count += saturated;
  }
  return count;
}

// A block of values, in the wire's own type or summed, to gradients.
template <class T, class G>
void unpack_values(const T* values, bool may_redo, G* gradient, int64_t numel, Compute<G> multiplier, Tally& tally) {
  if constexpr (std::is_same_v<G, double>) {
    for (int64_t i = 0; i < numel; ++i) {
      bool saturated;
      gradient[i] = decode_to<G>(values[i], multiplier, saturated);
      tally.num_saturated += saturated;
    }
    tally.add_values(gradient, numel);
  } else {
    constexpr uint32_t kInfinity = 0x7F800000U;
    BlockSquares squares;
    unpack_block(values, gradient, multiplier, may_redo, squares);
    if (may_redo && squares.largest_bits >= kInfinity) {
      unpack_block(values, gradient, multiplier, /*may_redo=*/false, squares);
    }
    tally.add_block(squares, gradient, numel);
    if (squares.largest_bits >= float_bits(kLargest<G>)) {  // else nothing can have been clamped
      tally.num_saturated += count_saturated<G>(values, numel, multiplier);
    }
  }
}

template <class W, class G>
Tally unpack_chunk(const Wires& wires, int64_t first, G* gradient, int64_t numel, Compute<G> multiplier,
                   Compute<G> inverse_scale) {
  using C = Compute<G>;
  constexpr bool kIsFloat = std::is_same_v<G, float>;
  const bool is_direct = !kIsBlock<W> && wires.num == 1 && multiplier == C(1);
  // What saturated is counted by a second look at the wire, which by then must not hold the gradients.
  const bool is_in_place = static_cast<const void*>(wires.at<W>(0, first)) == gradient && inverse_scale != C(1);
  Tally tally;
  for (int64_t i = 0; i < numel; i += kBlock) {
    const int64_t length = std::min(kBlock, numel - i);
    G unpacked[kBlock];
    G* const destination = length == kBlock && !is_in_place ? gradient + i : unpacked;
    bool is_done = false;
    if constexpr (!kIsBlock<W>) {
      if (is_direct) {
        const W* const wire = wires.at<W>(0, first + i);
        const bool may_redo = kIsFloat && !std::is_same_v<W, float>;
        if (length == kBlock) {
          unpack_values(wire, may_redo, destination, length, inverse_scale, tally);
        } else {
          unpack_values(Padded<W>(wire, length).values, may_redo, destination, length, inverse_scale, tally);
        }
        is_done = true;
      }
    }
    if (!is_done) {
      C sums[kBlock];
      sum_wires<W>(wires, first + i, length, multiplier, sums);
      unpack_values(sums, kIsFloat, destination, length, inverse_scale, tally);
    }
    if (destination == unpacked) {
      std::copy_n(unpacked, length, gradient + i);
    }
  }
  return tally;
}

template <class G>
Tally measure_chunk(const G* gradient, int64_t numel) {
  Tally tally;
  if constexpr (std::is_same_v<G, double>) {
    tally.add_values(gradient, numel);
  } else {
    for (int64_t i = 0; i < numel; i += kBlock) {
      const int64_t length = std::min(kBlock, numel - i);
      BlockSquares squares;
      const auto measure = [&](const G* values) {
        measure_rows(squares, [&](int64_t row) { return Row<float>::of(values + row); });
      };
      if (length == kBlock) {
        measure(gradient + i);
      } else {
        measure(Padded<G>(gradient + i, length).values);
      }
      tally.add_block(squares, gradient + i, length);
    }
  }
  return tally;
}

template <class W, class C, class Out>
void reduce_block(const Wires& wires, int64_t first, int64_t length, C multiplier, Scaling<C> scaling,
                  const Rounding& rounding, C scale, C* residual, Out* encoded) {
  C values[kBlock];
  sum_wires<W>(wires, first, length, multiplier, values);
  if (residual != nullptr) {
    add_residual(residual, scale, values);
  }
  encode_values<C>(values, kBlock, scaling, rounding, first, encoded);
  if (residual != nullptr) {
    keep_loss(values, encoded, C(1), C(1) / scale, residual);
  }
}

template <class C, class W, class Out>
void reduce_chunk(const Wires& wires, int64_t begin, int64_t numel, C multiplier, Scaling<C> scaling,
                  const Rounding& rounding, C scale, C* residual, void* out) {
  int64_t i = begin;
  for (; i + kBlock <= begin + numel; i += kBlock) {
    reduce_block<W>(wires, i, kBlock, multiplier, scaling, rounding, scale, from_or_null(residual, i),
                    unit_at<Out>(out, i));
  }
  if (const int64_t rest = begin + numel - i; rest > 0) {
    Padded<C> kept(from_or_null(residual, i), rest);
    Out encoded[num_units<Out>(kBlock)];
    reduce_block<W>(wires, i, rest, multiplier, scaling, rounding, scale, residual != nullptr ? kept.values : nullptr,
                    encoded);
    std::copy_n(encoded, num_units<Out>(rest), unit_at<Out>(out, i));
    if (residual != nullptr) {
      std::copy_n(kept.values, rest, residual + i);
    }
  }
}
