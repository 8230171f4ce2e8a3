# Included by llama-cpp-python's project() when `bench.peers.install` builds it. Its CMakeLists.txt forces the cache's
# LLAMA_BUILD_COMMON, the code of command lines and servers, which is as large as the library; a variable goes before
# the cache.
set(LLAMA_BUILD_COMMON OFF)
