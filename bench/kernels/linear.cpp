// Times the kernel of kiln::linear on the layers of a model, for bench.kernels.linear.
//
//     linear SECONDS LAYERS ROWS...
//
// Activations are ELEMENTs, weights ITEMs: quantized, if these are others.
//
// Prints, for each number of rows: rows, processor seconds of the thread, operations, bytes of weights.
//
// The layers' weights exceed the caches, as a model's do. They lie in huge pages, because weights that are mapped from
// files are read about as fast.

#include KERNEL

#include <cmath>

#include "driver.h"

struct Layer {
  int64_t inputs, outputs;
};

// Of one of a model's layers: queries, keys and values; output; gate and up; down.
constexpr Layer kLayers[] = {{768, 2304}, {768, 768}, {768, 6144}, {3072, 768}};
constexpr int64_t kMaxInputs = 3072, kMaxOutputs = 6144, kGroup = 128;

using P = kiln::Products<ELEMENT, ITEM>;

struct Model {
  const ITEM* weights;
  const float* scales;
  int64_t layer_size = 0, rows;
  const ELEMENT* activations;
  ELEMENT* out;

  // Multiplies by the weights of one layer, until so many seconds have been taken.
  void pass(int64_t layer, double seconds, Totals& totals) const {
    const ITEM* weight = weights + layer * layer_size;
    for (const Layer& kind : kLayers) {
      if (totals.seconds >= seconds) return;
      const void* const list[] = {weight};
      const float* const scale_list[] = {scales};
      const int64_t num_scales = kiln::Weight<P>::kIsGrouped ? 2 * kind.inputs / kGroup : 1;
      const double start = processor_time();
      kiln::multiply<ELEMENT, ITEM>(
          out, activations, list, scale_list, &num_scales, &kind.outputs, 1, rows, kind.inputs, nullptr, 1);
      totals.seconds += processor_time() - start;
      totals.operations += 2.0 * rows * kind.inputs * kind.outputs;
      totals.bytes += kiln::count_bytes<P>(kind.inputs * kind.outputs);
      weight += kind.inputs * kind.outputs / P::kItemsPerByte;
    }
  }
};

int main(int count, char** words) {
  if (count < 4) return 2;
  omp_set_num_threads(1);
  const double seconds = std::atof(words[1]);
  const int64_t num_layers = std::atoll(words[2]);
  Model model;
  for (const Layer& kind : kLayers) model.layer_size += kind.inputs * kind.outputs / P::kItemsPerByte;
  model.weights = allocate<ITEM>(model.layer_size * num_layers);
  model.scales = allocate<float>(kMaxOutputs * 2 * kMaxInputs / kGroup);
  for (int i = 3; i < count; i++) {
    model.rows = std::atoll(words[i]);
    ELEMENT* activations = allocate<ELEMENT>(model.rows * kMaxInputs);
    model.activations = activations;
    model.out = allocate<ELEMENT>(model.rows * kMaxOutputs);
    Totals warm_up, totals;
    model.pass(0, HUGE_VAL, warm_up);
    for (int64_t layer = 1; totals.seconds < seconds; layer++) model.pass(layer % num_layers, seconds, totals);
    totals.print(words[i]);
    std::free(activations);
    std::free(model.out);
  }
  return 0;
}
