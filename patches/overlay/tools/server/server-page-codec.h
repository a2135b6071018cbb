#pragma once

// The bytes of the files beside a page's own file: made out of what they hold, and read back where they are whole. Pure.
//
// A page in files is FILE, in libllama's own format, and beside it FILE.ckpt, FILE.lora and FILE.dft. These three have one
// container: a header with the size and the checksum of each section, then the sections. patches/page-files.md has it byte
// for byte. What is read is not trusted: a size is held against what is there before memory is taken for it.

#include "server-page-checksum.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// of the three files; another one is not read
constexpr uint32_t SERVER_PAGE_CODEC_VERSION = 1;

// of the three files: the magic, and the whole header at its longest, with 3 sections and 65536 checkpoints
constexpr size_t SERVER_PAGE_MAGIC_SIZE      = 8;
constexpr size_t SERVER_PAGE_HEADER_SIZE_MAX = 28 + 20*(3 + 65536);

// of all of a file or its begin; with SERVER_PAGE_HEADER_SIZE_MAX bytes one of ours is known even where its first 16 bytes
// are damaged, with fewer by its magic alone
bool server_page_is_ours   (const server_page_span & contents); // there is enough of it to say so
bool server_page_is_foreign(const server_page_span & contents); // it does not even begin as one of ours does

// what a state is good for, by content: names and values, in order
// both are printable UTF-8 and not empty: they end up in logs and in answers
struct server_page_identity {
    std::vector<std::pair<std::string, std::string>> fields;
};

// "": that side does not have the field
struct server_page_difference {
    std::string field;
    std::string page;
    std::string server;
};

// in the order of the page's fields, then of those that only the server has; empty: the state can be used
std::vector<server_page_difference> server_page_compare(const server_page_identity & page, const server_page_identity & server);

// another file of the same page, as it was written
struct server_page_member {
    std::string suffix; // "": FILE itself

    uint64_t n_bytes  = 0;
    uint64_t checksum = 0; // of the whole file
};

// the spans are the caller's memory where it is encoded, and point into the file's bytes where it was decoded
struct server_page_checkpoint {
    int64_t n_tokens = 0;
    int32_t pos_min  = 0;
    int32_t pos_max  = 0;

    server_page_span target;
    server_page_span draft;
    server_page_span spec;
};

// FILE.ckpt, which is always there
struct server_page_ckpt {
    server_page_identity identity;

    std::vector<server_page_member>     members; // FILE, and each of the other two where it is there
    std::vector<server_page_checkpoint> checkpoints;

    // the last position in each context, -1 where it holds nothing
    int32_t pos_max_target = -1;
    int32_t pos_max_draft  = -1;

    int n_lost = 0; // decoded: checkpoints that were damaged, they are not among the others
};

// FILE.lora, where adapters are active
struct server_page_lora {
    std::vector<std::pair<std::string, float>> adapters; // fingerprint, scale
};

// FILE.dft, where there is a draft or a speculative state
struct server_page_draft {
    server_page_span state;
    server_page_span spec;
};

// a file as parts that are written one after another: of the caller's data, which is not copied, and of bytes that are owned
// here. Moved, not copied: the parts point into it
struct server_page_bytes {
    server_page_bytes() = default;
    server_page_bytes(server_page_bytes &&) = default;
    server_page_bytes & operator=(server_page_bytes &&) = default;

    std::vector<server_page_span>     parts;
    std::vector<std::vector<uint8_t>> owned;

    std::string error; // not empty: what the format does not allow, and there are no parts
};

// reads the caller's data once, for the checksums
server_page_bytes server_page_encode(const server_page_ckpt  & page);
server_page_bytes server_page_encode(const server_page_lora  & page);
server_page_bytes server_page_encode(const server_page_draft & page);

enum server_page_decode_status {
    SERVER_PAGE_DECODE_OK,
    SERVER_PAGE_DECODE_FOREIGN, // another program's file
    SERVER_PAGE_DECODE_VERSION, // of a server with another format
    SERVER_PAGE_DECODE_TORN,    // shorter than its header says
    SERVER_PAGE_DECODE_CORRUPT,
};

struct server_page_decode_result {
    server_page_decode_status status = SERVER_PAGE_DECODE_OK;

    std::string message; // what is wrong, and where
};

// `out` is empty where the status is not OK; its spans live as long as `data`
server_page_decode_result server_page_decode(const uint8_t * data, size_t size, server_page_ckpt  & out);
server_page_decode_result server_page_decode(const uint8_t * data, size_t size, server_page_lora  & out);
server_page_decode_result server_page_decode(const uint8_t * data, size_t size, server_page_draft & out);
