// sources: server-page-codec.cpp server-page-record.cpp server-page-checksum.cpp

// What reads the files of a page, on any bytes: it accepts what it would write itself, and nothing else.
//
// The first byte of an input chooses the reader, and whether the checksums are made right before it reads: hardly any input
// would get past them otherwise.

#include "server-page-codec.h"
#include "server-page-record.h"

#include "page-codec-fuzzing.h"
#include "page-codec-testing.h"

#include <cstdio>
#include <cstdlib>

namespace {

// printed before the sanitizers' report of where it was
void require(bool condition, const char * what) {
    if (!condition) {
        std::fprintf(stderr, "not so: %s\n", what);
        std::abort();
    }
}

bytes joined(const server_page_bytes & file) {
    require(file.error.empty(), "what was read can be written");
    bytes res;
    for (const auto & part : file.parts) {
        const auto * data = static_cast<const uint8_t *>(part.data);
        res.insert(res.end(), data, data + part.size);
    }
    return res;
}

bool is_empty(const server_page_ckpt & page) {
    return page.identity.fields.empty() && page.members.empty() && page.checkpoints.empty() && page.n_lost == 0;
}
bool is_empty(const server_page_lora  & page) { return page.adapters.empty(); }
bool is_empty(const server_page_draft & page) { return !page.state.data && !page.spec.data; }

size_t n_lost(const server_page_ckpt & page) { return page.n_lost; }
size_t n_lost(const server_page_lora  &)     { return 0; }
size_t n_lost(const server_page_draft &)     { return 0; }

template <typename T> void read_file(const bytes & file) {
    T page;
    const auto res = server_page_decode(file.data(), file.size(), page);
    if (res.status != SERVER_PAGE_DECODE_OK) {
        require(!res.message.empty(), "a refusal says why");
        require(is_empty(page), "nothing is left of what was refused");
        return;
    }

    const auto again = joined(server_page_encode(page));
    require((again == file) == (n_lost(page) == 0), "what was read with nothing lost is written as it was");

    T rest;
    require(server_page_decode(again.data(), again.size(), rest).status == SERVER_PAGE_DECODE_OK && n_lost(rest) == 0,
            "what was left of a damaged file is a good file");
}

void read_record(const std::string & text) {
    server_page_record rec;
    if (!server_page_record_parse(FUZZ_NAME, text, rec)) {
        return;
    }
    require(server_page_record_text(rec) == text, "a record is written as it was read");
    require(server_page_is_stage_name(rec.stage), "a stage is below the staging directory");

    std::vector<std::string> files = rec.retired;
    for (const auto & member : rec.members) {
        files.push_back(member.file);
    }
    for (const auto & file : files) {
        const auto is_this = [&](const std::string & suffix) { return file == FUZZ_NAME + suffix; };
        require(std::count_if(server_page_suffixes().begin(), server_page_suffixes().end(), is_this) == 1, "only files of the page are listed");
        require(std::count(files.begin(), files.end(), file) == 1, "a file stays or goes");
    }
}

}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size == 0) {
        return 0;
    }
    // a block of the exact size, so that a read past its end is found
    bytes file(data + 1, data + size);

    const bool is_sealed = data[0] & FUZZ_SEALED;
    const int  reader    = data[0] % FUZZ_N_READERS;

    if (reader == FUZZ_RECORD) {
        const std::string text(file.begin(), file.end());
        read_record(is_sealed ? fuzz_sealed(text) : text);
        return 0;
    }
    if (is_sealed) {
        seal(file);
    }
    if (reader == FUZZ_CKPT) {
        read_file<server_page_ckpt>(file);
    } else if (reader == FUZZ_LORA) {
        read_file<server_page_lora>(file);
    } else {
        read_file<server_page_draft>(file);
    }
    return 0;
}
