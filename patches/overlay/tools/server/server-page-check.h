#pragma once

// What the files of one page are good for, by the rules that the server restores with. Pure.
//
// A page's own file without any of ours beside it is plain: nothing vouches for it. A good FILE.ckpt vouches for FILE and the
// others. FILE or FILE.ckpt damaged, or adapters that are not known, cost everything; another file costs its part. What another
// program or another version wrote is no damage: it cannot be judged here. A FILE of another size than FILE.ckpt tells of is
// taken for another program's, without FILE.ckpt: libllama refuses it if it was cut off.

#include "server-page-codec.h"

#include <optional>
#include <string>
#include <vector>

// a part of a page that is not there or cannot be used: what it is good for begins anew
struct server_page_loss {
    std::string suffix;
    std::string why;
};

// the head of FILE, which is libllama's: u32 magic, u32 version, u32 number of tokens, the tokens of 4 bytes each
enum server_page_head {
    SERVER_PAGE_HEAD_OK,
    SERVER_PAGE_HEAD_DAMAGED, // its magic, but not the bytes that it tells of
    SERVER_PAGE_HEAD_VERSION, // of another libllama
    SERVER_PAGE_HEAD_FOREIGN, // not its magic
};

server_page_head server_page_read_head(const server_page_span & file, uint32_t magic, uint32_t version);

struct server_page_check_file {
    std::string      suffix;
    server_page_span contents;
};

enum server_page_check_status {
    SERVER_PAGE_CHECK_WHOLE,
    SERVER_PAGE_CHECK_PLAIN,    // as llama-server writes it without sidecars
    SERVER_PAGE_CHECK_DEGRADED, // FILE is good, parts are lost
    SERVER_PAGE_CHECK_DAMAGED,
    SERVER_PAGE_CHECK_UNKNOWN,  // of another version, or another program's
};

struct server_page_checked {
    server_page_check_status status = SERVER_PAGE_CHECK_WHOLE;

    std::string suffix; // of the file that is to blame
    std::string why;    // not empty: the page cannot be restored. Follows the page's name in a sentence

    std::vector<server_page_loss> losses;
    std::vector<std::string>      foreign; // suffixes of files that are another program's

    // what was read; the spans point into the files
    bool                             has_ckpt = false; // else nothing is known but FILE
    server_page_ckpt                 ckpt;
    std::optional<server_page_lora>  lora;             // nullopt: the files do not say
    std::optional<server_page_draft> draft;
};

// of the files that are there, one of a suffix
server_page_checked server_page_check(const std::string & name, server_page_head head, const std::vector<server_page_check_file> & files);
