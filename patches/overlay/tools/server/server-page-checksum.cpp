#include "server-page-checksum.h"

#define XXH_INLINE_ALL
#include "hash/xxhash/xxhash.h"

uint64_t server_page_checksum(const void * data, size_t size) {
    return XXH3_64bits(data, size);
}

uint64_t server_page_checksum(const std::vector<server_page_span> & parts) {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);

    for (const auto & part : parts) {
        XXH3_64bits_update(&state, part.data, part.size);
    }

    return XXH3_64bits_digest(&state);
}
