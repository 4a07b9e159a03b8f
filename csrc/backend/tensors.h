// Tensors as bytes that ranks read and write.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/collectives.h"

namespace fastsync {

// Memory that ranks can read or write as bytes lies in one piece. A tensor that does not gets a copy.
bool lies_in_one_piece(const at::Tensor& tensor);

at::Tensor to_read(const at::Tensor& tensor);
std::vector<at::Tensor> to_read(const std::vector<at::Tensor>& tensors);
// Returns memory for what the tensor will hold, with the same content or with any.
at::Tensor to_write(const at::Tensor& tensor, bool keeps_content = false);
std::vector<at::Tensor> to_write(const std::vector<at::Tensor>& tensors);
// Copies what was written for the tensor, unless it was written there.
void put_back(const at::Tensor& tensor, const at::Tensor& written);
void put_back(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& written);

inline std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }
inline int64_t num_bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }
int64_t num_bytes(const std::vector<at::Tensor>& tensors);

// The sizes of pieces, one for each rank: they are tensors, or so many rows of one, or equal parts of it.
std::vector<int64_t> sizes_of(const std::vector<at::Tensor>& tensors, int64_t size,
                              const std::vector<int64_t>& splits = {});
// Where pieces of these sizes begin: in a tensor each, or one after the other in one tensor.
Pieces pieces_of(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& sizes);
Pieces pieces_of(const std::vector<at::Tensor>& tensors, int64_t size);

}  // namespace fastsync
