#include "backend/tensors.h"

#include <ATen/ATen.h>

#include <numeric>

namespace fastsync {

namespace {

using Tensors = std::vector<at::Tensor>;

template <class Function>
Tensors each(const Tensors& tensors, const Function& function) {
  Tensors results;
  results.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    results.push_back(function(tensor));
  }
  return results;
}

}  // namespace

bool lies_in_one_piece(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor to_read(const at::Tensor& tensor) {
  return lies_in_one_piece(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor to_write(const at::Tensor& tensor, bool keeps_content) {
  if (lies_in_one_piece(tensor)) {
    return tensor;
  }
  return keeps_content ? to_read(tensor) : at::empty(tensor.sizes(), tensor.options());
}

Tensors to_read(const Tensors& tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return to_read(tensor); });
}

Tensors to_write(const Tensors& tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return to_write(tensor); });
}

void put_back(const at::Tensor& tensor, const at::Tensor& written) {
  if (!lies_in_one_piece(tensor)) {
    tensor.copy_(written);
  }
}

void put_back(const Tensors& tensors, const Tensors& written) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    put_back(tensors[i], written[i]);
  }
}

int64_t num_bytes(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const at::Tensor& tensor) { return sum + num_bytes(tensor); });
}

std::vector<int64_t> sizes_of(const Tensors& tensors, int64_t size, const std::vector<int64_t>& splits) {
  if (static_cast<int64_t>(tensors.size()) == size) {
    std::vector<int64_t> sizes;
    for (const at::Tensor& tensor : tensors) {
      sizes.push_back(num_bytes(tensor));
    }
    return sizes;
  }
  const int64_t rows = tensors[0].dim() == 0 ? 1 : tensors[0].size(0);
  std::vector<int64_t> sizes(size, num_bytes(tensors[0]) / size);
  for (size_t rank = 0; rank < splits.size(); ++rank) {
    sizes[rank] = rows == 0 ? 0 : num_bytes(tensors[0]) / rows * splits[rank];
  }
  return sizes;
}

Pieces pieces_of(const Tensors& tensors, const std::vector<int64_t>& sizes) {
  Pieces pieces;
  int64_t offset = 0;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    pieces.push_back(tensors.size() == sizes.size() ? bytes_of(tensors[rank]) : bytes_of(tensors[0]) + offset);
    offset += sizes[rank];
  }
  return pieces;
}

Pieces pieces_of(const Tensors& tensors, int64_t size) { return pieces_of(tensors, sizes_of(tensors, size)); }

}  // namespace fastsync
