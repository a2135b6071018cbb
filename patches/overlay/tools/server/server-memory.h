#pragma once

// How much host memory this process can still take.

#include <cstdint>

// bytes: what the system has available, or what is left of the smallest control group limit on the path to this process
// 0 where the system does not tell
int64_t server_memory_available();

// bytes of this process that are resident and not of files, 0 where it is not known
int64_t server_memory_resident();

// from here on large blocks that are freed go back to the system at once
void server_memory_prefer_mmap();

// give small blocks that were freed back to the system
void server_memory_trim();
