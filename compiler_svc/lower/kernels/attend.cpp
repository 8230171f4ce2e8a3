// Writes a step's keys and values into the cache, in place, and attends to the cache: `kiln::attend_in_place`, whose
// meaning is in execution/attention/operators.py. Reads what live tokens see, and nothing else: tokens without a position
// cost nothing, and their outputs are not written.
//
// An output depends on its own row alone: neither on other rows nor on the number of threads. Both ways, for few tokens and
// for many, divide long rows at fixed positions, so that threads can share them.
//
// Caches are read through `load` and written through `convert` (vectors.h), one head of one position at a time: that is
// where scales of narrower elements belong. What `load` leaves out of elements, `kUnit`, is a factor of scores and outputs.

#include <omp.h>

#include "attend_few.h"
#include "attend_many.h"

namespace kiln {

// With more queries than this for each KV head, from more than one token, packing keys pays.
constexpr int64_t kFewQueries = 16;
// With fewer parts for each thread than this, shares are too uneven.
constexpr int64_t kPartsPerThread = 4;

// A part of a row that one thread takes at once, for one KV head: some of its positions, for some of its tokens, and how
// long that takes.
struct Part {
  int64_t first_token, end_token, begin, end, cost;
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
      plan.add({0, static_cast<int64_t>(plan.row.tokens.size()), first, end, end - first});
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
      const int64_t chunk = plan.parts[part].begin / kChunkPositions, queries = plan.row.tokens.size() * group;
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

// What the tokens [first_token, end_token) of a row see, for one KV head. Its cost is the number of pairs.
inline Part find_part(const Row& row, int64_t first_token, int64_t end_token) {
  Part part{first_token, end_token, row.end, 0, 0};
  for (int64_t i = first_token; i < end_token; i++) {
    const Token& token = row.tokens[i];
    part.begin = std::min(part.begin, token.begin), part.end = std::max(part.end, token.end);
    part.cost += token.end - token.begin;
  }
  return part;
}

// The spans of a part. The last one writes the tokens into the cache.
inline std::vector<Part> list_spans(const Part& part) {
  std::vector<Part> spans;
  for (int64_t at = part.begin / kSpanPositions * kSpanPositions; at < part.end; at += kSpanPositions) {
    const int64_t begin = std::max(at, part.begin), end = std::min(at + kSpanPositions, part.end);
    spans.push_back({part.first_token, part.end_token, begin, end, (end - begin) * (part.end_token - part.first_token)});
  }
  return spans;
}

template <class Number, class Query, class Cached>
void attend_many(const Step<Query, Cached>& step, std::vector<Plan>& plans) {
  const int64_t most = tile_tokens(step), rows = tile_rows(step), padded_dim = step.padded_dim();
  const int64_t threads = omp_get_max_threads();
  int64_t num_parts = 0, most_positions = 0;
  for (Plan& plan : plans) {
    const int64_t count = plan.row.tokens.size();
    num_parts += (count + most - 1) / most * step.kv_heads;
    most_positions = std::max(most_positions, plan.row.end - plan.row.begin);
  }
  // With few tiles of queries, threads share their spans. That changes no bits.
  const bool is_shared = num_parts < threads * kPartsPerThread;
  const int64_t most_spans = most_positions / kSpanPositions + 2;
  int64_t num_partials = 0;
  for (Plan& plan : plans) {
    if (is_shared) plan.first_partial = num_partials;
    for (int64_t first = 0; first < static_cast<int64_t>(plan.row.tokens.size()); first += most) {
      const Part tile = find_part(plan.row, first, std::min<int64_t>(first + most, plan.row.tokens.size()));
      if (is_shared)
        for (const Part& span : list_spans(tile)) plan.add(span);
      else
        plan.add(tile);
    }
    if (is_shared) num_partials += step.kv_heads * plan.parts.size() * rows;
  }
  std::vector<Partial> partials(num_partials);
  const std::unique_ptr<float[]> sums(new float[num_partials * padded_dim]);
#pragma omp parallel num_threads(threads)
  {
    bool is_written = true;
    for (const Plan& plan : plans) {
      if (reads_own_tokens<Query, Cached>(plan.row)) continue;
      is_written = false;
#pragma omp for schedule(static) nowait
      for (size_t i = 0; i < plan.row.tokens.size(); i++)
        for (int64_t kv_head = 0; kv_head < step.kv_heads; kv_head++)
          write_token(step, plan.row, plan.row.tokens[i], kv_head);
    }
    if (!is_written) {
#pragma omp barrier
    }
    const int64_t tiles = PackedRow<Number>::count_tiles(most_positions, step.head_dim);
    ManyScratch<Number> scratch(rows, is_shared ? 0 : most_spans, tiles, step.head_dim);
    PackedRow<Number> packed(scratch.packed, tiles, step.head_dim);
    run_share(plans, step.kv_heads, [&](const Plan& plan, int64_t kv_head, size_t index) {
      const Row& row = plan.row;
      const Part& part = plan.parts[index];
      read_queries(step, row, kv_head, part.first_token, part.end_token, scratch);
      if (is_shared) {
        const int64_t at = plan.first_partial + (kv_head * plan.parts.size() + index) * rows;
        attend_span(
            step, row, kv_head, part.first_token, part.end_token, part.begin, part.end, scratch, packed, &partials[at],
            &sums[at * padded_dim]);
      } else {
        const std::vector<Part> spans = list_spans(part);
        for (size_t span = 0; span < spans.size(); span++)
          attend_span(
              step, row, kv_head, part.first_token, part.end_token, spans[span].begin, spans[span].end, scratch, packed,
              &scratch.partials[span * rows], &scratch.sums[span * rows * padded_dim]);
        join_spans(
            step, row, kv_head, part.first_token, part.end_token, scratch.partials.data(), spans.size(), scratch.joined);
      }
      const bool is_last = index + 1 == plan.parts.size() || plan.parts[index + 1].first_token != part.first_token;
      if constexpr (std::is_same_v<Query, Cached>)
        if (is_last && reads_own_tokens<Query, Cached>(row))
          for (int64_t i = part.first_token; i < part.end_token; i++)
            write_token(step, row, row.tokens[i], kv_head, stream<Cached>);
    });
    _mm_sfence();
    if (is_shared) {
#pragma omp barrier
      for (const Plan& plan : plans) {
#pragma omp for schedule(static) nowait
        for (int64_t kv_head = 0; kv_head < step.kv_heads; kv_head++)
          for (size_t first = 0, end = 0; first < plan.parts.size(); first = end) {
            const Part& part = plan.parts[first];
            while (end < plan.parts.size() && plan.parts[end].first_token == part.first_token) end++;
            const int64_t at = plan.first_partial + (kv_head * plan.parts.size() + first) * rows;
            join_spans(
                step, plan.row, kv_head, part.first_token, part.end_token, &partials[at], end - first, scratch.joined);
          }
      }
    }
  }
}

// Whether prompts in bfloat16 are multiplied by pairs. In the time of a float, AMD's Zen 4 multiplies a pair; Intel's
// processors take four times as long for one, so that floats are twice as fast there (decision 94).
static bool multiplies_pairs = kHasPairs && !__builtin_cpu_is("intel");

template <class Query, class Cached>
void attend(Step<Query, Cached> step) {
  step.scale *= kLog2E * kUnit<Cached>, step.soft_cap *= kLog2E;
  std::vector<Plan> plans;
  for (int64_t row = 0; row < step.rows; row++) {
    Plan plan{Row(step, row), {}};
    if (!plan.row.tokens.empty()) plans.push_back(std::move(plan));
  }
  if (step.tokens == 1 || step.tokens * step.group() <= kFewQueries)
    return attend_few(step, plans);
  if constexpr (kHasPairs && std::is_same_v<Query, BFloat16> && std::is_same_v<Cached, BFloat16>)
    if (multiplies_pairs) return attend_many<Pair>(step, plans);
  attend_many<float>(step, plans);
}

}  // namespace kiln
