// The loops over values: each pass goes over one tile, a span at a time. They are compiled for an instruction set, see
// Note [Two instruction sets].
//
// Values beyond the limit, inf and nan show in the largest magnitude of a span, or of a wire's block. The loops go
// through such values once more, one by one, with the arithmetic of wire_format.h.
#pragma once

#include "passes/cpu/vectors.h"

#include "passes/cpu/push_target.h"

namespace fastsync::cpu::FASTSYNC_INSTRUCTIONS {
namespace {

// Makes a whole span of memory that may be shorter. If it is shorter, a copy filled up with zeros stands in for it.
template <class T>
class Whole {
 public:
  FASTSYNC_INLINE Whole(T* memory, int64_t num_units) : memory_(memory), num_units_(num_units) {
    if (is_copy()) {
      std::fill(std::copy_n(memory, num_units, copy_), copy_ + kNumUnits, T{});
    }
  }
  T* data() { return is_copy() ? copy_ : memory_; }
  void put_back() {
    if (is_copy()) {
      std::copy_n(copy_, num_units_, memory_);
    }
  }

 private:
  static constexpr int64_t kNumUnits = num_units<std::remove_const_t<T>>(kSpan);
  bool is_copy() const { return num_units_ < kNumUnits && memory_ != nullptr; }

  T* memory_;
  int64_t num_units_;
  std::remove_const_t<T> copy_[kNumUnits];
};

// ---- a wire's values ------------------------------------------------------------------------------------------------

// Calls call(i, value) with each value in the blocks.
template <class C, class W, class Call>
FASTSYNC_INLINE void decode_blocks(const W* block, int64_t numel, const Call& call) {
  for (int64_t i = 0; i < numel; i += kBlockValues, ++block) {
    int32_t numbers[kBlockValues];
    W::get(block->bytes, numbers);
    for (int j = 0; j < kBlockValues; ++j) {
      call(i + j, static_cast<C>(static_cast<float>(numbers[j]) * block->scale));
    }
  }
}

// Calls call(values) with a span of values that load can read. Blocks are decoded first.
template <class C, class W, class Call>
FASTSYNC_INLINE void with_values(const W* wire, int64_t numel, const Call& call) {
  if constexpr (kIsBlock<W>) {
    C values[kSpan];
    decode_blocks<C>(wire, numel, [&](int64_t i, C value) { values[i] = value; });
    std::fill(values + numel, values + kSpan, C{});
    call(static_cast<const C*>(values));
  } else {
    call(Whole<const W>(wire, numel).data());
  }
}

// Encodes a block. amax is the largest magnitude of its values times the multiplier.
template <class T, class W>
FASTSYNC_INLINE void quantize(const T* values, float multiplier, float amax, W& block) {
  if (!is_finite(amax)) {
    block = {std::numeric_limits<float>::quiet_NaN(), {}};
    return;
  }
  block.scale = block_scale<W>(amax);
  const float inverse = block_inverse<W>(amax);
  int32_t numbers[kBlockValues];
  for (int i = 0; i < kBlockValues; i += kLanes<float>) {
    const Vec<float> rounded = load<float>(values + i) * multiplier * inverse + 0x1.8p23F;  // like round_to_int
    store_raw(numbers + i, reinterpret_cast<Bits<float>>(rounded) - 0x4B400000);
  }
  W::put(numbers, block.bytes);
}

// wire[i] = encode(values[i] * multiplier), clamped to ±limit if values[i] is finite. Returns how many values
// saturated. The wire may be the values' own memory.
template <class C, class T, class W>
int64_t encode_values(const T* values, C multiplier, C limit, W* wire) {
  if constexpr (kIsBlock<W>) {
    int64_t num_saturated = 0;
    for (int64_t i = 0; i < kSpan; i += kBlockValues, ++wire) {
      Bits<C> largest{};
      for (int j = 0; j < kBlockValues; j += kLanes<C>) {
        largest = larger<C>(largest, load<C>(values + i + j) * multiplier);
      }
      if (std::is_same_v<C, float> && __builtin_expect(largest_of(largest) <= limit, 1)) {
        quantize(values + i, static_cast<float>(multiplier), static_cast<float>(largest_of(largest)), *wire);
        continue;
      }
      float clamped[kBlockValues];
      Bits<float> clamped_bits{};
      for (int j = 0; j < kBlockValues; ++j) {
        bool saturated;
        clamped[j] = static_cast<float>(scale_and_clamp<C>(decode(values[i + j]), multiplier, limit, saturated));
        num_saturated += saturated;
      }
      for (int j = 0; j < kBlockValues; j += kLanes<float>) {
        clamped_bits = larger<float>(clamped_bits, load<float>(clamped + j));
      }
      quantize(clamped, 1.0F, largest_of(clamped_bits), *wire);
    }
    return num_saturated;
  } else {
    W copy[kSpan];
    const bool is_in_place = static_cast<const void*>(values) == wire;
    W* const encoded = is_in_place ? copy : wire;
    Bits<C> largest{};
    for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
      const Vec<C> scaled = load<C>(values + i) * multiplier;
      largest = larger<C>(largest, scaled);
      store<W, C>(encoded + i, scaled);
    }
    int64_t num_saturated = 0;
    if (!__builtin_expect(largest_of(largest) <= limit, 1)) {
      for (int64_t i = 0; i < kSpan; ++i) {
        bool saturated;
        const C scaled = scale_and_clamp<C>(decode(values[i]), multiplier, limit, saturated);
        encoded[i] = encode<W>(static_cast<Compute<W>>(scaled));
        num_saturated += saturated;
      }
    }
    if (is_in_place) {
      std::copy_n(copy, kSpan, wire);
    }
    return num_saturated;
  }
}

// residual[i] = (values[i] - decode(wire[i]) * multiplier) * factor, or before[i] if the decoded value is inf or nan.
template <class W, class C>
void keep_loss(const C* values, const W* wire, C multiplier, C factor, const C* before, C* residual) {
  with_values<C>(wire, kSpan, [&](const auto* sent_values) {
    for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
      const Vec<C> sent = load<C>(sent_values + i);
      Vec<C> back = sent * multiplier;
      back = back > kLargest<C> ? kLargest<C> : back;
      back = back < -kLargest<C> ? -kLargest<C> : back;
      const Vec<C> lost = (load<C>(values + i) - back) * factor;
      store<C, C>(residual + i, magnitudes<C>(sent) <= kLargest<C> ? lost : load<C>(before + i));
    }
  });
}

// Adds up the wires by Note [Sums by a tree]. Of the sums that wait for another one, a level has one at most.
template <class W, class C>
void sum_wires_by_tree(const Wires& wires, int64_t first, int64_t numel, C multiplier, C* sums) {
  C waiting[kMostTreeLevels][kSpan];
  int num_waiting = 0;
  for (int64_t r = 0; r < wires.num; ++r) {
    const int num_sums = sums_behind_wire(r, wires.num);
    C* const to = waiting[num_sums > 0 ? num_waiting - 1 : num_waiting++];
    with_values<C>(wires.at<W>(r, first), numel, [&](const auto* values) {
      for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
        const Vec<C> value = load<C>(values + i);
        store<C, C>(to + i, num_sums > 0 ? load<C>(to + i) + value : value);
      }
    });
    for (int sum = 1; sum < num_sums; ++sum) {
      --num_waiting;
      for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
        C* const left = waiting[num_waiting - 1] + i;
        store<C, C>(left, load<C>(left) + load<C>(waiting[num_waiting] + i));
      }
    }
  }
  for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
    store<C, C>(sums + i, load<C>(waiting[0] + i) * multiplier);
  }
}

// sums[i] = sum over the wires of value first + i, times the multiplier. For single values, four vectors of sums stay
// in registers while the loop goes over the wires. With fewer, finding the next wire would cost more than adding.
template <class W, class C>
void sum_wires(const Wires& wires, int64_t first, int64_t numel, C multiplier, C* sums) {
  constexpr int kVectors = 4;
  if (wires.by_tree) {
    sum_wires_by_tree<W>(wires, first, numel, multiplier, sums);
    return;
  }
  if constexpr (kIsBlock<W>) {
    decode_blocks<C>(wires.at<W>(0, first), numel, [&](int64_t i, C value) { sums[i] = value * multiplier; });
    for (int64_t r = 1; r < wires.num; ++r) {
      decode_blocks<C>(wires.at<W>(r, first), numel, [&](int64_t i, C value) { sums[i] += value * multiplier; });
    }
    std::fill(sums + numel, sums + kSpan, C{});
  } else if (numel == kSpan) {
    for (int64_t i = 0; i < kSpan; i += kLanes<C> * kVectors) {
      Vec<C> totals[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        totals[v] = load<C>(wires.at<W>(0, first) + i + v * kLanes<C>) * multiplier;
      }
      for (int64_t r = 1; r < wires.num; ++r) {
        const W* const values = wires.at<W>(r, first) + i;
        for (int v = 0; v < kVectors; ++v) {
          totals[v] += load<C>(values + v * kLanes<C>) * multiplier;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        store<C, C>(sums + i + v * kLanes<C>, totals[v]);
      }
    }
  } else {
    for (int64_t r = 0; r < wires.num; ++r) {
      Whole<const W> values(wires.at<W>(r, first), numel);
      for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
        const Vec<C> value = load<C>(values.data() + i) * multiplier;
        store<C, C>(sums + i, r == 0 ? value : load<C>(sums + i) + value);
      }
    }
  }
}

// ---- gradients ------------------------------------------------------------------------------------------------------

// gathered[i] = gradient[i] * weight, plus the residual if there is one. These values are to be sent.
template <class G, class C>
void gather(const G* gradient, const C* residual, C weight, C* gathered) {
  for (int64_t i = 0; i < kSpan; i += kLanes<C>) {
    Vec<C> values{};
    if (weight != C(0)) {  // else it counts as 0, also if it is inf or nan
      values = load<C>(gradient + i) * weight;
    }
    store<C, C>(gathered + i, residual != nullptr ? values + load<C>(residual + i) : values);
  }
}

// Returns the squares and the largest magnitude of a span. load_at(i) gives the vector at index i.
template <class Load>
FASTSYNC_INLINE SpanSquares measure(const Load& load_at) {
  Vec<float> low{}, high{};
  Bits<float> largest{};
  for (int64_t i = 0; i < kSpan; i += kNumColumns) {
    const Vec<float> first = load_at(i);
    const Vec<float> second = load_at(i + kLanes<float>);
    low += first * first;
    high += second * second;
    largest = larger<float>(larger<float>(largest, first), second);
  }
  SpanSquares squares{{}, largest_of(largest)};
  store_raw(squares.columns, low);
  store_raw(squares.columns + kLanes<float>, high);
  return squares;
}

// Writes a span of values, which are sums or in the wire's type, to gradients in other memory.
template <class T, class G>
void unpack_values(const T* values, Compute<G> multiplier, G* gradient, int64_t numel, Tally& tally) {
  const auto one_by_one = [&] {
    for (int64_t i = 0; i < kSpan; ++i) {
      bool saturated;
      gradient[i] = decode_to<G>(values[i], multiplier, saturated);
      tally.num_saturated += saturated;
    }
  };
  if constexpr (std::is_same_v<G, double>) {
    one_by_one();
    tally.add_values(gradient, numel);
  } else {
    const auto stored = [&](int64_t i) { return load<float>(gradient + i); };
    Bits<float> largest{};  // from values before they are stored, because store may turn a nan into another value
    SpanSquares squares = measure([&](int64_t i) {
      const Vec<float> scaled = load<float>(values + i) * multiplier;
      largest = larger<float>(largest, scaled);
      store<G, float>(gradient + i, scaled);
      return std::is_same_v<G, float> ? scaled : stored(i);
    });
    if (!__builtin_expect(largest_of(largest) < kLargest<G>, 1)) {
      one_by_one();
      squares = measure(stored);
    }
    tally.add_span(squares, gradient, numel);
  }
}

// Returns the statistics of gradients that unpacking leaves as they are.
template <class G>
Tally measure_tile(const G* gradient, int64_t numel) {
  Tally tally;
  if constexpr (std::is_same_v<G, double>) {
    tally.add_values(gradient, numel);
  } else {
    for (int64_t i = 0; i < numel; i += kSpan) {
      const int64_t length = std::min(kSpan, numel - i);
      Whole<const G> values(gradient + i, length);
      const auto squares = measure([&](int64_t j) { return load<float>(values.data() + j); });
      tally.add_span(squares, values.data(), length);
    }
  }
  return tally;
}

// ---- one tile ------------------------------------------------------------------------------------------------------

template <class W, class G>
Tally pack_tile(const G* gradient, const Compute<G>* residual, Compute<G>* lost, int64_t numel, Compute<G> multiplier,
                Compute<G> limit, Compute<G> weight, void* wire, int64_t first) {
  using C = Compute<G>;
  if (residual == nullptr && weight != C(0)) {
    multiplier *= weight;
    weight = C(1);
  }
  Tally tally;
  for (int64_t i = 0; i < numel; i += kSpan) {
    const int64_t length = std::min(kSpan, numel - i);
    Whole<const G> values(gradient + i, length);
    Whole<W> encoded(unit_at<W>(wire, first + i), num_units<W>(length));
    if (residual == nullptr && weight == C(1)) {
      tally.num_saturated += encode_values(values.data(), multiplier, limit, encoded.data());
    } else {
      Whole<const C> before(residual == nullptr ? nullptr : residual + i, length);
      C gathered[kSpan];
      gather(values.data(), before.data(), weight, gathered);
      tally.num_saturated += encode_values(gathered, multiplier, limit, encoded.data());
      if (residual != nullptr) {
        Whole<C> kept(lost + i, length);
        keep_loss(gathered, encoded.data(), C(1) / multiplier, C(1), before.data(), kept.data());
        kept.put_back();
      }
    }
    encoded.put_back();
  }
  return tally;
}

template <class W, class G>
Tally unpack_tile(const Wires& wires, int64_t first, G* gradient, int64_t numel, Compute<G> multiplier,
                  Compute<G> factor) {
  using C = Compute<G>;
  const bool is_sum = wires.num > 1 || multiplier != C(1);
  const bool is_in_place = !is_sum && static_cast<const void*>(wires.at<W>(0, first)) == gradient;
  if (is_in_place && factor == C(1)) {
    return measure_tile(gradient, numel);
  }
  Tally tally;
  for (int64_t i = 0; i < numel; i += kSpan) {
    const int64_t length = std::min(kSpan, numel - i);
    G unpacked[kSpan];
    G* const destination = length == kSpan && !is_in_place ? gradient + i : unpacked;
    if (is_sum) {
      C sums[kSpan];
      sum_wires<W>(wires, first + i, length, multiplier, sums);
      unpack_values(sums, factor, destination, length, tally);
    } else {
      with_values<C>(wires.at<W>(0, first + i), length,
                     [&](const auto* values) { unpack_values(values, factor, destination, length, tally); });
    }
    if (destination == unpacked) {
      std::copy_n(unpacked, length, gradient + i);
    }
  }
  return tally;
}

template <class C, class W, class Out>
Tally reduce_tile(const Wires& wires, int64_t begin, int64_t numel, C multiplier, C limit, C scale, C* residual,
                  void* out) {
  for (int64_t i = 0; i < numel; i += kSpan) {
    const int64_t length = std::min(kSpan, numel - i);
    C sums[kSpan];
    sum_wires<W>(wires, begin + i, length, multiplier, sums);
    Whole<Out> encoded(unit_at<Out>(out, begin + i), num_units<Out>(length));
    if (residual == nullptr) {
      encode_values(sums, C(1), limit, encoded.data());
    } else {
      Whole<C> kept(residual + i, length);
      for (int64_t j = 0; j < kSpan; ++j) {
        sums[j] += kept.data()[j] * scale;
      }
      encode_values(sums, C(1), limit, encoded.data());
      keep_loss(sums, encoded.data(), C(1), C(1) / scale, kept.data(), kept.data());
      kept.put_back();
    }
    encoded.put_back();
  }
  return {};
}

}  // namespace
}  // namespace fastsync::cpu::FASTSYNC_INSTRUCTIONS

#include "passes/cpu/pop_target.h"
