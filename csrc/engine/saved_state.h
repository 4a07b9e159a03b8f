// The saved state of each parameter is the fp16 scale of its bucket, and the residual and the right factor of its
// gradient. It is kept for a checkpoint, or until the parameter comes into another bucket.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace fastsync {

// A weak reference to a parameter. It keeps no model alive, and no other tensor can take the address while it exists.
using ParameterId = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

class SavedState {
 public:
  // A parameter, its scale, its residual and its factor, each unset if there is none.
  using Row = std::tuple<at::Tensor, std::optional<double>, std::optional<at::Tensor>, std::optional<at::Tensor>>;

  SavedState() = default;
  explicit SavedState(const std::vector<Row>& rows);
  // Returns a row for each parameter that still lives.
  std::vector<Row> rows() const;
  // A line that the ranks have to agree on: it tells whether they were given the same scales and factors.
  const std::string& description() const { return description_; }

  // Records the scale of the bucket that holds these parameters. If the bucket has none, they lose theirs. Waits for
  // the device.
  void record_scale(const std::vector<ParameterId>& parameters, const at::Tensor& scale);
  // Records the residuals that are defined. There is one for each parameter, or none at all.
  void record_residuals(const std::vector<ParameterId>& parameters, const std::vector<at::Tensor>& residuals);

  // Records the factors that are defined, likewise.
  void record_factors(const std::vector<ParameterId>& parameters, const std::vector<at::Tensor>& factors);

  // Forgets all scales and factors, which have to be equal on all ranks.
  void forget_equal_state();

  // Returns the scale that a bucket of these parameters starts with, as float32 [1] on the device. It is the smallest
  // of their scales, so that no gradient saturates. Undefined if a scale is unknown; then the gradients decide.
  at::Tensor smallest_scale(const std::vector<ParameterId>& parameters, c10::Device device) const;
  // Returns the residuals of these parameters, and forgets them. A residual is undefined if there is none. The result
  // is empty if there are none at all.
  std::vector<at::Tensor> take_residuals(const std::vector<ParameterId>& parameters, c10::Device device);
  // Returns the factors of these parameters, undefined where there is none, and forgets them.
  std::vector<at::Tensor> take_factors(const std::vector<ParameterId>& parameters, c10::Device device);

 private:
  struct Entry {
    ParameterId id;
    std::optional<double> scale = {};
    at::Tensor residual = {};
    at::Tensor factor = {};
  };

  Entry& entry_of(const ParameterId& id);

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::string description_ = "nothing saved";
};

}  // namespace fastsync
