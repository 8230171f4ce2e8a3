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

// The vocabulary, cut into so many parts of equal length: tokens with the same place in their parts form a column.
constexpr int64_t kParts = 32;

// Ids that are hashed at a time.
constexpr int64_t kLanes = 64;

}  // namespace

extern "C" {

// As `logit_changes.change_logits`, of one row. `mask` may be null.
void kiln_change_row(const float* given, int64_t vocab_size, int64_t num_pairs, const int32_t* ids, const float* bias,
                     const float* factor, const float* penalty, const uint8_t* mask, float* __restrict logits) {
  memcpy(logits, given, vocab_size * sizeof *logits);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    float& logit = logits[ids[pair]];
    const float own = logit + bias[pair];
    logit = (own < 0 ? own * factor[pair] : own / factor[pair]) + penalty[pair];
  }
  if (mask == nullptr) return;
  // Sums: what is no number stays so.
  const int64_t num_whole = vocab_size / 8;
  for (int64_t byte = 0; byte < num_whole; ++byte) {
    // A copy, which compilers know to be apart from the table: they add several numbers at a time.
    float own[8];
    memcpy(own, logits + 8 * byte, sizeof own);
    for (int bit = 0; bit < 8; ++bit) own[bit] += kAdded.values[mask[byte]][bit];
    memcpy(logits + 8 * byte, own, sizeof own);
  }
  for (int64_t id = 8 * num_whole; id < vocab_size; ++id) logits[id] += kAdded.values[mask[num_whole]][id % 8];
}

// As `kiln_change_row`, `sampling.is_valid` and `candidates.take_top`, of one row: returns 0 or 1, and writes `count` of
// the row's tokens, of which there are `vocab_size`.
int32_t kiln_find_top(const float* given, int64_t vocab_size, int64_t num_pairs, const int32_t* pair_ids,
                      const float* bias, const float* factor, const float* penalty, const uint8_t* mask, int64_t count,
                      float* top, int32_t* ids) {
  // One for all rows, which stays in the processor's cache.
  thread_local std::vector<float> changed;
  changed.resize(vocab_size);
  float* logits = changed.data();
  kiln_change_row(given, vocab_size, num_pairs, pair_ids, bias, factor, penalty, mask, logits);
  const int64_t num_columns = (vocab_size + kParts - 1) / kParts;
  std::vector<float> peaks(num_columns, kExcluded);
  // Not bool: no compiler computes with several of them at a time.
  int32_t is_below_infinity = 1;
  for (int64_t first = 0; first < vocab_size; first += num_columns) {
    const int64_t length = std::min(num_columns, vocab_size - first);
    for (int64_t column = 0; column < length; ++column) {
      const float logit = logits[first + column];
      peaks[column] = logit > peaks[column] ? logit : peaks[column];
      is_below_infinity &= logit < -kExcluded;
    }
  }
  if (!is_below_infinity || *std::max_element(peaks.begin(), peaks.end()) == kExcluded) {
    std::fill_n(top, count, 0.0f);
    std::fill_n(ids, count, 0);
    return 0;
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
      if (logits[id] >= threshold && logits[id] > kExcluded) keys.push_back(make_key(logits[id], id));
    }
  }
  if (static_cast<int64_t>(keys.size()) > count) {
    std::nth_element(keys.begin(), keys.begin() + count, keys.end(), std::greater<uint64_t>());
    keys.resize(count);
  }
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
  // Excluded tokens come last.
  for (int64_t id = 0; static_cast<int64_t>(keys.size()) < count; ++id) {
    if (logits[id] == kExcluded) keys.push_back(make_key(kExcluded, id));
  }
  for (int64_t place = 0; place < count; ++place) {
    ids[place] = static_cast<int32_t>(read_id(keys[place]));
    top[place] = logits[ids[place]];
  }
  return 1;
}

// As `noise.mix`, of ids that share their keys; `rounds` has a number for each round.
void kiln_mix(const int32_t* ids, int64_t count, int32_t first, int32_t second, const int32_t* rounds,
              int64_t num_rounds, int32_t* bits) {
  for (int64_t start = 0; start < count; start += kLanes) {
    const int64_t length = std::min(kLanes, count - start);
    uint32_t left[kLanes], right[kLanes];
    for (int64_t lane = 0; lane < length; ++lane) {
      const uint32_t id = static_cast<uint32_t>(ids[start + lane]);
      left[lane] = id ^ static_cast<uint32_t>(first);
      right[lane] = rotate(id, 16) ^ static_cast<uint32_t>(second);
    }
    for (int64_t round = 0; round < num_rounds; ++round) {
      const uint32_t key = static_cast<uint32_t>((round % 2 ? second : first) ^ rounds[round]);
      for (int64_t lane = 0; lane < length; ++lane) {
        const uint32_t own = left[lane];
        left[lane] = right[lane] ^ (own & rotate(own, 19)) ^ rotate(own, 14) ^ key;
        right[lane] = own;
      }
    }
    for (int64_t lane = 0; lane < length; ++lane) bits[start + lane] = static_cast<int32_t>(left[lane]);
  }
}
}
