// Writes a step's keys and values into the cache, in place, and attends to the cache: `kiln::attend_in_place`, whose
// meaning is in execution/attention/operators.py. Reads what live tokens see, and nothing else: tokens without a position
// cost nothing, and their outputs are not written.
//
// An output depends on its own row alone: neither on other rows nor on the number of threads.
//
// Caches are read through `load` and written through `convert` (vectors.h), one head of one position at a time: that is
// where scales of narrower elements belong.

#include <omp.h>

#include "attend_few.h"
#include "attend_many.h"

namespace kiln {

// With more queries than this for each KV head, from more than one token, packing keys pays.
constexpr int64_t kFewQueries = 16;

// A part of a row that one thread takes at once, for one KV head: positions or tokens, and how long that takes.
struct Part {
  int64_t first, end, cost;
};

// A row and its parts.
struct Plan {
  Row row;
  std::vector<Part> parts;
  int64_t cost = 0;            // of all parts, for one KV head
  int64_t first_partial = -1;  // of the row's partial results, if parts are joined later

  void add(Part part) {
    parts.push_back(part);
    cost += part.cost;
  }
};

// Calls `run(plan, kv_head, index of the part)` for this thread's share of all parts, which is even by cost.
template <class Run>
inline void run_share(const std::vector<Plan>& plans, int64_t kv_heads, const Run& run) {
  int64_t total = 0, at = 0;
  for (const Plan& plan : plans) total += plan.cost * kv_heads;
  const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
  for (const Plan& plan : plans) {
    if (at >= end) return;
    if (at + plan.cost * kv_heads <= begin) {
      at += plan.cost * kv_heads;
      continue;
    }
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
      for (size_t part = 0; part < plan.parts.size(); part++) {
        if (at >= begin && at < end) run(plan, kv_head, part);
        at += plan.parts[part].cost;
      }
  }
}

template <class Query, class Cached>
void attend_few(const Step<Query, Cached>& step, std::vector<Plan>& plans) {
  const int64_t group = step.group(), padded_dim = step.padded_dim(), most = step.tokens * group;
  int64_t num_partials = 0;
  for (Plan& plan : plans) {
    for (int64_t at = plan.row.begin / kChunkPositions * kChunkPositions; at < plan.row.end; at += kChunkPositions) {
      const int64_t first = std::max(at, plan.row.begin), end = std::min(at + kChunkPositions, plan.row.end);
      plan.add({first, end, end - first});
    }
    if (plan.parts.size() > 1) {
      plan.first_partial = num_partials;
      num_partials += step.kv_heads * plan.parts.size() * plan.row.tokens.size() * group;
    }
  }
  std::vector<Partial> partials(num_partials);
  std::vector<float> sums(num_partials * padded_dim);
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    FewScratch scratch(most, padded_dim);
    std::vector<Partial> own(most);
    run_share(plans, step.kv_heads, [&](const Plan& plan, int64_t kv_head, size_t part) {
      const int64_t chunk = plan.parts[part].first / kChunkPositions, queries = plan.row.tokens.size() * group;
      if (plan.first_partial < 0) {
        attend_chunk(step, plan.row, kv_head, chunk, scratch, own.data(), scratch.sums.data());
        for (int64_t i = 0; i < queries; i++)
          finish(step, plan.row, plan.row.tokens[i / group], kv_head * group + i % group, &own[i], 1, &scratch.joined[0]);
      } else {
        const int64_t at = plan.first_partial + (kv_head * plan.parts.size() + part) * queries;
        attend_chunk(step, plan.row, kv_head, chunk, scratch, &partials[at], &sums[at * padded_dim]);
      }
    });
    if (num_partials > 0) {
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t item = 0; item < static_cast<int64_t>(plans.size()) * step.heads; item++) {
        const Plan& plan = plans[item / step.heads];
        if (plan.first_partial < 0) continue;
        const int64_t head = item % step.heads, count = plan.parts.size(), queries = plan.row.tokens.size() * group;
        std::vector<Partial> ordered(count);
        for (size_t token = 0; token < plan.row.tokens.size(); token++) {
          for (int64_t part = 0; part < count; part++)
            ordered[part] =
                partials[plan.first_partial + (head / group * count + part) * queries + token * group + head % group];
          finish(step, plan.row, plan.row.tokens[token], head, ordered.data(), count, &scratch.joined[0]);
        }
      }
    }
  }
}

template <class Query, class Cached>
void attend_many(const Step<Query, Cached>& step, std::vector<Plan>& plans) {
  const int64_t most = tile_tokens(step);
  for (Plan& plan : plans) {
    const int64_t count = plan.row.tokens.size();
    for (int64_t first = 0; first < count; first += most) {
      const int64_t end = std::min(first + most, count);
      int64_t cost = 0;
      for (int64_t i = first; i < end; i++) cost += plan.row.tokens[i].end - plan.row.tokens[i].begin;
      plan.add({first, end, cost});
    }
  }
#pragma omp parallel num_threads(omp_get_max_threads())
  {
    for (const Plan& plan : plans) {
#pragma omp for schedule(static) nowait
      for (size_t i = 0; i < plan.row.tokens.size(); i++)
        for (int64_t kv_head = 0; kv_head < step.kv_heads; kv_head++)
          write_token(step, plan.row, plan.row.tokens[i], kv_head);
    }
#pragma omp barrier
    ManyScratch scratch(round_up(std::max(most * step.group(), step.group()), kQueryRows), step.padded_dim());
    run_share(plans, step.kv_heads, [&](const Plan& plan, int64_t kv_head, size_t part) {
      attend_tile(step, plan.row, kv_head, plan.parts[part].first, plan.parts[part].end, scratch);
    });
  }
}

template <class Query, class Cached>
void attend(Step<Query, Cached> step) {
  step.scale *= kLog2E, step.soft_cap *= kLog2E;
  std::vector<Plan> plans;
  for (int64_t row = 0; row < step.rows; row++) {
    Plan plan{Row(step, row), {}};
    if (!plan.row.tokens.empty()) plans.push_back(std::move(plan));
  }
  if (step.tokens == 1 || step.tokens * step.group() <= kFewQueries)
    attend_few(step, plans);
  else
    attend_many(step, plans);
}

}  // namespace kiln
