// The loops over values: what each pass does to one chunk, in vectors. pack_unpack.cpp includes this twice, in a
// namespace for any CPU and in one for AVX2. There is no #pragma once, and what it needs is included there.
//
// A row with a value out of the ordinary (beyond the limit, inf or nan) goes back to the arithmetic of wire_format.h.
#include "passes/cpu/vectors.h"

// A wire's values from the i-th on.
template <class C, class W>
FASTSYNC_INLINE Vec<C> load_at(const W* wire, int64_t i) {
  if constexpr (!kIsBlock<W>) {
    return load<C>(wire + i);
  } else if constexpr (std::is_same_v<C, double>) {  // a vector has four: eight would go beyond the last block's end
    return Vec<C>{decode_at<C>(wire, i), decode_at<C>(wire, i + 1), decode_at<C>(wire, i + 2),
                  decode_at<C>(wire, i + 3)};
  } else {
    const W& block = wire[i / kBlockValues];
    const Ints numbers = load_numbers<W>(block.bytes + i % kBlockValues * W::kBits / 8);
    return __builtin_convertvector(numbers, Vec<float>) * block.scale;
  }
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

template <class T>
float largest_magnitude(const T* values, float multiplier) {
  Bits largest{};
  for (int i = 0; i < kBlockValues; i += kLanes<float>) {
    largest = larger(largest, load<float>(values + i) * multiplier);
  }
  return float_from_bits(largest_of(largest));
}

// Of values whose largest magnitude, times the multiplier, this is.
template <class T, class W>
void quantize(const T* values, float multiplier, float amax, W& block) {
  if (!is_finite(amax)) {
    block = {std::numeric_limits<float>::quiet_NaN(), {}};
    return;
  }
  block.scale = block_scale<W>(amax);
  const float inverse = block_inverse<W>(amax);
  for (int i = 0; i < kBlockValues; i += 32) {
    Ints numbers[4];
    for (int j = 0; j < 4; ++j) {
      numbers[j] = round_to_ints(load<float>(values + i + 8 * j) * multiplier * inverse);
    }
    store_numbers<W>(numbers, block.bytes + i * W::kBits / 8);
  }
}

template <class C, class T, class W>
int64_t encode_block(const T* values, Scaling<C> scaling, W& block) {
  if constexpr (std::is_same_v<C, float>) {
    const float amax = largest_magnitude(values, scaling.multiplier);
    if (__builtin_expect(amax <= scaling.limit, 1)) {
      quantize(values, scaling.multiplier, amax, block);
      return 0;
    }
  }
  int64_t num_saturated = 0;
  float clamped[kBlockValues];
  for (int j = 0; j < kBlockValues; j += kRow) {
    num_saturated += encode_row<C>(values + j, scaling, clamped + j);
  }
  quantize(clamped, 1.0F, largest_magnitude(clamped, 1.0F), block);
  return num_saturated;
}

// wire[i] = encode(values[i]); returns how many values saturated.
template <class C, class T, class W>
int64_t encode_values(const T* values, Scaling<C> scaling, W* wire) {
  int64_t num_saturated = 0;
  if constexpr (kIsBlock<W>) {
    for (int64_t i = 0; i < kBlock; i += kBlockValues) {
      num_saturated += encode_block<C>(values + i, scaling, wire[i / kBlockValues]);
    }
  } else {
    for (int64_t i = 0; i < kBlock; i += kRow) {
      num_saturated += encode_row<C>(values + i, scaling, wire + i);
    }
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

// ---- one chunk ------------------------------------------------------------------------------------------------------

template <class W, class G>
int64_t pack_chunk(const G* gradient, Compute<G>* residual, int64_t numel, Scaling<Compute<G>> scaling,
                   Compute<G> weight, void* wire, int64_t first) {
  using C = Compute<G>;
  if (residual == nullptr && weight != C(0)) {
    scaling.multiplier *= weight;
    weight = C(1);
  }
  int64_t num_saturated = 0;
  for (int64_t i = 0; i < numel; i += kBlock) {
    const int64_t length = std::min(kBlock, numel - i);
    Whole<const G> values(gradient + i, length);
    Whole<W> encoded(unit_at<W>(wire, first + i), num_units<W>(length));
    if (residual == nullptr && weight == C(1)) {
      num_saturated += encode_values<C>(values.data(), scaling, encoded.data());
    } else {
      Whole<C> kept(from_or_null(residual, i), length);
      C gathered[kBlock];
      gather(values.data(), kept.data(), weight, gathered);
      num_saturated += encode_values<C>(gathered, scaling, encoded.data());
      if (residual != nullptr) {
        keep_loss(gathered, encoded.data(), C(1) / scaling.multiplier, C(1), kept.data());
      }
      kept.put_back();
    }
    encoded.put_back();
  }
  return num_saturated;
}

// Of gradients that are what they should be already.
template <class G>
Tally measure_chunk(const G* gradient, int64_t numel) {
  Tally tally;
  if constexpr (std::is_same_v<G, double>) {
    tally.add_values(gradient, numel);
  } else {
    for (int64_t i = 0; i < numel; i += kBlock) {
      const int64_t length = std::min(kBlock, numel - i);
      Whole<const G> values(gradient + i, length);
      BlockSquares squares;
      measure_rows(squares, [&](int64_t row) { return Row<float>::of(values.data() + row); });
      tally.add_block(squares, gradient + i, length);
    }
  }
  return tally;
}

template <class W, class G>
Tally unpack_chunk(const Wires& wires, int64_t first, G* gradient, int64_t numel, Compute<G> multiplier,
                   Compute<G> inverse_scale) {
  using C = Compute<G>;
  constexpr bool kIsFloat = std::is_same_v<G, float>;
  const bool lies_there = static_cast<const void*>(wires.at<W>(0, first)) == gradient;
  if constexpr (std::is_same_v<W, G>) {
    if (lies_there && wires.num == 1 && multiplier == C(1) && inverse_scale == C(1)) {
      return measure_chunk(gradient, numel);
    }
  }
  // What saturated is counted by a second look at the wire, which by then must not hold the gradients.
  const bool is_in_place = lies_there && inverse_scale != C(1);
  Tally tally;
  for (int64_t i = 0; i < numel; i += kBlock) {
    const int64_t length = std::min(kBlock, numel - i);
    G unpacked[kBlock];
    G* const destination = length == kBlock && !is_in_place ? gradient + i : unpacked;
    const auto unpack = [&](const auto* values, bool may_redo) {
      unpack_values(values, may_redo, destination, length, inverse_scale, tally);
    };
    bool is_done = false;
    if constexpr (!kIsBlock<W>) {
      if (wires.num == 1 && multiplier == C(1)) {
        unpack(Whole<const W>(wires.at<W>(0, first + i), length).data(), kIsFloat && !std::is_same_v<W, float>);
        is_done = true;
      }
    }
    if (!is_done) {
      C sums[kBlock];
      sum_wires<W>(wires, first + i, length, multiplier, sums);
      unpack(sums, kIsFloat);
    }
    if (destination == unpacked) {
      std::copy_n(unpacked, length, gradient + i);
    }
  }
  return tally;
}

template <class C, class W, class Out>
void reduce_chunk(const Wires& wires, int64_t begin, int64_t numel, C multiplier, Scaling<C> scaling, C scale,
                  C* residual, void* out) {
  for (int64_t i = begin; i < begin + numel; i += kBlock) {
    const int64_t length = std::min(kBlock, begin + numel - i);
    C values[kBlock];
    sum_wires<W>(wires, i, length, multiplier, values);
    Whole<C> kept(from_or_null(residual, i), length);
    Whole<Out> encoded(unit_at<Out>(out, i), num_units<Out>(length));
    if (residual != nullptr) {
      add_residual(kept.data(), scale, values);
    }
    encode_values<C>(values, scaling, encoded.data());
    if (residual != nullptr) {
      keep_loss(values, encoded.data(), C(1), C(1) / scale, kept.data());
    }
    kept.put_back();
    encoded.put_back();
  }
}
