#pragma once

// The checksum of page files: XXH3, 64 bits. It finds damage, it proves no origin.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct server_page_span {
    const void * data = nullptr;
    size_t       size = 0;
};

uint64_t server_page_checksum(const void * data, size_t size);

// of the parts one after another
uint64_t server_page_checksum(const std::vector<server_page_span> & parts);

// the same, a piece at a time
struct server_page_checksum_state {
    server_page_checksum_state();
    ~server_page_checksum_state();

    void     add(const void * data, size_t size);
    uint64_t value() const;

private:
    struct state;
    std::unique_ptr<state> st;
};
