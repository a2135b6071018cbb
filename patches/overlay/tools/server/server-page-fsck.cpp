#include "server-page-fsck-run.h"
#include "server-page-quarantine.h"

#include <algorithm>
#include <exception>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

struct page_file {
    std::string suffix;
    uint64_t    n_bytes = 0;

    handle file;

    std::vector<uint8_t> data; // of another program's the begin only

    server_page_span span() const { return { data.data(), data.size() }; }
};

struct page_files {
    std::vector<page_file> files; // in the order of server_page_suffixes()

    bool pending    = false; // there is a commit record, and it can be completed
    bool is_foreign = false; // FILE

    std::string record_error; // not empty: the commit record is damaged, or what it lists

    bool has_state() const { return !files.empty() && files.front().suffix.empty(); }
};

// under the lock
static result look_at_record(const server_page_commit & page, page_files & found) {
    server_page_record rec;

    auto res = page.load_record(rec, found.pending);
    if (res.ok() && found.pending) {
        res = page.check(rec);
    }
    if (res.status == SERVER_PAGE_FILES_CORRUPT) {
        found.pending      = false;
        found.record_error = res.message;
        return {};
    }
    return res;
}

// up to so many bytes from its begin
static result read_up_to(server_page_os & os, const path & p, page_file & cur, uint64_t n_bytes) {
    const size_t n_before = cur.data.size();
    try {
        cur.data.resize(std::max<uint64_t>(n_before, std::min(cur.n_bytes, n_bytes)));
    } catch (const std::exception &) {
        return { SERVER_PAGE_FILES_DECLINED, p.str() + ": there is no memory for its " + std::to_string(cur.n_bytes) + " bytes" };
    }
    const size_t n_new = cur.data.size() - n_before;

    return n_new == 0 ? result() : server_page_told(os.read(p, *cur.file, cur.data.data() + n_before, n_new));
}

// under the lock; a file that cannot be ours is not read on, it may be of any size
static result read_page(server_page_fsck_run & run, const server_page_commit & page, page_files & found) {
    if (auto res = look_at_record(page, found); !res.ok() || found.pending) {
        return res;
    }

    bool any_ours = false;
    for (const auto & suffix : server_page_suffixes()) {
        const auto p = page.root / (page.name + suffix);

        page_file cur;
        cur.suffix = suffix;
        const auto opened = run.os.open(p, cur.file, cur.n_bytes);
        if (opened.status == SERVER_PAGE_OS_NOT_FOUND) {
            continue;
        }
        if (!opened.ok()) {
            return server_page_told(opened);
        }
        if (auto res = read_up_to(run.os, p, cur, SERVER_PAGE_HEADER_SIZE_MAX); !res.ok()) {
            return res;
        }
        any_ours = any_ours || (!suffix.empty() && server_page_is_ours(cur.span()));
        found.files.push_back(std::move(cur));
    }

    for (auto & cur : found.files) {
        const bool can_be_ours = cur.suffix.empty()
            ? any_ours || server_page_read_head(cur.span(), run.options.magic, run.options.version) != SERVER_PAGE_HEAD_FOREIGN
            : (found.has_state() || !found.record_error.empty()) && server_page_is_ours(cur.span());

        found.is_foreign = found.is_foreign || (cur.suffix.empty() && !can_be_ours);
        if (can_be_ours) {
            if (auto res = read_up_to(run.os, page.root / (page.name + cur.suffix), cur, UINT64_MAX); !res.ok()) {
                return res;
            }
        }
        cur.file.reset(); // some systems move no file that is open
    }
    return {};
}

//
// verdict
//

struct verdict {
    std::vector<server_page_finding> findings;

    server_page_aside aside; // what findings of damage and orphans are about
};

static bool is_put_aside(const server_page_finding & finding) {
    return finding.what == SERVER_PAGE_FOUND_DAMAGED || finding.what == SERVER_PAGE_FOUND_ORPHAN;
}

static server_page_finding finding_of(const std::string & name, const server_page_checked & checked) {
    server_page_finding res;
    res.name = name;
    switch (checked.status) {
        case SERVER_PAGE_CHECK_WHOLE:    res.what = SERVER_PAGE_FOUND_WHOLE;    break;
        case SERVER_PAGE_CHECK_PLAIN:    res.what = SERVER_PAGE_FOUND_PLAIN;    break;
        case SERVER_PAGE_CHECK_DEGRADED: res.what = SERVER_PAGE_FOUND_DEGRADED; break;
        case SERVER_PAGE_CHECK_DAMAGED:  res.what = SERVER_PAGE_FOUND_DAMAGED;  break;
        case SERVER_PAGE_CHECK_UNKNOWN:  res.what = SERVER_PAGE_FOUND_UNKNOWN;  break;
    }
    if (!checked.why.empty()) {
        res.why = "'" + name + "' " + checked.why;
    }
    if (res.what == SERVER_PAGE_FOUND_DEGRADED || (res.what == SERVER_PAGE_FOUND_UNKNOWN && checked.why.empty())) {
        res.losses = checked.losses;
    }
    return res;
}

static verdict judge_orphans(const std::string & name, const page_files & found) {
    verdict res;
    for (const auto & cur : found.files) {
        server_page_finding finding;
        finding.name    = name + cur.suffix;
        finding.n_bytes = cur.n_bytes;
        if (server_page_is_ours(cur.span())) {
            finding.what = SERVER_PAGE_FOUND_ORPHAN;
            finding.why  = "there is no '" + name + "' that it belongs to";
            res.aside.why += (res.aside.empty() ? "" : "\n") + ("'" + finding.name + "': " + finding.why);
            res.aside.suffixes.push_back(cur.suffix);
        } else {
            finding.what = SERVER_PAGE_FOUND_UNKNOWN;
            finding.why  = "it is another program's";
        }
        res.findings.push_back(finding);
    }
    return res;
}

static verdict judge_pending(const std::string & name) {
    server_page_finding finding;
    finding.what = SERVER_PAGE_FOUND_PENDING;
    finding.name = name;
    finding.why  = "an interrupted publication has not been completed yet";
    return { { finding }, {} };
}

static verdict judge(const server_page_fsck_run & run, const std::string & name, const page_files & found) {
    const bool has_damaged_record = !found.record_error.empty();

    if (found.pending) {
        return judge_pending(name);
    }
    if (!found.has_state() && !has_damaged_record) {
        return judge_orphans(name, found);
    }

    auto head = SERVER_PAGE_HEAD_FOREIGN;

    std::vector<server_page_check_file> files;
    uint64_t n_bytes = 0;
    for (const auto & cur : found.files) {
        files.push_back({ cur.suffix, cur.span() });
        n_bytes += cur.n_bytes;
        if (cur.suffix.empty()) {
            head = server_page_read_head(cur.span(), run.options.magic, run.options.version);
        }
    }
    auto checked = server_page_check(name, head, files);

    // nobody knows which generation the files in place are of, but where FILE.ckpt vouches for them, or they are none of ours
    const std::string record_why = "has an interrupted publication that cannot be completed: " + found.record_error;
    const bool stays = found.is_foreign || (checked.has_ckpt && checked.status != SERVER_PAGE_CHECK_DAMAGED);
    if (has_damaged_record && !stays) {
        checked.status = SERVER_PAGE_CHECK_DAMAGED;
        checked.why    = record_why;
    }

    verdict res;
    res.findings.push_back(finding_of(name, checked));
    res.findings[0].n_bytes = n_bytes;

    if (checked.status == SERVER_PAGE_CHECK_DAMAGED) {
        res.aside.why = res.findings[0].why;
        for (const auto & cur : found.files) {
            if (std::find(checked.foreign.begin(), checked.foreign.end(), cur.suffix) == checked.foreign.end()) {
                res.aside.suffixes.push_back(cur.suffix);
            }
        }
    } else if (has_damaged_record) {
        server_page_finding staging;
        staging.what  = SERVER_PAGE_FOUND_DAMAGED;
        staging.name  = name + SERVER_PAGE_STAGING;
        staging.why   = "'" + name + "' " + record_why;
        res.aside.why = staging.why;
        res.findings.push_back(staging);
    }
    res.aside.staging = has_damaged_record;

    return res;
}

//
// one page
//

static void tell_all(server_page_fsck_run & run, const verdict & judged, const std::string & to, bool done) {
    for (auto finding : judged.findings) {
        if (is_put_aside(finding)) {
            finding.to   = to;
            finding.done = done;
        }
        run.tell(finding);
    }
}

// what was damaged a moment ago is looked at again, and moved if it still is
static void quarantine_page(server_page_fsck_run & run, const server_page_commit & page, const verdict & before) {
    page_files found;
    handle     held;
    if (run.failed(page.name, run.lock(true, held)) || run.failed(page.name, read_page(run, page, found))) {
        tell_all(run, before, "", false); // what cannot be put right is told all the same
        return;
    }

    auto judged = judge(run, page.name, found);
    path place;
    if (!judged.aside.empty()) {
        if (auto res = server_page_put_aside(page, judged.aside, run.options.now_s, place); !res.ok()) {
            res.message = judged.aside.why + "; it could not be put aside: " + res.message;
            run.failed(page.name, res);
            auto & findings = judged.findings;
            findings.erase(std::remove_if(findings.begin(), findings.end(), is_put_aside), findings.end());
        }
    }
    tell_all(run, judged, place.str(), true);
}

static void check_page(server_page_fsck_run & run, const server_page_generation & generation) {
    const server_page_commit page(run.os, run.dir, generation.name, run.guard);

    if (generation.staged) {
        run.recover(page.name, false);
    }

    page_files found;
    {
        handle held;
        if (run.failed(page.name, run.lock(false, held)) || run.failed(page.name, read_page(run, page, found))) {
            return;
        }
    }
    const auto judged = judge(run, page.name, found);
    if (!judged.aside.empty() && !run.options.dry_run) {
        found = {}; // the memory
        quarantine_page(run, page, judged);
        return;
    }
    tell_all(run, judged, (page.root / SERVER_PAGE_QUARANTINE).str(), false);
}

server_page_fsck_status server_page_fsck(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell) {
    server_page_fsck_run run(os, dir, options, tell);

    std::vector<server_page_generation> generations;
    if (run.list(generations)) {
        for (const auto & generation : generations) {
            check_page(run, generation);
        }
    }
    return run.status;
}
