#include "server-page-quarantine.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <ctime>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

static const uint64_t N_BYTES_WHY_MAX = 64*1024;

static result write_why(server_page_os & os, const path & p, const std::string & text) {
    handle file;
    if (auto res = server_page_told(os.create(p, file)); !res.ok()) {
        return res;
    }
    if (auto res = server_page_told(os.write(p, *file, text.data(), text.size())); !res.ok()) {
        return res;
    }
    return server_page_told(os.sync(p, *file));
}

static std::string note(const std::string & why, int64_t now_s) {
    const std::time_t now = now_s;

    char date[32] = "";
    if (const std::tm * utc = std::gmtime(&now)) {
        std::strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S UTC", utc);
    }
    return "quarantined " + std::to_string(now_s) + " (" + date + ")\n" + why + "\n"
        "The files beside this note are as they were found. To use one again, move it back to the directory of the pages.\n";
}

// whether something else than a directory stands there
static bool is_taken(server_page_os & os, const path & p) {
    server_page_os_entry entry;

    return os.look(p, entry).ok() && entry.kind != SERVER_PAGE_OS_DIR;
}

static result make_place(const server_page_commit & page, path & place) {
    const path quarantine = page.root / SERVER_PAGE_QUARANTINE;

    bool made = false;
    if (auto res = server_page_told(page.os.make_dir(quarantine, made)); !res.ok()) {
        if (is_taken(page.os, quarantine)) {
            res = { SERVER_PAGE_FILES_IO, quarantine.str() + ": no directory, but a file or a link, which is left alone" };
        }
        return res;
    }
    made = false;
    for (int n = 1; !made; ++n) {
        place = quarantine / (page.name + "-" + std::to_string(n));
        if (auto res = server_page_told(page.os.make_dir(place, made)); !res.ok() && !is_taken(page.os, place)) {
            return res;
        }
    }
    return {};
}

static result sync_all(server_page_os & os, const std::vector<path> & dirs) {
    for (const auto & each : dirs) {
        if (auto res = server_page_told(os.sync_dir(each)); !res.ok()) {
            return res;
        }
    }
    return {};
}

static result move_all(const server_page_commit & page, const server_page_aside & aside, const path & place) {
    for (const auto & suffix : aside.suffixes) {
        const auto file = page.name + suffix;
        if (auto res = server_page_told(page.os.rename(page.root / file, place / file)); !res.ok()) {
            return res;
        }
        // a damaged file that comes back without its sidecars would pass for a good one
        if (suffix.empty()) {
            if (auto res = sync_all(page.os, { place, page.root }); !res.ok()) {
                return res;
            }
        }
    }
    if (aside.staging) {
        if (auto res = server_page_told(page.os.rename(page.staging, place / (page.name + SERVER_PAGE_STAGING))); !res.ok()) {
            return res;
        }
    }
    return sync_all(page.os, { place, page.root });
}

// whether there is nothing in it but the note; that goes then, and the place with it
static bool take_back(server_page_os & os, const path & place) {
    std::vector<server_page_os_entry> entries;
    if (!os.list(place, entries).ok() ||
            std::any_of(entries.begin(), entries.end(), [](const auto & entry) { return entry.name != SERVER_PAGE_WHY; })) {
        return false;
    }
    (void) os.remove(place / SERVER_PAGE_WHY);
    (void) os.remove_dir(place);
    return true;
}

result server_page_put_aside(const server_page_commit & page, const server_page_aside & aside, int64_t now_s, path & place) {
    if (auto res = make_place(page, place); !res.ok()) {
        return res;
    }

    auto res = write_why(page.os, place / SERVER_PAGE_WHY, note(aside.why, now_s));
    if (res.ok()) {
        res = sync_all(page.os, { place, page.root / SERVER_PAGE_QUARANTINE, page.root });
    }
    if (res.ok()) {
        res = move_all(page, aside, place);
    }
    if (!res.ok() && !take_back(page.os, place)) {
        res.message += "; a part of it may be in " + place.str();
    }
    return res;
}

result server_page_aside_since(server_page_os & os, const path & place, int64_t & at_s) {
    at_s = -1;

    handle   file;
    uint64_t n_bytes = 0;
    const auto opened = os.open(place / SERVER_PAGE_WHY, file, n_bytes);
    if (!opened.ok()) {
        return server_page_told_unless_gone(opened);
    }

    std::string text(std::min(n_bytes, N_BYTES_WHY_MAX), '\0');
    if (auto res = server_page_told(os.read(place / SERVER_PAGE_WHY, *file, &text[0], text.size())); !res.ok()) {
        return res;
    }
    if (std::sscanf(text.c_str(), "quarantined %" SCNd64, &at_s) != 1) {
        at_s = -1;
    }
    return {};
}
