// Measures what this machine's arithmetic units and memory do at most, for bench.limits.
//
//     limits THREADS SECONDS
//
// Prints, for each unit: its name, the rate of all threads by the clock, and the rate of one of them by its processor
// time. Rates are operations a second (an addition and a multiplication are two), or bytes a second. A unit that the
// processor lacks has no line. Compile it with -march=native.

#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <utility>
#include <vector>

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

double now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

#if defined(__AVX512F__)
using Floats = __m512;
using Integers = __m512i;
inline Floats fill(float value) { return _mm512_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
#else
using Floats = __m256;
using Integers = __m256i;
inline Floats fill(float value) { return _mm256_set1_ps(value); }
inline Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
#endif

constexpr int kSums = 12;  // so many that no sum waits for itself, and so few that none leaves its register

// Keeps the compiler from knowing what a register holds.
template <class Vector>
inline void hide(Vector& vector) {
  asm volatile("" : "+v"(vector));
}

// Repeats an operation on sums that do not depend on each other; returns the number of operations. The indices are
// constants, so that the sums stay in registers.
template <class Vector, class Operation, size_t... Index>
int64_t repeat(Vector a, Vector b, Vector first, Operation operation, std::index_sequence<Index...>) {
  constexpr int64_t kRepetitions = 20000;
  Vector sums[] = {(static_cast<void>(Index), first)...};
  hide(a);
  hide(b);
  (hide(sums[Index]), ...);
  for (int64_t i = 0; i < kRepetitions; i++) ((sums[Index] = operation(a, b, sums[Index])), ...);
  (hide(sums[Index]), ...);
  return kRepetitions * static_cast<int64_t>(sizeof...(Index));
}

template <class Vector, class Operation>
int64_t repeat(Vector a, Vector b, Vector first, Operation operation) {
  return repeat(a, b, first, operation, std::make_index_sequence<kSums>());
}

int64_t add_floats() {
  const auto operation = [](Floats a, Floats b, Floats sum) { return multiply_add(a, b, sum); };
  const int64_t count = repeat(fill(1.5f), fill(1e-9f), fill(1.0f), operation);
  return count * 2 * static_cast<int64_t>(sizeof(Floats) / sizeof(float));
}

#if defined(__AVX512BF16__)
int64_t add_bfloats() {
  const Integers ones = _mm512_set1_epi16(0x3f80);
  const auto operation = [](Integers a, Integers b, Integers sum) {
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)a, (__m512bh)b));
  };
  return repeat(ones, ones, _mm512_castps_si512(fill(1.0f)), operation) * 64;
}
#endif

#if defined(__AVX512VNNI__)
int64_t add_bytes() {
  const Integers ones = _mm512_set1_epi8(1);
  const auto operation = [](Integers a, Integers b, Integers sum) { return _mm512_dpbusd_epi32(sum, a, b); };
  return repeat(ones, ones, ones, operation) * 128;
}
#endif

#if defined(__AMX_BF16__)
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Linux gives a process the state of tiles if it asks for it, before its threads begin.
bool may_use_tiles() {
  constexpr long kRequestState = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
}

// Four sums, which is as many as an instruction takes turns to end.
int64_t add_tiles() {
  constexpr int64_t kRepetitions = 5000;
  // Not on the stack, because the compiler takes it that the instruction reads eight bytes.
  static const TileConfiguration configuration;
  _tile_loadconfig(&configuration);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < kRepetitions; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return kRepetitions * 4 * (16 * 16 * 32 * 2);
}
#endif

constexpr int64_t kMemoryBytes = int64_t{1} << 30;
char* memory;

int64_t read_memory(int thread, int threads) {
  constexpr int kStreams = 4;
  const int64_t begin = kMemoryBytes / threads * thread, step = kStreams * static_cast<int64_t>(sizeof(Integers));
  const char* const end = memory + begin + kMemoryBytes / threads / step * step;
  Integers sums[kStreams] = {};
  for (const char* at = memory + begin; at < end; at += step)
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; i++) sums[i] += reinterpret_cast<const Integers*>(at)[i];
  for (Integers& sum : sums) hide(sum);
  return end - memory - begin;
}

struct Unit {
  const char* name;
  int64_t (*run)(int thread, int threads);
  bool (*is_there)() = [] { return true; };
};

constexpr Unit kUnits[] = {
    {"read", read_memory},
    {"float32", [](int, int) { return add_floats(); }},
#if defined(__AVX512BF16__)
    {"bfloat16", [](int, int) { return add_bfloats(); }},
#endif
#if defined(__AMX_BF16__)
    {"bfloat16_tiles", [](int, int) { return add_tiles(); }, may_use_tiles},
#endif
#if defined(__AVX512VNNI__)
    {"int8", [](int, int) { return add_bytes(); }},
#endif
};

void measure(const Unit& unit, int threads, double seconds) {
  struct Share {
    double operations = 0, begin, end, processor;
  };
  std::vector<Share> shares(threads);
  std::barrier start(threads);
  std::vector<std::thread> running;
  for (int thread = 0; thread < threads; thread++)
    running.emplace_back([&, thread] {
      Share& share = shares[thread];
      unit.run(thread, threads);  // warms up
      start.arrive_and_wait();
      const double processor = now(CLOCK_THREAD_CPUTIME_ID);
      share.begin = now(CLOCK_MONOTONIC);
      do share.operations += unit.run(thread, threads);
      while (now(CLOCK_MONOTONIC) < share.begin + seconds);
      share.end = now(CLOCK_MONOTONIC);
      share.processor = now(CLOCK_THREAD_CPUTIME_ID) - processor;
    });
  for (std::thread& thread : running) thread.join();
  double rate = 0, operations = 0, processor = 0;
  for (const Share& share : shares) {
    rate += share.operations / (share.end - share.begin);
    operations += share.operations;
    processor += share.processor;
  }
  std::printf("%s %.9g %.9g\n", unit.name, rate, operations / processor);
}

int main(int count, char** words) {
  if (count != 3) return 2;
  const int64_t huge = int64_t{2} << 20;
  memory = static_cast<char*>(std::aligned_alloc(huge, kMemoryBytes));
  madvise(memory, kMemoryBytes, MADV_HUGEPAGE);
  for (int64_t i = 0; i < kMemoryBytes; i += 8) *reinterpret_cast<int64_t*>(memory + i) = i;
  for (const Unit& unit : kUnits)
    if (unit.is_there()) measure(unit, std::atoi(words[1]), std::atof(words[2]));
  return 0;
}
