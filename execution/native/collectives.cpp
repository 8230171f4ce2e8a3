// A collective moves its tensor in chunks. For each chunk a rank writes its part into a buffer of its own, meets the
// others at a barrier, and reads all parts. Chunks alternate between two sets of buffers, so a chunk needs no second
// barrier: a buffer is written again only after the next chunk's barrier, which no rank reaches before it has read this
// chunk.
//
// Large sums among many ranks are divided: each rank adds up one slice of the chunk and the others copy it, at the
// price of one more barrier. Either way every element is added in rank order by the same code, so all ranks get the
// same bits.

#include "collectives.h"

#include <atomic>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define KILN_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KILN_EVERY_CPU
#endif

namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kChunkBytes = 256 * 1024;
// Bounds the array of the parts' addresses, which is on the stack.
constexpr int32_t kMaxRanks = 256;
// Measured: from this many bytes and ranks on, dividing a sum pays for its second barrier.
constexpr size_t kDividedBytes = 64 * 1024;
constexpr int kDividedRanks = 4;
// About 2 microseconds.
constexpr int kLapsBetweenYields = 32;
// The lowest bit of Shared::generation.
constexpr uint32_t kAborted = 1;

// The start of the shared memory. Behind it are the buffers: two of kChunkBytes for each rank, two for divided sums.
struct Shared {
  // Twice the number of barriers passed, plus kAborted. Waiting ranks sleep on it.
  alignas(kCacheLine) std::atomic<uint32_t> generation;
  alignas(kCacheLine) std::atomic<uint32_t> arrived;
  alignas(kCacheLine) std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

Shared& shared_of(const Communicator& communicator) { return *static_cast<Shared*>(communicator.memory); }

char* buffer_of(const Communicator& communicator, uint32_t turn, int owner) {
  const size_t index = turn * (communicator.tp_degree + 1) + owner;
  return static_cast<char*>(communicator.memory) + sizeof(Shared) + index * kChunkBytes;
}

char* result_buffer_of(const Communicator& communicator, uint32_t turn) {
  return buffer_of(communicator, turn, communicator.tp_degree);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Not FUTEX_PRIVATE: the sleepers are other processes.
void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, int64_t timeout_ns) {
  const timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void abort_all(Shared& shared) {
  shared.generation.fetch_or(kAborted);
  wake_all(shared.generation);
}

// Waits until the generation changes: spins at first, then sleeps.
Outcome wait_for_change(const Communicator& communicator, uint32_t generation) {
  Shared& shared = shared_of(communicator);
  const int64_t started = now_ns();
  while (communicator.spin_ns > 0 && now_ns() - started < communicator.spin_ns) {
    for (int lap = 0; lap < kLapsBetweenYields; ++lap) {
      if (shared.generation.load(std::memory_order_acquire) != generation) return kDone;
      pause_briefly();
    }
    // The rank that this one waits for may be waiting for this very core: the scheduler prefers to run a woken process
    // beside the one that woke it.
    sched_yield();
  }
  Outcome outcome = kDone;
  shared.sleepers.fetch_add(1);
  while (shared.generation.load() == generation) {
    const int64_t left_ns = started + communicator.timeout_ns - now_ns();
    if (left_ns <= 0) {
      abort_all(shared);
      outcome = kTimedOut;
      break;
    }
    sleep_while(shared.generation, generation, left_ns);
  }
  shared.sleepers.fetch_sub(1);
  return outcome;
}

// Returns when all ranks have arrived. Everything that they wrote before is then visible.
Outcome meet(const Communicator& communicator) {
  Shared& shared = shared_of(communicator);
  const uint32_t generation = shared.generation.load(std::memory_order_acquire);
  if (generation & kAborted) return kWasAborted;
  if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(communicator.tp_degree)) {
    shared.arrived.store(0, std::memory_order_relaxed);
    const uint32_t before = shared.generation.fetch_add(2);
    if (shared.sleepers.load() > 0) wake_all(shared.generation);
    return before & kAborted ? kWasAborted : kDone;
  }
  const Outcome outcome = wait_for_change(communicator, generation);
  if (outcome != kDone) return outcome;
  return shared.generation.load(std::memory_order_acquire) & kAborted ? kWasAborted : kDone;
}

// The set of buffers that a chunk uses. All ranks read the same number: it changes only when all have arrived.
uint32_t turn_of(const Communicator& communicator) {
  return (shared_of(communicator).generation.load(std::memory_order_acquire) >> 1) & 1;
}

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Both round to nearest, ties to even, as torch does.

struct BFloat16 {
  static float widen(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

  static uint16_t narrow(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
  }
};

struct Float16 {
  static float widen(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
    // Exponents differ by 112; multiplying is correct for subnormal numbers too.
    const uint32_t wide = to_bits(from_bits(rest << 13) * 0x1p112f) | (rest >= 0x7c00 ? 0x7f800000 : 0);
    return from_bits(wide | sign);
  }

  static uint16_t narrow(float value) {
    constexpr uint32_t kInfinity = 0x7f800000, kRoundsToInfinity = 0x477ff000, kSmallestNormal = 0x38800000;
    const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t narrow;
    if (rest > kInfinity) {
      narrow = 0x7e00;
    } else if (rest >= kRoundsToInfinity) {
      narrow = 0x7c00;
    } else if (rest < kSmallestNormal) {
      // The last bit of 0.5 has the value of a subnormal number's last bit, so the sum rounds at the right place.
      narrow = to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f);
    } else {
      narrow = ((rest + 0xfff + ((rest >> 13) & 1)) >> 13) - (112 << 10);
    }
    return static_cast<uint16_t>(narrow | sign);
  }
};

constexpr int64_t kBlock = 512;

KILN_EVERY_CPU void add_float32(const char* const* parts, int num_parts, int64_t count, char* out) {
  float* sum = reinterpret_cast<float*>(out);
  const float* first = reinterpret_cast<const float*>(parts[0]);
  const float* second = reinterpret_cast<const float*>(parts[1]);
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t end = start + kBlock < count ? start + kBlock : count;
    for (int64_t i = start; i < end; ++i) sum[i] = first[i] + second[i];
    for (int part = 2; part < num_parts; ++part) {
      const float* next = reinterpret_cast<const float*>(parts[part]);
      for (int64_t i = start; i < end; ++i) sum[i] += next[i];
    }
  }
}

KILN_EVERY_CPU void add_int32(const char* const* parts, int num_parts, int64_t count, char* out) {
  uint32_t* sum = reinterpret_cast<uint32_t*>(out);
  memcpy(sum, parts[0], count * sizeof *sum);
  for (int part = 1; part < num_parts; ++part) {
    const uint32_t* next = reinterpret_cast<const uint32_t*>(parts[part]);
    for (int64_t i = 0; i < count; ++i) sum[i] += next[i];
  }
}

// Adds in float32 and rounds once.
template <typename Narrow>
inline __attribute__((always_inline)) void add_narrow(const char* const* parts, int num_parts, int64_t count, char* out) {
  float sum[kBlock];
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t length = start + kBlock < count ? kBlock : count - start;
    const uint16_t* first = reinterpret_cast<const uint16_t*>(parts[0]) + start;
    for (int64_t i = 0; i < length; ++i) sum[i] = Narrow::widen(first[i]);
    for (int part = 1; part < num_parts; ++part) {
      const uint16_t* next = reinterpret_cast<const uint16_t*>(parts[part]) + start;
      for (int64_t i = 0; i < length; ++i) sum[i] += Narrow::widen(next[i]);
    }
    uint16_t* rounded = reinterpret_cast<uint16_t*>(out) + start;
    for (int64_t i = 0; i < length; ++i) rounded[i] = Narrow::narrow(sum[i]);
  }
}

KILN_EVERY_CPU void add_bfloat16(const char* const* parts, int num_parts, int64_t count, char* out) {
  add_narrow<BFloat16>(parts, num_parts, count, out);
}

KILN_EVERY_CPU void add_float16(const char* const* parts, int num_parts, int64_t count, char* out) {
  add_narrow<Float16>(parts, num_parts, count, out);
}

// Adds items [first, first + count) of the ranks' buffers in one set.
void add_parts(const Communicator& communicator, uint32_t turn, DType dtype, int64_t first, int64_t count, char* out) {
  const char* parts[kMaxRanks];
  for (int rank = 0; rank < communicator.tp_degree; ++rank) {
    parts[rank] = buffer_of(communicator, turn, rank) + first * item_size(dtype);
  }
  switch (dtype) {
    case kFloat32: return add_float32(parts, communicator.tp_degree, count, out);
    case kBFloat16: return add_bfloat16(parts, communicator.tp_degree, count, out);
    case kInt32: return add_int32(parts, communicator.tp_degree, count, out);
    case kFloat16: return add_float16(parts, communicator.tp_degree, count, out);
  }
}

// The first item of a rank's slice of a chunk. Each slice begins on a cache line of its own.
int64_t slice_start(const Communicator& communicator, int64_t count, int rank) {
  constexpr int64_t kItems = kCacheLine;
  const int64_t slice = (count / communicator.tp_degree + kItems - 1) / kItems * kItems;
  return slice * rank < count ? slice * rank : count;
}

Outcome reduce_chunk(const Communicator& communicator, DType dtype, const char* in, int64_t count, char* out) {
  const uint32_t turn = turn_of(communicator);
  const size_t size = count * item_size(dtype);
  memcpy(buffer_of(communicator, turn, communicator.rank), in, size);
  Outcome outcome = meet(communicator);
  if (outcome != kDone) return outcome;
  if (communicator.tp_degree < kDividedRanks || size < kDividedBytes) {
    add_parts(communicator, turn, dtype, 0, count, out);
    return kDone;
  }
  const int64_t start = slice_start(communicator, count, communicator.rank);
  const bool is_last = communicator.rank + 1 == communicator.tp_degree;
  const int64_t end = is_last ? count : slice_start(communicator, count, communicator.rank + 1);
  char* result = result_buffer_of(communicator, turn);
  if (end > start) add_parts(communicator, turn, dtype, start, end - start, result + start * item_size(dtype));
  outcome = meet(communicator);
  if (outcome == kDone) memcpy(out, result, size);
  return outcome;
}

}  // namespace

extern "C" {

int32_t kiln_max_ranks() { return kMaxRanks; }

size_t kiln_memory_size(int32_t tp_degree) { return sizeof(Shared) + 2 * (tp_degree + 1) * kChunkBytes; }

void kiln_abort(void* memory) { abort_all(*static_cast<Shared*>(memory)); }

int32_t kiln_is_aborted(const void* memory) {
  return static_cast<const Shared*>(memory)->generation.load() & kAborted;
}

void kiln_reset(void* memory) {
  Shared& shared = *static_cast<Shared*>(memory);
  shared.arrived.store(0);
  shared.sleepers.store(0);
  shared.generation.fetch_and(~kAborted);
}

int32_t kiln_all_reduce(const Communicator* communicator, int32_t dtype, const void* in, int64_t count, void* out) {
  const DType type = static_cast<DType>(dtype);
  const int64_t chunk = kChunkBytes / item_size(type);
  for (int64_t start = 0; start < count; start += chunk) {
    const int64_t length = count - start < chunk ? count - start : chunk;
    const size_t offset = start * item_size(type);
    const char* part = static_cast<const char*>(in) + offset;
    const Outcome outcome = reduce_chunk(*communicator, type, part, length, static_cast<char*>(out) + offset);
    if (outcome != kDone) return outcome;
  }
  return kDone;
}

int32_t kiln_all_gather(const Communicator* communicator, const void* in, int64_t num_rows, int64_t row_bytes,
                        void* out) {
  const int64_t size = num_rows * row_bytes;
  const int64_t out_row_bytes = row_bytes * communicator->tp_degree;
  for (int64_t start = 0; start < size; start += kChunkBytes) {
    const int64_t end = size - start < static_cast<int64_t>(kChunkBytes) ? size : start + kChunkBytes;
    const uint32_t turn = turn_of(*communicator);
    memcpy(buffer_of(*communicator, turn, communicator->rank), static_cast<const char*>(in) + start, end - start);
    const Outcome outcome = meet(*communicator);
    if (outcome != kDone) return outcome;
    for (int rank = 0; rank < communicator->tp_degree; ++rank) {
      const char* part = buffer_of(*communicator, turn, rank);
      char* column = static_cast<char*>(out) + rank * row_bytes;
      for (int64_t at = start; at < end;) {
        const int64_t row = at / row_bytes, within = at % row_bytes;
        const int64_t length = row_bytes - within < end - at ? row_bytes - within : end - at;
        memcpy(column + row * out_row_bytes + within, part + (at - start), length);
        at += length;
      }
    }
  }
  return kDone;
}
}
