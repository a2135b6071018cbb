#pragma once

// The steps of a publication, for one page in its directory; their order and what it is good for: server-page-files.h.
//
// Everything but write_stage() is done under the lock of the directory, exclusively if it changes anything.

#include "server-page-files.h"
#include "server-page-os.h"
#include "server-page-record.h"

#include <string>
#include <vector>

struct server_page_commit {
    typedef server_page_files_result   result;
    typedef server_page_os_path        path;
    typedef server_page_os_handle_ptr  handle;

    server_page_commit(server_page_os & os, const std::string & dir, const std::string & name, const server_page_guard & guard);

    server_page_os & os;

    const path        root;
    const std::string name;
    const path        lock;
    const path        staging;
    const path        record;

    const server_page_guard guard;

    // a place that is taken by anything but a file would stop a publication half-way; one that is another program's is not ours
    result check_places() const;

    // complete what has a record, then sweep; that something could not be swept is a warning only
    result settle(std::string & warning) const;

    // the owner's handle keeps it from being swept
    result make_stage(std::string & stage, handle & owner) const;
    result write_stage(const std::vector<server_page_file> & files, server_page_record & rec) const; // the record gets the checksums

    // of what was just written; pending: the record may be placed
    result commit(const server_page_record & rec) const;

    result load_record(server_page_record & rec, bool & found) const;

    // whether a record of somebody who died can be completed: every member is in the stage still or in its place already, with
    // the contents that the record tells of, and nothing stands in the way
    result check(const server_page_record & rec) const;

    // what has a record, each part of which may have been done before; ok with a message: done, but the record may come back
    result recover(const server_page_record & rec) const;

    // stages that nobody owns, and the staging directory where it is empty; nothing where there is a record, but in a dry run
    // that takes it for completed. `swept` tells which stages; the first failure is returned, the others are still swept
    result sweep(bool dry_run, bool is_completed, std::vector<std::string> & swept) const;

private:
    result place_record(const server_page_record & rec) const;
    result find_members(const server_page_record & rec, std::vector<std::string> & staged) const;
    result check_contents(const server_page_record & rec, const std::vector<std::string> & staged) const;
    result complete(const server_page_record & rec) const;
    bool   is_staged_name(const std::string & file) const;
    result sweep_stage(const path & stage, bool dry_run, std::vector<std::string> & swept, bool & left) const;
};

static const char * const SERVER_PAGE_STAGING = ".page-staging"; // after the name
static const char * const SERVER_PAGE_LOCK    = ".page-lock";
static const char * const SERVER_PAGE_RECORD  = "commit";

server_page_files_result server_page_told(const server_page_os_result & res);

// for what may just as well be gone already
server_page_files_result server_page_told_unless_gone(const server_page_os_result & res);

// what stands in the place of a file: not found is no error, anything but a file is one
server_page_files_result server_page_look_for_file(server_page_os & os, const server_page_os_path & p, bool & found, uint64_t & n_bytes);
