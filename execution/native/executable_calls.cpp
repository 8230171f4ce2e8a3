// The functions that AOTInductor's code calls; `compiler_svc/lower/collectives.py` declares them there. 0 is success.
//
// No torch headers: the dynamic linker finds the functions used here in the process, which has loaded torch. So this
// library can be built without torch.

#include "collectives.h"

#include <cstring>

#include <dlfcn.h>

namespace {

typedef void* TensorHandle;

thread_local const Communicator* current = nullptr;

// The step that this thread's executable runs: the shape of its tokens, and how many lead up to the last live one. What
// executables that do not say it move is moved whole.
struct Step {
  int64_t rows, tokens, live;
};
thread_local Step step = {0, 0, 0};

// The part of torch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h) that this file uses.
struct Torch {
  int32_t (*get_data_ptr)(TensorHandle, void**);
  int32_t (*get_dim)(TensorHandle, int64_t*);
  int32_t (*get_sizes)(TensorHandle, int64_t**);
  int32_t (*get_strides)(TensorHandle, int64_t**);
  int32_t (*get_dtype)(TensorHandle, int32_t*);
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, TensorHandle*);
  int32_t (*delete_tensor_object)(TensorHandle);
  int32_t float32, bfloat16, int32, float16, cpu;
  bool is_found = false;

  Torch() {
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    int32_t (*get_float32)(), (*get_bfloat16)(), (*get_int32)(), (*get_float16)(), (*get_cpu)();
    is_found = library != nullptr && find(library, "get_data_ptr", get_data_ptr) && find(library, "get_dim", get_dim) &&
               find(library, "get_sizes", get_sizes) && find(library, "get_strides", get_strides) &&
               find(library, "get_dtype", get_dtype) && find(library, "empty_strided", empty_strided) &&
               find(library, "delete_tensor_object", delete_tensor_object) &&
               find(library, "dtype_float32", get_float32) && find(library, "dtype_bfloat16", get_bfloat16) &&
               find(library, "dtype_int32", get_int32) && find(library, "dtype_float16", get_float16) &&
               find(library, "device_type_cpu", get_cpu);
    if (!is_found) return;
    float32 = get_float32(), bfloat16 = get_bfloat16(), int32 = get_int32(), float16 = get_float16(), cpu = get_cpu();
  }

  template <typename Function>
  static bool find(void* library, const char* name, Function& function) {
    char symbol[64] = "aoti_torch_";
    function = reinterpret_cast<Function>(dlsym(library, strncat(symbol, name, 48)));
    return function != nullptr;
  }
};

constexpr int64_t kMaxAxes = 16;

struct Operand {
  const char* data;
  int64_t num_axes;
  int64_t sizes[kMaxAxes];
  int64_t count;
  int32_t torch_dtype;
  DType dtype;
};

const Torch& torch() {
  static const Torch found;
  return found;
}

// Reads a contiguous tensor of a dtype that collectives take.
bool read_operand(TensorHandle handle, Operand& operand) {
  void* data;
  int64_t *sizes, *strides;
  if (torch().get_data_ptr(handle, &data) || torch().get_dim(handle, &operand.num_axes) ||
      torch().get_sizes(handle, &sizes) || torch().get_strides(handle, &strides) ||
      torch().get_dtype(handle, &operand.torch_dtype)) {
    return false;
  }
  if (operand.num_axes < 1 || operand.num_axes > kMaxAxes) return false;
  operand.data = static_cast<const char*>(data);
  operand.count = 1;
  for (int64_t axis = operand.num_axes - 1; axis >= 0; --axis) {
    if (sizes[axis] != 1 && strides[axis] != operand.count) return false;
    operand.sizes[axis] = sizes[axis];
    operand.count *= sizes[axis];
  }
  if (operand.torch_dtype == torch().float32) return operand.dtype = kFloat32, true;
  if (operand.torch_dtype == torch().bfloat16) return operand.dtype = kBFloat16, true;
  if (operand.torch_dtype == torch().int32) return operand.dtype = kInt32, true;
  if (operand.torch_dtype == torch().float16) return operand.dtype = kFloat16, true;
  return false;
}

// The items of a tensor that collectives move: those of the step's live tokens if it is [rows, tokens, …], otherwise all.
int64_t count_live(const Operand& operand) {
  if (operand.num_axes < 3 || operand.sizes[0] != step.rows || operand.sizes[1] != step.tokens) return operand.count;
  return operand.count / (step.rows * step.tokens) * step.live;
}

// A new contiguous tensor; null if the allocation fails.
void* make_output(const Operand& operand, const int64_t* sizes, TensorHandle* output) {
  int64_t strides[kMaxAxes], stride = 1;
  for (int64_t axis = operand.num_axes - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= sizes[axis];
  }
  void* data = nullptr;
  if (torch().empty_strided(operand.num_axes, sizes, strides, operand.torch_dtype, torch().cpu, 0, output)) {
    return nullptr;
  }
  return torch().get_data_ptr(*output, &data) ? nullptr : data;
}

// A caller does not take over the output of a failed call, so it is freed here.
int32_t finish(int32_t outcome, TensorHandle output) {
  if (outcome != kDone) torch().delete_tensor_object(output);
  return outcome;
}

bool is_ready(int64_t tp_degree) {
  return torch().is_found && current != nullptr && current->tp_degree == tp_degree;
}

}  // namespace

extern "C" {

void kiln_use(const Communicator* communicator) { current = communicator; }

// Executables that skip tokens call it at the start of a step, all ranks with the same numbers. Results of collectives
// are undefined where tokens are not live.
void kiln_begin_step(int64_t rows, int64_t tokens, int64_t live) { step = {rows, tokens, live}; }

int32_t aoti_torch_cpu_all_reduce(TensorHandle input, int64_t tp_degree, TensorHandle* output) {
  Operand operand;
  if (!is_ready(tp_degree) || !read_operand(input, operand)) return kInvalid;
  void* out = make_output(operand, operand.sizes, output);
  if (out == nullptr) return kInvalid;
  return finish(kiln_all_reduce(current, operand.dtype, operand.data, count_live(operand), out), *output);
}

int32_t aoti_torch_cpu_all_gather(TensorHandle input, int64_t tp_degree, TensorHandle* output) {
  Operand operand;
  if (!is_ready(tp_degree) || !read_operand(input, operand)) return kInvalid;
  const int64_t last = operand.num_axes - 1, columns = operand.sizes[last];
  if (columns == 0) return kInvalid;
  int64_t sizes[kMaxAxes];
  memcpy(sizes, operand.sizes, sizeof sizes);
  sizes[last] *= tp_degree;
  void* out = make_output(operand, sizes, output);
  if (out == nullptr) return kInvalid;
  const int64_t row_bytes = columns * item_size(operand.dtype);
  return finish(kiln_all_gather(current, operand.data, count_live(operand) / columns, row_bytes, out), *output);
}
}
