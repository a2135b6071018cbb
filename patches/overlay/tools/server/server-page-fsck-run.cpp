#include "server-page-fsck-run.h"

#include <algorithm>
#include <exception>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

void server_page_fsck_run::tell(const server_page_finding & finding) {
    const bool damaged = finding.what == SERVER_PAGE_FOUND_DAMAGED || finding.what == SERVER_PAGE_FOUND_DEGRADED;

    status = finding.what == SERVER_PAGE_FOUND_FAILED ? SERVER_PAGE_FSCK_FAILED : damaged ? std::max(status, SERVER_PAGE_FSCK_DAMAGED) : status;
    tell_user(finding);
}

bool server_page_fsck_run::failed(const std::string & name, const result & res) {
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

result server_page_fsck_run::lock(bool exclusive, handle & held) {
    return exclusive
        ? server_page_told(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held))
        : server_page_told_unless_gone(os.lock(root / SERVER_PAGE_LOCK, SERVER_PAGE_OS_LOCK_SHARED, held));
}

result server_page_fsck_run::read_file(const path & p, std::vector<uint8_t> & data, bool & found, uint64_t n_bytes_max) const {
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

// fsck tells of a damaged record where it comes to the page
static void recover(server_page_fsck_run & run, bool tells_of_damage) {
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

bool server_page_fsck_run::list_recovered(std::vector<server_page_generation> & generations, bool tells_of_damage) {
    if (failed("", server_page_files(os, dir).list(generations))) {
        return false;
    }
    recover(*this, tells_of_damage);

    return !failed("", server_page_files(os, dir).list(generations));
}

void server_page_fsck_run::check_orphans(const server_page_generation & generation, bool removes) {
    const server_page_commit page(os, dir, generation.name);

    const bool writes = removes && !options.dry_run;

    handle held;
    if (failed(page.name, lock(writes, held))) {
        return;
    }

    // it may have come meanwhile, or be a link to a file elsewhere
    server_page_os_entry entry;
    for (const auto & p : { page.root / page.name, page.record }) {
        const auto looked = os.look(p, entry);
        if (looked.ok() && entry.kind != SERVER_PAGE_OS_FILE) {
            failed(page.name, { SERVER_PAGE_FILES_IO, p.str() + ": no file, and it is not followed; what is beside it is left alone" });
        }
        if (looked.status != SERVER_PAGE_OS_NOT_FOUND) {
            failed(page.name, server_page_told(looked));
            return;
        }
    }

    for (const auto & file : generation.files) {
        const auto p = page.root / (page.name + file.suffix);

        std::vector<uint8_t> begin;
        bool is_there = false;
        if (failed(page.name + file.suffix, read_file(p, begin, is_there, SERVER_PAGE_MAGIC_SIZE)) || !is_there) {
            continue;
        }

        server_page_finding finding;
        finding.what    = server_page_is_ours({ begin.data(), begin.size() }) ? SERVER_PAGE_FOUND_ORPHAN : SERVER_PAGE_FOUND_UNKNOWN;
        finding.name    = page.name + file.suffix;
        finding.n_bytes = file.n_bytes;
        finding.why     = finding.what == SERVER_PAGE_FOUND_ORPHAN ? "there is no '" + page.name + "' that it belongs to" : "it is another program's";
        finding.removes = removes && finding.what == SERVER_PAGE_FOUND_ORPHAN;
        if (finding.removes && writes) {
            if (failed(finding.name, server_page_told(os.remove(p)))) {
                continue;
            }
            finding.done = true;
        }
        tell(finding);
    }
    if (writes) {
        failed(page.name, server_page_told(os.sync_dir(root)));
    }
}

bool server_page_has_state(const server_page_generation & generation) {
    const auto & files = generation.files;

    return std::any_of(files.begin(), files.end(), [](const auto & file) { return file.suffix.empty(); });
}
