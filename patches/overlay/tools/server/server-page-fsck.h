#pragma once

// A directory of page files, kept in order: what was interrupted is finished, what is damaged or belongs to nothing is put
// aside, and what has been aside for long enough is removed. No llama.h, no JSON.
//
// fsck deletes nothing of a page. What is good for nothing is moved to .quarantine/NAME-N/, see server-page-quarantine.h:
//
//   a damaged page                with all its files that are not another program's
//   sidecars of ours without FILE and with nothing under way: an interrupted fsck leaves them, or somebody who removed FILE
//   NAME.page-staging             where its commit record is damaged, or what that lists. The page stays if it is good
//                                 without: a good FILE.ckpt vouches for it
//
// gc removes what has been in quarantine for so many days, and nothing else. Both sweep the half-written stages of publications
// that died, see server-page-files.h.
//
// What is damaged is read twice: once beside readers, and again under the lock that keeps everybody out, for it may have been
// replaced in between. Another program's files are never touched, and no more is read of them than it takes to know whose
// they are. Memory is needed for one page at a time. What fails for one name is told, and the others go on.
//
// A dry run changes nothing. Where the directory has no file for its lock, nobody commits there, and it goes without.

#include "server-page-check.h"
#include "server-page-os.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

struct server_page_fsck_options {
    bool dry_run = false;

    // of FILE
    uint32_t magic   = 0;
    uint32_t version = 0;

    int64_t now_s  = 0;  // since the epoch
    int64_t n_days = 30; // gc: how long something stays in quarantine
};

enum server_page_finding_what {
    SERVER_PAGE_FOUND_WHOLE,
    SERVER_PAGE_FOUND_PLAIN,
    SERVER_PAGE_FOUND_DEGRADED,
    SERVER_PAGE_FOUND_DAMAGED,     // `to`: where it is, or would be
    SERVER_PAGE_FOUND_UNKNOWN,     // another version's, or another program's: left alone
    SERVER_PAGE_FOUND_PENDING,     // an interrupted publication that a dry run does not complete
    SERVER_PAGE_FOUND_RECOVERED,   // completed, or a stage that was swept
    SERVER_PAGE_FOUND_ORPHAN,      // a sidecar of ours without FILE; `to` as well
    SERVER_PAGE_FOUND_QUARANTINED, // gc: old ones are removed, `done`
    SERVER_PAGE_FOUND_FAILED,      // could not be read, or what was to be done failed
    SERVER_PAGE_FOUND_WAITING,     // the lock is another process's; told once, and before anything else can be
};

struct server_page_finding {
    server_page_finding_what what = SERVER_PAGE_FOUND_WHOLE;

    std::string name; // of a page; of a file for an orphan; of a staging directory; of a directory in quarantine
    uint64_t    n_bytes = 0;
    std::string why;
    std::string to;

    std::vector<server_page_loss> losses; // degraded

    bool removes = false; // it is removed, or would be
    bool done    = false; // moved, removed or completed; false in a dry run
};

typedef std::function<void(const server_page_finding &)> server_page_tell;

enum server_page_fsck_status {
    SERVER_PAGE_FSCK_OK,
    SERVER_PAGE_FSCK_DAMAGED, // a page or a part of one, be it put aside by now
    SERVER_PAGE_FSCK_FAILED,  // not everything was looked at or done
};

server_page_fsck_status server_page_fsck(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell);

server_page_fsck_status server_page_gc(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell);
