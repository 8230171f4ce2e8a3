// Sums and concatenations over the rank processes of one deployment, in memory that they share.
//
// A plain C interface: `execution/collectives/library.py` declares it once more for Python.

#pragma once

#include <cstddef>
#include <cstdint>

enum Outcome : int32_t { kDone = 0, kWasAborted = 1, kTimedOut = 2, kInvalid = 3 };
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt32 = 2, kFloat16 = 3 };

// One rank's handle. Every rank calls the same collectives in the same order, in one thread.
struct Communicator {
  void* memory;
  int32_t rank;
  int32_t tp_degree;
  // A rank that waits for others spins this long before it sleeps.
  int64_t spin_ns;
  // A rank that waits longer fails the collective for all ranks.
  int64_t timeout_ns;
};

inline size_t item_size(int32_t dtype) { return dtype == kBFloat16 || dtype == kFloat16 ? 2 : 4; }

extern "C" {

// The largest number of ranks that can share memory.
int32_t kiln_max_ranks();

// Bytes of the memory that the ranks share. The caller zeroes it.
size_t kiln_memory_size(int32_t tp_degree);

// Fails the running collective, and all later ones until `kiln_reset`. Any process may call it at any time.
void kiln_abort(void* memory);

int32_t kiln_is_aborted(const void* memory);

// Allows collectives again. No rank may be in one.
void kiln_reset(void* memory);

// Sums `count` items in rank order, bitwise equal on all ranks. Returns an Outcome; `out` is undefined unless kDone.
int32_t kiln_all_reduce(const Communicator* communicator, int32_t dtype, const void* in, int64_t count, void* out);

// Concatenates rows: `in` has `num_rows` rows of `row_bytes`; each row of `out` holds that row of every rank, in rank
// order. Returns an Outcome; `out` is undefined unless kDone.
int32_t kiln_all_gather(const Communicator* communicator, const void* in, int64_t num_rows, int64_t row_bytes,
                        void* out);

// Sets the communicator that compiled executables use in this thread; null for none.
void kiln_use(const Communicator* communicator);
}
