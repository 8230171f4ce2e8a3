// What programs that time a kernel have in common. They include the kernel first.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <sys/mman.h>

inline double processor_time() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// Elements in huge pages, which `std::free` releases.
template <class Element>
Element* allocate(int64_t count) {
  constexpr int64_t huge = int64_t{2} << 20, size = static_cast<int64_t>(sizeof(Element));
  const int64_t bytes = (count * size + huge - 1) / huge * huge;
  void* memory = std::aligned_alloc(huge, bytes);
  madvise(memory, bytes, MADV_HUGEPAGE);
  Element* elements = static_cast<Element*>(memory);
  // Neither zeros nor denormals: some processors multiply these at another speed.
  for (int64_t i = 0; i < count; i++)
    if constexpr (size == 1)
      elements[i].bits = 0x28 + i % 16;
    else
      kiln::store_one(elements + i, 0.25f + 0.001f * (i % 512));
  return elements;
}

struct Totals {
  double seconds = 0, operations = 0, bytes = 0;

  // Answers one of the words that the program was called with.
  void print(const char* word) const {
    std::printf("%s %.9g %.9g %.9g\n", word, seconds, operations, bytes);
    std::fflush(stdout);
  }
};
