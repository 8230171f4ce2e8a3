// What ranks do on the host to rows of logits, float32 [vocab_size] each; `execution/host_rows.py` calls it.
//
// Results have the bits of torch's, so the compiler must not join products and sums (-ffp-contract=off).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// What each byte of a mask adds to eight logits.
struct Added {
  float values[256][8];

  constexpr Added() : values() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int bit = 0; bit < 8; ++bit) values[byte][bit] = byte >> bit & 1 ? 0.0f : kExcluded;
    }
  }
};

constexpr Added kAdded;

// The likelier token has the greater key; of equally likely ones, that with the lower id.
uint64_t make_key(float logit, int64_t id) {
  const float unsigned_zero = logit + 0.0f;
  uint32_t bits;
  memcpy(&bits, &unsigned_zero, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 1u << 31;
  return static_cast<uint64_t>(bits) << 32 | ~static_cast<uint32_t>(id);
}

int64_t read_id(uint64_t key) { return ~static_cast<uint32_t>(key); }

uint32_t rotate(uint32_t bits, int count) { return bits << count | bits >> (32 - count); }

// A row of logits, and what changes it. The arrays have a number for each pair; `mask` may be null.
struct Row {
  const float* logits;
  float temperature;
  int64_t num_pairs;
  const int32_t* pair_ids;
  const float* bias;
  const float* factor;
  const float* penalty;
  const uint8_t* mask;

  float add_mask(float logit, int64_t id) const {
    // A sum: what is no number stays so.
    return mask == nullptr ? logit : logit + kAdded.values[mask[id / 8]][id % 8];
  }
};

void change_pairs(const Row& row, float* logits) {
  for (int64_t pair = 0; pair < row.num_pairs; ++pair) {
    float& logit = logits[row.pair_ids[pair]];
    const float own = logit + row.bias[pair];
    logit = (own < 0 ? own * row.factor[pair] : own / row.factor[pair]) + row.penalty[pair];
  }
}

// The vocabulary, cut into so many parts of equal length: tokens with the same place in their parts form a column.
constexpr int64_t kParts = 32;

// The logits of a byte of the mask.
using Eight = float __attribute__((vector_size(32)));

inline void load(const float* from, Eight& loaded) { memcpy(&loaded, from, sizeof loaded); }

// What takes most of the time is compiled twice, and the processor decides: baseline instructions take four numbers.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

// Raises the highest logit of each column by those of a part; returns whether all of them are less than infinity.
FOR_EACH_PROCESSOR bool raise_peaks(const float* logits, const uint8_t* mask, int64_t length, float* peaks) {
  // Not bool, for the same reason. Where the mask adds something, it changes no answer.
  int32_t is_below_infinity = 1;
  for (int64_t column = 0; column < length; ++column) is_below_infinity &= logits[column] < -kExcluded;
  const int64_t num_whole = length / 8;
  for (int64_t byte = 0; byte < num_whole; ++byte) {
    const float* const added = kAdded.values[mask == nullptr ? 0xFF : mask[byte]];
    Eight own, change, peak;
    load(logits + 8 * byte, own), load(added, change), load(peaks + 8 * byte, peak);
    own += change;
    const Eight raised = own > peak ? own : peak;
    memcpy(peaks + 8 * byte, &raised, sizeof raised);
  }
  for (int64_t column = 8 * num_whole; column < length; ++column) {
    const float own = logits[column] + kAdded.values[mask == nullptr ? 0xFF : mask[num_whole]][column % 8];
    peaks[column] = std::max(peaks[column], own);
  }
  return is_below_infinity;
}

bool find_top(const Row& row, int64_t vocab_size, int64_t count, float* scores, int32_t* ids) {
  const float* logits = row.logits;
  // One for all rows, which stays in the processor's cache.
  thread_local std::vector<float> changed;
  if (row.num_pairs > 0) {
    changed.assign(logits, logits + vocab_size);
    change_pairs(row, changed.data());
    logits = changed.data();
  }
  // Each part begins with a byte of the mask.
  const int64_t num_columns = (vocab_size + 8 * kParts - 1) / (8 * kParts) * 8;
  std::vector<float> peaks(num_columns, kExcluded);
  bool is_valid = true;
  for (int64_t first = 0; first < vocab_size; first += num_columns) {
    const uint8_t* const mask = row.mask == nullptr ? nullptr : row.mask + first / 8;
    is_valid &= raise_peaks(logits + first, mask, std::min(num_columns, vocab_size - first), peaks.data());
  }
  if (!is_valid || *std::max_element(peaks.begin(), peaks.end()) == kExcluded) {
    std::fill_n(scores, count, 0.0f);
    std::fill_n(ids, count, 0);
    return false;
  }
  // Each of the highest columns has a token at least as likely as this.
  float threshold = kExcluded;
  if (count <= num_columns) {
    std::vector<float> ordered = peaks;
    std::nth_element(ordered.begin(), ordered.begin() + count - 1, ordered.end(), std::greater<float>());
    threshold = ordered[count - 1];
  }
  std::vector<uint64_t> keys;
  for (int64_t column = 0; column < num_columns; ++column) {
    if (peaks[column] < threshold || peaks[column] == kExcluded) continue;
    for (int64_t id = column; id < vocab_size; id += num_columns) {
      const float logit = row.add_mask(logits[id], id);
      if (logit >= threshold && logit > kExcluded) keys.push_back(make_key(logit, id));
    }
  }
  if (static_cast<int64_t>(keys.size()) > count) {
    std::nth_element(keys.begin(), keys.begin() + count, keys.end(), std::greater<uint64_t>());
    keys.resize(count);
  }
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
  // Excluded tokens come last.
  for (int64_t id = 0; static_cast<int64_t>(keys.size()) < count; ++id) {
    if (row.add_mask(logits[id], id) == kExcluded) keys.push_back(make_key(kExcluded, id));
  }
  const float largest = row.add_mask(logits[read_id(keys[0])], read_id(keys[0]));
  const float divisor = row.temperature == 0 ? 1 : row.temperature;
  for (int64_t place = 0; place < count; ++place) {
    ids[place] = static_cast<int32_t>(read_id(keys[place]));
    scores[place] = (row.add_mask(logits[ids[place]], ids[place]) - largest) / divisor;
  }
  return true;
}

// Ids that are hashed at a time.
constexpr int64_t kLanes = 64;

}  // namespace

extern "C" {

// As `logit_changes.change_logits`.
void kiln_change_row(const Row* row, int64_t vocab_size, float* __restrict logits) {
  memcpy(logits, row->logits, vocab_size * sizeof *logits);
  change_pairs(*row, logits);
  if (row->mask == nullptr) return;
  const int64_t num_whole = vocab_size / 8;
  for (int64_t byte = 0; byte < num_whole; ++byte) {
    // A copy, which compilers know to be apart from the table: they add several numbers at a time.
    float own[8];
    memcpy(own, logits + 8 * byte, sizeof own);
    for (int bit = 0; bit < 8; ++bit) own[bit] += kAdded.values[row->mask[byte]][bit];
    memcpy(logits + 8 * byte, own, sizeof own);
  }
  for (int64_t id = 8 * num_whole; id < vocab_size; ++id) logits[id] = row->add_mask(logits[id], id);
}

// As `kiln_change_row`, `sampling.is_valid`, `candidates.take_top` and `sampling.score`: writes scores and ids of
// `count` tokens of each row, of which there are `vocab_size`, and whether its logits are numbers.
void kiln_find_top(const Row* rows, int64_t num_rows, int64_t vocab_size, int64_t count, float* scores, int32_t* ids,
                   bool* valid) {
  for (int64_t row = 0; row < num_rows; ++row) {
    valid[row] = find_top(rows[row], vocab_size, count, scores + row * count, ids + row * count);
  }
}

// As `sampling.find_nucleus`, but the first candidate stays: excludes the others from `scores`, [num_rows, count] as
// `weights`. `measure` is [num_rows]; `step` is how far the `top_p` of one row is from that of the next.
void kiln_keep_nucleus(const float* weights, const float* measure, const float* top_p, int64_t step, int64_t num_rows,
                       int64_t count, float* scores) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const float share = top_p[row * step], mass = share * measure[row];
    if (share >= 1) continue;
    // torch sums in this precision, too.
    double sum = 0;
    for (int64_t place = row * count; place < (row + 1) * count; ++place) {
      sum += weights[place];
      const float before = static_cast<float>(sum) - weights[place];
      if (place > row * count && !(before < mass)) scores[place] = kExcluded;
    }
  }
}

// As `noise.draw_uniform`, but less than 0: numbers [num_rows, count] of as many ids and of keys [num_rows, 2]. `step`
// is how far the ids of one row are from those of the next; `constants` has one for each round.
void kiln_draw_uniform(const int32_t* ids, int64_t step, int64_t num_rows, int64_t count, const int32_t* keys,
                       const int32_t* constants, int64_t num_rounds, float* uniform) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t* const own = keys + 2 * row;
    for (int64_t start = 0; start < count; start += kLanes) {
      const int64_t length = std::min(kLanes, count - start);
      uint32_t left[kLanes], right[kLanes];
      for (int64_t lane = 0; lane < length; ++lane) {
        const uint32_t id = static_cast<uint32_t>(ids[row * step + start + lane]);
        left[lane] = id ^ static_cast<uint32_t>(own[0]);
        right[lane] = rotate(id, 16) ^ static_cast<uint32_t>(own[1]);
      }
      for (int64_t round = 0; round < num_rounds; ++round) {
        const uint32_t key = static_cast<uint32_t>(own[round % 2] ^ constants[round]);
        for (int64_t lane = 0; lane < length; ++lane) {
          const uint32_t before = left[lane];
          left[lane] = right[lane] ^ (before & rotate(before, 19)) ^ rotate(before, 14) ^ key;
          right[lane] = before;
        }
      }
      for (int64_t lane = 0; lane < length; ++lane) {
        const float high = static_cast<float>(left[lane] >> 16), low = static_cast<float>(left[lane] & 0xFFFF);
        uniform[row * count + start + lane] = (high * 0x1p-16f + (low + 0.5f) * 0x1p-32f) * (0x1p-24f - 1);
      }
    }
  }
}

// What `noise.spread` does between two logarithms: makes numbers of those less than 0.
void kiln_scale(int64_t count, float scale, float* numbers) {
  for (int64_t place = 0; place < count; ++place) numbers[place] = -numbers[place] * scale - 1;
}

// As `sampling.draw`: the candidate of each row with the largest sum of its score and its noise, which is `most` less a
// number of `rest`. Scores and numbers are [num_rows, count]; `step` is as in `kiln_draw_uniform`.
void kiln_draw(const int32_t* ids, int64_t step, int64_t num_rows, int64_t count, const float* scores,
               const float* rest, float most, int32_t* tokens) {
  for (int64_t row = 0; row < num_rows; ++row) {
    float largest = kExcluded;
    int32_t token = std::numeric_limits<int32_t>::max();
    for (int64_t place = 0; place < count; ++place) {
      const float value = scores[row * count + place] + (most - rest[row * count + place]);
      const int32_t id = ids[row * step + place];
      if (value > largest || (value == largest && id < token)) largest = value, token = id;
    }
    tokens[row] = token;
  }
}
}
