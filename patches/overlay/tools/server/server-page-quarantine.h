#pragma once

// The quarantine of a directory: where files of a page go that are good for nothing, and when they were put there.
//
//   .quarantine/NAME-N/           0700, N counts from 1; what has that name already is left alone, the next N is taken
//       .why.txt                  when and why, written before anything is moved; no page can have that name
//       NAME, NAME.ckpt, ...      its own file first, so that an interruption leaves nothing that looks like a page
//       NAME.page-staging/        where its commit record is damaged, or what that lists; it is moved last

#include "server-page-commit.h"

static const char * const SERVER_PAGE_QUARANTINE = ".quarantine";
static const char * const SERVER_PAGE_WHY        = ".why.txt";

struct server_page_aside {
    std::vector<std::string> suffixes; // of the files that go; "" is the first

    bool staging = false;

    std::string why;

    bool empty() const { return suffixes.empty() && !staging; }
};

// under the lock that keeps everybody out; `place`: where to. Where nothing could be moved there is no place
server_page_files_result server_page_put_aside(const server_page_commit & page, const server_page_aside & aside, int64_t now_s,
        server_page_os_path & place);

// since the epoch, -1: its note does not say
server_page_files_result server_page_aside_since(server_page_os & os, const server_page_os_path & place, int64_t & at_s);
