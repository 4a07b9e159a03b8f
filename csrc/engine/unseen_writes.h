// A sample of a gradient's values notices writes that a version counter does not count.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastsync {

// Note [Sampled gradients]
// GradScaler.unscale_ divides gradients without a word to their version counters, and so do writes to .data and by
// NumPy. With shards a step takes means that are not in .grad, so it has to notice such writes. All of them that are
// meant for whole gradients change nearly every value. So some values of each gradient are noted, and compared by bits.

// Returns some values of a tensor, spread over it, in memory of their own on its device. Undefined for an undefined
// tensor.
at::Tensor sample_of(const at::Tensor& tensor);
// Tells for each pair of samples whether the bits differ. For samples on a device the host waits, once.
std::vector<bool> differ(const std::vector<at::Tensor>& noted, const std::vector<at::Tensor>& current);
// Tells on their device for each byte of the pairs, one after the other, whether it differs. Undefined if there is
// none. The samples of a pair are equally long.
at::Tensor bytes_that_differ(const std::vector<at::Tensor>& noted, const std::vector<at::Tensor>& current);

}  // namespace fastsync
