// Times the kernel of kiln::attend, for bench.kernels.attend.
//
//     attend SECONDS ROWS:TOKENS:LIVE:HEADS:KV_HEADS...
//
// Queries are ELEMENTs, keys and values ITEMs.
//
// Prints, for each shape: the shape, processor seconds of the thread, operations that count, bytes of keys and values that
// are read.
//
// Each row's TOKENS are the last of LIVE positions. Calls take turns with the caches of as many layers as exceed the
// processor's caches, because a model's weights pass by from one step to the next.

#include KERNEL

#include "driver.h"

constexpr int64_t kHeadDim = 64, kCacheBytes = int64_t{128} << 20;

void run(double seconds, const char* word) {
  long rows, tokens, live, heads, kv_heads;
  if (std::sscanf(word, "%ld:%ld:%ld:%ld:%ld", &rows, &tokens, &live, &heads, &kv_heads) != 5) std::exit(2);
  const int64_t layer_size = rows * kv_heads * live * kHeadDim;
  const int64_t layer_bytes = 2 * layer_size * static_cast<int64_t>(sizeof(ITEM));
  const int64_t num_layers = std::max<int64_t>(kCacheBytes / layer_bytes, 1);
  ITEM* const caches = allocate<ITEM>(2 * layer_size * num_layers);
  // Slices of one projection, as models have them.
  const int64_t stride = (heads + 2 * kv_heads) * kHeadDim;
  ELEMENT* const projected = allocate<ELEMENT>(rows * tokens * stride);
  ELEMENT* const attended = allocate<ELEMENT>(rows * tokens * heads * kHeadDim);
  std::vector<int32_t> positions, slots;
  for (int32_t row = 0; row < rows; row++) {
    slots.push_back(row);
    for (int64_t token = 0; token < tokens; token++) positions.push_back(static_cast<int32_t>(live - tokens + token));
  }
  kiln::Step<ELEMENT, ITEM> step{};
  step.attended = attended, step.queries = projected;
  step.keys = projected + heads * kHeadDim, step.values = step.keys + kv_heads * kHeadDim;
  step.positions = positions.data(), step.block_table = slots.data();
  step.rows = rows, step.tokens = tokens, step.heads = heads, step.kv_heads = kv_heads, step.head_dim = kHeadDim;
  step.block_tokens = live, step.row_blocks = 1;
  step.query_stride = step.key_stride = step.value_stride = stride;
  step.scale = 0.125f;
  // A token sees the positions before its row's tokens, those tokens before it, and itself.
  const double seen = 1.0 * tokens * (live - tokens) + 0.5 * tokens * (tokens + 1);
  const auto pass = [&](int64_t layer, Totals& totals) {
    step.key_cache = caches + 2 * layer_size * layer, step.value_cache = step.key_cache + layer_size;
    const double start = processor_time();
    kiln::attend(step);
    totals.seconds += processor_time() - start;
    totals.operations += 4.0 * kHeadDim * rows * heads * seen;
    totals.bytes += static_cast<double>(layer_bytes);
  };
  Totals warm_up, totals;
  pass(0, warm_up);
  for (int64_t layer = 1; totals.seconds < seconds; layer++) pass(layer % num_layers, totals);
  totals.print(word);
  std::free(caches);
  std::free(projected);
  std::free(attended);
}

int main(int count, char** words) {
  if (count < 3) return 2;
  omp_set_num_threads(1);
  for (int i = 2; i < count; i++) run(std::atof(words[1]), words[i]);
  return 0;
}
