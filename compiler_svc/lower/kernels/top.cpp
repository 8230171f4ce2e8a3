// The places of the largest keys of each row, largest first: what sampling takes its candidates from.
//
// Most keys are smaller than those found so far, so a row costs little more than reading it once.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <omp.h>

namespace kiln {

// Places [rows, count] of keys [rows, width], which differ within a row. The rows are of `groups` of equal size, and of
// each group those from `live[group]` on get 0, 1, 2, …
inline void take_top(int64_t* places, const int64_t* keys, int64_t rows, int64_t width, int64_t count,
                     const int32_t* live, int64_t groups) {
  const int64_t size = rows / groups;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    int64_t* const out = places + row * count;
    if (row % size >= live[row / size]) {
      std::iota(out, out + count, int64_t{0});
      continue;
    }
    using Candidate = std::pair<int64_t, int64_t>;  // key, place
    std::vector<Candidate> top;
    top.reserve(2 * count);
    const auto is_before = [](const Candidate& one, const Candidate& other) { return one.first > other.first; };
    int64_t bound = std::numeric_limits<int64_t>::min();  // no smaller key can be among the largest
    for (int64_t place = 0; place < width; place++) {
      const int64_t key = keys[row * width + place];
      if (key < bound) continue;
      top.emplace_back(key, place);
      if (static_cast<int64_t>(top.size()) == 2 * count) {
        std::nth_element(top.begin(), top.begin() + count - 1, top.end(), is_before);
        top.resize(count);
        bound = top.back().first;
      }
    }
    std::partial_sort(top.begin(), top.begin() + count, top.end(), is_before);
    for (int64_t i = 0; i < count; i++) out[i] = top[i].second;
  }
}

}  // namespace kiln
