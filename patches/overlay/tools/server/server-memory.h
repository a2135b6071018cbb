#pragma once

// How much host memory this process can still take.

#include <cstdint>

// bytes: what the system has available, or what is left of the smallest control group limit on the path to this process
// 0 where the system does not tell
int64_t server_memory_available();

// bytes of this process that are resident and not of files, 0 where it is not known
int64_t server_memory_resident();
