#include "server-page-fsck-run.h"
#include "server-page-quarantine.h"

#include <algorithm>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

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

// the note last: without it the rest would stay for ever
static result remove_tree(server_page_os & os, const path & p) {
    std::vector<server_page_os_entry> entries;
    if (auto res = server_page_told(os.list(p, entries)); !res.ok()) {
        return res;
    }
    std::stable_partition(entries.begin(), entries.end(), [](const auto & entry) { return entry.name != SERVER_PAGE_WHY; });

    for (const auto & entry : entries) {
        const bool is_dir = entry.kind == SERVER_PAGE_OS_DIR;
        if (auto res = is_dir ? remove_tree(os, p / entry.name) : server_page_told(os.remove(p / entry.name)); !res.ok()) {
            return res;
        }
    }
    return server_page_told(os.remove_dir(p));
}

static void collect(server_page_fsck_run & run, const std::string & name) {
    const auto p     = path { run.dir, SERVER_PAGE_QUARANTINE } / name;
    const auto label = p.below;

    server_page_finding finding;
    finding.what = SERVER_PAGE_FOUND_QUARANTINED;
    finding.name = label;

    int64_t at = -1;
    if (run.failed(label, server_page_aside_since(run.os, p, at)) || run.failed(label, size_of_tree(run.os, p, finding.n_bytes))) {
        return;
    }

    const bool any_age = run.options.n_days == 0;
    if (at < 0 || (!any_age && (at == 0 || at > run.options.now_s))) {
        finding.why = std::string("its ") + SERVER_PAGE_WHY + " does not say since when by a clock that is right, it is kept";
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

static void collect_quarantine(server_page_fsck_run & run) {
    handle held;
    if (run.failed("", run.lock(!run.options.dry_run, held))) {
        return;
    }

    std::vector<server_page_os_entry> entries;
    const auto listed = run.os.list({ run.dir, SERVER_PAGE_QUARANTINE }, entries);
    if (!listed.ok()) {
        run.failed(SERVER_PAGE_QUARANTINE, server_page_told_unless_gone(listed));
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
    server_page_fsck_run run(os, dir, options, tell);

    std::vector<server_page_generation> generations;
    if (!run.list(generations)) {
        return run.status;
    }
    for (const auto & generation : generations) {
        if (generation.staged) {
            run.recover(generation.name, true);
        }
    }
    collect_quarantine(run);

    return run.status;
}
