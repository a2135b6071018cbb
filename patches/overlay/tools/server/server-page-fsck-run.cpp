#include "server-page-fsck-run.h"

#include "server-page-guard.h"

#include <algorithm>

typedef server_page_files_result  result;
typedef server_page_os_path       path;
typedef server_page_os_handle_ptr handle;

server_page_fsck_run::server_page_fsck_run(server_page_os & os, const std::string & dir, const server_page_fsck_options & options,
        const server_page_tell & tell) :
    dir(dir), options(options), tell_user(tell), guard(server_page_guard_of(options.magic, options.version)), os(os, !options.dry_run, [this](const path & p) {
        if (told_wait) {
            return;
        }
        told_wait = true;

        server_page_finding finding;
        finding.what = SERVER_PAGE_FOUND_WAITING;
        finding.why  = "another process holds " + p.str() + ", waiting";
        this->tell(finding);
    }) {}

void server_page_fsck_run::tell(const server_page_finding & finding) {
    switch (finding.what) {
        case SERVER_PAGE_FOUND_FAILED:   status = SERVER_PAGE_FSCK_FAILED; break;
        case SERVER_PAGE_FOUND_DAMAGED:
        case SERVER_PAGE_FOUND_DEGRADED:
        case SERVER_PAGE_FOUND_ORPHAN:   status = std::max(status, SERVER_PAGE_FSCK_DAMAGED); break;
        default:                         break;
    }
    tell_user(finding);
}

bool server_page_fsck_run::failed(const std::string & name, const result & res) {
    if (res.ok()) {
        return false;
    }
    if (told_failures.insert(name + "\n" + res.message).second) {
        server_page_finding finding;
        finding.what = SERVER_PAGE_FOUND_FAILED;
        finding.name = name;
        finding.why  = res.message;
        tell(finding);
    }
    return true;
}

result server_page_fsck_run::lock(bool exclusive, handle & held) {
    const path p = { dir, SERVER_PAGE_LOCK };

    return exclusive
        ? server_page_told(os.lock(p, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held))
        : server_page_told_unless_gone(os.lock(p, SERVER_PAGE_OS_LOCK_SHARED, held));
}

bool server_page_fsck_run::list(std::vector<server_page_generation> & generations) {
    return !failed("", server_page_files(os, dir).list(generations));
}

void server_page_fsck_run::recover(const std::string & name, bool tells_of_damage) {
    std::vector<std::string> done;

    const auto res = server_page_files(os, dir, guard).recover(name, options.dry_run, done);
    for (const auto & each : done) {
        server_page_finding finding;
        finding.what = SERVER_PAGE_FOUND_RECOVERED;
        finding.name = name;
        finding.why  = each;
        finding.done = !options.dry_run;
        tell(finding);
    }
    if (res.status != SERVER_PAGE_FILES_CORRUPT || tells_of_damage) {
        failed(name, res);
    }
}
