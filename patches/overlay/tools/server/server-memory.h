#pragma once

// How much host memory this process can still take, and what it is asked for beside buffers.

#include <cstddef>
#include <cstdint>

// host memory that libllama keeps for each KV cell beside the KV itself; it is written when the cache is made
constexpr int64_t SERVER_KV_CELL_BYTES = 64;

// bytes: what the system has available, or what is left of the smallest control group limit on the path to this process
// 0 where the system does not tell
int64_t server_memory_available();

// bytes of this process that are resident and not of files, 0 where it is not known
int64_t server_memory_resident();

// of a large block that is about to be filled: a few large faults instead of many small ones, where the system has that
void server_memory_prefer_huge_pages(void * data, size_t size);

// from here on large blocks that are freed go back to the system at once
void server_memory_prefer_mmap();

// give small blocks that were freed back to the system
void server_memory_trim();
