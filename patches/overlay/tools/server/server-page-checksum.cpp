#include "server-page-checksum.h"

#define XXH_INLINE_ALL
#include "hash/xxhash/xxhash.h"

uint64_t server_page_checksum(const void * data, size_t size) {
    return XXH3_64bits(data, size);
}

struct server_page_checksum_state::state {
    XXH3_state_t xxh;
};

server_page_checksum_state::server_page_checksum_state() : st(std::make_unique<state>()) {
    XXH3_64bits_reset(&st->xxh);
}

server_page_checksum_state::~server_page_checksum_state() = default;

void server_page_checksum_state::add(const void * data, size_t size) {
    XXH3_64bits_update(&st->xxh, data, size);
}

uint64_t server_page_checksum_state::value() const {
    return XXH3_64bits_digest(&st->xxh);
}

uint64_t server_page_checksum(const std::vector<server_page_span> & parts) {
    server_page_checksum_state state;

    for (const auto & part : parts) {
        state.add(part.data, part.size);
    }

    return state.value();
}
