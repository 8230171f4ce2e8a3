// Times the kernel of kiln::linear on the layers of a model, for bench.kernels.linear.
//
//     linear ELEMENT SECONDS LAYERS ROWS...
//
// Prints, for each number of rows: rows, processor seconds of the thread, operations, bytes of weights.
//
// The layers' weights exceed the caches, as a model's do. They lie in huge pages, because weights that are mapped from
// files are read about as fast.

#include KERNEL

#include <cmath>
#include <string>

#include "driver.h"

struct Layer {
  int64_t inputs, outputs;
};

// Of one of a model's layers: queries, keys and values; output; gate and up; down.
constexpr Layer kLayers[] = {{768, 2304}, {768, 768}, {768, 6144}, {3072, 768}};
constexpr int64_t kMaxInputs = 3072, kMaxOutputs = 6144;

template <class Element>
struct Model {
  const Element* weights;
  int64_t layer_size = 0, rows;
  const Element* activations;
  Element* out;

  // Multiplies by the weights of one layer, until so many seconds have been taken.
  void pass(int64_t layer, double seconds, Totals& totals) const {
    const Element* weight = weights + layer * layer_size;
    for (const Layer& kind : kLayers) {
      if (totals.seconds >= seconds) return;
      const void* const list[] = {weight};
      const double start = processor_time();
      kiln::multiply<Element>(out, activations, list, &kind.outputs, 1, rows, kind.inputs, nullptr, 1);
      totals.seconds += processor_time() - start;
      totals.operations += 2.0 * rows * kind.inputs * kind.outputs;
      totals.bytes += 1.0 * sizeof(Element) * kind.inputs * kind.outputs;
      weight += kind.inputs * kind.outputs;
    }
  }
};

template <class Element>
int run(double seconds, int64_t num_layers, int count, char** rows) {
  Model<Element> model;
  for (const Layer& kind : kLayers) model.layer_size += kind.inputs * kind.outputs;
  model.weights = allocate<Element>(model.layer_size * num_layers);
  for (int i = 0; i < count; i++) {
    model.rows = std::atoll(rows[i]);
    Element* activations = allocate<Element>(model.rows * kMaxInputs);
    model.activations = activations;
    model.out = allocate<Element>(model.rows * kMaxOutputs);
    Totals warm_up, totals;
    model.pass(0, HUGE_VAL, warm_up);
    for (int64_t layer = 1; totals.seconds < seconds; layer++) model.pass(layer % num_layers, seconds, totals);
    totals.print(rows[i]);
    std::free(activations);
    std::free(model.out);
  }
  return 0;
}

int main(int count, char** words) {
  if (count < 5) return 2;
  omp_set_num_threads(1);
  const double seconds = std::atof(words[2]);
  const int64_t num_layers = std::atoll(words[3]);
  const bool is_float = std::string(words[1]) == "float";
  return is_float ? run<float>(seconds, num_layers, count - 4, words + 4)
                  : run<kiln::BFloat16>(seconds, num_layers, count - 4, words + 4);
}
