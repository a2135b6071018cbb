// What an input of fuzz-page-codec.cpp begins with, for who reads it and for who makes the first ones.

#pragma once

#include "server-page-checksum.h"

#include <cstdint>
#include <cstdio>
#include <string>

enum { FUZZ_CKPT, FUZZ_LORA, FUZZ_DRAFT, FUZZ_RECORD, FUZZ_N_READERS };

static const uint8_t FUZZ_SEALED = 0x80; // beside the reader

static const std::string FUZZ_NAME = "a  b"; // of the page that a record is of; spaces are what separates its words

// a record without its last line, with the one that is right
inline std::string fuzz_sealed(const std::string & text) {
    char line[32];
    std::snprintf(line, sizeof(line), "checksum %016llx\n", (unsigned long long) server_page_checksum(text.data(), text.size()));
    return text + line;
}
