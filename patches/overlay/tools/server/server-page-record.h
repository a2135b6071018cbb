#pragma once

// The commit record of a page, as text: the stage of a new generation, which files it has, which ones go.
//
//   page commit 2
//   stage 4711-3
//   file 1234 0123456789abcdef NAME         its bytes, their checksum
//   file 56 0123456789abcdef NAME.ckpt
//   retire NAME.dft
//   checksum 0123456789abcdef               of all the lines before

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct server_page_record {
    struct member {
        std::string file;
        uint64_t    n_bytes;
        uint64_t    checksum;
    };

    std::string stage;

    std::vector<member>      members;
    std::vector<std::string> retired;
};

// bytes: four lines of the longest names are a third of that
static const size_t SERVER_PAGE_RECORD_MAX = 4096;

// of the files that a page can have: "", ".ckpt", ".lora", ".dft"
const std::vector<std::string> & server_page_suffixes();

// digits and dashes: what begins below a staging directory stays there
bool server_page_is_stage_name(const std::string & str);

std::string server_page_record_text(const server_page_record & rec);

// false: the text is not, to the byte, what server_page_record_text() makes for a page of this name. The checksum finds
// damage and proves no origin, so no file but those of the page is accepted, each of them once at most.
bool server_page_record_parse(const std::string & name, const std::string & text, server_page_record & rec);
