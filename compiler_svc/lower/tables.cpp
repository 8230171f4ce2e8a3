// What every library does with its tables of inputs; see tables.py, which also declares what is defined here.

#include <sstream>
#include <stdexcept>

namespace kiln {
namespace {

template <typename Value>
void check(size_t input, const char* what, int64_t place, Value expected, Value got) {
  if (expected == got) {
    return;
  }
  std::stringstream message;
  message << "input_handles[" << input << "]: unmatched " << what;
  if (place >= 0) {
    message << " at " << place;
  }
  message << ", expected: " << expected << ", but got: " << got << "\n";
  throw std::runtime_error(message.str());
}

}  // namespace

void check_inputs(const AtenTensorHandle* handles, const Input* inputs, size_t count, const int64_t* extents) {
  for (size_t input = 0; input < count; ++input) {
    const AtenTensorHandle handle = handles[input];
    const int64_t dims = inputs[input].dims;
    int32_t dtype = 0, device_type = 0;
    int64_t got_dims = 0;
    int64_t *sizes = nullptr, *strides = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &got_dims));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    check(input, "dtype", -1, inputs[input].dtype(), dtype);
    check(input, "device type", -1, aoti_torch_device_type_cpu(), device_type);
    check(input, "number of dims", -1, dims, got_dims);
    for (int64_t dim = 0; dim < dims; ++dim) {
      check(input, "dim value", dim, extents[dim], sizes[dim]);
      check(input, "stride value", dim, extents[dims + dim], strides[dim]);
    }
    extents += 2 * dims;
  }
}

}  // namespace kiln
