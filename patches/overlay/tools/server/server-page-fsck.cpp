#include "server-page-fsck-run.h"

#include <algorithm>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

struct page_files {
    std::vector<std::pair<std::string, std::vector<uint8_t>>> contents;

    uint64_t n_bytes = 0;

    bool        pending = false;
    std::string record_error; // not empty: the commit record is damaged

    server_page_checked checked;

    bool has_record() const { return pending || !record_error.empty(); }

    // while nobody looked
    bool is_gone() const { return !has_record() && (contents.empty() || !contents.front().first.empty()); }
};

// under the lock
static result look_at_record(const server_page_commit & page, page_files & found) {
    server_page_record       rec;
    std::vector<std::string> staged;

    auto res = page.load_record(rec, found.pending);
    if (res.ok() && found.pending) {
        res = page.check_members(rec, staged);
    }
    if (res.status == SERVER_PAGE_FILES_CORRUPT) {
        found.record_error = res.message;
        return {};
    }
    return res;
}

// under the lock
static result read_page(const server_page_fsck_run & run, const server_page_commit & page, page_files & found) {
    if (auto res = look_at_record(page, found); !res.ok()) {
        return res;
    }
    if (found.pending && found.record_error.empty()) {
        return {};
    }

    for (const auto & suffix : server_page_suffixes()) {
        std::vector<uint8_t> data;
        bool is_there = false;
        if (auto res = run.read_file(page.root / (page.name + suffix), data, is_there); !res.ok()) {
            return res;
        }
        if (is_there) {
            found.n_bytes += data.size();
            found.contents.emplace_back(suffix, std::move(data));
        }
    }
    return {};
}

static void judge(const server_page_fsck_run & run, const std::string & name, page_files & found) {
    auto head = SERVER_PAGE_HEAD_FOREIGN;

    std::vector<server_page_check_file> files;
    for (const auto & [suffix, data] : found.contents) {
        files.push_back({ suffix, { data.data(), data.size() } });
        if (suffix.empty()) {
            head = server_page_read_head(files.back().contents, run.options.magic, run.options.version);
        }
    }
    found.checked = server_page_check(name, head, files);

    if (!found.record_error.empty()) {
        found.checked.status = SERVER_PAGE_CHECK_DAMAGED;
        found.checked.why    = "has an interrupted publication that cannot be completed: " + found.record_error;
    }
}

static server_page_finding finding_of(const std::string & name, const page_files & found) {
    server_page_finding res;
    res.name    = name;
    res.n_bytes = found.n_bytes;

    if (found.pending && found.record_error.empty()) {
        res.what = SERVER_PAGE_FOUND_PENDING;
        res.why  = "an interrupted publication has not been completed yet";
        return res;
    }
    switch (found.checked.status) {
        case SERVER_PAGE_CHECK_WHOLE:    res.what = SERVER_PAGE_FOUND_WHOLE;    break;
        case SERVER_PAGE_CHECK_PLAIN:    res.what = SERVER_PAGE_FOUND_PLAIN;    break;
        case SERVER_PAGE_CHECK_DEGRADED: res.what = SERVER_PAGE_FOUND_DEGRADED; break;
        case SERVER_PAGE_CHECK_DAMAGED:  res.what = SERVER_PAGE_FOUND_DAMAGED;  break;
        case SERVER_PAGE_CHECK_UNKNOWN:  res.what = SERVER_PAGE_FOUND_UNKNOWN;  break;
    }
    if (!found.checked.why.empty()) {
        res.why = "'" + name + "' " + found.checked.why;
    }
    if (res.what == SERVER_PAGE_FOUND_DEGRADED || (res.what == SERVER_PAGE_FOUND_UNKNOWN && found.checked.why.empty())) {
        res.losses = found.checked.losses;
    }
    return res;
}

//
// quarantine
//

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

static result make_quarantine(server_page_fsck_run & run, const std::string & name, path & place) {
    bool made = false;
    if (auto res = server_page_told(run.os.make_dir(run.quarantine, made)); !res.ok()) {
        return res;
    }
    made = false;
    for (int n = 1; !made; ++n) {
        place = run.quarantine / (name + "-" + std::to_string(n));
        if (auto res = server_page_told(run.os.make_dir(place, made)); !res.ok()) {
            return res;
        }
    }
    return {};
}

static result sync_all(server_page_fsck_run & run, const std::vector<path> & dirs) {
    for (const auto & each : dirs) {
        if (auto res = server_page_told(run.os.sync_dir(each)); !res.ok()) {
            return res;
        }
    }
    return {};
}

// under the lock that keeps everybody out
static result put_aside(server_page_fsck_run & run, const server_page_commit & page, const page_files & found, const std::string & why, path & place) {
    if (auto res = make_quarantine(run, page.name, place); !res.ok()) {
        return res;
    }
    if (auto res = write_why(run.os, place / SERVER_PAGE_WHY, "quarantined " + std::to_string(run.options.now_s) + "\n" + why + "\n"); !res.ok()) {
        (void) run.os.remove(place / SERVER_PAGE_WHY); // a disk that is full need not keep these
        (void) run.os.remove_dir(place);
        return res;
    }
    if (auto res = sync_all(run, { place, run.quarantine, run.root }); !res.ok()) {
        return res;
    }

    const auto & foreign = found.checked.foreign;
    for (const auto & [suffix, data] : found.contents) {
        if (std::find(foreign.begin(), foreign.end(), suffix) != foreign.end()) {
            continue;
        }
        if (auto res = server_page_told(run.os.rename(page.root / (page.name + suffix), place / (page.name + suffix))); !res.ok()) {
            return res;
        }
        // a damaged file that comes back without its sidecars would pass for a good one
        if (suffix.empty()) {
            if (auto res = sync_all(run, { place, run.root }); !res.ok()) {
                return res;
            }
        }
    }
    if (!found.record_error.empty()) {
        if (auto res = server_page_told(run.os.rename(page.staging, place / (page.name + SERVER_PAGE_STAGING))); !res.ok()) {
            return res;
        }
    }
    return sync_all(run, { place, run.root });
}

// what was damaged a moment ago is looked at again, and moved if it still is
static void quarantine_page(server_page_fsck_run & run, const server_page_commit & page) {
    handle held;
    if (run.failed(page.name, run.lock(true, held))) {
        return;
    }
    page_files found;
    if (run.failed(page.name, read_page(run, page, found))) {
        return;
    }
    if (found.is_gone()) {
        return;
    }
    judge(run, page.name, found);

    auto finding = finding_of(page.name, found);
    if (finding.what == SERVER_PAGE_FOUND_DAMAGED) {
        path place;
        finding.done = !run.failed(page.name, put_aside(run, page, found, finding.why, place));
        finding.to   = place.str();
    }
    run.tell(finding);
}

//
// one page
//

static void check_page(server_page_fsck_run & run, const std::string & name) {
    const server_page_commit page(run.os, run.dir, name);

    page_files found;
    {
        handle held;
        if (run.failed(name, run.lock(false, held)) || run.failed(name, read_page(run, page, found))) {
            return;
        }
    }
    if (found.is_gone()) {
        return;
    }
    judge(run, name, found);

    auto finding = finding_of(name, found);
    if (finding.what == SERVER_PAGE_FOUND_DAMAGED) {
        if (!run.options.dry_run) {
            found = {}; // the memory
            quarantine_page(run, page);
            return;
        }
        finding.to = run.quarantine.str();
    }
    run.tell(finding);
}

server_page_fsck_status server_page_fsck(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell) {
    server_page_fsck_run run { os, dir, options, tell };

    std::vector<server_page_generation> generations;
    if (!run.list_recovered(generations, false)) {
        return run.status;
    }
    for (const auto & generation : generations) {
        if (server_page_has_state(generation) || generation.pending) {
            check_page(run, generation.name);
        } else {
            run.check_orphans(generation, false);
        }
    }
    return run.status;
}
