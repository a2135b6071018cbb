#include "server-page-fsck.h"

#include "server-page-commit.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <new>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

static const char * const QUARANTINE = ".quarantine";
static const char * const WHY        = "why.txt";

static const size_t N_BYTES_WHY_MAX = 64*1024;

struct fsck_run {
    server_page_os & os;

    const std::string                dir;
    const server_page_fsck_options & options;
    const server_page_tell &         tell_user;

    const path root       = { dir, "" };
    const path quarantine = root / QUARANTINE;

    server_page_fsck_status status = SERVER_PAGE_FSCK_OK;

    void tell(const server_page_finding & finding) {
        const bool damaged = finding.what == SERVER_PAGE_FOUND_DAMAGED || finding.what == SERVER_PAGE_FOUND_DEGRADED;

        status = finding.what == SERVER_PAGE_FOUND_FAILED ? SERVER_PAGE_FSCK_FAILED : damaged ? std::max(status, SERVER_PAGE_FSCK_DAMAGED) : status;
        tell_user(finding);
    }

    // true: it is not, and that was told
    bool failed(const std::string & name, const result & res) {
        if (res.ok()) {
            return false;
        }
        server_page_finding finding;
        finding.what = SERVER_PAGE_FOUND_FAILED;
        finding.name = name;
        finding.why  = res.message;
        tell(finding);
        return true;
    }

    result lock(bool exclusive, handle & held) {
        return exclusive
            ? server_page_told(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held))
            : server_page_told_unless_gone(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_SHARED, held));
    }
};

//
// what is in the directory
//

// fsck tells of a damaged record where it comes to the page
static void recover(fsck_run & run, bool tells_of_damage) {
    std::vector<std::string> done;

    const auto res = server_page_files(run.os, run.dir).recover(run.options.dry_run, done);
    for (const auto & each : done) {
        server_page_finding finding;
        finding.what = SERVER_PAGE_FOUND_RECOVERED;
        finding.why  = each;
        finding.done = !run.options.dry_run;
        run.tell(finding);
    }
    if (res.status != SERVER_PAGE_FILES_CORRUPT || tells_of_damage) {
        run.failed("", res);
    }
}

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

static result read_file(server_page_os & os, const path & p, std::vector<uint8_t> & data, bool & found, uint64_t n_bytes_max = UINT64_MAX) {
    handle   file;
    uint64_t n_bytes = 0;

    const auto opened = os.open(p, file, n_bytes);
    found = opened.ok();
    if (!found) {
        return server_page_told_unless_gone(opened);
    }
    try {
        data.resize(std::min(n_bytes, n_bytes_max));
    } catch (const std::exception &) {
        return { SERVER_PAGE_FILES_DECLINED, p.str() + ": there is no memory for its " + std::to_string(n_bytes) + " bytes" };
    }
    return data.empty() ? result() : server_page_told(os.read(p, *file, data.data(), data.size()));
}

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
static result read_page(const fsck_run & run, const server_page_commit & page, page_files & found) {
    if (auto res = look_at_record(page, found); !res.ok()) {
        return res;
    }
    if (found.pending && found.record_error.empty()) {
        return {};
    }

    for (const auto & suffix : server_page_suffixes()) {
        std::vector<uint8_t> data;
        bool is_there = false;
        if (auto res = read_file(run.os, page.root / (page.name + suffix), data, is_there); !res.ok()) {
            return res;
        }
        if (is_there) {
            found.n_bytes += data.size();
            found.contents.emplace_back(suffix, std::move(data));
        }
    }
    return {};
}

static void judge(const fsck_run & run, const std::string & name, page_files & found) {
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

static result make_quarantine(fsck_run & run, const std::string & name, path & place) {
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

static result sync_all(fsck_run & run, const std::vector<path> & dirs) {
    for (const auto & each : dirs) {
        if (auto res = server_page_told(run.os.sync_dir(each)); !res.ok()) {
            return res;
        }
    }
    return {};
}

// under the lock that keeps everybody out
static result put_aside(fsck_run & run, const server_page_commit & page, const page_files & found, const std::string & why, path & place) {
    if (auto res = make_quarantine(run, page.name, place); !res.ok()) {
        return res;
    }
    if (auto res = write_why(run.os, place / WHY, "quarantined " + std::to_string(run.options.now_s) + "\n" + why + "\n"); !res.ok()) {
        (void) run.os.remove(place / WHY); // a disk that is full need not keep these
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
static void quarantine_page(fsck_run & run, const server_page_commit & page) {
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

static void check_page(fsck_run & run, const std::string & name) {
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

// sidecars without FILE, of which nothing is under way; ours are removed by gc
static void check_orphans(fsck_run & run, const server_page_generation & generation, bool removes) {
    const server_page_commit page(run.os, run.dir, generation.name);

    const bool writes = removes && !run.options.dry_run;

    handle held;
    if (run.failed(page.name, run.lock(writes, held))) {
        return;
    }

    // it may have come meanwhile, or be a link to a file elsewhere
    server_page_os_entry entry;
    for (const auto & p : { page.root / page.name, page.record }) {
        const auto looked = run.os.look(p, entry);
        if (looked.ok() && entry.kind != SERVER_PAGE_OS_FILE) {
            run.failed(page.name, { SERVER_PAGE_FILES_IO, p.str() + ": no file, and it is not followed; what is beside it is left alone" });
        }
        if (looked.status != SERVER_PAGE_OS_NOT_FOUND) {
            run.failed(page.name, server_page_told(looked));
            return;
        }
    }

    for (const auto & file : generation.files) {
        const auto p = page.root / (page.name + file.suffix);

        std::vector<uint8_t> begin;
        bool is_there = false;
        if (run.failed(page.name + file.suffix, read_file(run.os, p, begin, is_there, SERVER_PAGE_MAGIC_SIZE)) || !is_there) {
            continue;
        }

        server_page_finding finding;
        finding.what    = server_page_is_ours({ begin.data(), begin.size() }) ? SERVER_PAGE_FOUND_ORPHAN : SERVER_PAGE_FOUND_UNKNOWN;
        finding.name    = page.name + file.suffix;
        finding.n_bytes = file.n_bytes;
        finding.why     = finding.what == SERVER_PAGE_FOUND_ORPHAN ? "there is no '" + page.name + "' that it belongs to" : "it is another program's";
        finding.removes = removes && finding.what == SERVER_PAGE_FOUND_ORPHAN;
        if (finding.removes && writes) {
            if (run.failed(finding.name, server_page_told(run.os.remove(p)))) {
                continue;
            }
            finding.done = true;
        }
        run.tell(finding);
    }
    if (writes) {
        run.failed(page.name, server_page_told(run.os.sync_dir(run.root)));
    }
}

static bool has_state(const server_page_generation & generation) {
    const auto & files = generation.files;

    return std::any_of(files.begin(), files.end(), [](const auto & file) { return file.suffix.empty(); });
}

// false: the directory cannot be read
static bool list_recovered(fsck_run & run, std::vector<server_page_generation> & generations, bool tells_of_damage) {
    if (run.failed("", server_page_files(run.os, run.dir).list(generations))) {
        return false;
    }
    recover(run, tells_of_damage);

    return !run.failed("", server_page_files(run.os, run.dir).list(generations));
}

server_page_fsck_status server_page_fsck(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell) {
    fsck_run run { os, dir, options, tell };

    std::vector<server_page_generation> generations;
    if (!list_recovered(run, generations, false)) {
        return run.status;
    }
    for (const auto & generation : generations) {
        if (has_state(generation) || generation.pending) {
            check_page(run, generation.name);
        } else {
            check_orphans(run, generation, false);
        }
    }
    return run.status;
}

//
// gc
//

static result size_of_tree(server_page_os & os, const path & p, uint64_t & n_bytes) {
    std::vector<server_page_os_entry> entries;
    if (auto res = server_page_told(os.list(p, entries)); !res.ok()) {
        return res;
    }
    for (const auto & entry : entries) {
        n_bytes += entry.n_bytes;
        if (entry.kind == SERVER_PAGE_OS_DIR) {
            if (auto res = size_of_tree(os, p / entry.name, n_bytes); !res.ok()) {
                return res;
            }
        }
    }
    return {};
}

// why.txt last: without it the rest would stay for ever
static result remove_tree(server_page_os & os, const path & p) {
    std::vector<server_page_os_entry> entries;
    if (auto res = server_page_told(os.list(p, entries)); !res.ok()) {
        return res;
    }
    std::stable_partition(entries.begin(), entries.end(), [](const auto & entry) { return entry.name != WHY; });

    for (const auto & entry : entries) {
        const bool is_dir = entry.kind == SERVER_PAGE_OS_DIR;
        if (auto res = is_dir ? remove_tree(os, p / entry.name) : server_page_told(os.remove(p / entry.name)); !res.ok()) {
            return res;
        }
    }
    return server_page_told(os.remove_dir(p));
}

// when it was put there, -1: that is not known
static int64_t quarantined_at(const std::vector<uint8_t> & why) {
    const std::string text(why.begin(), why.end());

    int64_t res = -1;
    return std::sscanf(text.c_str(), "quarantined %" SCNd64, &res) == 1 ? res : -1;
}

static void collect(fsck_run & run, const std::string & name) {
    const auto p     = run.quarantine / name;
    const auto label = std::string(QUARANTINE) + "/" + name;

    server_page_finding finding;
    finding.what = SERVER_PAGE_FOUND_QUARANTINED;
    finding.name = label;

    std::vector<uint8_t> why;
    bool found = false;
    if (run.failed(label, read_file(run.os, p / WHY, why, found, N_BYTES_WHY_MAX)) || run.failed(label, size_of_tree(run.os, p, finding.n_bytes))) {
        return;
    }

    const int64_t at = quarantined_at(why);
    if (at < 0) {
        finding.why = std::string("its ") + WHY + " does not say since when, it is kept";
        run.tell(finding);
        return;
    }

    const int64_t n_days = std::max<int64_t>(0, run.options.now_s - at)/(24*60*60);

    finding.removes = n_days >= run.options.n_days;
    finding.why     = "put aside " + std::to_string(n_days) + " days ago, kept for " + std::to_string(run.options.n_days);
    if (finding.removes && !run.options.dry_run) {
        if (run.failed(label, remove_tree(run.os, p))) {
            return;
        }
        finding.done = true;
    }
    run.tell(finding);
}

static void collect_quarantine(fsck_run & run) {
    handle held;
    if (run.failed("", run.lock(!run.options.dry_run, held))) {
        return;
    }

    std::vector<server_page_os_entry> entries;
    const auto listed = run.os.list(run.quarantine, entries);
    if (!listed.ok()) {
        run.failed(QUARANTINE, server_page_told_unless_gone(listed));
        return;
    }
    std::sort(entries.begin(), entries.end(), [](const auto & a, const auto & b) { return a.name < b.name; });
    for (const auto & entry : entries) {
        if (entry.kind == SERVER_PAGE_OS_DIR) {
            collect(run, entry.name);
        }
    }
}

server_page_fsck_status server_page_gc(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell) {
    fsck_run run { os, dir, options, tell };

    std::vector<server_page_generation> generations;
    if (!list_recovered(run, generations, true)) {
        return run.status;
    }
    for (const auto & generation : generations) {
        if (!has_state(generation) && !generation.pending) {
            check_orphans(run, generation, true);
        }
    }
    collect_quarantine(run);

    return run.status;
}
