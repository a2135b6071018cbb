#include "server-page-guard.h"

#include "server-page-check.h"

#include <algorithm>

typedef server_page_files_result result;
typedef server_page_os_path      path;

static server_page_span span(const std::vector<uint8_t> & bytes) {
    return { bytes.data(), bytes.size() };
}

// no bytes: it is not there, or empty
static result read_begin(server_page_os & os, const path & p, size_t n_bytes_max, std::vector<uint8_t> & begin) {
    server_page_os_handle_ptr file;
    uint64_t                  n_bytes = 0;

    const auto opened = os.open(p, file, n_bytes);

    begin.resize(std::min<uint64_t>(n_bytes, n_bytes_max));
    if (begin.empty()) {
        return server_page_told_unless_gone(opened);
    }
    return server_page_told(os.read(p, *file, begin.data(), begin.size()));
}

static result theirs(const path & p) {
    return { SERVER_PAGE_FILES_IO, p.str() + " is another program's, and a page of this name would replace it: use another name, or move it away" };
}

server_page_guard server_page_guard_of(uint32_t magic, uint32_t version) {
    return [magic, version](server_page_os & os, const std::string & dir, const std::string & name) -> result {
        std::vector<uint8_t> begin;

        bool any_ours = false;
        for (const auto & suffix : server_page_suffixes()) {
            if (suffix.empty()) {
                continue;
            }
            const path p = { dir, name + suffix };
            if (auto res = read_begin(os, p, SERVER_PAGE_HEADER_SIZE_MAX, begin); !res.ok()) {
                return res;
            }
            if (server_page_is_foreign(span(begin))) {
                return theirs(p);
            }
            any_ours = any_ours || server_page_is_ours(span(begin));
        }

        // a state whose head is damaged is known by what is beside it
        const path p = { dir, name };
        if (auto res = read_begin(os, p, sizeof(magic), begin); !res.ok()) {
            return res;
        }
        const bool foreign = !begin.empty() && !any_ours && server_page_read_head(span(begin), magic, version) == SERVER_PAGE_HEAD_FOREIGN;

        return foreign ? theirs(p) : result();
    };
}

result server_page_foreign_sidecars(server_page_os & os, const std::string & dir, const std::string & name, std::vector<std::string> & suffixes) {
    for (const auto & suffix : server_page_suffixes()) {
        std::vector<uint8_t> begin;
        if (auto res = read_begin(os, { dir, name + suffix }, suffix.empty() ? 0 : SERVER_PAGE_HEADER_SIZE_MAX, begin); !res.ok()) {
            return res;
        }
        if (server_page_is_foreign(span(begin))) {
            suffixes.push_back(suffix);
        }
    }
    return {};
}
